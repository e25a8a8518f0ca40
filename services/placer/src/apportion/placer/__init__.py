"""Which slices, on which devices?"""
