"""What deploy/ asks of Prometheus is what we answer: each metric of each expression is scraped from real services.

A pool's monitor runs on a real bus; admission's and the placer's own metrics come from the telemetry that they use.
Where Debian's `prometheus` is installed it is run as well: it scrapes that text and evaluates every expression, and
`promtool` runs the tests of the alert rules.
"""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts import samples, subjects
from apportion.contracts.causes import DeviceHealth, Refusal, RunCause
from apportion.contracts.codec import encode_fact
from apportion.contracts.ids import ADMISSION, PLACER, Author, JobId, NodeId, PoolId, run_id
from apportion.contracts.testing import a_job, a_node, a_placement, a_queue
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.health import probe
from apportion.runtime.stream import Bus
from apportion.runtime.telemetry import Telemetry

pytestmark = pytest.mark.integration

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
RULES = DEPLOY / "prometheus" / "alerts.yml"
POOL = PoolId("main")
NODE = NodeId("node-1")
_METRIC = re.compile(r"\b(?:apportion|hw|messaging|process)_[a-z_]+\b")
_LABELS = re.compile(r"\{[^}]*\}|\bby \([^)]*\)")


def expressions() -> list[str]:
    """Every expression in deploy/."""
    found: list[str] = []
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        found += [target["expr"] for panel in panels for target in panel["targets"]]
    lines = RULES.read_text().splitlines()
    for number, line in enumerate(lines):
        if (text := line.strip()).startswith("expr:"):
            text = text.removeprefix("expr:").strip()
            if text == ">":  # folded: what is indented further belongs to it
                depth = len(line) - len(line.lstrip())
                rest = lines[number + 1 :]
                end = next(i for i, each in enumerate(rest) if len(each) - len(each.lstrip()) <= depth)
                text = " ".join(each.strip() for each in rest[:end])
            found.append(text)
    return found


async def said_by_a_pool(data_dir: Path) -> str:
    """What all services answer on /metrics once something has happened in their pool."""
    async with EmbeddedServer(data_dir / "bus", port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="test")
        await bus.provision()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "apportion.monitor", "--bus-url", server.url, "--data-dir", str(data_dir)),
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await _history(bus)
            run = data_dir / "run" / "monitor.json"
            wanted = (
                "hw_gpu_utilization{",
                "hw_energy_joules_total{",
                "apportion_device_pcie_ratio{",
                "apportion_stream_bytes{",
                "apportion_runs_ended",
            )
            async with asyncio.timeout(60):
                while True:
                    await _sample(bus)
                    if run.exists():
                        port = json.loads(run.read_bytes())["health_port"]
                        _, text = await asyncio.to_thread(probe, port, "/metrics")
                        if all(name in text for name in wanted):
                            break
                    await asyncio.sleep(0.1)
        finally:
            process.terminate()
            await process.wait()
            await bus.close()
    others = [Telemetry(service, data_dir=data_dir).prometheus().decode() for service in ("admission", "placer")]
    return "\n".join([text, *others])


async def _history(bus: Bus) -> None:
    name, run = JobId("acme/train-7"), run_id(JobId("acme/train-7"), 0, 1)
    device = a_node().devices[0].uuid
    told: dict[str, list[ev.Fact]] = {
        ADMISSION: [a_queue(limit_compute_milli=1000), a_job(), a_job("waits")],
        f"agent-{NODE}": [a_node_with_links()],
        PLACER: [a_placement()],
    }
    later: dict[str, list[ev.Fact]] = {
        f"agent-{NODE}": [
            ev.RunStarted(run_id=run, node_id=NODE, pid=1, started_at=1),
            ev.RunFinished(run_id=run, node_id=NODE, cause=RunCause.SUCCESS, finished_at=2),
            ev.DeviceHealthChanged(
                node_id=NODE,
                device_uuid=device,
                before=DeviceHealth.HEALTHY,
                after=DeviceHealth.DEGRADED,
                code="xid-63",
            ),
        ],
        ADMISSION: [
            ev.JobSucceeded(job_id=name, attempts=1, wait_ms=1, run_ms=1),
            ev.WishRejected(tenant=a_job().tenant, answers=1, wish_id="w", wish_type="x", code=Refusal.EXPIRED),
        ],
    }
    leases = {}
    for number, part in enumerate((told, later)):
        for author, facts in part.items():
            messages = [
                encode_fact(POOL, Author(author), fact, event_id=f"{author}.{number}.{index}")
                for index, fact in enumerate(facts)
            ]
            if author not in leases:
                claim = ev.LeaseClaimed(author=author, session="s", core="test@1#0")
                leases[author] = await bus.claim(
                    Author(author), encode_fact(POOL, Author(author), claim, event_id=f"{author}.claim.s")
                )
            await bus.publish_fenced(leases[author], messages)


def a_node_with_links() -> ev.NodeRegistered:
    node = a_node()
    linked = tuple(replace(device, pcie_generation=5, pcie_lanes=16) for device in node.devices)
    return replace(node, devices=linked)


