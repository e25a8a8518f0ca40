"""Start at most once, find again after a crash, stop: the agent's side of run processes.

Every run has a directory, made exclusively and synced before anybody is asked to start it, and a shim that outlives
the agent (spawner.py). This module asks, watches, signals and cleans up, without polling: a pidfd says when a shim has
ended. What the files mean is judged in run_records.py; what ought to run is the core's business.
"""

# ruff: noqa: PTH102, PTH104, PTH110, PTH208  plain paths: every run passes here, and building Path objects took a third of the time

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

import msgspec

from apportion.contracts.ids import RunId
from apportion.node_agent import spawner
from apportion.node_agent.run_logs import STREAMS, KeptLogs, LogDesk, Retention, generations
from apportion.node_agent.run_records import (
    Absent,
    Claim,
    Claimed,
    Ended,
    ExecFailed,
    Exited,
    ExitRecord,
    Gate,
    Groups,
    Intent,
    LossReason,
    Lost,
    NeverStarted,
    Observed,
    Prepared,
    ProcessSeen,
    RunAs,
    Running,
    Started,
    Unreadable,
    directory_name,
    end_of_record,
    interpret,
    run_of_directory,
)

RUN_ID_VARIABLE: Final = "APPORTION_RUN_ID"
TOKEN_VARIABLE: Final = "APPORTION_RUN_TOKEN"  # noqa: S105  it marks processes; it grants nothing

LOG_BYTES_MAX: Final = 16 * 1024 * 1024
_PACKET_BYTES: Final = 4096
_ANSWER_S_MAX: Final = 5.0
"""After that long without a word, the files are asked."""
_IDLE_SHIM_S: Final = 10.0
_SPAWNER_IDLE_S: Final = 60.0
_SPAWNER_START_S_MAX: Final = 20.0
_ASK_ATTEMPTS_MAX: Final = 3
_KILL_S_MAX: Final = 10.0
_SWEEP_PAUSE_S: Final = 0.01
_READ_BYTES: Final = 16384
_RETENTION: Final = Retention()

_Record = TypeVar("_Record", bound=msgspec.Struct)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: an argument vector and the whole environment; nothing is inherited from the agent."""

    run_id: RunId
    epoch: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_bytes_max: int = LOG_BYTES_MAX
    """Most bytes kept of stdout and stderr together."""
    open_files_max: int | None = None
    groups: Groups | None = None
    """Control groups, made and read back, in which the workload is started."""
    user: RunAs | None = None
    """As whom the workload is started, and whose its private directory is; None: the agent's own."""
    owner: RunAs | None = None
    """Whose the directory is, where what is started is only the client of a container's engine."""


class StartedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose workload is running; start times are clock ticks since boot, and tell a pid from its reuse."""

    run_id: RunId
    shim_pid: int
    shim_start_ticks: int
    pid: int
    start_ticks: int
    started_at_ns: int


class RunEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run that was being watched; no process of it is left."""

    run_id: RunId
    epoch: int
    end: Ended


class StartRefused(Exception):
    """The run must not be started: its directory says that it was, or that a later epoch was ordered."""

    def __init__(self, run_id: RunId, observed: Observed, reason: str) -> None:
        super().__init__(f"{run_id}: {reason}")
        self.run_id = run_id
        self.observed = observed
        self.reason = reason


class StartFailed(Exception):
    """The workload was not started and won't be: ``end`` says why."""

    def __init__(self, run_id: RunId, end: Ended) -> None:
        super().__init__(f"{run_id}: {end}")
        self.run_id = run_id
        self.end = end


class SpawnerUnavailable(Exception):
    """No spawner could be reached or started."""


class RootInUse(Exception):
    """Another agent of this machine holds the directory."""


class RunStillLives(Exception):
    """A run that hasn't ended can't be removed."""


class _Packet(msgspec.Struct, frozen=True):
    """What a shim tells of its run: one of the four."""

    run: str
    """The name of the run's directory."""
    claimed: Claim | None = None
    started: Started | None = None
    ended: ExitRecord | None = None
    refused: str | None = None


class _Spawner:
    """The spawner that is asked, held by a descriptor that tells its end."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int) -> None:
        self.connection = connection
        self.pid = pid
        self.pidfd = pidfd


class _Shim:
    """A live shim, held by a descriptor that can't come to mean another process."""

    def __init__(self, channel: socket.socket | None) -> None:
        self.channel = channel
        """None for a shim of an earlier agent: it guards its run to the end, and exits."""
        self.pidfd = -1
        self.run: RunId | None = None


