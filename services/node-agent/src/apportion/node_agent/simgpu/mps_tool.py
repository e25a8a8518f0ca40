"""``nvidia-cuda-mps-control`` of a simulated node: the daemon, its server, and the command line that steers them.

Daemon and server are real processes, as on hardware: killing one takes its clients' work along, and a pid file that
is left behind is stale.
"""

# ruff: noqa: SIM105  contextlib would be imported for each command

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100,PTH120  started for each command: imports count
sys.path.insert(0, _HERE)
try:
    from apportion.node_agent.simgpu import client
except ModuleNotFoundError:  # Run as a plain file, without site: the client lies beside it.
    import client  # type: ignore[import-not-found,no-redef]

_PID_FILE = "nvidia-cuda-mps-control.pid"
_CUDA_13_1 = 13010
_USAGE = """usage: nvidia-cuda-mps-control [-d | -f | -h] [-S]
  -d  start the control daemon in the background
  -f  start it in the foreground
Without an option, commands are read from stdin, one a line: start_server -uid U, get_server_list,
get_server_status PID, get_client_list PID, terminate_client SERVER CLIENT, shutdown_server PID, ps, quit,
get/set_default_active_thread_percentage, get/set_active_thread_percentage PID,
get/set_default_device_pinned_mem_limit DEVICE, get/set_device_pinned_mem_limit PID DEVICE"""


def _pipe_directory() -> str:
    return (client.environment("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps").rstrip("/")  # noqa: S108


def _visible() -> str:
    value = client.environment("CUDA_VISIBLE_DEVICES")
    return "" if value is None else "=" + value


_USAGE_13_1 = (
    """  -S  start it with static partitioning of SMs: sm_partition add DEVICE CHUNKS, sm_partition rm ID, lspart"""
)


def _usage() -> str:
    """What this driver's tool says of itself."""
    try:
        channel = client.Channel()
        channel.send('{"op": "system"}')
        answer = channel.read_line().decode()
    except client.GpuError:
        return _USAGE
    version = answer.partition('"cuda_version":')[2].partition(",")[0]
    return f"{_USAGE}\n{_USAGE_13_1}" if version.isdecimal() and int(version) >= _CUDA_13_1 else _USAGE


def _start_daemon(*, in_background: bool, is_partitioned: bool) -> int:
    directory = _pipe_directory()
    os.makedirs(directory, exist_ok=True)  # noqa: PTH103
    ready, told = os.pipe()
    if in_background and os.fork() != 0:
        os.close(told)
        answer = os.read(ready, 1024).decode()
        if answer != "ok":
            client.complain("nvidia-cuda-mps-control", answer or "the daemon ended")
        return 0 if answer == "ok" else 1
    if in_background:
        os.setsid()
    try:
        channel = client.Channel()
        channel.call("mps_daemon", directory, _visible(), "S" if is_partitioned else "")
    except client.GpuError as error:
        os.write(told, error.message.encode())
        return 1
    _write(f"{directory}/{_PID_FILE}", str(os.getpid()))
    if in_background:
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.write(told, b"ok")
    os.close(told)
    os.close(ready)
    _serve_daemon(channel, directory)
    return 0


def _serve_daemon(channel: "client.Channel", directory: str) -> None:
    server = 0
    while line := channel.read_line():
        if line == b"start_server":
            if server:
                os.waitpid(server, 0)
            server = os.fork()
            if server == 0:
                channel.close()
                _serve_server(directory)
                os._exit(0)
        elif line == b"quit":
            break
    channel.close()
    try:
        os.unlink(f"{directory}/{_PID_FILE}")  # noqa: PTH108
    except FileNotFoundError:
        pass
    if server:
        os.waitpid(server, 0)


def _serve_server(directory: str) -> None:
    """Be the server: hold its connection until the node ends it."""
    try:
        channel = client.Channel()
        channel.call("mps_server", directory)
        log = (client.environment("CUDA_MPS_LOG_DIRECTORY") or directory) + "/server.log"
        while line := channel.read_line():
            if line.startswith(b"log "):
                with open(log, "a") as file:  # noqa: PTH123
                    file.write(f"[Server {os.getpid()}] {line[4:].decode()}\n")
    except client.GpuError:
        pass


def _write(path: str, text: str) -> None:
    with open(path + ".new", "w") as file:  # noqa: PTH123
        file.write(text)
    os.rename(path + ".new", path)  # noqa: PTH104


def _control() -> int:
    """Carry out the commands on stdin; 1 if any failed."""
    code = 0
    for line in sys.stdin:
        command = line.strip()
        if not command:
            continue
        try:
            answer = "\n".join(client.Channel().call("mps_control", _pipe_directory(), command))
        except client.GpuError as error:
            print(error.message or error.code)
            code = 1
        else:
            if answer:
                print(answer)
    return code


def main(arguments: list[str]) -> int:
    """The tool's exit code."""
    if arguments == ["-h"]:
        print(_usage())
        return 0
    if arguments and set(arguments) <= {"-d", "-f", "-S"} and arguments != ["-S"]:
        return _start_daemon(in_background="-d" in arguments, is_partitioned="-S" in arguments)
    if arguments:
        client.complain("nvidia-cuda-mps-control", _USAGE)
        return 1
    return _control()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
