"""The services' own asyncio code on virtual time: a few runs. `make sim-live` has as many as one likes."""

from typing import Any

import msgspec
import pytest

from apportion.contracts.codec import Message
from apportion.runtime import stream
from apportion.runtime.stream import Bus, Lease
from tests.simulation import live
from tests.simulation.run import RunBroken, options_of
from tests.simulation.world import Options


def small(seed: int, jobs: int = 20) -> Options:
    """A short run with many faults."""
    return Options(seed=seed, nodes=2, devices=2, jobs=jobs, arrival_ms=250, fault_ms=400)


def until_one_shows_it() -> None:
    """Most seeds show a planted bug; which do changes with every change of what is simulated."""
    for seed in range(1, 17):
        live.run(small(seed))


@pytest.mark.parametrize("seed", live.corpus())
def test_a_seed_that_once_failed_holds(seed: int) -> None:
    """What was broken once stays mended."""
    live.run(options_of(seed))


def test_every_rule_holds_and_a_seed_is_a_run() -> None:
    """Lost requests and acknowledgements, crashes at an await, outages: no rule broken, and twice the same."""
    first, network = live.run(small(3))
    assert (first.faults, network["lost"]) > (3, 3)
    again, _ = live.run(small(3))
    assert again.digest == first.digest


def test_a_stale_placer_that_reads_the_newest_claim_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: whoever was fenced takes the other's claim for its own, and goes on writing."""
    real = Bus.publish_fenced

    async def publish_fenced(self: Bus, lease: Lease, messages: list[Message]) -> int:
        newest = await self.newest_claim(lease.author)
        assert newest is not None
        return await real(self, msgspec.structs.replace(lease, claim=newest.seq), messages)

    monkeypatch.setattr(Bus, "publish_fenced", publish_fenced)
    with pytest.raises(RunBroken):
        until_one_shows_it()


def test_a_reader_that_does_not_miss_what_is_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: what the server counted and nobody received is passed over."""
    real = stream._Delivery._arrived

    def arrived(self: Any, message: Any, now: float) -> None:
        parts = message.reply.split(".")
        if len(parts) == 9:
            self._consumer_last = int(parts[6]) - 1
        elif message.headers is not None:
            message.headers["Nats-Last-Consumer"] = "0"
        real(self, message, now)

    monkeypatch.setattr(stream._Delivery, "_arrived", arrived)
    with pytest.raises(RunBroken):
        until_one_shows_it()
