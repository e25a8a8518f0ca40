"""The spawner: one small process per node that outlives the agent, and the shims that it forks to guard runs.

Run as a plain file (``python -I -S spawner.py DIRECTORY READY_FD IDLE_S``) and built from the standard library alone:
what it imports, every shim of the node carries. It decides nothing: the agent hands it a channel, and it forks a shim
at the other end. Told the name of a run directory, a shim claims it, starts the workload, keeps its output within
bounds, and writes down how it ended. It guards one run at a time and may be given another once the agent has heard the
end of the last: a fork of Python costs as much as the rest of a short run. Which runs to start, stop or believe is the
agent's business (processes.py).

A channel carries packets: ``run NAME``, ``go NAME`` and ``withdraw NAME`` to the shim, JSON to the agent. It ends with
the agent; then a shim at its gate withdraws, one without a run exits, and one that guards a run does so to its end.
For that time files and signals are enough: SIGRTMIN+n to the shim means signal n to the run.

If a shim is killed, what it guarded becomes the spawner's child, and is killed by it; if both are, the agent finds it
by its session and its environment. PR_SET_PDEATHSIG would need a fork of Python for each workload in place of vfork,
twice the cost of the whole run, and would cover no process but the first.

The files of a run directory, in the order in which they appear::

    intent.json   the agent's order, complete before the directory has its name
    claim         the shim's identity; made once, by link(2), so that of two shims one starts the workload
    started       the workload's identity
    stdout, stderr, then stdout.1, stderr.1 and so on as they are full: the newest two of each are kept
    exit          how the run ended; once it is there, no process of the run is left
"""

# ruff: noqa: SIM105, PTH104, PTH106, PTH108, PTH120, PTH123  contextlib and pathlib would be copied into every shim of the node

import ctypes
import errno
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_READ_BYTES = 65536
_REQUEST_BYTES = 1024
_TELL_MS_MAX = 5000
_REAP_PAUSE_S = 0.002
_LISTEN_BACKLOG = 8
_UNHEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ORDERS = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_name = ctypes.create_string_buffer(b"apportion-shim")


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def start_ticks_of(stat: bytes) -> int:
    """The start time in ``/proc/PID/stat``, in clock ticks since boot; the command may hold any byte, ``)`` too.

    >>> start_ticks_of(b"7 (a ) b) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0")
    4242
    """
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def _start_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return start_ticks_of(file.read())


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", "rb", buffering=0) as file:
        return file.read().strip().decode()


class _BoundedLog:
    """Files that follow one another as they are full, the newest two of which are kept: at most twice ``limit`` bytes.

    The first has the plain name, the others their number behind it, so that no byte ever moves to another place.
    """

    def __init__(self, path: str, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._size = 0
        self._generation = 0
        self._fd = -1

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._name(self._generation), flags, 0o600)

    def _name(self, generation: int) -> str:
        return f"{self._path}.{generation}" if generation else self._path

    def close(self) -> None:
        """Nothing more will come."""
        if self._fd >= 0:
            os.close(self._fd)

    def write(self, data: bytes) -> None:
        """Append, as far as the disk lets us: a full disk must not end a run that only wanted to talk."""
        if self._fd < 0:
            self._fd = self._open()  # At the first word: most short runs say nothing.
        elif self._size and self._size + len(data) > self._limit:
            os.close(self._fd)
            self._generation += 1
            try:
                os.unlink(self._name(self._generation - 2))
            except FileNotFoundError:
                pass
            self._fd = self._open()
            self._size = 0
        try:
            self._size += os.write(self._fd, data)
        except OSError:
            self._size += len(data)


