"""The monitor: what happened, what is wrong, and what it cost."""
