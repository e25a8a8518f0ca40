"""What Apportion's services say to each other: wishes, facts, subjects, codec."""
