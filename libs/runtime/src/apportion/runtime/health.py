"""Is the service alive, is it ready, what does it measure: three questions over HTTP on loopback, and fixed pages.

It answers from a thread of its own, so that a busy loop still says that it lives. What "ready" means is left to the
service; that no stranger can ask is left to loopback.
"""

import http.client
import json
import os
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import msgspec
import structlog

Readiness: TypeAlias = Callable[[], tuple[bool, Mapping[str, object]]]
"""(is it ready, details for people). Called from the health thread: it reads, and changes nothing."""

Pages: TypeAlias = Mapping[str, tuple[str, bytes]]
"""Content type and body, by path: what a service serves beside its health, and what never changes while it runs."""

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

log = structlog.get_logger(__name__)


class HealthPortTaken(Exception):
    """The health port that was asked for is in use. Somebody's probes point there: we take no other by ourselves."""

    exit_code = 2

    def __init__(self, port: int) -> None:
        super().__init__(f"health_port {port} is in use; choose another, or 0 for any free one.")
        self.port = port


class HealthRun(msgspec.Struct, frozen=True, kw_only=True):
    """``run/<service>.json``: where a running service answers about its health."""

    pid: int
    health_port: int
    started_at: int


class HealthServer:
    """``/healthz`` (the process answers), ``/readyz`` (503 until ready), ``/metrics`` (Prometheus text), and ``pages``.

    ``service`` names the run file, so it is unique per data directory: ``placer``, ``node-agent-node-1``.
    """

    def __init__(
        self,
        service: str,
        data_dir: Path,
        *,
        port: int = 0,
        is_ready: Readiness,
        metrics: Callable[[], bytes] = lambda: b"",
        pages: Pages = MappingProxyType({}),
    ) -> None:
        self.service = service
        self.run_path = data_dir / "run" / f"{service}.json"
        self._wanted_port = port
        self._is_ready = is_ready
        self._metrics = metrics
        self._pages = pages
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._started_at = 0

    @property
    def port(self) -> int:
        """The port that it listens on; 0 while it doesn't."""
        return 0 if self._server is None else int(self._server.server_address[1])

    def start(self) -> None:
        """Listen, and say where in the run file. Raises HealthPortTaken."""
        try:
            server = _LoopbackServer(("127.0.0.1", self._wanted_port), self._handler())
        except OSError as err:
            raise HealthPortTaken(self._wanted_port) from err
        self._server = server
        self._started_at = time.time_ns()
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="health", daemon=True
        )
        self._thread.start()
        self.run_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.run_path.with_suffix(".new")
        fresh.write_bytes(
            msgspec.json.encode(HealthRun(pid=os.getpid(), health_port=self.port, started_at=self._started_at))
        )
        fresh.replace(self.run_path)
        log.info("health_listening", url=f"http://127.0.0.1:{self.port}")

    def stop(self) -> None:
        """Listen no longer. Idempotent."""
        server, thread = self._server, self._thread
        if server is None or thread is None:
            return
        self._server = self._thread = None
        self.run_path.unlink(missing_ok=True)
        server.shutdown()
        thread.join()
        server.server_close()

    def _answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body."""
        match path.partition("?")[0]:
            case "/healthz":
                alive_s = (time.time_ns() - self._started_at) // 1_000_000_000
                return _as_json(HTTPStatus.OK, {"service": self.service, "pid": os.getpid(), "alive_s": alive_s})
            case "/readyz":
                try:
                    ready, details = self._is_ready()
                except Exception as err:  # noqa: BLE001  (whatever it is, the service can't say that it is ready)
                    ready, details = False, {"error": f"{type(err).__name__}: {err}"}
                status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
                return _as_json(status, {"service": self.service, "ready": ready, **details})
            case "/metrics":
                return HTTPStatus.OK, _METRICS_TYPE, self._metrics()
            case page if page in self._pages:
                kind, body = self._pages[page]
                return HTTPStatus.OK, kind, body
            case _:
                known = ["/healthz", "/readyz", "/metrics", *sorted(self._pages)]
                return _as_json(HTTPStatus.NOT_FOUND, {"known": known})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            """GET only."""

            # A client that says nothing may not hold a thread for ever.
            timeout = 5.0

            def do_GET(self) -> None:
                status, kind, body = answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: object) -> None:
                """Probes come every few seconds; they are not worth a line."""

        return Handler


class _LoopbackServer(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without http.server's look-up of our own name, which can take seconds where DNS is slow."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = "localhost"
        self.server_port = int(self.server_address[1])

    def handle_error(self, _request: object, _client_address: object) -> None:
        """A client that hung up is no news."""


def _as_json(status: HTTPStatus, content: Mapping[str, object]) -> tuple[HTTPStatus, str, bytes]:
    return status, "application/json", json.dumps(content, default=str).encode() + b"\n"


def probe(port: int, path: str = "/readyz", timeout_s: float = 3.0) -> tuple[bool, str]:
    """(does the service on this machine say yes, what it says): what a container's health check asks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status == HTTPStatus.OK, response.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as err:
        return False, f"no answer on port {port} ({err})"
    finally:
        connection.close()


if __name__ == "__main__":
    # python -m apportion.runtime.health PORT: images have no curl.
    is_well, said = probe(int(sys.argv[1]))
    sys.stdout.write(said + "\n")
    sys.exit(0 if is_well else 1)
