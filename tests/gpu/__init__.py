"""What only a real board can show. Skipped, with a printed reason, where there is none."""
