"""Tests of the whole, beside each member's own."""
