"""Says whether a tenant may ask for this much, and how the job ends."""
