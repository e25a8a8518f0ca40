"""``python -m tests.torture --rounds 1000 --seed 1``; one JSON object; ends with 1 where a rule was broken."""

import sys

from tests.torture.run import main

if __name__ == "__main__":
    sys.exit(main())
