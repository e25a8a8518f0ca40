"""Sentences about events and jobs, for people: made from what the log says, adding nothing. Pure."""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec

from apportion.cli.output import printable
from apportion.contracts.envelope import Entry, Undecodable
from apportion.contracts.ids import RunId, job_of_run
from apportion.placer.words import score_words
from apportion.runtime.stream import RawMessage

_NEVER_SHOWN = frozenset({
    "type", "job_id", "run_id", "node_id", "caused_by", "candidates", "excluded", "command", "env", "spec", "workload",
    "devices", "enforced", "request_digest", "wish_id", "config", "labels", "slices",
})  # fmt: skip


def why_text(content: dict[str, Any]) -> list[str]:
    """Why a job is as it is, in a few lines: the state, the reason with its numbers, what would end the wait."""
    job, pending, runs = content["job"], content["pending"], content["runs"]
    name = job["job_id"]
    match job["state"]:
        case "waiting":
            return waiting_text(name, pending)
        case "placed" | "running":
            live = [run for run in runs if run["state"] in {"placed", "started"}]
            where = ", ".join(sorted({run["node_id"] for run in live}))
            lines = [f"{name} is {job['state']} on {where}"]
            placed = _last(content["timeline"], "RunPlaced")
            lines += _choice(placed) if placed else []
            return lines
        case _:
            lines = [f"{name} {job['state']}" + (f": {job['reason']}" if job["reason"] else "")]
            if job["attempts"] > 1:
                causes = [row["cause"] for row in content["timeline"] if row["kind"] == "JobRequeued"]
                lines.append(
                    f"  it took {job['attempts']} attempts; the earlier ones ended by {', '.join(map(str, causes))}"
                )
            last = _last(content["timeline"], "RunFinished")
            if last is not None and job["state"] == "failed":
                body = _body(last)
                end = " ".join(f"{key} {body[key]}" for key in ("exit_code", "signal", "detail") if body.get(key))
                lines.append(f"  its run {last['run_id']} on {last['node_id']} ended {last['cause']} {end}".rstrip())
            return [printable(line) for line in lines]


def waiting_text(name: str, pending: dict[str, Any] | None) -> list[str]:
    """Why a job waits: the newest stated reason, its numbers, and who holds what it needs."""
    if pending is None:
        return [f"{name} waits, and no reason has been stated yet"]
    lines = [f"{name} waits: {pending['code']}" + (f". {pending['hint']}" if pending.get("hint") else "")]
    for title, key in (("it asks for", "requested"), ("the best there is", "available"), ("the limit", "limit")):
        numbers = _object(pending.get(key))
        if numbers:
            lines.append(f"  {title}: {', '.join(f'{amount} {what}' for what, amount in numbers.items())}")
    holders = _object(pending.get("blocking_ids"))
    if holders:
        lines.append(f"  likely ended by: {', '.join(map(str, holders))}")
    return [printable(line) for line in lines]


def stopped_text(timeline: list[dict[str, Any]]) -> list[str]:
    """By whom and why the last run of a job that waits again was stopped; nothing where none was."""
    last = _last(timeline, "RunStopOrdered")
    if last is None:
        return []
    body = _body(last)
    reason = f": {body['reason']}" if body.get("reason") else ""
    return [
        printable(f"  its last run was stopped ({last['cause']}) by {body.get('actor') or last['said_by']}{reason}")
    ]


def memory_text(memory: dict[str, Any] | None) -> list[str]:
    """What was expected of a job's memory, what its runs used, and what earlier ones advise, as far as it is known."""
    if memory is None:
        return []
    lines = []
    if memory["expected_mib"]:
        learned = f", corrected by {memory['corrected_by_runs']} runs" if memory["corrected_by_runs"] else ""
        expected = f"{memory['expected_mib']} MiB, {memory['expected_p95_mib']} at most{learned}"
        lines.append(f"its model was expected to need {expected}")
    if memory["used_mib"]:
        lines.append(f"it used at most {memory['used_mib']} MiB of each device")
    if memory["advice"]:
        lines.append(f"advice: {memory['advice']}; {memory['suggested_mib']} MiB would do")
    return [printable(line) for line in lines]


