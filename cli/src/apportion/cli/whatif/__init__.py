"""What would have happened: a recorded stretch, or a trace, decided by the real cores on a virtual clock."""
