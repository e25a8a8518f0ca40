"""Beyond this machine the bus is spoken to over TLS, or not at all."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apportion.contracts.ids import PoolId
from apportion.runtime.embedded import find_binary
from apportion.runtime.stream import Bus, BusUnreachable
from apportion.runtime.transport import CertificateInvalid, PlainTextRefused, options

POOL = PoolId("main")
NO_OPENSSL = shutil.which("openssl") is None


@pytest.mark.parametrize(
    "url",
    [
        "nats://10.0.0.7:4222",
        "nats://bus.example:4222",
        "bus.example",
        "nats://127.0.0.1,nats://10.0.0.7",
        "nats://0.0.0.0",
    ],
)
def test_plain_tcp_stays_on_this_machine(url: str) -> None:
    with pytest.raises(PlainTextRefused, match=r"expected TLS.*BUS_CA_FILE.*BUS_PLAIN=true") as refused:
        options(url, key=None, ca_file=None, allow_plain=False)
    assert refused.value.exit_code == 2
    assert options(url, key=None, ca_file=None, allow_plain=True) == {}


@pytest.mark.parametrize("url", ["nats://127.0.0.1:4222", "127.9.9.9", "nats://localhost:1", "nats://[::1]:4222"])
def test_on_this_machine_plain_tcp_will_do(url: str) -> None:
    assert options(url, key=None, ca_file=None, allow_plain=False) == {}


def test_tls_begins_with_the_first_byte() -> None:
    found = options("tls://bus.example:4222", key=None, ca_file=None, allow_plain=False)
    assert found["tls_handshake_first"] is True
    # One address of several without TLS is as good as none with it.
    with pytest.raises(PlainTextRefused):
        options("tls://bus.example,nats://bus2.example", key=None, ca_file=None, allow_plain=False)


def test_a_file_that_is_no_authority_is_named(tmp_path: Path) -> None:
    for content in (None, "nonsense"):
        path = tmp_path / "ca.pem"
        if content is not None:
            path.write_text(content)
        with pytest.raises(CertificateInvalid, match=r"ca\.pem: expected the PEM file"):
            options("nats://bus.example", key=None, ca_file=path, allow_plain=False)


@pytest.fixture
async def encrypted(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """A server that speaks TLS alone, and the authority that vouches for it."""
    subprocess.run(  # noqa: ASYNC221 - nothing else runs yet
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "ca.pem"),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    config = tmp_path / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: "{tmp_path}"\n'  # it takes a free one, and says which
        f'tls {{ cert_file: "{tmp_path}/ca.pem", key_file: "{tmp_path}/key.pem", handshake_first: true }}\n'
    )
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen([find_binary(dict(os.environ)), "-c", config], stdout=log, stderr=log)
    try:
        async with asyncio.timeout(60):
            while (port := _port_of(tmp_path / f"nats-server_{server.pid}.ports")) is None:
                await asyncio.sleep(0.02)
        yield f"nats://localhost:{port}", tmp_path / "ca.pem"
    finally:
        server.kill()
        server.wait()


def _port_of(file: Path) -> int | None:
    """Where a server listens; None while it hasn't said so in whole."""
    try:
        (url,) = json.loads(file.read_text())["nats"]
    except (OSError, ValueError):
        return None
    return int(url.rpartition(":")[2])


@pytest.mark.integration
@pytest.mark.skipif(NO_OPENSSL, reason="no openssl on this machine to make a certificate with")
async def test_the_bus_is_reached_over_tls_by_those_who_trust_it(encrypted: tuple[str, Path]) -> None:
    url, ca_file = encrypted
    bus = await Bus.connect(url, pool=POOL, name="test", ca_file=ca_file)
    await bus.client.flush()
    await bus.close()
    # By the system's authorities nobody vouches for it, and without TLS nobody answers.
    with pytest.raises(BusUnreachable):
        await Bus.connect(url.replace("nats:", "tls:"), pool=POOL, name="test", wait_s=0.5)
    with pytest.raises(BusUnreachable):
        await Bus.connect(url, pool=POOL, name="test", wait_s=0.5)
