"""Faults that a process does to itself: what it reads comes late, twice or never, and its wall clock is wrong.

Nothing beside the process is needed for them, so they work however a pool was started. A process hears of a fault by
the facts that it follows anyway, before it loses any of them, and ends it by its own monotonic clock: no fault outlives
its time, nor the process that it is done to. Off unless the setting ``faults`` is on.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog
from msgspec import Struct
from nats.aio.msg import Msg

from apportion.contracts import events as ev
from apportion.contracts import subjects
from apportion.contracts.causes import DONE_BY_ITSELF, FaultKind
from apportion.contracts.codec import TYPE_PREFIX, decode_fact
from apportion.contracts.ids import MONITOR
from apportion.runtime.clock import NS_PER_S, Clock, SystemClock

DROPPED_PCT: Final = 10
REPEATED_PCT: Final = 50
DELAY_S_MAX: Final = 1.0
JUMP_S_MAX: Final = 3_600

_TYPES: Final = frozenset(TYPE_PREFIX + ev.type_name(kind) for kind in (ev.FaultInjected, ev.FaultCleared))

log = structlog.get_logger(__name__)


class _Fault(Struct):
    """One that is in force here."""

    kind: FaultKind
    ends_at: int
    """By the monotonic clock; ns."""
    draw: random.Random
    jump_ns: int = 0


class _Held(Struct):
    """A message that comes late."""

    due_at: float
    message: Msg
    deliver: Callable[[Msg], None]


class Disturbances(SystemClock):
    """What is wrong now with what one process reads; also its clock, which may be wrong, too."""

    def __init__(self, of: str, *, clock: Clock | None = None) -> None:
        self._of = of
        self._clock: Clock = clock or SystemClock()
        self._faults: dict[str, _Fault] = {}
        self._held: deque[_Held] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = self.repeated = self.delayed = 0
        """Messages that were."""

    def now(self) -> int:
        """The wall clock, as far off as faults have it."""
        return self._clock.now() + sum(fault.jump_ns for fault in self._in_force())

    def monotonic(self) -> int:
        """The monotonic clock, which no fault touches."""
        return self._clock.monotonic()

    def pass_on(self, message: Msg, recorded_at: int | None, deliver: Callable[[Msg], None]) -> None:
        """Hand a message of a stream's consumer on: at once, late, twice, or not at all.

        ``recorded_at`` is None for what the consumer says of itself, which is never lost: it keeps its place in the
        order. What a loss leaves is a gap, as where a network loses, and the reader has to find it.
        """
        if recorded_at is not None:
            self._hear(message, recorded_at)
        in_force = self._in_force()
        if not in_force and not self._held:
            deliver(message)
            return
        times, delay_s = 1, 0.0
        if recorded_at is not None:
            for fault in in_force:
                match fault.kind:
                    case FaultKind.MESSAGE_DROP:
                        times = 0 if fault.draw.randrange(100) < DROPPED_PCT else times
                    case FaultKind.MESSAGE_DUPLICATE:
                        times *= 2 if fault.draw.randrange(100) < REPEATED_PCT else 1
                    case FaultKind.MESSAGE_DELAY:
                        delay_s = max(delay_s, fault.draw.uniform(0, DELAY_S_MAX))
                    case _:
                        pass
        self.dropped += times == 0
        self.repeated += times > 1
        self.delayed += delay_s > 0
        if not delay_s and not self._held:
            for _ in range(times):
                deliver(message)
            return
        # Behind what is held already, and no sooner.
        due_at = max(asyncio.get_running_loop().time() + delay_s, self._held[-1].due_at if self._held else 0.0)
        self._held.extend([_Held(due_at, message, deliver)] * times)
        self._release()

    def _release(self) -> None:
        """Deliver what is due, in its order."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._held and self._held[0].due_at <= loop.time():
            held = self._held.popleft()
            held.deliver(held.message)
        if self._held:
            self._timer = loop.call_at(self._held[0].due_at, self._release)

    def _hear(self, message: Msg, recorded_at: int) -> None:
        # Whose word it is the subject says: a wish may claim any type.
        if (message.headers or {}).get("ce-type") not in _TYPES or not subjects.is_fact_of(MONITOR, message.subject):
            return
        event = decode_fact(message.subject, message.headers, message.data, seq=0, recorded_at=recorded_at).event
        if isinstance(event, ev.FaultCleared):
            self._faults.pop(event.fault_id, None)
        elif isinstance(event, ev.FaultInjected) and event.target == self._of and event.fault_id not in self._faults:
            # What is read again after a restart is old: its time runs from when the bus stored it.
            left_ns = min(event.for_s * NS_PER_S, recorded_at + event.for_s * NS_PER_S - time.time_ns())
            if left_ns > 0 and event.kind in DONE_BY_ITSELF:
                draw = random.Random(event.seed)  # noqa: S311 - repeatable, which is the point
                jump = draw.randrange(-JUMP_S_MAX, JUMP_S_MAX + 1) or 1 if event.kind is FaultKind.CLOCK_JUMP else 0
                self._faults[event.fault_id] = _Fault(
                    kind=event.kind, ends_at=self.monotonic() + left_ns, draw=draw, jump_ns=jump * NS_PER_S
                )
                log.warning("disturbed", fault=event.fault_id, kind=event.kind.value, jump_s=jump)

    def _in_force(self) -> list[_Fault]:
        if not self._faults:
            return []
        now = self.monotonic()
        self._faults = {name: fault for name, fault in self._faults.items() if now < fault.ends_at}
        return list(self._faults.values())
