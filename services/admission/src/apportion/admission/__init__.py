"""May this tenant ask for this much, and how does the job end?"""
