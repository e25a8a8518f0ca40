"""The command language of ``nvidia-cuda-mps-control`` (version 2), against the simulated node; pure."""

import msgspec

from apportion.node_agent.simgpu.model import Client, Device, DriverError, MpsDaemon, MpsServer, SimNode, mib_of


class ControlAnswer(msgspec.Struct, kw_only=True):
    """What a command prints, and what the processes behind it have to do."""

    text: str = ""
    failed: list[Client] = msgspec.field(default_factory=list)
    starts_server: bool = False
    ends_server: bool = False
    ends_daemon: bool = False
    never_answers: bool = False
    """The command hangs, as one about a wedged server does."""


def control(node: SimNode, daemon: MpsDaemon, line: str, now_us: int) -> ControlAnswer:
    """Carry out one command line; raises DriverError with the tool's complaint."""
    words = line.split()
    match words:
        case ["sm_partition", "add", name, chunks] if chunks.isdecimal():
            return ControlAnswer(text=node.add_partition(daemon, _device(daemon, name), int(chunks), now_us).name)
        case ["sm_partition", "rm", name]:
            node.remove_partition(daemon, name, now_us)
            return ControlAnswer()
        case ["lspart"]:
            return ControlAnswer(text=_partitions(node, daemon))
        case ["get_server_list"]:
            return ControlAnswer(text=str(daemon.server.pid) if daemon.server is not None else "")
        case ["start_server", "-uid", uid, *_] if uid.isdecimal():
            return ControlAnswer(starts_server=daemon.server is None)
        case ["get_server_status", pid]:
            return ControlAnswer(text="FAULT" if _server(daemon, pid).faulted else "ACTIVE")
        case ["get_client_list", pid]:
            return ControlAnswer(text="\n".join(str(client) for client in _client_pids(_server(daemon, pid))))
        case ["ps", *_]:
            return ControlAnswer(text=_ps(daemon))
        case ["terminate_client", pid, client] if client.isdecimal():
            if _server(daemon, pid).is_wedged:
                return ControlAnswer(never_answers=True)
            failed = node.terminate_client(_server(daemon, pid), int(client), now_us)
            if not failed:
                raise DriverError("CLIENT_NOT_FOUND", f"Failed to find client process {client}")
            return ControlAnswer(failed=failed)
        case ["shutdown_server", pid, *_]:
            return ControlAnswer(failed=node.remove_server(_server(daemon, pid), now_us), ends_server=True)
        case ["quit", *_]:
            return ControlAnswer(failed=node.remove_daemon(daemon, now_us), ends_daemon=True)
        case ["set_default_active_thread_percentage", value]:
            daemon.thread_percentage = _percentage(value)
            return ControlAnswer(text=f"{daemon.thread_percentage}")
        case ["get_default_active_thread_percentage"]:
            return ControlAnswer(text=f"{daemon.thread_percentage}")
        case ["set_active_thread_percentage", pid, value]:
            server = _server(daemon, pid)
            server.thread_percentage = _percentage(value)
            return ControlAnswer(text=f"{server.thread_percentage}")
        case ["get_active_thread_percentage", pid]:
            return ControlAnswer(text=f"{_server(daemon, pid).thread_percentage}")
        case ["set_default_device_pinned_mem_limit", name, value]:
            daemon.pinned_mib[_device(daemon, name).uuid] = _mib(value)
            return ControlAnswer(text=value)
        case ["get_default_device_pinned_mem_limit", name]:
            return ControlAnswer(text=_limit(daemon.pinned_mib.get(_device(daemon, name).uuid)))
        case ["set_device_pinned_mem_limit", pid, name, value]:
            _server(daemon, pid).pinned_mib[_device(daemon, name).uuid] = _mib(value)
            return ControlAnswer(text=value)
        case ["get_device_pinned_mem_limit", pid, name]:
            return ControlAnswer(text=_limit(_server(daemon, pid).pinned_mib.get(_device(daemon, name).uuid)))
        case _:
            raise DriverError("UNKNOWN_COMMAND", f"Unrecognized command: {line}")


def _server(daemon: MpsDaemon, pid: str) -> MpsServer:
    if daemon.server is None or str(daemon.server.pid) != pid:
        raise DriverError("SERVER_NOT_FOUND", f"Failed to find MPS server {pid}")
    return daemon.server


def _device(daemon: MpsDaemon, name: str) -> Device:
    for ordinal, device in enumerate(daemon.devices):
        if name in (str(ordinal), device.uuid):
            return device
    raise DriverError("DEVICE_NOT_FOUND", f"Failed to find device {name}")


def _percentage(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= 100:
        raise DriverError("INVALID_VALUE", f"Invalid thread percentage {text}")
    return value


def _mib(text: str) -> int:
    value = mib_of(text)
    if value is None:
        raise DriverError("INVALID_VALUE", f"Invalid memory limit {text}")
    return value


def _limit(mib: int | None) -> str:
    return "" if mib is None else f"{mib}M"


def _client_pids(server: MpsServer) -> list[int]:
    return sorted({client.pid for client in server.clients.values()})


def _partitions(node: SimNode, daemon: MpsDaemon) -> str:
    rows = [f"{'PARTITION':<48}{'CHUNKS':<8}{'SMS':<6}CLIENTS"]
    for part in daemon.partitions.values():
        clients = ",".join(str(one.pid) for one in node.clients_of(daemon, part.name)) or "-"
        rows.append(f"{part.name:<48}{part.chunks:<8}{part.sms:<6}{clients}")
    return "\n".join(rows)


def _ps(daemon: MpsDaemon) -> str:
    rows = [f"{'PID':<10}{'ID':<10}{'SERVER':<10}DEVICE"]
    if daemon.server is not None:
        for client in daemon.server.clients.values():
            rows += [
                f"{client.pid:<10}{client.number:<10}{daemon.server.pid:<10}{uuid[:12]}" for uuid in client.contexts
            ]
    return "\n".join(rows)