def _choice(placed: dict[str, Any]) -> list[str]:
    """Why this place was chosen, as the placer stated it."""
    body = _body(placed)
    lines = []
    candidates = body.get("candidates") or []
    if candidates:
        policy = body.get("policy", "")
        lines.append(f"  {len(candidates)} places were compared{f' by {policy}' if policy else ''}, the best first:")
        lines += [f"    {each['node_id']}: {score_words(policy, each.get('parts') or {})}" for each in candidates[:3]]
    excluded = body.get("excluded") or {}
    if excluded:
        lines.append(f"  out: {', '.join(f'{count} by {reason}' for reason, count in sorted(excluded.items()))}")
    lines.extend(
        f"  holds {each['compute_milli']}m and {each['memory_mib']} MiB of {each['device_uuid']} ({each['mode']})"
        for each in body.get("slices") or []
    )
    return [printable(line) for line in lines]


def _last(timeline: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((row for row in reversed(timeline) if row["kind"] == kind), None)


def _body(row: dict[str, Any]) -> dict[str, Any]:
    found = _object(row.get("body"))
    return found if isinstance(found, dict) else {}


def _object(value: Any) -> Any:
    """JSON as SQL gives it: text, or already an object."""
    return json.loads(value) if isinstance(value, str) else value


def is_about(entry: Entry, job: str) -> bool:
    """True where the event is about that job or one of its runs."""
    event = entry.event
    if isinstance(event, Undecodable):
        return event.job_id is not None and f"{entry.tenant}/{event.job_id}" == job
    named = getattr(event, "job_id", None)
    if named is None and (run := getattr(event, "run_id", None)) is not None:
        named = job_of_run(RunId(run))
    if named is None:
        return False
    return named == job or (entry.tenant is not None and f"{entry.tenant}/{named}" == job)


def event_line(entry: Entry) -> str:
    """One event on one line: when, which stream and sequence, who, what, about what, and its plain fields."""
    at = datetime.fromtimestamp(entry.recorded_at / 1e9, tz=UTC).strftime("%H:%M:%S.%f")[:-3]
    who = entry.author or entry.tenant or ""
    event = entry.event
    if isinstance(event, Undecodable):
        what = f"{event.type or entry.subject_type} undecodable {event.code}"
        fields = {"field": event.field, "expected": event.expected, "found": event.found, "bytes": event.size}
        about = event.job_id or ""
    else:
        said = msgspec.to_builtins(event)
        what = type(event).__name__
        about = said.get("run_id") or said.get("job_id") or said.get("node_id") or ""
        if said.get("run_id") and said.get("node_id"):
            about = f"{about} on {said['node_id']}"
        fields = {
            key: value for key, value in said.items() if key not in _NEVER_SHOWN and value not in (None, "", {}, [])
        }
    rest = " ".join(f"{key}={value}" for key, value in fields.items() if value not in (None, ""))
    return printable(f"{at} {entry.stream.value[0]}{entry.seq:<6} {who:<16} {what:<24} {about}  {rest}".rstrip()[:400])


def event_json(entry: Entry, raw: RawMessage) -> str:
    """One event as one JSON object: its envelope, and the event as it was decoded."""
    content = {
        "schema": "apportion.event/1",
        "stream": entry.stream.value,
        "seq": entry.seq,
        "recorded_at": datetime.fromtimestamp(entry.recorded_at / 1e9, tz=UTC).isoformat(),
        "subject": raw.subject,
        "id": entry.event_id,
        "author": entry.author,
        "tenant": entry.tenant,
        "kind": type(entry.event).__name__,
        "event": msgspec.to_builtins(entry.event),
    }
    return json.dumps(content, ensure_ascii=False)
