"""Figures that anyone can take again: each module is a measurement, `python -m bench` the main ones."""
