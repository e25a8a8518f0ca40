"""The spawner: one small process per node that outlives the agent, and the shim that it forks for each run.

Run as a plain file (``python -I -S spawner.py DIRECTORY READY_FD IDLE_S``) and built from the standard library alone:
what it imports, every shim of the node carries. It decides nothing. A request names a run directory and brings a
channel; the shim forked for it claims the directory, starts the workload, keeps its output within bounds, and writes
down how it ended. Which runs to start, stop or believe is the agent's business (processes.py).

The files of a run directory, in the order in which they appear::

    intent.json   the agent's order, complete before the directory has its name
    claim         the shim's identity; made once, by link(2), so that of two shims one starts the workload
    started       the workload's identity
    stdout, stderr, and stdout.1, stderr.1 once they were full
    exit          how the run ended; once it is there, no process of the run is left
"""

# ruff: noqa: SIM105, PTH104, PTH105, PTH108, PTH123  contextlib and pathlib would be copied into every shim of the node

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
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_READ_BYTES = 65536
_REQUEST_BYTES = 1024
_REAP_PAUSE_S = 0.002
_LISTEN_BACKLOG = 8
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RESTORED = (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)

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
    """A file that starts anew once it is full and keeps one older generation: at most twice ``limit`` bytes."""

    def __init__(self, path: str, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._size = 0
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        """Append, as far as the disk lets us: a full disk must not end a run that only wanted to talk."""
        if self._size and self._size + len(data) > self._limit:
            os.close(self._fd)
            os.replace(self._path, self._path + ".1")
            self._fd = self._open()
            self._size = 0
        try:
            self._size += os.write(self._fd, data)
        except OSError:
            self._size += len(data)


class _Shim:
    """The guardian of one run; it lives until no process of the run is left."""

    def __init__(self, directory: str, channel: socket.socket, boot_id: str) -> None:
        self._directory = directory
        self._channel = channel
        self._boot_id = boot_id
        self._child = 0
        self._can_signal = False

    def run(self) -> None:
        os.setsid()
        # Whatever of the run is orphaned becomes our child, so "no children left" means "nothing of it left".
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_NAME, ctypes.addressof(_name))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in range(1, signal.SIGRTMAX - signal.SIGRTMIN + 1):
            signal.signal(signal.SIGRTMIN + number, self._on_order)
        os.chdir(self._directory)
        with open("intent.json", "rb", buffering=0) as file:
            intent = json.loads(file.read())
        pid = os.getpid()
        claim = {"pid": pid, "start_ticks": _start_ticks(pid), "boot_id": self._boot_id, "token": intent["token"]}
        if not self._claim(json.dumps(claim).encode()):
            self._tell({"refused": "claimed"})
            return
        self._tell({"claimed": claim})
        if intent["gate"] == "held" and self._wait_for_release() != b"go":
            self._write_exit({"outcome": "abandoned", "finished_at_ns": time.time_ns()})
            return
        self._run_workload(intent)

    def _on_order(self, number: int, _frame: object) -> None:
        """SIGRTMIN+n to us means signal n to the run.

        Only its parent can signal a process without any risk of hitting another that got the same pid, and this way
        an agent that was restarted needs no channel: a pidfd of the shim is enough.
        """
        if self._can_signal:
            self._signal_run(number - signal.SIGRTMIN)

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

    def _tell(self, message: dict[str, object]) -> None:
        try:
            self._channel.send(json.dumps(message).encode())
        except OSError:
            pass  # The agent is gone; the files say the same to the next one.

    def _wait_for_release(self) -> bytes:
        try:
            return self._channel.recv(_REQUEST_BYTES)
        except OSError:
            return b""

    def _write_exit(self, record: dict[str, object]) -> None:
        """Last, and complete or not at all: synced before it gets its name."""
        fd = os.open("exit.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(fd, json.dumps(record).encode())
        os.fsync(fd)
        os.close(fd)
        os.rename("exit.tmp", "exit")

    def _run_workload(self, intent: dict[str, object]) -> None:
        limit = intent["log_bytes_max"]
        assert isinstance(limit, int)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        failed_read, failed_write = os.pipe2(os.O_CLOEXEC)
        logs = {out_read: _BoundedLog("stdout", limit // 4), err_read: _BoundedLog("stderr", limit // 4)}
        shim = os.getpid()
        child = os.fork()
        if child == 0:
            _exec_workload(intent, shim, out_write, err_write, failed_write)
        for fd in (out_write, err_write, failed_write):
            os.close(fd)
        failure = os.read(failed_read, 256)  # Ends with the exec: the pipe closes then.
        os.close(failed_read)
        if failure:
            os.waitpid(child, 0)
            code, _, step = failure.decode().partition(" ")
            self._write_exit(
                {"outcome": "exec_failed", "errno": int(code), "step": step, "finished_at_ns": time.time_ns()},
            )
            return
        started_at_ns = time.time_ns()
        started = {"pid": child, "start_ticks": _start_ticks(child), "started_at_ns": started_at_ns}
        _write_file("started.tmp", json.dumps(started).encode())
        os.rename("started.tmp", "started")
        self._child = child
        self._can_signal = True
        self._tell({"started": started})
        self._channel.close()

        child_fd = os.pidfd_open(child)
        _copy_until_exit(child_fd, logs)
        finished_at_ns = time.time_ns()
        # The run is its first process: what that left behind is ended with it. The group's number is ours while
        # the leader is not reaped, so this can't hit anybody else.
        self._signal_run(signal.SIGKILL)
        self._can_signal = False
        _, status, usage = os.wait4(child, 0)
        _reap_the_rest(logs)
        _copy_what_is_there(logs)
        signalled = os.WIFSIGNALED(status)
        self._write_exit(
            {
                "outcome": "exited",
                "exit_code": None if signalled else os.WEXITSTATUS(status),
                "signal": os.WTERMSIG(status) if signalled else None,
                "started_at_ns": started_at_ns,
                "finished_at_ns": finished_at_ns,
                "max_rss_kib": usage.ru_maxrss,
                "cpu_us": round((usage.ru_utime + usage.ru_stime) * 1e6),
            },
        )


def _write_file(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.write(fd, data)
    os.close(fd)


def _exec_workload(intent: dict[str, object], shim: int, out: int, err: int, failed: int) -> None:
    """Become the workload; on failure tell why on ``failed`` and exit. Never returns."""
    step = "setup"
    try:
        os.setpgid(0, 0)
        for number in _RESTORED:
            signal.signal(number, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        step = "limits"
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        open_files = intent["open_files_max"]
        if isinstance(open_files, int):
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
        step = "directory"
        os.chdir("work")
        step = "parent"
        # Nobody would write down how a workload without its shim ended, so it doesn't outlive it.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim:
            os._exit(127)
        step = "exec"
        argv, env = intent["argv"], intent["env"]
        assert isinstance(argv, list)
        assert isinstance(env, dict)
        os.execvpe(argv[0], argv, env)  # noqa: S606  an argument vector, never a shell
    except OSError as err_:
        os.write(failed, f"{err_.errno} {step}".encode())
    except BaseException:  # noqa: BLE001  a forked child must end here, whatever happened
        os.write(failed, f"{errno.EINVAL} {step}".encode())
    os._exit(127)


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
    pid = os.getpid()
    while True:
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if reaped:
            continue
        with open(f"/proc/{pid}/task/{pid}/children", "rb", buffering=0) as file:
            children = file.read().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)  # Not reaped yet, so the pid is theirs.
        _copy_what_is_there(logs)
        time.sleep(_REAP_PAUSE_S)


def _serve(directory: str, ready_fd: int, idle_s: float) -> None:
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lock = os.open("spawner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=root)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # Another one serves this node already.
    # Through the directory's descriptor the address stays within a socket path's 107 bytes.
    address = f"/proc/self/fd/{root}/spawner.sock"
    try:
        os.unlink(address)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(_LISTEN_BACKLOG)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the shims; their exit files speak for them.
    boot_id = _boot_id()
    os.write(ready_fd, b"ready")
    os.close(ready_fd)
    gc.collect()
    gc.disable()
    gc.freeze()  # A collection would touch, and so copy, every page that the shims share.

    poll = select.poll()
    poll.register(listener, select.POLLIN)
    agents: dict[int, socket.socket] = {}
    while True:
        ready = poll.poll(None if agents else round(idle_s * 1000))
        if not ready and not agents:
            return
        for fd, _ in ready:
            if fd == listener.fileno():
                agent, _ = listener.accept()
                agents[agent.fileno()] = agent
                poll.register(agent, select.POLLIN)
                continue
            agent = agents[fd]
            try:
                name, fds, _, _ = socket.recv_fds(agent, _REQUEST_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                name, fds = b"", []
            if not name:
                poll.unregister(fd)
                del agents[fd]
                agent.close()
                continue
            try:
                child = os.fork()
            except OSError:
                child = -1  # The channel's end tells the agent.
            if child == 0:
                status = 1
                try:
                    listener.close()
                    for other in agents.values():
                        other.close()
                    os.close(lock)
                    _Shim(f"{directory}/runs/{name.decode()}", socket.socket(fileno=fds[0]), boot_id).run()
                    status = 0
                finally:
                    os._exit(status)
            for descriptor in fds:
                os.close(descriptor)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
