"""The whole stack, driven through the command."""
