"""What libcuda is to a workload on a simulated node: devices, memory, kernels; and it fails as libcuda does.

Runs of a few milliseconds must not pay for it, so it imports nothing that is written in Python and can be run as a
plain file's neighbour (``python -S -E workload.py``), without the rest of Apportion.
"""

import _socket  # ``socket`` would bring enum and selectors, and take longer than a whole short run
import posix
import sys

SOCKET_VARIABLE = "APPORTION_SIMGPU_SOCKET"
"""Where the simulated node is: it stands for the device files, which are found without any variable."""
_DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108  libcuda's own default
_SEPARATOR = "\x1f"
_READ_BYTES = 65536


class GpuError(Exception):
    """A CUDA error by its name, as in CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message


class VisibleDevice:
    """A device as this process sees it; ``sms`` is its share under MPS."""

    def __init__(self, ordinal: int, text: str) -> None:
        uuid, memory_mib, sms = text.split(",")
        self.ordinal = ordinal
        self.uuid = uuid
        self.memory_mib = int(memory_mib)
        self.sms = int(sms)


def environment(name: str) -> str | None:
    """A variable of this process's environment, as it was at its start."""
    value = posix.environ.get(name.encode())
    return None if value is None else value.decode(errors="replace")


def _optional(name: str) -> str:
    value = environment(name)
    return "" if value is None else "=" + value.replace(_SEPARATOR, " ").replace("\n", " ")


class Channel:
    """A connection to the simulated node: a line out, a line in."""

    def __init__(self, path: str | None = None) -> None:
        address = path or environment(SOCKET_VARIABLE)
        if not address:
            raise GpuError("CUDA_ERROR_NO_DEVICE", f"{SOCKET_VARIABLE} is not set")
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            self._socket.connect(address)
        except OSError as error:
            raise GpuError("CUDA_ERROR_NO_DEVICE", f"{address}: {error}") from error
        self._buffer = b""

    def send(self, *fields: object) -> None:
        """Send without waiting for an answer."""
        try:
            self._socket.sendall(_SEPARATOR.join(map(str, fields)).encode() + b"\n")
        except OSError as error:
            raise GpuError("CUDA_ERROR_UNKNOWN", "the driver is gone") from error

    def read_line(self) -> bytes:
        """The next line; b"" once the driver is gone."""
        while b"\n" not in self._buffer:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                return b""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def call(self, *fields: object) -> list[str]:
        """Send and return the answer's fields; raises GpuError on a refusal."""
        self.send(*fields)
        kind, *answer = self.read_line().decode().split(_SEPARATOR)
        if kind == "ok":
            return answer
        if kind == "error":
            raise GpuError(*answer[:2])
        raise GpuError("CUDA_ERROR_UNKNOWN", "the driver is gone")

    def close(self) -> None:
        """Let go; what the process had is free from now on."""
        self._socket.close()


class Driver:
    """The devices of this process; honours CUDA_VISIBLE_DEVICES and CUDA_MPS_* like libcuda."""

    def __init__(self, path: str | None = None) -> None:
        self._channel = Channel(path)
        kind, context_mib, *devices = self._channel.call(
            "hello",
            _optional("CUDA_VISIBLE_DEVICES"),
            posix.fspath(environment("CUDA_MPS_PIPE_DIRECTORY") or _DEFAULT_PIPE_DIRECTORY).rstrip("/"),
            _optional("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
            _optional("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
            _optional("CUDA_MPS_SM_PARTITION"),
        )
        self._is_open = True
        self.is_mps_client = kind == "mps"
        self.context_mib = int(context_mib)
        self.devices = [VisibleDevice(ordinal, text) for ordinal, text in enumerate(devices)]

    def alloc(self, ordinal: int, mib: int) -> int:
        """Reserve memory on a device; the allocation's handle."""
        return int(self._channel.call("alloc", ordinal, mib)[0])

    def free(self, handle: int) -> None:
        """Give an allocation back."""
        self._channel.call("free", handle)

    def memory(self, ordinal: int) -> tuple[int, int]:
        """Free and total MiB of the device; both the whole board's, also under a pinned limit."""
        free, total = self._channel.call("memory", ordinal)
        return int(free), int(total)

    def launch(self, ordinal: int, sms: int, us: int, bound: str = "sm") -> None:
        """Queue a kernel that takes ``us`` on ``sms`` SMs; what is wrong with it is told by ``sync``.

        ``bound`` is what it needs most: ``sm``, ``l2`` or ``dram``.
        """
        self._channel.send("launch", ordinal, sms, us, bound)

    def sync(self, ordinal: int) -> int:
        """Wait for this process's kernels; microseconds on the device's clock from the first launch to the last end."""
        return int(self._channel.call("sync", ordinal)[0])

    def illegal_access(self, ordinal: int) -> None:
        """Touch memory that isn't ours: raises, and takes the whole fault domain along."""
        self._channel.call("illegal", ordinal)

    def close(self) -> None:
        """Let go of all devices."""
        if self._is_open:
            self._is_open = False
            try:  # noqa: SIM105  contextlib would be imported for each run
                self._channel.send("bye")
            except GpuError:
                pass
            self._channel.close()

    def __del__(self) -> None:
        """As libcuda does when a process ends by itself; one that is killed gets no such chance."""
        if getattr(self, "_is_open", False):
            self.close()


def complain(program: str, text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"{program}: {text}\n")
    sys.stderr.flush()
