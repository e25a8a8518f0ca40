"""One seed, one run: ``python -m tests.simulation.run --seed 7 --events 200000``.

Runs seeds from the given one on until that many events were simulated. A broken rule prints the seed, the options, the
commit, how many events had been stored, and the command that runs it again.
"""

import argparse
import itertools
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from apportion.admission import core as admission_core
from apportion.contracts.ids import ADMISSION, MONITOR, PLACER
from apportion.monitor import core as monitor_core
from apportion.monitor import redeciding
from apportion.placer import core as placer_core
from tests.simulation import faults
from tests.simulation.checkers import Checker, must
from tests.simulation.world import Options, S, World

CORPUS = Path(__file__).with_name("corpus.txt")
LONG_EVENTS = 100_000
PATIENCE_S = 900
"""Virtual time after the faults within which everything must have ended."""


@dataclass
class Outcome:
    """What a run showed."""

    seed: int
    events: int
    faults: int
    decisions: int
    refused: int
    digest: str
    virtual_s: int


class RunBroken(AssertionError):
    """A seed broke a rule."""

    def __init__(self, options: Options, events: int, why: BaseException, *, again: str = "") -> None:
        self.options = options
        super().__init__(
            f"{why}\n  options {options}\n  after {events} events, commit {commit()}\n"
            f"  again: {again or f'make sim SEED={options.seed} EVENTS=1'}"
        )


def commit() -> str:
    """The commit that runs, as git names it."""
    try:
        told = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told.stdout.strip()


def run(options: Options) -> Outcome:
    """One whole run; raises RunBroken where a rule was broken."""
    checker = Checker()
    world = World(options, checker)
    try:
        if options.faults:
            faults.arrange(world)
        healed_at = 0
        while world.step():
            if world.requests_left:
                continue
            if not healed_at:
                healed_at = world.now + 5 * S
                world.at(healed_at, lambda: faults.heal(world))
            if world.now > healed_at and (_is_done(world, checker) or world.now > healed_at + PATIENCE_S * S):
                break
        # A little longer, so that late words are said and every reader has read all.
        world.is_over = True
        until = world.now + 60 * S
        while world._heap and world._heap[0][0] < until and world.step():
            pass
        checker.at_rest()
        decisions = 0
        for author, core, again in (
            (ADMISSION, admission_core, admission_core),
            (PLACER, placer_core, placer_core),
            (MONITOR, monitor_core, redeciding),
        ):
            made, state = checker.replay(author, again)
            decisions += made
            live = world.services[author]
            read = core.position(live.state)
            must(read == core.position(state), f"{author} has read to the end", read, core.position(state))
            must(core.snapshot(live.state) == core.snapshot(state), f"{author} live is {author} replayed")
    except AssertionError as broken:
        raise RunBroken(options, checker.events, broken) from broken
    return Outcome(
        seed=options.seed,
        events=checker.events,
        faults=world.faults_made,
        decisions=decisions,
        refused=world.bus.refused,
        digest=world.history_hash(),
        virtual_s=(world.now - 1_788_264_000 * S) // S,
    )


def _is_done(world: World, checker: Checker) -> bool:
    return (
        len(checker.terminal) == len(checker.admitted)
        and not checker.holding
        and len(checker.answers) >= len(checker.wishes)
        and not any(p.is_running for m in world.machines for p in m.processes.values())
    )


def options_of(seed: int) -> Options:
    """The options that belong to a seed: sizes vary, so that small and crowded pools are seen as well as large ones."""
    return Options(
        seed=seed,
        nodes=2 + seed % 4,
        devices=(2, 4, 8)[seed % 3],
        jobs=(100, 160, 240)[(seed // 3) % 3],
        arrival_ms=(80, 150, 300)[(seed // 9) % 3],
        fault_ms=(400, 900, 2500)[(seed // 2) % 3],
    )


def corpus() -> list[int]:
    """Seeds that once failed."""
    return [int(line.split()[0]) for line in CORPUS.read_text().splitlines() if line.split("#")[0].strip()]


def keep(seed: int, why: str, *, path: Path = CORPUS) -> None:
    """Note a seed that failed, so that it is run first from now on; what was wrong goes beside it by hand."""
    kept = {line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()}
    if str(seed) not in kept:
        with path.open("a", encoding="utf-8") as corpus_file:
            corpus_file.write(f"{seed}  # {commit()}: {why}\n")


def main() -> int:
    """Run seeds until enough events were simulated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=200_000)
    asked = parser.parse_args()
    print(f"simulation from seed {asked.seed}, {asked.events} events, commit {commit()}", flush=True)
    done = 0
    began = time.perf_counter()
    # In a long run those that once failed come first; one seed alone is asked for to see that one.
    kept = corpus() if asked.events >= LONG_EVENTS else []
    for seed in itertools.chain(kept, itertools.count(asked.seed)):
        if done >= asked.events:
            break
        try:
            outcome = run(options_of(seed))
        except RunBroken as broken:
            print(f"FAILED seed {seed}: {broken}\n  kept in {CORPUS}", flush=True)
            keep(seed, str(broken).partition("\n")[0][:120])
            return 1
        done += outcome.events
        print(
            f"seed {seed}: {outcome.events} events in {outcome.virtual_s} virtual s, {outcome.faults} faults, "
            f"{outcome.decisions} decisions made again, {outcome.refused} batches of lost leases refused, "
            f"history {outcome.digest[:12]}",
            flush=True,
        )
    print(f"{done} events, 0 rules broken, {done / (time.perf_counter() - began):,.0f} events/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
