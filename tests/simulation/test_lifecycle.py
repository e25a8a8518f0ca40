"""What the fold does is what the tables say, over whole simulated histories; the pictures are drawn from the tables."""

import pytest

from apportion.contracts.envelope import Stream
from apportion.pool.lifecycle import DEVICE, JOB, NODE, RUN, Moves
from apportion.pool.state import Pool, evolve
from tests.simulation import faults
from tests.simulation.checkers import Checker
from tests.simulation.run import options_of
from tests.simulation.world import World

States = dict[tuple[str, str], str]


def states_of(pool: Pool) -> States:
    """What every job, run, node and device is in."""
    found: States = {}
    for job in pool.jobs.values():
        found["job", job.job_id] = str(job.state)
        for run in job.runs.values():
            found["run", run.run_id] = str(run.state)
    for node in pool.nodes.values():
        found["node", node.node_id] = str(node.state)
        for uuid, view in node.devices.items():
            found["device", uuid] = str(view.device.health)
    return found


@pytest.mark.parametrize("seed", [2, 5, 9])
def test_nothing_moves_but_along_the_tables(seed: int) -> None:
    """A transition that the documentation lacks is a transition that nobody thought about."""
    tables: dict[str, Moves] = {"job": JOB, "run": RUN, "node": NODE, "device": DEVICE}
    options = options_of(seed)
    options.jobs = 100
    world = World(options, Checker())
    faults.arrange(world)
    for _ in range(12_000):
        if not world.step():
            break
    pool = Pool()
    before: States = {}
    seen: set[tuple[str, str, str]] = set()
    for stored in world.bus.streams[Stream.FACTS]:
        evolve(pool, stored.entry)
        after = states_of(pool)
        for key, state in after.items():
            was = before.get(key, "")
            if was != state:
                kinds = tables[key[0]].get((was, state), ())
                assert isinstance(stored.entry.event, kinds), f"{key} {was or '∅'} → {state}: {stored.entry.event}"
                seen.add((key[0], was, state))
        before = after
    assert {("job", "queued", "running"), ("run", "placed", "started"), ("run", "finished", "released")} <= seen
