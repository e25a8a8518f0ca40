"""``python -m tests.simulation --seed 7 --events 200000``."""

import sys

from tests.simulation.run import main

if __name__ == "__main__":
    sys.exit(main())