class _Watched:
    """A live run and its shim."""

    def __init__(self, intent: Intent, claim: Claim, shim: _Shim, loop: asyncio.AbstractEventLoop) -> None:
        self.intent = intent
        self.claim = claim
        self.shim = shim
        self.started: asyncio.Future[StartedProcess] = loop.create_future()
        self.ended: asyncio.Future[Ended] = loop.create_future()
        # It may fail with nobody waiting for it; the queue of ends tells all.
        self.started.add_done_callback(_retrieve)


class _Ask:
    """A run that a shim was told to claim."""

    def __init__(self, intent: Intent, loop: asyncio.AbstractEventLoop) -> None:
        self.intent = intent
        self.answer: asyncio.Future[_Watched | None] = loop.create_future()


class _Together(Generic[_Item, _Result]):
    """Blocking work in a thread, in one trip for all who came while the last was under way."""

    def __init__(
        self,
        work: Callable[[list[_Item]], list[_Result]],
        threads: ThreadPoolExecutor,
        run_task: Callable[[Coroutine[object, object, None]], None],
    ) -> None:
        """``work``: one result for each item; what it raises, all of them get."""
        self._work = work
        self._threads = threads
        self._run_task = run_task
        self._waiting: list[tuple[_Item, asyncio.Future[_Result]]] = []
        self._is_at_work = False

    async def __call__(self, item: _Item) -> _Result:
        """The item's result."""
        done: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if not self._is_at_work:
            self._is_at_work = True
            self._run_task(self._work_off())
        return await done

    async def _work_off(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                try:
                    results = await loop.run_in_executor(self._threads, self._work, [item for item, _ in batch])
                except OSError as err:
                    for _, done in batch:
                        if not done.done():
                            done.set_exception(err)
                else:
                    for (_, done), result in zip(batch, results, strict=True):
                        if not done.done():
                            done.set_result(result)
        finally:
            self._is_at_work = False


class Processes:
    """The runs of one node, under one directory; use as an asynchronous context.

    ``ends`` brings every watched run's end exactly once, in the order in which they were noticed.
    """

    def __init__(
        self,
        root: Path,
        *,
        spawner_idle_s: float = _SPAWNER_IDLE_S,
        retention: Retention = _RETENTION,
        is_passed_through: bool = False,
    ) -> None:
        """``is_passed_through``: other users may go through the directory to what is theirs below it."""
        self._root = root
        self._runs = root / "runs"
        self._runs_path = str(self._runs)
        self._spawner_idle_s = spawner_idle_s
        self._mode = 0o711 if is_passed_through else 0o700
        self._boot_id = _boot_id()
        self._watched: dict[RunId, _Watched] = {}
        self._starting: dict[RunId, asyncio.Future[_Watched]] = {}
        self._asked: dict[RunId, _Ask] = {}
        self._stills: dict[RunId, bool] = {}
        self._shims: set[_Shim] = set()
        self._idle: list[_Shim] = []
        self._trim: asyncio.TimerHandle | None = None
        self._spawner: _Spawner | None = None
        self._spawner_lock = asyncio.Lock()
        self._lock_fd = -1
        self._runs_fd = -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="processes")
        self._make_directory = _Together(self._make_and_sync, self._threads, self._run_task)
        self._bury = _Together(self._bury_all, self._threads, self._run_task)
        self._serials = itertools.count(1)
        self.kept = KeptLogs(root / "logs", retention)
        """What ended runs wrote."""
        self.desk = LogDesk(runs=self._runs, kept=self.kept, live=lambda: {*self._watched, *self._starting})
        self.ends: asyncio.Queue[RunEnded] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        """Take the directory for this agent; raises RootInUse where another one holds it."""
        self._runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (self._root, self._runs):
            directory.chmod(self._mode)
        self._lock_fd = os.open(self._root / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            os.close(self._lock_fd)
            raise RootInUse(str(self._root)) from err
        self._runs_fd = os.open(self._runs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for leftover in self._runs.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)  # Being made or removed when its agent died.
        self.kept.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let go of everything; the runs go on. A later agent adopts them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._trim is not None:
            self._trim.cancel()
        for shim in list(self._shims):
            self._let_go(shim)
        self._watched.clear()
        self._drop_spawner()
        self._threads.shutdown(wait=True)
        os.close(self._runs_fd)
        os.close(self._lock_fd)

    async def adopt(self) -> dict[RunId, Observed]:
        """What became of the runs of earlier agents; those that live are watched from now on.

        To be called once, before the first start. No process is left of any run reported as ended or lost.
        """
        found: dict[RunId, Observed] = {}
        for name in sorted(os.listdir(self._runs_fd)):
            run = run_of_directory(name)
            if run is None:
                continue
            observed = self.observe(run)
            if isinstance(observed, Claimed | Running) and self._watch_earlier(run, observed) is None:
                observed = self.observe(run)  # It ended between the two looks.
            if isinstance(observed, Lost):
                await self._sweep(run)
            found[run] = observed
        return found

    def observe(self, run: RunId) -> Observed:
        """The run's state by its directory and /proc, now."""
        directory = self._directory(run)
        intent = _read_record(f"{directory}/intent.json", Intent)
        claim = _read_record(f"{directory}/claim", Claim)
        shim = _see_process(claim.pid) if isinstance(claim, Claim) and claim.pid else None
        # The end is read after the process was looked for: a shim that ends in between has left its word.
        return interpret(
            intent=intent,
            claim=claim,
            shim=shim,
            started=_read_record(f"{directory}/started", Started),
            exit_record=_read_record(f"{directory}/exit", ExitRecord),
            boot_id=self._boot_id,
        )

    async def start(self, launch: Launch) -> StartedProcess:
        """Start the run, or find it started: asked twice, at once or later, the workload runs once.

        Raises StartRefused if it ran before or a later epoch ordered it, StartFailed if it could not be executed.
        """
        return await self._wait_for_start(await self._order(launch, Gate.OPEN))

    async def prepare(self, launch: Launch) -> Claim:
        """Have a shim claim the run and wait at its gate for ``release`` or ``withdraw``.

        If the agent dies meanwhile, the shim withdraws by itself and the workload is never started.
        """
        watched = await self._order(launch, Gate.HELD)
        return watched.claim

    async def release(self, run: RunId) -> StartedProcess:
        """Open the gate of a prepared run; repeating it changes nothing."""
        watched = self._watched.get(run)
        if watched is None:
            raise StartFailed(run, self._end_of(run))
        self._tell(watched, "go")
        return await self._wait_for_start(watched)

    async def withdraw(self, run: RunId) -> Ended:
        """Give up a prepared run before its gate opened; one that was released meanwhile is killed."""
        return await self.stop(run, grace_s=0)

    def signal(self, run: RunId, number: int) -> bool:
        """Send a signal to the run's process group, by way of its shim; False if it doesn't live.

        SIGTERM or SIGKILL before the workload's start withdraws the order; any other is then lost.
        """
        watched = self._watched.get(run)
        if watched is None or watched.shim.pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(watched.shim.pidfd, signal.SIGRTMIN + number)
        except ProcessLookupError:
            return False
        return True

    async def still(self, run: RunId, *, is_still: bool) -> int | None:
        """Have every process of the run stand still, or go on; how many there are once all do. None: it has ended.

        Those in sessions of their own too, and those that are born meanwhile. Where it is asked otherwise before all
        do, who asked first is answered None.
        """
        self._stills[run] = is_still
        number = signal.SIGSTOP if is_still else signal.SIGCONT
        loop = asyncio.get_running_loop()
        while (watched := self._watched.get(run)) is not None and self._stills.get(run) is is_still:
            count, left = await loop.run_in_executor(self._threads, signal_processes_under, watched.claim.pid, number)
            if count and not left:
                return count
            await asyncio.sleep(_SWEEP_PAUSE_S)
        return None

    def is_still(self, run: RunId) -> bool:
        """Whether the run was last asked to stand still."""
        return self._stills.get(run, False)

    def signal_first(self, process: StartedProcess, number: int) -> bool:
        """Send a signal to the run's first process alone, if it handles it; False where it doesn't, or is gone.

        For a signal that would end whoever doesn't handle it, and the run's other processes need not.
        """
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            return False
        try:
            seen = _see_process(process.pid)
            if seen is None or seen.start_ticks != process.start_ticks or not _handles(process.pid, number):
                return False
            signal.pidfd_send_signal(pidfd, number)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(pidfd)
        return True

    async def stop(self, run: RunId, *, grace_s: float) -> Ended:
        """End the run: SIGTERM, SIGKILL after ``grace_s``; returns its end once no process of it is left.

        A shim that doesn't answer SIGKILL's order within 10 s is killed itself; the run is then lost.
        """
        watched = self._watched.get(run)
        if watched is None:
            return self._end_of(run)
        self._tell(watched, "withdraw")
        if grace_s > 0:
            self.signal(run, signal.SIGTERM)
            self.signal(run, signal.SIGCONT)  # A suspended run gets its chance too.
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(watched.ended), grace_s)
        deadline = time.monotonic() + _KILL_S_MAX
        while time.monotonic() < deadline:
            # Repeated, as a fork bomb may outrun one round.
            self.signal(run, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(watched.ended), 0.5)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(watched.shim.pidfd, signal.SIGKILL)
        return await asyncio.shield(watched.ended)

    async def ended(self, run: RunId) -> Ended:
        """The run's end, when it comes."""
        watched = self._watched.get(run)
        return self._end_of(run) if watched is None else await asyncio.shield(watched.ended)

    async def remove(self, run: RunId) -> None:
        """Forget an ended run but for what it wrote; then it could be started again, so its facts must be out."""
        if run in self._watched or run in self._starting:
            raise RunStillLives(run)

        if (error := await self._bury(run)) is not None:
            raise error

    def _bury_all(self, runs: list[RunId]) -> list[OSError | None]:
        return [self._bury_one(run) for run in runs]

    def _bury_one(self, run: RunId) -> OSError | None:
        try:
            # Kept before the directory goes: an agent that dies in between finds it still there, and does the rest.
            self.kept.keep(run, Path(self._directory(run)), time.time())
            grave = self._set_aside(run)
        except OSError as err:
            return err
        if grave is not None:
            shutil.rmtree(grave, ignore_errors=True)
        return None

    def work_path(self, run: RunId) -> Path:
        """The run's private directory, in which it is started."""
        return Path(f"{self._directory(run)}/work")

    def log_paths(self, run: RunId) -> dict[str, list[Path]]:
        """The files that hold the run's output, oldest first, by stream."""
        directory = Path(self._directory(run))
        return {stream: list(generations(directory, stream).values()) for stream in STREAMS}

    def live(self) -> dict[RunId, Claim]:
        """The runs that are being watched, with their shims."""
        return {run: watched.claim for run, watched in sorted(self._watched.items())}

    # Starting

    async def _order(self, launch: Launch, gate: Gate) -> _Watched:
        run = launch.run_id
        watched = self._watched.get(run)
        if watched is not None:
            self._check_epoch(launch, watched.intent.epoch)
            return watched
        starting = self._starting.get(run)
        if starting is not None:
            return await asyncio.shield(starting)
        future: asyncio.Future[_Watched] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._starting[run] = future
        try:
            watched = await self._order_alone(launch, gate)
        except BaseException as err:
            future.set_exception(err if isinstance(err, Exception) else StartRefused(run, Absent(), "cancelled"))
            raise
        else:
            future.set_result(watched)
            return watched
        finally:
            del self._starting[run]

    async def _order_alone(self, launch: Launch, gate: Gate) -> _Watched:
        run = launch.run_id
        if not os.path.exists(self._directory(run)):  # noqa: ASYNC240  one stat of a local name
            return await self._order_anew(launch, gate)
        observed = self.observe(run)
        if isinstance(observed, Prepared) and not self._take_claim(run, observed.intent):
            observed = self.observe(run)  # A shim that was on its way has taken it.
        elif isinstance(observed, Prepared):
            observed = NeverStarted(epoch=observed.intent.epoch)
        match observed:
            case Absent():
                pass
            case NeverStarted(epoch=epoch):
                self._check_epoch(launch, epoch)
                grave = self._set_aside(run)
                if grave is not None:
                    shutil.rmtree(grave, ignore_errors=True)
            case Claimed() | Running():
                self._check_epoch(launch, observed.intent.epoch)
                watched = self._watch_earlier(run, observed)
                if watched is None:
                    raise StartRefused(run, self.observe(run), "it has just ended")
                return watched
            case _:
                raise StartRefused(run, observed, "it was started before")
        return await self._order_anew(launch, gate)

    async def _order_anew(self, launch: Launch, gate: Gate) -> _Watched:
        run = launch.run_id
        intent = Intent(
            run_id=run,
            epoch=launch.epoch,
            argv=launch.argv,
            env={**launch.env, RUN_ID_VARIABLE: run, TOKEN_VARIABLE: (token := secrets.token_hex(16))},
            gate=gate,
            log_bytes_max=launch.log_bytes_max,
            open_files_max=launch.open_files_max,
            groups=launch.groups,
            user=launch.user,
            owner=launch.owner,
            boot_id=self._boot_id,
            token=token,
        )
        if not await self._make_directory(intent):
            raise StartRefused(run, self.observe(run), "its directory exists")
        for _ in range(_ASK_ATTEMPTS_MAX):
            watched = await self._ask(intent)
            if watched is not None:
                return watched
        raise SpawnerUnavailable(f"no shim came up for {run}")

    def _check_epoch(self, launch: Launch, epoch: int) -> None:
        if launch.epoch < epoch:
            raise StartRefused(launch.run_id, self.observe(launch.run_id), f"epoch {epoch} has ordered it since")

    def _take_claim(self, run: RunId, intent: Intent) -> bool:
        """Take an unclaimed order back: once we hold its claim, no shim can start it any more."""
        directory = Path(self._directory(run))
        draft = directory / "claim.agent"
        draft.write_bytes(
            msgspec.json.encode(Claim(pid=0, start_ticks=0, boot_id=self._boot_id, token=intent.token)),
        )
        try:
            os.link(draft, directory / "claim")
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def _set_aside(self, run: RunId) -> Path | None:
        grave = self._runs / f".removing-{next(self._serials)}"
        try:
            Path(self._directory(run)).rename(grave)
        except FileNotFoundError:
            return None
        return grave

    def _make_and_sync(self, intents: list[Intent]) -> list[bool]:
        """Make the runs' directories and have them on disk, all by one sync; False where there was one.

        Durable before anybody may act on it: after a power failure the directory alone says that the run may have
        been started. In a thread: where other processes sync, each change of a directory waits for the journal.
        """
        made = [_make_directory(self._runs_path, intent) for intent in intents]
        os.fsync(self._runs_fd)
        return made

    async def _wait_for_start(self, watched: _Watched) -> StartedProcess:
        """The workload's start, by its shim's word; where that was lost, by its files."""
        while not watched.started.done():
            await asyncio.wait([watched.started], timeout=_ANSWER_S_MAX)
            state = self.observe(watched.intent.run_id)
            if not watched.started.done() and isinstance(state, Running):
                watched.started.set_result(_started_process(watched.intent.run_id, watched.claim, state.started))
        return watched.started.result()

    async def _ask(self, intent: Intent) -> _Watched | None:
        """Have a shim claim and start the run; None if none did, and then asking again is safe."""
        run = intent.run_id
        loop = asyncio.get_running_loop()
        ask = self._asked[run] = _Ask(intent, loop)
        deadline = loop.call_later(_ANSWER_S_MAX, _set_unless_done, ask.answer)
        try:
            while not self._hand_over(run, self._idle.pop(0) if self._idle else await self._fork_shim()):
                pass  # That shim was gone.
            watched = await ask.answer
        finally:
            deadline.cancel()
            del self._asked[run]
        if watched is not None:
            return watched
        observed = self.observe(run)
        if isinstance(observed, Claimed | Running):
            return self._watch_earlier(run, observed)
        if isinstance(observed, Prepared):
            return None
        raise StartFailed(run, observed) if isinstance(observed, Ended) else StartRefused(run, observed, "gone")

    def _hand_over(self, run: RunId, shim: _Shim) -> bool:
        """Tell the shim to guard this run; False if it has died."""
        assert shim.channel is not None
        shim.run = run
        try:
            shim.channel.send(f"run {directory_name(run)}".encode())
        except OSError:
            self._let_go(shim)
            return False
        return True

    def _tell(self, watched: _Watched, word: str) -> None:
        """Say something about its gate to the shim; where it has none, or is gone, nothing is lost."""
        if watched.shim.channel is not None and watched.intent.gate is Gate.HELD and not watched.started.done():
            with contextlib.suppress(OSError):
                watched.shim.channel.send(f"{word} {directory_name(watched.intent.run_id)}".encode())

    async def _fork_shim(self) -> _Shim:
        """A new shim at the other end of a channel; that it never came up is told by the channel's end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        shim = _Shim(ours)
        try:
            with theirs:
                await self._send_request(theirs)
        except BaseException:
            ours.close()
            raise
        self._shims.add(shim)
        asyncio.get_running_loop().add_reader(ours, self._on_packets, shim)
        return shim

    async def _send_request(self, channel: socket.socket) -> None:
        for _ in range(_ASK_ATTEMPTS_MAX):
            spawner_ = await self._connect_spawner()
            try:
                socket.send_fds(spawner_.connection, [b"+"], [channel.fileno()])
            except BlockingIOError:
                await _writable(spawner_.connection)
            except OSError:
                self._drop_spawner()
            else:
                return
        raise SpawnerUnavailable(str(self._root))

    async def _connect_spawner(self) -> _Spawner:
        if self._spawner is not None:
            return self._spawner
        async with self._spawner_lock:
            for _ in range(_ASK_ATTEMPTS_MAX):
                if self._spawner is None:
                    self._spawner = self._try_connect() or await self._start_spawner()
                if self._spawner is not None:
                    return self._spawner
        raise SpawnerUnavailable(str(self._root))

    def _try_connect(self) -> _Spawner | None:
        root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"/proc/self/fd/{root}/spawner.sock")
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid: int = struct.unpack("3i", credentials)[0]
            pidfd = os.pidfd_open(pid)
        except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
            connection.close()
            return None
        finally:
            os.close(root)
        connection.setblocking(False)
        asyncio.get_running_loop().add_reader(pidfd, self._drop_spawner)
        return _Spawner(connection, pid, pidfd)

    async def _start_spawner(self) -> _Spawner | None:
        """Start the node's spawner in a session of its own, so that it outlives us; None if it went away again."""
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
        try:
            with (self._root / "spawner.log").open("ab") as log:
                process = subprocess.Popen(  # noqa: ASYNC220  once per node; the wait is for the pipe
                    [
                        *(sys.executable, "-I", "-S", spawner.__file__, str(self._root.resolve())),
                        *(str(ready_write), str(self._spawner_idle_s)),
                    ],
                    env={"PATH": os.environ.get("PATH", os.defpath)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                    pass_fds=[ready_write],
                )
            os.close(ready_write)
            await asyncio.wait_for(_readable(ready_read), _SPAWNER_START_S_MAX)
        finally:
            os.close(ready_read)
        if process.poll() is None:
            process.returncode = 0  # It outlives us on purpose; nobody is to wait for it.
        return self._try_connect()

    def _drop_spawner(self) -> None:
        """Forget a spawner that has died; its shims go on."""
        if self._spawner is not None:
            asyncio.get_running_loop().remove_reader(self._spawner.pidfd)
            os.close(self._spawner.pidfd)
            self._spawner.connection.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._spawner.pid, os.WNOHANG)
            self._spawner = None

    @property
    def spawner_pid(self) -> int | None:
        """The process that forks the shims; None before the first start."""
        return None if self._spawner is None else self._spawner.pid

    # Watching

    def _on_packets(self, shim: _Shim) -> None:
        """What a shim tells, packet by packet, and that it is gone."""
        while shim.channel is not None:
            try:
                packet = shim.channel.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._on_shim_gone(shim)
                return
            self._on_packet(shim, msgspec.json.decode(packet, type=_Packet))

    def _on_packet(self, shim: _Shim, packet: _Packet) -> None:
        run = shim.run
        if run is None or packet.run != directory_name(run):
            return
        if packet.claimed is not None:
            self._on_claimed(shim, run, packet.claimed)
            return
        watched = self._watched.get(run)
        if packet.refused is not None and watched is not None and watched.shim is shim:
            return  # It couldn't write down the end, and will exit: the files and the sweep then have the word.
        if packet.started is not None:
            if watched is not None and not watched.started.done():
                watched.started.set_result(_started_process(run, watched.claim, packet.started))
            return
        shim.run = None
        self._make_idle(shim)
        if packet.ended is not None and watched is not None:
            self._settle(run, watched, end_of_record(packet.ended, watched.intent))
        elif packet.refused is not None and run in self._asked:
            _set_unless_done(self._asked[run].answer)

    def _on_claimed(self, shim: _Shim, run: RunId, claim: Claim) -> None:
        ask = self._asked.get(run)
        if shim.pidfd < 0:
            shim.pidfd = _open_process(claim)  # If it has just died, the channel's end is next.
        if ask is None or ask.answer.done():
            observed = self.observe(run)  # It took so long that the files were asked, or that nobody waits any more.
            if run not in self._watched and isinstance(observed, Claimed | Running):
                self._watched[run] = _Watched(observed.intent, claim, shim, asyncio.get_running_loop())
            return
        watched = self._watched[run] = _Watched(ask.intent, claim, shim, asyncio.get_running_loop())
        ask.answer.set_result(watched)

    def _make_idle(self, shim: _Shim) -> None:
        """Keep a shim for the next run, for a while."""
        self._idle.append(shim)
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(_IDLE_SHIM_S, self._trim_idle)

    def _trim_idle(self) -> None:
        """Let half of the idle shims go, so that a burst's are gone soon and a steady trickle keeps its own."""
        self._trim = None
        for shim in self._idle[: -(-len(self._idle) // 2)]:
            self._let_go(shim)
        if self._idle:
            self._trim = asyncio.get_running_loop().call_later(_IDLE_SHIM_S, self._trim_idle)

    def _let_go(self, shim: _Shim) -> None:
        """Stop listening to a shim; without a run it exits, with one it guards it to the end."""
        loop = asyncio.get_running_loop()
        if shim.channel is not None:
            loop.remove_reader(shim.channel)
            shim.channel.close()
            shim.channel = None
        if shim.pidfd >= 0:
            loop.remove_reader(shim.pidfd)
            os.close(shim.pidfd)
            shim.pidfd = -1
        self._shims.discard(shim)
        if shim in self._idle:
            self._idle.remove(shim)

    def _watch_earlier(self, run: RunId, state: Claimed | Running) -> _Watched | None:
        """Hold the shim of an earlier agent and notice its end; None if that process is gone already."""
        pidfd = _open_process(state.claim)
        if pidfd < 0:
            return None
        shim = _Shim(None)
        shim.pidfd, shim.run = pidfd, run
        self._shims.add(shim)
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._on_shim_gone, shim)
        watched = self._watched[run] = _Watched(state.intent, state.claim, shim, loop)
        if isinstance(state, Running):
            watched.started.set_result(_started_process(run, state.claim, state.started))
        return watched

    def _on_shim_gone(self, shim: _Shim) -> None:
        run = shim.run
        self._let_go(shim)
        if run is None:
            return
        if run in self._asked:
            _set_unless_done(self._asked[run].answer)  # How far it came is for the files to say.
        watched = self._watched.get(run)
        if watched is None or watched.shim is not shim:
            return
        record = _read_record(f"{self._directory(run)}/exit", ExitRecord)
        if isinstance(record, ExitRecord):
            self._settle(run, watched, end_of_record(record, watched.intent))
        else:
            self._run_task(self._finish(run, watched))  # Killed: its processes are to be found first.

    async def _finish(self, run: RunId, watched: _Watched) -> None:
        end = self._end_of(run)
        if isinstance(end, Lost):
            await self._sweep(run)
        self._settle(run, watched, end)

    def _settle(self, run: RunId, watched: _Watched, end: Ended) -> None:
        del self._watched[run]
        self._stills.pop(run, None)
        if not watched.started.done():
            self._settle_start(run, watched, end)
        watched.ended.set_result(end)
        self.ends.put_nowait(RunEnded(run_id=run, epoch=watched.intent.epoch, end=end))

    def _settle_start(self, run: RunId, watched: _Watched, end: Ended) -> None:
        """Whoever waits for the start hears of it, or why there will be none."""
        started = _read_record(f"{self._directory(run)}/started", Started)
        if isinstance(started, Started):
            watched.started.set_result(_started_process(run, watched.claim, started))
        else:
            watched.started.set_exception(StartFailed(run, end))

    def _end_of(self, run: RunId) -> Ended:
        """The end of a run whose shim is gone."""
        observed = self.observe(run)
        match observed:
            case Exited() | ExecFailed() | NeverStarted() | Lost():
                return observed
            case _:
                return Lost(reason=LossReason.SHIM_GONE)

    async def _sweep(self, run: RunId) -> None:
        """Kill what a killed shim left of the run, until there is nothing."""
        intent = _read_record(f"{self._directory(run)}/intent.json", Intent)
        claim = _read_record(f"{self._directory(run)}/claim", Claim)
        if not isinstance(intent, Intent) or intent.boot_id != self._boot_id:
            return  # Nothing of another boot is left, and without its token we would not know what is ours.
        session = claim.pid if isinstance(claim, Claim) else 0
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(self._threads, kill_processes_of, intent.token, session):  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(_SWEEP_PAUSE_S)

    def _run_task(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _directory(self, run: RunId) -> str:
        return f"{self._runs_path}/{directory_name(run)}"


def _make_directory(runs: str, intent: Intent) -> bool:
    """The run's whole directory at once; False where there is one."""
    draft = f"{runs}/.making-{intent.token}"
    os.mkdir(draft, 0o700)
    try:
        os.mkdir(f"{draft}/work", 0o700)
        owner = intent.owner or intent.user
        if owner is not None:
            os.chown(f"{draft}/work", owner.uid, owner.gid)
            os.chmod(draft, 0o711)  # noqa: PTH101, S103  it may go through to its own, and read nothing on the way
        fd = os.open(f"{draft}/intent.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, msgspec.json.encode(intent))
        finally:
            os.close(fd)
        os.rename(draft, f"{runs}/{directory_name(intent.run_id)}")
    except OSError as err:
        shutil.rmtree(draft, ignore_errors=True)
        # A rename fails on a directory that isn't empty, and none of ours is.
        if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def kill_processes_of(token: str, session: int) -> int:
    """SIGKILL every process of a run and return how many there were, zombies left out.

    A process belongs to the run if its environment has the token, or if it is in the session of the run's dead shim:
    while that session has members, the kernel gives its number to nobody else.
    """
    marker = f"{TOKEN_VARIABLE}={token}".encode()
    count = 0
    session_is_ours = session > 0 and _see_process(session) is None
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        pid = int(name)
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            continue
        try:
            fields = _stat_fields(pid)
            if fields is None or fields[0] in (b"Z", b"X"):
                continue
            in_session = session_is_ours and int(fields[3]) == session
            if in_session or marker in _read_file(f"/proc/{pid}/environ").split(b"\0"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                count += 1
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        finally:
            os.close(pidfd)
    return count


def signal_processes_under(parent: int, number: int) -> tuple[int, int]:
    """Send SIGSTOP or SIGCONT to all that descend from a process; how many there are, and in how many it shows not yet.

    To be repeated until it shows in all: what was born behind the look is found by the next.
    """
    count = left = 0
    parents = [parent]
    while parents:
        above = parents.pop()
        try:
            tasks = os.listdir(f"/proc/{above}/task")
            found = [pid for task in tasks for pid in _read_file(f"/proc/{above}/task/{task}/children").split()]
        except OSError:
            continue  # Gone: who it left is the shim's child, and found there by the next look.
        for pid in map(int, found):
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                continue
            try:
                fields = _stat_fields(pid)
                # Of the parent that named it: with the descriptor in hand, the number means no other process.
                if fields is None or fields[0] in (b"Z", b"X") or int(fields[1]) != above:
                    continue
                count += 1
                if (fields[0] in (b"T", b"t")) is not (number == signal.SIGSTOP):
                    signal.pidfd_send_signal(pidfd, number)
                    left += 1
            except (ProcessLookupError, PermissionError):
                continue
            finally:
                os.close(pidfd)
            parents.append(pid)
    return count, left


def _handles(pid: int, number: int) -> bool:
    try:
        status = _read_file(f"/proc/{pid}/status")
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith(b"SigCgt:")), b"SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


async def _readable(fd: int) -> None:
    await _ready(fd, asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)


async def _writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await _ready(connection.fileno(), loop.add_writer, loop.remove_writer)


async def _ready(fd: int, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(fd, _set_unless_done, future)
    try:
        await future
    finally:
        remove(fd)


def _set_unless_done(future: asyncio.Future[None] | asyncio.Future[_Watched | None]) -> None:
    if not future.done():
        future.set_result(None)


def _retrieve(future: asyncio.Future[_Watched] | asyncio.Future[StartedProcess]) -> None:
    if not future.cancelled():
        future.exception()


def _started_process(run: RunId, claim: Claim, started: Started) -> StartedProcess:
    return StartedProcess(
        run_id=run,
        shim_pid=claim.pid,
        shim_start_ticks=claim.start_ticks,
        pid=started.pid,
        start_ticks=started.start_ticks,
        started_at_ns=started.started_at_ns,
    )


def _read_record(path: str, kind: type[_Record]) -> _Record | Unreadable | None:
    try:
        data = _read_file(path)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError:
        return Unreadable()


def _read_file(path: str) -> bytes:
    """The whole file, by three calls to the kernel: io.open makes twice as many, and this is on every run's way."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, _READ_BYTES)
        if len(data) == _READ_BYTES:
            while more := os.read(fd, _READ_BYTES):
                data += more
        return data
    finally:
        os.close(fd)


def _open_process(claim: Claim) -> int:
    """A descriptor of the process that made the claim; -1 where it is gone."""
    try:
        pidfd = os.pidfd_open(claim.pid)
    except ProcessLookupError:
        return -1
    # Looked up with the descriptor in hand: only now can the pid not pass to another process unseen.
    seen = _see_process(claim.pid)
    if seen is None or seen.start_ticks != claim.start_ticks:
        os.close(pidfd)
        return -1
    return pidfd


def _stat_fields(pid: int) -> list[bytes] | None:
    """The fields of ``/proc/PID/stat`` from the state on; None without such a process."""
    try:
        stat = _read_file(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat[stat.rindex(b")") + 2 :].split()


def _see_process(pid: int) -> ProcessSeen | None:
    fields = _stat_fields(pid)
    if fields is None or fields[0] in (b"Z", b"X"):
        return None
    return ProcessSeen(start_ticks=int(fields[19]))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
