"""The whole stack as its user meets it: the command ``apportion``, real processes, a real bus, a real log."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apportion.cli.leftovers import Kind, processes_of
from apportion.cli.places import PoolNote, read_note

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_COMMAND = (sys.executable, "-m", "apportion.cli")
_PATIENCE_S = 60.0
"""Only how long a broken pool may keep a test waiting; nothing is said about speed here."""


class Pool:
    """A pool that ``apportion up`` runs in a directory of its own."""

    def __init__(self, data_dir: Path, options: tuple[str, ...] = ("--nodes", "2")) -> None:
        self.data_dir = data_dir
        self._options = options
        self.process: subprocess.Popen[str] | None = None

    def up(self) -> PoolNote:
        """Start it, and wait until it says that it is ready."""
        self.process = subprocess.Popen(
            [*_COMMAND, "up", "--port", "0", *self._options, "--data-dir", str(self.data_dir)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "APPORTION_CONFIG": ""},
            cwd=self.data_dir.parent,
        )
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if line.startswith("next:"):
                break
        note = read_note(self.data_dir)
        assert note is not None, "".join(said)
        return note

    def down(self) -> str:
        """SIGTERM; what it said on its way out."""
        assert self.process is not None
        self.process.terminate()
        _, said = self.process.communicate(timeout=_PATIENCE_S)
        return said

    def end(self) -> None:
        """Whatever is left of it, gone."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.communicate(timeout=30)
            self.process.kill()
            with self.process:
                pass
        for process in processes_of(self.data_dir):
            os.kill(process.pid, signal.SIGKILL)

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """A command against this pool, ended."""
        return subprocess.run(
            [*_COMMAND, *arguments, "--data-dir", str(self.data_dir)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )

    def json(self, *arguments: str, stdin: str | None = None) -> dict[str, Any]:
        """What a command prints with ``-o json``."""
        done = self.run(*arguments, "-o", "json", stdin=stdin)
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def sql(self, statement: str) -> list[dict[str, Any]]:
        """Rows of a question to the log."""
        rows: list[dict[str, Any]] = self.json("sql", statement)["rows"]
        return rows


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """A pool, ended whatever happens."""
    made = Pool(tmp_path / "pool")
    try:
        yield made
    finally:
        made.end()


def _request(name: str, *command: str, **more: Any) -> str:
    return json.dumps({
        "queue": "main",
        "job_id": name,
        "workload": {"command": command},
        "resources": {"gpu_milli": 250, "gpu_memory_mib": 4096},
        **more,
    })  # fmt: skip


def _until(what: str, is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.1)


def test_a_pool_runs_jobs_survives_kills_and_leaves_nothing_behind(pool: Pool) -> None:
    """The promise of `up`: work is done and told, no death of a service loses any, and the end is clean."""
    note = pool.up()
    assert set(note.pids) >= {"admission", "placer", "monitor", "node-agent-node-1", "node-agent-node-2", "nats-server"}

    # Whoever starts a second pool in the same place is refused, and the first one isn't touched.
    before = processes_of(pool.data_dir)
    second = pool.run("up", "--port", "0")
    assert second.returncode == 2
    assert "already run by process" in second.stderr
    assert processes_of(pool.data_dir) == before
    assert read_note(pool.data_dir) is not None

    said = _request("first", "/bin/sh", "-c", "echo out; echo bad >&2; exit 0")
    assert pool.json("submit", "-", "--wait", "finished", stdin=said)["outcome"] == "succeeded"
    # Its run is released or about to be: its node has what it wrote either way, and following ends with the job.
    assert pool.run("logs", "first", "-f").stdout == "out\n"
    assert pool.run("logs", "first", "--stderr").stdout == "bad\n"
    failed = pool.run(
        "submit", "-", "--wait", "finished", "--job-exit-code", stdin=_request("fails", "/bin/sh", "-c", "exit 7")
    )
    assert failed.returncode == 7, failed.stderr
    refused = pool.run("submit", "-", stdin=_request("bad", "/bin/true", gpus=1))
    assert refused.returncode == 6
    assert "FieldUnknown" in refused.stdout
    assert "gpus" in refused.stdout

    # A run is a process that can be killed by hand, and whose end is told with its cause.
    assert (
        pool.json("submit", "-", "--wait", "started", stdin=_request("victim", "sleep", "600"))["outcome"] == "started"
    )
    pid = pool.sql(
        "SELECT body ->> '$.pid' AS pid FROM v_event WHERE kind = 'RunStarted' AND job_id = 'default/victim'"
    )
    os.kill(int(pid[0]["pid"]), signal.SIGKILL)
    _until("victim failed", lambda: pool.json("show", "default/victim")["job"]["state"] == "failed")
    assert pool.json("show", "default/victim")["job"]["reason"] == "Killed"

    # Every service dies while a job runs; the job's exit code arrives all the same.
    sleeper = _request("survivor", "/bin/sh", "-c", "sleep 3; exit 0")
    assert pool.json("submit", "-", "--wait", "started", stdin=sleeper)["outcome"] == "started"
    for name, service in note.pids.items():
        if name != "nats-server":
            os.kill(service, signal.SIGKILL)
    _until("restarted", lambda: _all_ready(pool, note))
    _until("survivor ended", lambda: pool.json("show", "default/survivor")["job"]["state"] == "succeeded")
    story = pool.json("show", "default/survivor")
    assert [fact["kind"] for fact in story["timeline"]].count("RunStarted") == 1

    # A long job is stopped on request.
    assert pool.json("submit", "-", "--wait", "started", stdin=_request("long", "sleep", "600"))["outcome"] == "started"
    assert pool.run("cancel", "default/long", "--reason", "no longer needed").returncode == 0
    _until("cancelled", lambda: pool.json("show", "default/long")["job"]["state"] == "cancelled")

    # One more is running when the pool ends: nothing of it may stay, its control groups neither.
    held = {"gpu_milli": 250, "gpu_memory_mib": 4096, "memory_mib": 64, "cpu_milli": 100}
    left = _request("left", "sleep", "600", resources=held)
    assert pool.json("submit", "-", "--wait", "started", stdin=left)["outcome"] == "started"
    assert any(process.kind is Kind.RUN for process in processes_of(pool.data_dir))
    said = pool.down()
    assert "stopped in" in said
    assert processes_of(pool.data_dir) == []
    assert read_note(pool.data_dir) is None
    assert list(Path("/sys/fs/cgroup").rglob("default%2Fleft*")) == []

    # The log speaks without the pool, and every decision in it can be made again.
    assert pool.json("log", "verify")["ok"] is True
    replay = pool.json("replay", "--verify")
    assert replay["differences"] == 0
    assert replay["decisions"] > 0
    assert pool.sql("SELECT count(*) AS n FROM v_double_slice") == [{"n": 0}]
    # A chain of processes: the shell's exit code is what `show` says it was.
    assert pool.json("show", "fails")["runs"][0]["exit_code"] == 7


def test_a_job_is_held_preempted_resized_and_released_by_command(pool: Pool) -> None:
    """Each command's code and answer, and what the processes do for it; a dry run first, which does nothing."""
    pool.up()
    tried = pool.json("submit", "-", "--dry-run", stdin=_request("train", "sleep", "600"))
    assert (tried["outcome"], tried["fact"], tried["job_id"]) == ("dry run", "JobAdmitted", "default/train")
    assert pool.run("hold", "train").returncode == 5
    assert (
        pool.json("submit", "-", "--wait", "started", stdin=_request("train", "sleep", "600"))["outcome"] == "started"
    )

    judged = pool.json("preempt", "train", "--reason", "room for others", "--dry-run")
    assert (judged["verdict"], judged["fact"]) == ("accepted", "JobStopping")
    assert pool.json("show", "train")["job"]["state"] == "running"
    assert pool.run("hold", "train", "--reason", "not now").returncode == 0
    assert pool.run("preempt", "train", "--reason", "room for others").returncode == 0
    _until("held", lambda: pool.json("show", "train")["job"]["reason"] == "Held")
    assert "not now" in pool.run("why", "train").stdout
    planned = pool.run("plan", "-", "-o", "json", stdin=_request("next", "sleep", "1"))
    assert (planned.returncode, json.loads(planned.stdout)["starts"]) == (0, "now")
    never = json.dumps({**json.loads(_request("next", "sleep", "1")), "placement": {"site": "nowhere"}})
    planned = pool.run("plan", "-", "-o", "json", stdin=never)
    answer = json.loads(planned.stdout)
    assert (planned.returncode, answer["starts"], answer["why"]["code"]) == (3, "never", "NoMatchingNode")
    assert pool.sql("SELECT count(*) AS n FROM v_event WHERE job_id = 'default/next' AND kind = 'JobAdmitted'") == [
        {"n": 0}
    ]
    assert pool.run("preempt", "train", "--reason", "again").returncode == 6

    assert pool.run("reprioritize", "train", "900").returncode == 0
    assert pool.run("resize", "train", "--gpu-milli", "300", "--gpu-memory-mib", "2048").returncode == 0
    assert pool.run("release", "train").returncode == 0
    _until("running again", lambda: pool.json("show", "train")["job"]["state"] == "running")
    assert _slice_of(pool, "default/train/0/2") == (300, 2048)
    assert pool.run("resize", "train", "--gpu-milli", "200").returncode == 0
    _until("smaller", lambda: _slice_of(pool, "default/train/0/3") == (200, 2048))

    assert pool.run("drain", "node-1", "--reason", "r", "--dry-run").returncode == 0
    assert pool.run("drain", "nowhere", "--reason", "r", "--dry-run").returncode == 5
    assert pool.run("preempt", "train", "--reason", "enough", "--no-requeue").returncode == 0
    _until("cancelled", lambda: pool.json("show", "train")["job"]["state"] == "cancelled")
    assert pool.sql("SELECT count(*) AS n FROM v_event WHERE kind IN ('NodeDraining', 'NodeCordoned')") == [{"n": 0}]
    pool.down()
    assert pool.json("replay", "--verify")["differences"] == 0


def _slice_of(pool: Pool, run_id: str) -> tuple[int, int] | None:
    rows = pool.sql(
        "SELECT body ->> '$.slices[0].compute_milli' AS milli, body ->> '$.slices[0].memory_mib' AS mib"
        f" FROM v_event WHERE kind = 'RunPlaced' AND run_id = '{run_id}'"
    )
    return (int(rows[0]["milli"]), int(rows[0]["mib"])) if rows else None


def _all_ready(pool: Pool, before: PoolNote) -> bool:
    note = read_note(pool.data_dir)
    assert note is not None
    if any(note.pids.get(name) == pid for name, pid in before.pids.items() if name != "nats-server"):
        return False
    findings = pool.json("doctor")["doctor"]
    return not [each for each in findings if each["verdict"] == "fail"]


def test_a_flipped_byte_is_found_and_named(pool: Pool) -> None:
    """The log's chain is worth something only if `log verify` says where it was broken, and scripts can tell by 9."""
    import duckdb

    pool.up()
    assert pool.json("submit", "-", "--wait", "finished", stdin=_request("one", "/bin/true"))["outcome"] == "succeeded"
    pool.down()
    [path] = (pool.data_dir / "log").glob("*.duckdb")
    with duckdb.connect(str(path)) as connection:
        ordinal, seq = connection.execute(
            "SELECT ordinal, stream_seq FROM events WHERE type LIKE 'RunPlaced%' LIMIT 1"
        ).fetchone() or (0, 0)
        connection.execute(
            "UPDATE events SET payload = encode(replace(decode(payload), 'default', 'defaulT')) WHERE ordinal = ?",
            [ordinal],
        )
    verified = pool.run("log", "verify")
    assert verified.returncode == 9
    assert f"facts sequence {seq}" in verified.stdout


def test_a_pool_lets_in_whom_it_has_a_key_for(pool: Pool, tmp_path: Path) -> None:
    """The README's ways with a key work; without one, or with one that was revoked, nothing does."""
    url = pool.up().bus_url
    examples = Path(__file__).parents[2] / "examples"
    key = pool.data_dir / "keys" / "tenant-default.nk"

    def publish(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(examples / "python.py"), url, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)

    assert json.loads(publish("order-1", str(key)).stdout)["answer"] == "JobAdmitted"
    listed = {row["principal"] for row in pool.json("keys", "ls")["keys"]}
    assert {"tenant-default", "operator", "agent-node-1", "placer"} <= listed

    # The same program as another tenant: its key may publish its own wishes alone, and hear its own replies.
    other = pool.json("keys", "new", "tenant", "globex", "--reason", "a new customer")["seed_file"]
    refused = publish("order-2", other)
    assert refused.returncode != 0
    assert not refused.stdout
    assert pool.sql("select count(*) as n from events where event_id = 'order-2'") == [{"n": 0}]

    # What its jobs wrote, a tenant reads with its own key, wherever it is; and nobody else's.
    talks = pool.json("submit", "-", "--wait", "finished", stdin=_request("talks", "/bin/echo", "said by a job"))
    assert talks["outcome"] == "succeeded"

    def logs(job: str, seed: str) -> subprocess.CompletedProcess[str]:
        command = [*_COMMAND, "logs", job, "--bus-url", url, "--data-dir", str(tmp_path / "elsewhere")]
        env = {**os.environ, "APPORTION_BUS_KEY_FILE": seed}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)

    mine = logs("talks", str(key))
    assert (mine.returncode, mine.stdout) == (0, "said by a job\n"), mine.stderr
    assert logs("talks", other).returncode == 5
    assert logs("default/talks", other).returncode == 7
    shown = pool.json("show", "talks")
    assert {one["what"] for one in shown["enforced"]} >= {"memory", "compute", "fault_domain"}

    kept = tmp_path / "kept.nk"
    kept.touch(mode=0o600)
    kept.write_bytes(key.read_bytes())
    assert pool.run("keys", "revoke", "tenant-default", "--reason", "they left").returncode == 0
    changes = "select name, after->>'$.change' as change, reason from v_changes where what = 'key'"
    said = [(row["name"], row["change"], row["reason"]) for row in pool.sql(changes)]
    assert ("operator", "Made", "the pool was started with it") in said
    assert ("tenant-globex", "Made", "a new customer") in said
    assert ("tenant-default", "Revoked", "they left") in said
    revoked = pool.run("submit", "-", "--bus-url", url, stdin=_request("late", "/bin/true"))
    assert revoked.returncode == 0, revoked.stderr  # the operator's key still submits for the tenant
    env = {**os.environ, "APPORTION_BUS_KEY_FILE": str(kept)}
    command = [*_COMMAND, "submit", "-", "--bus-url", url, "--data-dir", str(tmp_path / "elsewhere")]
    late = subprocess.run(
        command, input=_request("later", "/bin/true"), env=env, capture_output=True, text=True, check=False
    )
    assert late.returncode == 7, late.stderr
    assert "a key that the bus" in late.stderr
    # A key that is known and may not do this: the bus's own word, not a wait that ended.
    env["APPORTION_BUS_KEY_FILE"] = other
    asked = subprocess.run(
        [*_COMMAND, "nodes", "--bus-url", url, "--data-dir", str(tmp_path / "elsewhere")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 7, asked.stderr
    assert "permissions violation" in asked.stderr
    assert pool.run("keys", "revoke", "operator", "--reason", "a try").returncode == 2
    assert "stopped in" in pool.down()
