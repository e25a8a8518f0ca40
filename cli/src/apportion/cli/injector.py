"""Breaks on this machine what the monitor says shall be broken, and mends it again.

It follows the monitor's facts: FaultInjected begins a fault, FaultCleared ends it, and so does the fault's own time by
our clock, in case the monitor is what was broken. What it could not do it says by asking that the fault is cleared.
What must be undone is told to a guard process before it is done (``fault_guard``), which undoes it where this one dies.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from apportion.cli import fault_guard, hogs, relay
from apportion.cli.hogs import CannotBreak
from apportion.cli.places import start_ticks
from apportion.contracts import events as ev
from apportion.contracts import subjects
from apportion.contracts.causes import FaultKind
from apportion.contracts.codec import Message, decode_fact, encode_wish
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import MONITOR, OPERATOR, PoolId
from apportion.runtime.stream import Bus, BusError

if TYPE_CHECKING:
    from apportion.cli.supervisor import Supervisor

HEAT_C: Final = 60
XID_LOST: Final = 79
SLOW_S: Final = (0.08, 0.02)
"""Of each tenth of a second the bus stands still so long, and goes on so long."""
STALE_S: Final = 4.0
"""Longer than a standby waits."""

log = structlog.get_logger(__name__)


class Guard:
    """The process that mends after our death; started with the first fault."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._broken: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def holding(self, key: str, how: dict[str, Any]) -> Iterator[None]:
        """Whatever happens within, it is mended at the end, by us or by the guard."""
        self._broken[key] = how
        self._say({"break": key, "mend": how})
        try:
            yield
        finally:
            fault_guard.mend(how)
            self._broken.pop(key, None)
            self._say({"mended": key})

    def close(self) -> None:
        """Let it mend what is left, and end."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _say(self, what: dict[str, Any]) -> None:
        if self._process is None or self._process.poll() is not None:
            # Its own session: what ends us by the terminal, or by our group, doesn't end it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "apportion.cli.fault_guard"],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for key, how in self._broken.items():
                self._write({"break": key, "mend": how})
            return
        self._write(what)

    def _write(self, what: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel it until it has ended: before Python 3.12 ``wait_for`` drops a cancellation that comes with its result."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=10)


class Injector:
    """One pool's faults on this machine; ``run`` until cancelled."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor
        self._guard = Guard()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._bus: Bus | None = None
        self.done = 0
        """Faults that were begun."""

    async def run(self, bus: Bus) -> None:
        """Follow the monitor's facts from here on."""
        self._bus = bus
        pool = PoolId(self._supervisor.plan.pool)
        after = (await bus.position(Stream.FACTS)).last_seq
        pattern = f"{subjects.ROOT}.{pool}.fact.{MONITOR}.pool"
        reader = await bus.reader(Stream.FACTS, after=after, filters=(pattern,))
        try:
            async for batch in reader.batches():
                for raw in batch:
                    event = decode_fact(
                        raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at
                    ).event
                    if isinstance(event, ev.FaultInjected):
                        self._begin(event)
                    elif isinstance(event, ev.FaultCleared) and (task := self._running.pop(event.fault_id, None)):
                        ending = asyncio.create_task(_end(task))
                        self._ending.add(ending)
                        ending.add_done_callback(self._ending.discard)
        finally:
            await self.close()

    async def close(self) -> None:
        """Mend everything."""
        tasks = list(self._running.values())
        self._running.clear()
        await asyncio.gather(*map(_end, tasks), *self._ending)
        await asyncio.to_thread(self._guard.close)

    def _begin(self, fault: ev.FaultInjected) -> None:
        log.warning("fault_injected", fault=fault.fault_id, kind=fault.kind.value, target=fault.target)
        self._running[fault.fault_id] = asyncio.create_task(self._one(fault), name=fault.fault_id)

    async def _one(self, fault: ev.FaultInjected) -> None:
        try:
            async with asyncio.timeout(fault.for_s):
                self.done += 1
                await self._do(fault)
        except TimeoutError:
            pass  # its time is up, whether the monitor says so or can't
        except (CannotBreak, OSError, BusError) as err:
            log.warning("fault_not_done", fault=fault.fault_id, error=str(err))
            await self._give_up(fault, str(err))
        except Exception as err:  # noqa: BLE001 - a simulated driver's errors are the driver's; the pool goes on
            log.warning("fault_not_done", fault=fault.fault_id, error=f"{type(err).__name__}: {err}")
            await self._give_up(fault, f"{type(err).__name__}: {err}")

    async def _give_up(self, fault: ev.FaultInjected, why: str) -> None:
        assert self._bus is not None
        wish = ev.FaultClearRequested(fault_id=fault.fault_id, reason=f"could not be done: {why}"[:1000])
        message = encode_wish(
            self._bus.pool, wish, tenant=OPERATOR, event_id=f"{fault.fault_id}.given-up", source="/apportion/injector"
        )
        headers = {**message.headers, "ce-actor": "service:supervisor"}
        with contextlib.suppress(BusError):
            await self._bus.publish_wish(Message(subject=message.subject, headers=headers, body=message.body))

    async def _do(self, fault: ev.FaultInjected) -> None:
        """Break, wait as long as it takes, and mend: whatever ends it ends it through here."""
        match fault.kind:
            case FaultKind.SERVICE_KILL:
                os.kill(self._pid(fault.target), signal.SIGKILL)
            case FaultKind.SERVICE_RESTART:
                os.kill(self._pid(fault.target), signal.SIGTERM)
            case FaultKind.SERVICE_PAUSE:
                await self._stand_still(fault, self._pid(fault.target))
            case FaultKind.PLACER_STALE:
                async with asyncio.timeout(max(STALE_S, fault.for_s / 2)):
                    await self._stand_still(fault, self._active("placer"))
            case FaultKind.NODE_LOSS:
                await self._lose(fault.target)
            case FaultKind.NODE_STALL:
                await self._stand_still(fault, self._pid(self._agent(fault.target)))
            case FaultKind.NODE_FLAP:
                draw = random.Random(fault.seed)  # noqa: S311 - repeatable, which is the point
                await self._blink(
                    fault,
                    lambda: self._pid(self._agent(fault.target)),
                    lambda: (draw.uniform(0.5, 8.0), draw.uniform(0.2, 3.0)),
                )
            case FaultKind.NODE_PARTITION:
                await self._cut_off(fault)
            case FaultKind.DEVICE_XID | FaultKind.DEVICE_LOST | FaultKind.DEVICE_ECC | FaultKind.DEVICE_HEAT:
                await self._ail(fault)
            case FaultKind.DEVICE_MPS_WEDGE | FaultKind.DEVICE_MEMORY_HOG | FaultKind.DEVICE_COMPUTE_HOG:
                await hogs.on_device(fault, self._supervisor.data_dir)
            case FaultKind.DISK_SLOW | FaultKind.DISK_FULL:
                await hogs.on_disk(fault, self._supervisor.data_dir)
            case FaultKind.BUS_RESTART:
                os.kill(self._bus_pid(), signal.SIGKILL)
            case FaultKind.BUS_PAUSE:
                await self._stand_still(fault, self._bus_pid())
            case FaultKind.BUS_SLOW:
                await self._blink(fault, self._bus_pid, lambda: SLOW_S)
            case FaultKind.MESSAGE_DELAY | FaultKind.MESSAGE_DUPLICATE | FaultKind.MESSAGE_DROP | FaultKind.CLOCK_JUMP:
                pass  # whoever it is done to does it, and hears of it by the same fact

    async def _stand_still(self, fault: ev.FaultInjected, pid: int, *, for_s: float | None = None) -> None:
        ticks = start_ticks(pid)
        if ticks is None:
            raise CannotBreak(f"process {pid} has ended")
        with self._guard.holding(f"{fault.fault_id}.{pid}", {"cont": pid, "ticks": ticks}):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(fault.for_s if for_s is None else for_s)

    async def _blink(
        self, fault: ev.FaultInjected, pid: Callable[[], int], times: Callable[[], tuple[float, float]]
    ) -> None:
        deadline = time.monotonic() + fault.for_s
        while time.monotonic() < deadline:
            still_s, going_s = times()
            with contextlib.suppress(CannotBreak, ProcessLookupError):  # being restarted just now
                await self._stand_still(fault, pid(), for_s=still_s)
            await asyncio.sleep(going_s)

    async def _lose(self, node: str) -> None:
        if self._agent(node) not in self._supervisor.services:
            raise CannotBreak(f"no node {node} on this machine")
        await self._supervisor.lose_node(node)
        try:
            await asyncio.Event().wait()
        finally:
            self._supervisor.return_node(node)

    async def _cut_off(self, fault: ev.FaultInjected) -> None:
        path = relay.cuts_path(self._supervisor.data_dir)
        if not relay.is_between(self._supervisor.data_dir, fault.target):
            raise CannotBreak(f"no way of {fault.target} to the bus goes through this machine's relay")
        with self._guard.holding(fault.fault_id, {"cut": str(path), "name": fault.fault_id}):
            relay.cut(path, fault.fault_id, fault.target, for_s=fault.for_s)
            await asyncio.sleep(fault.for_s)

    async def _ail(self, fault: ev.FaultInjected) -> None:
        from apportion.node_agent.simgpu.faults import Faults
        from apportion.node_agent.simnode import socket_of

        node, _, text = fault.target.partition("/")
        index = int(text)
        path = socket_of(self._supervisor.data_dir / "nodes" / node)
        if not path.exists():
            raise CannotBreak(f"{node} has no simulated devices on this machine: a real device is not broken from here")
        undo = "cool" if fault.kind is FaultKind.DEVICE_HEAT else "reset"
        with self._guard.holding(fault.fault_id, {"socket": str(path), "index": index, undo: True}):
            await asyncio.to_thread(self._break_device, Faults, path, fault, index)
            await asyncio.sleep(fault.for_s)

    @staticmethod
    def _break_device(faults_of: Callable[[Path], Any], path: Path, fault: ev.FaultInjected, index: int) -> None:
        with faults_of(path) as faults:
            match fault.kind:
                case FaultKind.DEVICE_HEAT:
                    faults.heat(index, HEAT_C)
                case FaultKind.DEVICE_ECC:
                    faults.ecc(index, uncorrected=1)
                case FaultKind.DEVICE_LOST:
                    faults.xid(index, XID_LOST)
                case _:
                    faults.xid(index, fault.xid or XID_LOST)

    @staticmethod
    def _agent(node: str) -> str:
        from apportion.cli.supervisor import agent_name

        return agent_name(node)

    def _pid(self, service: str) -> int:
        found = self._supervisor.services.get(service)
        if found is None or found.pid is None:
            raise CannotBreak(f"no process of {service} on this machine")
        return found.pid

    def _active(self, author: str) -> int:
        """The process of that author that decides."""
        from apportion.cli.supervisor import STANDBY
        from apportion.runtime.health import probe

        for name in (author, f"{author}-{STANDBY}"):
            service = self._supervisor.services.get(name)
            if service is not None and service.health_port:
                _, said = probe(service.health_port, timeout_s=1.0)
                with contextlib.suppress(ValueError):
                    if json.loads(said).get("role") == "active":
                        return self._pid(name)
        raise CannotBreak(f"no active {author} on this machine")

    def _bus_pid(self) -> int:
        pid = self._supervisor.server.pid
        if pid is None:
            raise CannotBreak("the bus is not a process of this supervisor")
        return pid