class _Shim:
    """The guardian of one run at a time; while it guards one, it lives until no process of the run is left."""

    def __init__(self, runs: str, channel: socket.socket, boot_id: str) -> None:
        self._runs = runs
        self._channel = channel
        self._boot_id = boot_id
        self._identity: dict[str, object] = {}
        self._name = ""
        self._can_tell = True
        self._child = 0
        self._is_withdrawn = False
        self._is_starting = False
        self._early: list[int] = []

    def serve(self) -> None:
        """Guard one run after the other, until the agent hangs up."""
        os.setsid()
        # Whatever of a run is orphaned becomes our child, so "no children left" means "nothing of it left".
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_NAME, ctypes.addressof(_name))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # No run gains rights by a program that lends them (setuid): none is meant to, and each is a way out.
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        pid = os.getpid()
        self._identity = {"pid": pid, "start_ticks": _start_ticks(pid), "boot_id": self._boot_id}
        while self._can_tell:
            word, _, name = self._read_packet().partition(" ")
            if not word:
                return
            if word == "run":
                self._name = name
                try:
                    self._guard()
                except BaseException as err:
                    self.tell({"refused": repr(err)})
                    raise
                os.chdir("/")

    def _guard(self) -> None:
        """Claim, start, watch, report; or leave the run to the shim that was faster."""
        # An order for an earlier run may still have come, but none comes after its end was heard.
        self._is_withdrawn = False
        cpu_s = time.process_time()
        os.chdir(f"{self._runs}/{self._name}")
        with open("intent.json", "rb", buffering=0) as file:
            intent = json.loads(file.read())
        claim = {**self._identity, "token": intent["token"]}
        if not self._claim(json.dumps(claim).encode()):
            self.tell({"refused": "claimed"})
            return
        self.tell({"claimed": claim})
        if intent["gate"] == "held" and not self._is_withdrawn and not self._wait_at_gate():
            self._is_withdrawn = True
        end = self._run_workload(intent)
        end["shim_cpu_us"] = round((time.process_time() - cpu_s) * 1e6)
        record = self._write_exit(end)
        self.tell({"ended": end})
        # Only now, as nobody waits for it: whoever was told puts the end on record as well, and what a power failure
        # tears is read as lost.
        os.fsync(record)
        os.close(record)

    def _read_packet(self) -> str:
        """What the agent says; nothing once it has hung up."""
        try:
            return self._channel.recv(_REQUEST_BYTES).decode()
        except OSError:
            return ""

    def _wait_at_gate(self) -> bool:
        """True once the gate was opened; False if the order was withdrawn, or the agent has hung up."""
        while packet := self._read_packet():
            if packet == f"go {self._name}":
                return True
            if packet == f"withdraw {self._name}":
                return False
        return False

    def on_order(self, number: int) -> None:
        """A signal for the run.

        Only its parent can signal a process without any risk of hitting another that got the same pid. An order to
        end that comes before the start withdraws it.
        """
        if self._child:
            self._signal_run(number)
        elif self._is_starting:
            self._early.append(number)
        elif number in (signal.SIGTERM, signal.SIGKILL):
            self._is_withdrawn = True

    def _signal_run(self, number: int) -> None:
        try:
            os.killpg(self._child, number)
            if os.getpgid(self._child) != self._child:
                os.kill(self._child, number)
        except (ProcessLookupError, PermissionError):
            pass

    def _claim(self, data: bytes) -> bool:
        """True for the one shim that may start this run.

        A link appears complete or not at all, so that nobody reads half a claim. It is not synced: after a power
        failure the boot id of the intent says that the run is lost, claimed or not.
        """
        draft = f"claim.{os.getpid()}"
        _write_file(draft, data)
        try:
            os.link(draft, "claim")
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
        return True

    def tell(self, message: dict[str, object]) -> None:
        """Say it to the agent; one that is gone or doesn't listen reads the files instead, and sees us exit."""
        data = json.dumps({"run": self._name, **message}).encode()
        try:
            try:
                self._channel.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._channel, select.POLLOUT)
                poll.poll(_TELL_MS_MAX)
                self._channel.send(data, socket.MSG_DONTWAIT)
        except OSError:
            self._can_tell = False

    @staticmethod
    def _write_exit(record: dict[str, object]) -> int:
        """Write the run's last file, complete or not at all for whoever looks; its descriptor, yet to be synced."""
        fd = os.open("exit.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(fd, json.dumps(record).encode())
        os.rename("exit.tmp", "exit")
        return fd

    def _run_workload(self, intent: dict[str, Any]) -> dict[str, object]:
        """Start the workload and watch it to its end; the record of that end."""
        if intent["open_files_max"] is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (intent["open_files_max"], intent["open_files_max"]))
            self._can_tell = False  # A limit isn't raised again, so this shim guards no other run.
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        limit = intent["log_bytes_max"] // 4
        logs = {out_read: _BoundedLog("stdout", limit), err_read: _BoundedLog("stderr", limit)}
        try:
            try:
                process = self._start(intent, out_write, err_write)
            finally:
                os.close(out_write)
                os.close(err_write)
            end = self._watch(process, logs) if isinstance(process, subprocess.Popen) else process
            if intent["groups"] is not None:
                end["oom_kills"] = _leave_groups(intent["groups"])
            return end
        finally:
            self._is_starting = False
            for fd, log in logs.items():
                os.close(fd)
                log.close()

    def _start(self, intent: dict[str, Any], out: int, err: int) -> subprocess.Popen[bytes] | dict[str, object]:
        """The workload's first process, or the end of a run that has none."""
        self._early.clear()
        self._is_starting = True  # From here on, an order waits for the workload instead of preventing it.
        if self._is_withdrawn:
            return {"outcome": "abandoned", "finished_at_ns": time.time_ns()}
        groups = [] if intent["groups"] is None else intent["groups"]["joins"]
        try:
            for group in groups:
                _join(group["path"])
        except OSError as error:
            self._go_back(groups)
            return {
                "outcome": "exec_failed",
                "errno": error.errno,
                "is_confined": False,
                "finished_at_ns": time.time_ns(),
            }
        try:
            return subprocess.Popen(
                intent["argv"],
                env=intent["env"],
                cwd="work",
                stdout=out,
                stderr=err,
                process_group=0,
                # Its directory is gone into before the user is changed: it needs no way there of its own.
                **_as_user(intent.get("user")),
                close_fds=False,  # All of ours close on exec by themselves.
            )
        except (OSError, ValueError) as error:
            number = error.errno if isinstance(error, OSError) else errno.EINVAL
            return {"outcome": "exec_failed", "errno": number, "finished_at_ns": time.time_ns()}
        finally:
            self._go_back(groups)

    def _go_back(self, groups: list[dict[str, str]]) -> None:
        """Out of the run's groups, where its limits would hold for us and for our next run too."""
        for group in groups:
            try:
                _join(group["back"])
            except OSError:
                self._can_tell = False  # So this shim guards no other run, and the agent removes the group.

    def _watch(self, process: subprocess.Popen[bytes], logs: dict[int, _BoundedLog]) -> dict[str, object]:
        started_at_ns = time.time_ns()
        child = process.pid
        started = {"pid": child, "start_ticks": _start_ticks(child), "started_at_ns": started_at_ns}
        # Half of it may be read for a moment, and then counts as nothing: the shim is there to be asked again.
        _write_file("started", json.dumps(started).encode())
        self._child = child
        self._is_starting = False
        for number in self._early:
            self._signal_run(number)
        self.tell({"started": started})
        child_fd = os.pidfd_open(child)
        _copy_until_exit(child_fd, logs)
        os.close(child_fd)
        finished_at_ns = time.time_ns()
        # The run is its first process: what that left behind is ended with it. The group's number is ours while
        # the leader is not reaped, so this can't hit anybody else.
        self._signal_run(signal.SIGKILL)
        self._child = 0
        _, status, usage = os.wait4(child, 0)
        process.returncode = 0  # Popen must not wait for what we have reaped.
        _reap_the_rest(logs)
        _copy_what_is_there(logs)
        signalled = os.WIFSIGNALED(status)
        return {
            "outcome": "exited",
            "exit_code": None if signalled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signalled else None,
            "started_at_ns": started_at_ns,
            "finished_at_ns": finished_at_ns,
            "max_rss_kib": usage.ru_maxrss,
            "cpu_us": round((usage.ru_utime + usage.ru_stime) * 1e6),
        }


