"""Queues through the command alone: limits hold, what is lent comes back, and `why` says so."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apportion.cli.leftovers import processes_of
from tests.e2e.test_pool import Pool, _until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FILE = """
[cli]
nodes = 1
devices = 2
[placer]
preempt_spares_s = 1
[[queue]]
name = "team"
guaranteed_compute_milli = 2000
reason = "quarter 3"
[[queue]]
name = "train"
parent = "team"
tenants = ["default"]
guaranteed_compute_milli = 1000
[[queue]]
name = "serve"
parent = "team"
tenants = ["default"]
[[policy]]
for_tenant = "default"
limit_jobs = 3
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """A pool with two queues in a team and two devices, ended whatever happens."""
    file = tmp_path / "apportion.toml"
    file.write_text(FILE)
    made = _WithFile(tmp_path / "pool", file)
    try:
        yield made
    finally:
        if made.process is not None and made.process.poll() is None:
            made.process.send_signal(signal.SIGTERM)
            try:
                made.process.wait(30)
            except subprocess.TimeoutExpired:
                made.process.kill()
        for process in processes_of(made.data_dir):
            os.kill(process.pid, signal.SIGKILL)


class _WithFile(Pool):
    """One that is started with a file of its own."""

    def __init__(self, data_dir: Path, file: Path) -> None:
        super().__init__(data_dir, ("--config", str(file)))


def _submit(pool: Pool, name: str, queue: str, wait: str = "admitted", **more: Any) -> dict[str, Any]:
    request = {
        "queue": queue,
        "job_id": name,
        "workload": {"command": ["sleep", "600"]},
        "resources": {"gpu": 1},
        "preemptible": True,
        **more,
    }
    return pool.json("submit", "-", "--wait", wait, stdin=json.dumps(request))


def _queue(pool: Pool, name: str) -> dict[str, Any]:
    found: dict[str, Any] = pool.json("queue", "show", name)
    return found


def _holds(pool: Pool, name: str) -> int:
    return int(_queue(pool, name)["held_compute_milli"])


def test_what_a_queue_lends_comes_back_and_no_limit_is_passed(pool: Pool) -> None:
    """The whole way: from a file, by borrowing and reclaim, to limits that are lowered over what runs."""
    pool.up()
    assert {row["queue"] for row in pool.json("queue", "ls")["queues"]} == {"team", "train", "serve"}
    said = pool.sql("SELECT DISTINCT actor, reason FROM v_changes WHERE what IN ('queue', 'limits') ORDER BY reason")
    assert [row["reason"] for row in said] == ["as apportion.toml has it", "quarter 3"]
    assert all(row["actor"].startswith("operator (user:") for row in said)

    # A job that could never run within a limit is refused with the limit's numbers; so is a guarantee that can't be.
    refused = pool.run("queue", "set", "train", "--guarantee", "compute_milli=3000", "--reason", "too much")
    assert refused.returncode == 6
    assert "at most 2000, which is left of what is guaranteed to team" in refused.stdout

    # Serve borrows what train leaves idle.
    for name in ("lent-1", "lent-2"):
        assert _submit(pool, name, "serve", "started")["outcome"] == "started"
    # The command heard it from the bus, and the log follows.
    _until("serve holds both devices", lambda: _holds(pool, "serve") == 2000)
    assert _queue(pool, "serve")["borrowed_compute_milli"] == 2000

    # Train wants its guarantee: the newer borrower goes, and says why.
    assert _submit(pool, "owed", "train", "started")["outcome"] == "started"
    _until("one borrower waits again", lambda: _holds(pool, "serve") == 1000)
    _until("train holds what is guaranteed to it", lambda: _holds(pool, "train") == 1000)
    story = pool.run("audit", "default/lent-2").stdout
    assert "queue train takes back what is guaranteed to it, and the victims' borrowed it" in story
    why = pool.run("why", "default/lent-2").stdout
    assert "has waited" in why
    assert "its last run was stopped (Preempted) by service:placer: for default/owed" in why
    assert "takes back what is guaranteed" in why

    # One more than its tenant may hold waits for the tenant's limit.
    limit = pool.json("queue", "set", "serve", "--limit", "jobs=1", "--on-lowered", "reclaim", "--reason", "less")
    assert limit["on_lowered"] == "reclaim"
    _until(
        "the queue's limit is the reason", lambda: "limit of jobs (1 of 1" in pool.run("why", "default/lent-2").stdout
    )
    assert _holds(pool, "serve") == 1000

    # A limit below what is held takes it back, by whoever set it and for that reason.
    assert pool.json("queue", "set", "serve", "--limit", "jobs=0", "--reason", "none for now")["limit_jobs"] == 0
    _until("serve holds nothing", lambda: _holds(pool, "serve") == 0)
    [stop] = pool.sql(
        "SELECT body ->> '$.actor' AS actor, body ->> '$.reason' AS reason FROM v_event"
        " WHERE kind = 'RunStopOrdered' AND job_id = 'default/lent-1'"
    )
    assert stop["actor"].startswith("operator (user:")
    assert stop["reason"].startswith("queue serve holds 1 of jobs and may hold 0")
    assert stop["reason"].endswith("none for now")

    # And raised again, it all goes on; the tenant's own limit holds over all its queues.
    assert pool.run("queue", "set", "serve", "--limit", "jobs=none", "--reason", "open").returncode == 0
    _until("serve runs again", lambda: _holds(pool, "serve") == 1000)
    policy = pool.data_dir.parent / "policy.toml"
    policy.write_text('for_tenant = "default"\nlimit_compute_milli = 1000\non_lowered = "keep"\n')
    assert pool.run("policy", "set", str(policy), "--reason", "one device").returncode == 0
    assert pool.run("cancel", "default/owed", "--reason", "done").returncode == 0
    _until("train holds nothing", lambda: _holds(pool, "train") == 0)
    _until(
        "the tenant's limit is the reason",
        lambda: (
            "Tenant default is at its limit" in pool.run("why", "default/lent-2").stdout
            or "Tenant default is at its limit" in pool.run("why", "default/lent-1").stdout
        ),
    )
    [row] = pool.json("policy", "show")["policies"]
    assert (row["held_compute_milli"], row["limit_compute_milli"], row["held_jobs"]) == (1000, 1000, 1)

    # Who goes first is policy, too.
    rules = pool.data_dir.parent / "rules.toml"
    rules.write_text("[placement]\nageing_s = 5\n[placement.class_points]\nspot = 500\n")
    assert pool.run("policy", "set", str(rules), "--reason", "spot waits less").returncode == 0
    _until("the log has both", lambda: len(pool.json("policy", "show")["policies"]) == 2)
    of_the_pool = pool.json("policy", "show")["policies"][0]
    assert of_the_pool["placement"] == {"ageing_s": 5, "class_points": {"spot": 500}}
    assert of_the_pool["reason"] == "spot waits less"

    # Everything of it can be decided again from the log.
    pool.down()
    replay = pool.json("replay", "--verify")
    assert replay["differences"] == 0
    assert pool.sql("SELECT count(*) AS n FROM v_double_slice") == [{"n": 0}]
