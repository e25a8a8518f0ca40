"""Slices made true: apply, read back, report; one file per mode, and the watchdog for what no hardware limits.

Nothing here decides who gets what. A start waits until what was read back agrees with what was asked, and everything
that was read is reported.
"""
