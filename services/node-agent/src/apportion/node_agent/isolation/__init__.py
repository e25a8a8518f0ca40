"""The isolation tests: what a neighbour can and can't do to another, tried on a device and stated with figures."""
