"""The placer: which slices, on which devices."""
