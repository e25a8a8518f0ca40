"""Services killed at named moments, on a real bus with real processes."""
