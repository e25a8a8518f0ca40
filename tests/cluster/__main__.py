"""``python -m tests.cluster [NAME …]``: what a bus of three servers survives, as one JSON object; 9 where it didn't."""

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import structlog

from tests.cluster import gaps, keys, partition, shorter

SCENARIOS: Final[dict[str, Callable[[Path], Coroutine[Any, Any, dict[str, Any]]]]] = {
    "single": gaps.single,
    "gaps": gaps.measure,
    "shorter": shorter.measure,
    "partition": partition.measure,
    "keys": keys.measure,
}


def main() -> int:
    """Run what was named, or everything."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENARIOS)}; all where none is named")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in SCENARIOS]:
        parser.error(f"expected names of {', '.join(SCENARIOS)}, found {', '.join(unknown)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    told: dict[str, Any] = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    for name in asked.names or SCENARIOS:
        with tempfile.TemporaryDirectory(prefix="apportion-cluster-") as folder:
            told[name] = asyncio.run(SCENARIOS[name](Path(folder)))
        print(f"# {name}: {'holds' if told[name]['holds'] else 'FAILS'}", file=sys.stderr, flush=True)
    print(json.dumps(told, indent=2))
    return 0 if all(told[name]["holds"] for name in asked.names or SCENARIOS) else 9


if __name__ == "__main__":
    sys.exit(main())
