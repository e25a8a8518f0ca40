"""The kill matrix as a command: ``python -m tests.kill --rounds 3``; exit code 9 where the proof fails."""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tests.kill.matrix import matrix


def main() -> int:
    """Run it, and print what it showed as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="apportion-kill-") as folder:
        outcome = asyncio.run(matrix(Path(folder) / "pool", seed=asked.seed, rounds=asked.rounds))
    recovery = sorted(outcome.recovery_ms) or [0]
    told = {
        "cells": outcome.cells,
        "reached": outcome.reached,
        "unreached": outcome.unreached,
        "jobs": outcome.jobs,
        "recovery_ms_p50": recovery[len(recovery) // 2],
        "recovery_ms_max": recovery[-1],
        **{name: outcome.proof[name] for name in (
            "events", "lost", "started_twice", "over_allocated", "placed_on_fenced", "started_and_not_ended",
            "chain_ok", "replay_decisions", "replay_differences", "holds",
        )},
    }  # fmt: skip
    print(json.dumps(told, indent=2))
    return 0 if outcome.proof["holds"] else 9


if __name__ == "__main__":
    sys.exit(main())
