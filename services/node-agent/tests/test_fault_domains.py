"""Whose doing a failed fault domain was: named where something seen names it, and never guessed."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apportion.contracts.ids import DeviceUuid, RunId
from apportion.node_agent.enforce.fault_domains import DomainFailed, DomainSigns, Kill, judge
from apportion.node_agent.enforce.mps import Mps, MpsCommandFailed

A, B, C = RunId("acme/a/0/1"), RunId("acme/b/0/1"), RunId("acme/c/0/1")
DEVICE = DeviceUuid("GPU-1")
FAULT = "[Server 7] Fatal fault on device GPU-1 by client 41"
SILENT = "no answer in 3 s"
CLIENT_PID = 42
SECOND = 1_000_000_000
SEEN_AT = 100 * SECOND


def signs(status: str, canary: str = "", log: str = "", **killed_at: int) -> DomainSigns:
    kills = tuple(Kill(at=at, run_id=RunId(f"acme/{name}/0/1")) for name, at in killed_at.items())
    return DomainSigns(
        device_uuid=DEVICE,
        status=status,
        canary=canary,
        log=log,
        run_of_pid={41: A, CLIENT_PID: B},
        kills=kills,
        seen_at=SEEN_AT,
    )


def test_a_server_that_serves_has_not_failed() -> None:
    """Even if one of its clients was killed."""
    assert judge(signs("ACTIVE", "ok", a=5)) is None


@pytest.mark.parametrize(
    ("seen", "offender"),
    [
        (signs("FAULT", log=FAULT), A),
        (signs("FAULT", log=FAULT, b=5), A),
        (signs("FAULT"), None),
        (signs("FAULT", log="[Server 7] New client 41 connected"), None),
        (signs("FAULT", log=FAULT.replace("41", "99")), None),
        (signs("ACTIVE", "ok", log=FAULT), A),
        (signs("ACTIVE", SILENT, b=5), B),
        (signs("ACTIVE", "it is no client of the server"), None),
        (signs("", b=5), None),
        # Who was killed first; the other may have aborted over what that did to it.
        (signs("ACTIVE", SILENT, a=7, b=6), B),
        (signs("ACTIVE", SILENT, a=SEEN_AT + 60 * SECOND), None),
    ],
)
def test_the_offender_is_who_the_signs_name(seen: DomainSigns, offender: RunId | None) -> None:
    found = judge(seen)
    assert found is not None
    assert found.offender == offender
    assert found.is_over == (seen.canary == "ok")
    assert seen.device_uuid in found.evidence


class Wedged(Mps):
    """A domain whose server says that it is active, and answers nobody once the test lets the canary end."""

    def __init__(self, directory: Path) -> None:
        client = SimpleNamespace(pid=CLIENT_PID, is_mps_client=True)
        devices: Any = SimpleNamespace(info=lambda _: SimpleNamespace(index=0), processes=lambda _: [client])
        watchdog: Any = SimpleNamespace(pids_of=lambda _: set(), watch=lambda *_, **__: None)
        super().__init__(devices, watchdog, directory=directory, path="", env={})
        self.domain = self._domain(DEVICE)
        self.domain.server_pid = 7
        self.is_asked = asyncio.Event()
        self.answers: asyncio.Queue[str] = asyncio.Queue()

    async def _status(self, _: object) -> str:
        return "ACTIVE"

    async def _canary(self, _: object) -> str:
        self.is_asked.set()
        return await self.answers.get()

    async def _control(self, domain: object, commands: str, *, s_max: float = 0) -> str:
        raise MpsCommandFailed(commands, code=None, said="nothing in 3 s")

    async def examined(self, run: RunId, killed_at: int = 0) -> DomainFailed | None:
        """As the shell does it where a run has ended badly."""
        if killed_at:
            self.killed(DEVICE, Kill(at=killed_at, run_id=run))
        return await self.examine(DEVICE)


@pytest.fixture
def mps(tmp_path: Path) -> Wedged:
    return Wedged(tmp_path)


@pytest.mark.parametrize("is_killed_noticed_first", [True, False])
async def test_a_failure_is_put_down_to_the_killed_run_in_whichever_order_the_ends_are_noticed(
    mps: Wedged, *, is_killed_noticed_first: bool
) -> None:
    """A neighbour meets the error that a kill left it, and may be heard of before the killed run is."""
    ends = [(A, 5), (B, 0)] if is_killed_noticed_first else [(B, 0), (A, 5)]
    first = asyncio.create_task(mps.examined(*ends[0]))
    await mps.is_asked.wait()
    second = asyncio.create_task(mps.examined(*ends[1]))
    await asyncio.sleep(0)  # It has said what it knows, and waits for the first.
    mps.answers.put_nowait(SILENT)
    for failed in await asyncio.gather(first, second):
        assert failed is not None
        assert failed.offender == A
        assert failed.evidence.endswith(f"killed with work in flight; caused by {A}")


async def test_a_failure_that_named_nobody_is_put_down_to_a_kill_that_is_noticed_later(mps: Wedged) -> None:
    """And to the first of them, though a neighbour's own abort was noticed before."""
    mps.answers.put_nowait(SILENT)
    nobody = await mps.examined(B)
    assert nobody is not None
    assert nobody.offender is None
    found = [await mps.examined(C, killed_at=6), await mps.examined(A, killed_at=5), await mps.examined(B)]
    assert [one and one.offender for one in found] == [C, A, A]


async def test_a_server_found_wedged_by_a_stop_or_after_a_fault_is_put_down_to_the_killed_run(mps: Wedged) -> None:
    """Whoever judges goes by what was noticed: a look that a fault asked for, and a stop that gets no answer."""
    mps.killed(DEVICE, Kill(at=5, run_id=A))
    stopped = await mps.terminate(DEVICE, {CLIENT_PID})
    assert stopped is not None
    assert stopped.offender == A
    mps.domain.failure = None
    mps.answers.put_nowait(SILENT)
    mps.reported(DEVICE, 31)
    suspected = await mps.examine(DEVICE)
    assert suspected is not None
    assert suspected.offender == A


async def test_a_kill_that_did_no_harm_is_not_held_against_the_run_later(mps: Wedged) -> None:
    """Once the server was seen to serve; one that came while it was looked at is for the next look."""
    looking = asyncio.create_task(mps.examined(A, killed_at=5))
    await mps.is_asked.wait()
    mps.killed(DEVICE, Kill(at=6, run_id=B))
    mps.answers.put_nowait("ok")
    assert await looking is None
    mps.answers.put_nowait(SILENT)
    failed = await mps.examine(DEVICE)
    assert failed is not None
    assert failed.offender == B
