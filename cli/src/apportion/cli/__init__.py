"""The command apportion: run a pool, publish wishes, ask the log."""
