"""Publishes the demo's workload, the way another system would: a process of its own with nothing but nats-py.

No code of ours is imported but the plan of what to send (``workload``, of the standard library alone). Each request is
one CloudEvent in binary mode: attributes in headers, the request as JSON in the body. It is acknowledged once it is on
disk; a request whose acknowledgement is missing is sent again under the same id, and the bus keeps one.

Says on stdout, a JSON object a line, what it does: first the plan, then a count each second, at last the total.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import nats
import nats.errors
from nats.js import JetStreamContext

from apportion.cli.workload import Plan, Submission, plan

_TRIES_MAX = 60
_SOURCE = "/demo/publisher"


def message_of(submission: Submission, pool: str) -> tuple[str, dict[str, str], bytes]:
    """Subject, headers and body of a request."""
    body = submission.raw if submission.raw is not None else json.dumps(submission.body).encode()
    headers = {
        "Nats-Msg-Id": f"{submission.tenant} {_SOURCE} {submission.event_id}",
        "ce-specversion": "1.0",
        "ce-id": submission.event_id,
        "ce-source": _SOURCE,
        "ce-type": "io.apportion.JobRequested.v1",
        "content-type": "application/json",
    }
    return f"apportion.v1.{pool}.wish.{submission.tenant}.JobRequested", headers, body


async def publish(what: Plan, *, url: str, pool: str, key_file: str | None) -> dict[str, Any]:
    """Send everything at its time; returns the counts."""
    options = {"nkeys_seed": key_file, "inbox_prefix": "_INBOX_gateway"} if key_file else {}
    client = await nats.connect(url.split(","), name="demo-publisher", max_reconnect_attempts=-1, **options)
    stream = client.jetstream(timeout=5)
    began = time.monotonic()
    counts = {"acknowledged": 0, "bad": 0, "sent_again": 0, "last_seq": 0}
    tenants: set[str] = set()
    told = began
    for submission in what.submissions:
        await asyncio.sleep(max(0.0, began + submission.at_s - time.monotonic()))
        seq, tries = await _send(stream, submission, pool)
        counts["acknowledged"] += 1
        counts["bad"] += submission.is_bad
        counts["sent_again"] += tries - 1
        counts["last_seq"] = max(counts["last_seq"], seq)
        tenants.add(submission.tenant)
        if time.monotonic() - told >= 1:
            told = time.monotonic()
            _tell({"what": "progress", **counts, "tenants": len(tenants)})
    await client.drain()
    return {**counts, "tenants": len(tenants), "seconds": round(time.monotonic() - began, 2)}


async def _send(stream: JetStreamContext, submission: Submission, pool: str) -> tuple[int, int]:
    """Sequence of the stored request, and how often it was sent."""
    subject, headers, body = message_of(submission, pool)
    for tries in range(1, _TRIES_MAX + 1):
        try:
            stored = await stream.publish(subject, body, headers=headers)
        except (nats.errors.Error, TimeoutError):
            # The bus is being restarted, or its answer was lost. The same id makes the second sending harmless.
            await asyncio.sleep(0.25)
        else:
            return stored.seq, tries
    raise SystemExit(f"publisher: {submission.event_id} was not acknowledged after {_TRIES_MAX} tries: is the bus up?")


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the publisher; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m apportion.cli.publisher", description=__doc__)
    parser.add_argument("--bus-url", required=True)
    parser.add_argument("--pool", default="main")
    parser.add_argument("--key-file", help="the seed of the gateway's key, where the bus asks for one")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--devices", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=36.0)
    parser.add_argument("--plan-only", action="store_true", help="say what would be sent, and send nothing")
    parser.add_argument("program", nargs="+", help="the workload's program and its first arguments")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    what = plan(seed=given.seed, devices=given.devices, window_s=given.seconds, program=given.program)
    _tell({
        "what": "plan",
        "requests": len(what.submissions),
        "bad": sum(each.is_bad for each in what.submissions),
        "notes": what.notes,
    })  # fmt: skip
    if not given.plan_only:
        _tell(
            {"what": "done", **asyncio.run(publish(what, url=given.bus_url, pool=given.pool, key_file=given.key_file))}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
