"""What a bus of three servers survives: real servers, real faults, and how long nobody could write."""
