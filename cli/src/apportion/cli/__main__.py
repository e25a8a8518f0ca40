"""The command ``apportion``: every command's module, and the entry point."""

from apportion.cli import job_commands, log_commands, pool_commands
from apportion.cli.app import main

__all__ = ["job_commands", "log_commands", "main", "pool_commands"]

if __name__ == "__main__":
    main()
