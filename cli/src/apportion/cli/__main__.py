"""Entry point of the command ``apportion``."""

from apportion.cli.app import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
