"""What happened, what is wrong, what did it cost?"""
