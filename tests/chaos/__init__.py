"""Tests of the random faults of ``bench.chaos``: how they are drawn and judged."""
