"""Health over real HTTP: alive, ready, metrics, and where to find them."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from apportion.runtime.health import HealthPortTaken, HealthServer


class Service:
    """A service whose readiness a test can set."""

    def __init__(self) -> None:
        self.ready: tuple[bool, Mapping[str, object]] = (False, {"waits_for": "bus"})

    def is_ready(self) -> tuple[bool, Mapping[str, object]]:
        return self.ready


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def server(service: Service, tmp_path: Path) -> Iterator[HealthServer]:
    health = HealthServer("placer", tmp_path, is_ready=service.is_ready, metrics=lambda: b"up 1\n")
    health.start()
    yield health
    health.stop()


def get(server: HealthServer, path: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{server.port}{path}", timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as err:
        with err:
            return err.code, err.read().decode()


def test_a_service_is_alive_before_it_is_ready(server: HealthServer, service: Service) -> None:
    """A restart cures no service that only waits for its bus."""
    assert get(server, "/healthz")[0] == 200
    status, body = get(server, "/readyz")
    assert (status, json.loads(body)) == (503, {"service": "placer", "ready": False, "waits_for": "bus"})
    service.ready = (True, {"seq": 7})
    status, body = get(server, "/readyz")
    assert (status, json.loads(body)) == (200, {"service": "placer", "ready": True, "seq": 7})


def test_readiness_that_fails_is_not_ready_and_says_why(tmp_path: Path) -> None:
    """The probe's answer is where people look first."""

    def broken() -> tuple[bool, Mapping[str, object]]:
        raise RuntimeError("no state yet")

    server = HealthServer("placer", tmp_path, is_ready=broken)
    server.start()
    try:
        status, body = get(server, "/readyz")
        assert (status, json.loads(body)["error"]) == (503, "RuntimeError: no state yet")
    finally:
        server.stop()


def test_a_service_adds_pages_and_no_page_hides_its_health(tmp_path: Path) -> None:
    """What is fixed is served as it is, under the type that it was given."""
    pages = {"/schemas": ("application/schema+json", b"{}"), "/healthz": ("text/plain", b"mine")}
    server = HealthServer("monitor", tmp_path, is_ready=lambda: (True, {}), pages=pages)
    server.start()
    try:
        assert get(server, "/schemas?x=1") == (200, "{}")
        assert json.loads(get(server, "/healthz")[1])["service"] == "monitor"
        assert "/schemas" in json.loads(get(server, "/schemas/none")[1])["known"]
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"http://127.0.0.1:{server.port}/schemas", timeout=60
        ) as response:
            assert response.headers["Content-Type"] == "application/schema+json"
    finally:
        server.stop()


def test_metrics_are_prometheus_text_and_unknown_paths_say_what_is_there(server: HealthServer) -> None:
    """Scrapers find it by convention, people by trying."""
    assert get(server, "/metrics") == (200, "up 1\n")
    status, body = get(server, "/nothing")
    assert (status, json.loads(body)) == (404, {"known": ["/healthz", "/readyz", "/metrics"]})


def test_the_run_file_names_the_chosen_port_and_goes_at_stop(server: HealthServer, tmp_path: Path) -> None:
    """With port 0 nobody could guess it."""
    said = json.loads((tmp_path / "run" / "placer.json").read_text())
    assert (said["pid"], said["health_port"]) == (os.getpid(), server.port)
    server.stop()
    assert not (tmp_path / "run" / "placer.json").exists()
    server.stop()


def test_a_taken_port_is_refused(tmp_path: Path, service: Service) -> None:
    """Probes are configured to ask there; answering elsewhere would look like death."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(HealthPortTaken, match=str(port)):
            HealthServer("placer", tmp_path, port=port, is_ready=service.is_ready).start()


def test_only_loopback_is_bound(server: HealthServer) -> None:
    """There is no password on these answers."""
    assert server._server is not None
    assert server._server.server_address[0] == "127.0.0.1"


def test_a_container_can_ask_without_curl(server: HealthServer, service: Service) -> None:
    """Small images have python and nothing else; orchestrators read the exit code."""

    def ask(port: int) -> tuple[int, str]:
        argv = [sys.executable, "-m", "apportion.runtime.health", str(port)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout

    code, said = ask(server.port)
    assert (code, json.loads(said)["waits_for"]) == (1, "bus")
    service.ready = (True, {})
    assert ask(server.port)[0] == 0
    port = server.port
    server.stop()
    assert ask(port)[0] == 1
