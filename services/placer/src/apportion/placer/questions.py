"""What others may ask the placer: why a job waits, and what would become of one. Nothing is changed by asking.

Answers are worked out on a copy of the state in a thread, so that decisions go on meanwhile.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from apportion.contracts import subjects
from apportion.contracts.events import JobSpec
from apportion.contracts.ids import JobId, TenantId
from apportion.placer import core
from apportion.placer.defrag import MOVES_MAX, Defragmentation, defragmented
from apportion.placer.plan import Plan, planned
from apportion.placer.state import State
from apportion.placer.why import Why, why_in
from apportion.runtime.clock import Clock
from apportion.runtime.stream import Bus

AT_ONCE: Final = 1
"""Questions that are worked on at once; the others wait their turn."""


class WhyAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why this job waits."""

    job_id: JobId


class PlanAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What would become of this job, were it admitted now."""

    job_id: JobId
    tenant: TenantId
    spec: JobSpec


class DefragAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which few runs, moved, would leave the pool of more use."""

    moves: Annotated[int, Meta(ge=1, le=1000)] = MOVES_MAX


class Problem(Struct, frozen=True, kw_only=True):
    """Why there is no answer."""

    code: str
    message: str


class _Failed(Struct, frozen=True, kw_only=True):
    error: Problem


class Questions:
    """Listens and answers, for as long as the connection lives."""

    def __init__(self, bus: Bus, *, state: Callable[[], State], clock: Clock) -> None:
        self._bus = bus
        self._state = state
        self._clock = clock
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def start(self) -> None:
        """Listen on each question's subject."""
        for name, handler in (("why", self._why), ("plan", self._plan), ("defrag", self._defrag)):
            await self._bus.serve(subjects.query(self._bus.pool, name), handler)

    async def _why(self, data: bytes) -> bytes:
        try:
            asked = msgspec.json.decode(data, type=WhyAsked)
        except (msgspec.ValidationError, msgspec.DecodeError) as err:
            return _failed("QuestionInvalid", str(err))
        if asked.job_id not in self._state().pool.jobs:
            return _failed("JobNotFound", f"the placer knows no live job {asked.job_id}")

        def worked_out(state: State, now: int) -> Why | None:
            return why_in(state, asked.job_id, now)

        return await self._answer(worked_out)

    async def _plan(self, data: bytes) -> bytes:
        try:
            asked = msgspec.json.decode(data, type=PlanAsked)
        except (msgspec.ValidationError, msgspec.DecodeError) as err:
            return _failed("QuestionInvalid", str(err))
        if asked.job_id in self._state().pool.jobs:
            return _failed("JobIdTaken", f"there is a job {asked.job_id} already")

        def worked_out(state: State, now: int) -> Plan:
            return planned(state, asked.job_id, asked.tenant, asked.spec, now)

        return await self._answer(worked_out)

    async def _defrag(self, data: bytes) -> bytes:
        try:
            asked = msgspec.json.decode(data, type=DefragAsked)
        except (msgspec.ValidationError, msgspec.DecodeError) as err:
            return _failed("QuestionInvalid", str(err))
        return await self._answer(lambda state, now: defragmented(state, now, asked.moves))

    async def _answer(self, worked_out: Callable[[State, int], Why | Plan | Defragmentation | None]) -> bytes:
        async with self._slots:
            data, now = core.snapshot(self._state()), self._clock.now()
            found = await asyncio.to_thread(lambda: worked_out(core.restore(data), now))
        return msgspec.json.encode(found)


def _failed(code: str, message: str) -> bytes:
    return msgspec.json.encode(_Failed(error=Problem(code=code, message=message)))
