"""All cores in one simulated world."""