def _as_user(user: dict[str, int] | None) -> dict[str, Any]:
    return {} if user is None else {"user": user["uid"], "group": user["gid"], "extra_groups": []}


def _join(group: str) -> None:
    """Go into a control group: what is forked from now on is born there."""
    fd = os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"0")
    finally:
        os.close(fd)


def _leave_groups(groups: dict[str, Any]) -> int:
    """Remove the groups of a run of which nothing is left; how many processes were killed for want of memory."""
    kills = 0
    try:
        with open(groups["oom_file"], "rb", buffering=0) as file:
            kills = oom_kills_of(file.read())
    except (OSError, ValueError):
        pass
    for group in groups["joins"]:
        try:
            os.rmdir(group["path"])
            os.rmdir(os.path.dirname(group["path"]))  # The last of the node's runs takes the place along.
        except OSError:
            pass
    return kills


def oom_kills_of(text: bytes) -> int:
    r"""The count in ``memory.events`` (version 2) or ``memory.oom_control`` (version 1).

    >>> oom_kills_of(b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    3
    """
    return next((int(line[9:]) for line in text.splitlines() if line.startswith(b"oom_kill ")), 0)


def _write_file(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.write(fd, data)
    os.close(fd)


def _copy_until_exit(child_fd: int, logs: dict[int, _BoundedLog]) -> None:
    """Move output into the logs until the child has ended."""
    poll = select.poll()
    poll.register(child_fd, select.POLLIN)
    for fd in logs:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == child_fd:
                return
            data = _read(fd)
            if data == b"":
                poll.unregister(fd)
            elif data is not None:
                logs[fd].write(data)


def _read(fd: int) -> bytes | None:
    """What can be read now: b"" at the end, None if nothing waits."""
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return None


def _copy_what_is_there(logs: dict[int, _BoundedLog]) -> None:
    for fd, log in logs.items():
        while data := _read(fd):
            log.write(data)


def _reap_the_rest(logs: dict[int, _BoundedLog]) -> None:
    """Kill and reap every process that the run left to us, daemons included, until there is none."""
    while True:
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if reaped:
            continue
        for child in _children():
            os.kill(child, signal.SIGKILL)  # Not reaped yet, so the pid is theirs.
        _copy_what_is_there(logs)
        time.sleep(_REAP_PAUSE_S)


def _children() -> list[int]:
    """The processes whose parent we are, those that were orphaned to us too."""
    pid = os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children", "rb", buffering=0) as file:
        return [int(child) for child in file.read().split()]


class _Spawner:
    """The process that forks; in a fork it turns into that run's shim."""

    def __init__(self, directory: str, idle_s: float) -> None:
        self._directory = directory
        self._idle_s = idle_s
        self._boot_id = _boot_id()
        self._agents: dict[int, socket.socket] = {}
        self._shims: set[int] = set()
        self._shim: _Shim | None = None

    def serve(self, ready_fd: int) -> None:
        """Serve until nobody has been connected for a while; at once return where another one serves already."""
        root = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock = os.open("spawner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=root)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        # Through the directory's descriptor the address stays within a socket path's 107 bytes.
        address = f"/proc/self/fd/{root}/spawner.sock"
        try:
            os.unlink(address)
        except FileNotFoundError:
            pass
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(_LISTEN_BACKLOG)
        for number in (*_UNHEARD, signal.SIGCHLD):
            signal.signal(number, self._ignore)  # SIG_IGN would be handed on to the workloads.
        for order in _ORDERS:  # Here, and not in each shim: they inherit it.
            signal.signal(order, self._on_order)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # What a killed shim leaves becomes ours.
        woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        os.write(ready_fd, b"ready")
        os.close(ready_fd)
        gc.collect()
        gc.disable()
        gc.freeze()  # A collection would touch, and so copy, every page that the shims share.

        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            ready = poll.poll(None if self._agents else round(self._idle_s * 1000))
            if not ready and not self._agents and not self._shims:
                return
            for fd, _ in ready:
                if fd == woken:
                    os.read(woken, _REQUEST_BYTES)
                    self._reap()
                    continue
                if fd == listener.fileno():
                    agent, _ = listener.accept()
                    self._agents[agent.fileno()] = agent
                    poll.register(agent, select.POLLIN)
                    continue
                channel = self._read_request(fd)
                if channel is None:
                    poll.unregister(fd)
                    self._agents.pop(fd).close()
                else:
                    self._fork(channel, (listener.fileno(), lock, woken, wake))

    @staticmethod
    def _ignore(_number: int, _frame: object) -> None:
        pass

    def _reap(self) -> None:
        """Reap the shims that have ended, and kill what a killed one has left."""
        was_orphaned = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            was_orphaned = was_orphaned or status != 0 or pid not in self._shims
            self._shims.discard(pid)
        if was_orphaned:
            for child in _children():
                if child not in self._shims:
                    os.kill(child, signal.SIGKILL)  # Its own orphans come to us when it has ended.

    def _on_order(self, number: int, _frame: object) -> None:
        if self._shim is not None:
            self._shim.on_order(number - signal.SIGRTMIN)

    def _read_request(self, fd: int) -> int | None:
        """The channel of a shim to be; None once the agent has hung up."""
        try:
            _, channels, _, _ = socket.recv_fds(self._agents[fd], 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return None
        return channels[0] if channels else None

    def _fork(self, channel_fd: int, ours: tuple[int, ...]) -> None:
        channel = socket.socket(fileno=channel_fd)
        try:
            pid = os.fork()
        except OSError as err:
            sys.stderr.write(f"fork: {err}\n")  # The channel's end tells the agent.
            channel.close()
            return
        if pid != 0:
            self._shims.add(pid)
            channel.close()
            return
        status = 1
        try:
            for fd in ours:
                os.close(fd)  # A shim must not hold the lock of a spawner that has died.
            for agent in self._agents.values():
                agent.close()
            self._shim = _Shim(f"{self._directory}/runs", channel, self._boot_id)
            self._shim.serve()
            status = 0
        except BaseException as err:  # noqa: BLE001  a forked child must end here, whatever happened
            sys.stderr.write(f"shim {os.getpid()}: {err!r}\n")
        finally:
            os._exit(status)


if __name__ == "__main__":
    _Spawner(sys.argv[1], float(sys.argv[3])).serve(int(sys.argv[2]))
