"""One per machine: devices, slices, processes."""