async def _sample(bus: Bus) -> None:
    devices = tuple(
        samples.DeviceSample(
            uuid=device.uuid,
            used_mib=10,
            free_mib=90,
            busy_pct=50,
            temperature_c=60,
            power_mw=300_000,
            energy_mj=5_000,
            pcie_sent_bytes=time.monotonic_ns(),
            pcie_received_bytes=time.monotonic_ns(),
            ecc_corrected=1,
            ecc_uncorrected=0,
        )
        for device in a_node().devices
    )
    body = samples.ENCODER.encode(samples.DeviceSamples(at=1, devices=devices))
    await bus.client.publish(subjects.sample(POOL, NODE, samples.DEVICES), body)
    heartbeat = json.dumps({"session": "node-1-s1", "epoch": 0, "at": time.time_ns()}).encode()
    await bus.client.publish(subjects.sample(POOL, NODE, "heartbeat"), heartbeat)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return asyncio.run(said_by_a_pool(tmp_path_factory.mktemp("pool")))


def test_there_are_expressions_to_check() -> None:
    assert len(expressions()) > 60
    assert all(_METRIC.search(each) or each.startswith("up{") for each in expressions())


def test_every_metric_that_is_asked_for_is_one_that_we_have(text: str) -> None:
    """A panel that asks for a name that nobody says stays empty without a word."""
    known = {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    asked = {name for each in expressions() for name in _METRIC.findall(_LABELS.sub("", each))}
    assert asked - known - _ONLY_AFTER_A_MOVE == set()


_ONLY_AFTER_A_MOVE = {"apportion_migrations_total"}
"""A counter with labels has no series before its first event."""


def test_every_metric_of_ours_is_in_the_docs(text: str) -> None:
    """Names are an interface: one that changes shows here."""
    page = (DEPLOY.parent / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `([a-z_]+)`", page, re.MULTILINE))
    ours = set(re.findall(r"^# TYPE ((?:apportion|hw|messaging)_\w+)", text, re.MULTILINE))
    assert ours == documented


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_fits_on_its_grid(path: Path) -> None:
    """Panels that overlap push one another around in Grafana; ids and uid are what links hold on to."""
    board = json.loads(path.read_text())
    assert board["uid"].startswith("apportion-")
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def test_promtool_takes_the_rules_and_their_tests_pass() -> None:
    """Each alert fires when it should, and not before."""
    promtool = tool("promtool")
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [promtool, *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


class _Page(BaseHTTPRequestHandler):
    text = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.text)

    def log_message(self, *_: object) -> None:
        """Not worth a line."""


@pytest.fixture
def prometheus(tmp_path: Path, text: str) -> Iterator[str]:
    """Where a real Prometheus answers that scrapes our text."""
    program = tool("prometheus")
    # One page with the families of three services, each of which has some of the same: the first of each is shown.
    _Page.text = _first_of_each(text).encode()
    pages = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    Thread(target=pages.serve_forever, daemon=True).start()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n  - job_name: apportion\n"
        f'    static_configs: [{{targets: ["127.0.0.1:{pages.server_address[1]}"]}}]\n'
    )
    said = tmp_path / "prometheus.log"
    with said.open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 60
        # It takes a free port, and says which in its own words alone.
        while (found := re.search(r'msg="Listening on" address=(127\.0\.0\.1:[1-9]\d*)', said.read_text())) is None:
            assert process.poll() is None, said.read_text()[-2000:]
            assert time.monotonic() < deadline, said.read_text()[-2000:]
            time.sleep(0.05)
        yield f"http://{found[1]}"
    finally:
        process.kill()
        process.wait()
        pages.shutdown()
        pages.server_close()


def _first_of_each(text: str) -> str:
    seen: set[str] = set()
    lines: list[str] = []
    family, is_new = "", True
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            is_new = family not in seen
            seen.add(family)
        if is_new and line:
            lines.append(line)
    return "\n".join(lines) + "\n"


def asked(url: str, expression: str) -> dict[str, Any]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}") as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_prometheus_itself_evaluates_every_expression(prometheus: str) -> None:
    """Against what a monitor really said; what a panel shows without a threshold has a value."""
    deadline = time.monotonic() + 30
    while True:
        try:
            # Two scrapes, or a rate has nothing to go by.
            if asked(prometheus, "count_over_time(up[1m]) >= 3")["data"]["result"]:
                break
        except OSError:
            pass
        assert time.monotonic() < deadline, "Prometheus scraped nothing"
        time.sleep(0.2)
    for expression in expressions():
        found = asked(prometheus, expression)
        assert found["status"] == "success", expression
        has_threshold = re.search(r" [<>=]=? ?\d", expression) is not None
        if not has_threshold and not _ONLY_AFTER_A_MOVE & set(_METRIC.findall(expression)):
            assert found["data"]["result"], f"nothing for {expression}"
