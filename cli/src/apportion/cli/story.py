"""A job's whole story in plain words, one sentence a fact, in the order of the log. Pure: rows in, lines out."""

from collections.abc import Mapping, Sequence
from typing import Any

from apportion.cli.output import duration_text

Row = Mapping[str, Any]
"""One row of v_job_timeline: ordinal, recorded_at, kind, said_by, actor, cause, run_id, node_id, body."""


def told(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each fact with ``text``, the sentence about it, and ``after_ms`` since the first; the rest as it came."""
    began = int(rows[0]["recorded_at"]) if rows else 0
    return [
        {
            **row,
            "after_ms": (int(row["recorded_at"]) - began) // 1_000_000,
            "text": sentence(row),
        }
        for row in rows
    ]


def story_lines(job: str, story: Sequence[Row]) -> list[str]:
    """The story for people: when, what, and who says so."""
    lines = [f"{job}: {len(story)} facts, each with its row in the log"]
    for fact in story:
        after = duration_text(fact["after_ms"] / 1000)
        lines.append(f"{fact['ordinal']:>8}  {fact['at']}  +{after:<7} {fact['text']}  [{fact['said_by']}]")
    return lines


def sentence(row: Row) -> str:
    """What a fact says, in words. A type that has none of its own is told by its name and cause."""
    body: Mapping[str, Any] = row["body"] or {}
    body = body.get("data", body) if "specversion" in body else body
    match row["kind"]:
        case str(kind) if row["body"] is None and row["cause"] is None:
            return f"{kind}: what it said was erased from the log"
        case "JobRequested":
            return f"was asked for in queue {body.get('queue', '?')}: {_resources(body)}"
        case "JobAdmitted":
            advice = body.get("advice") or {}
            said = f"; advice: {advice['text']}, {advice['suggested_mib']} MiB would do" if advice else ""
            return f"was admitted: {_spec(body.get('spec', {}))} (wish {body.get('answers')}){said}"
        case "JobRejected":
            return f"was refused: {_because(row, body)}{_refusal(body)}"
        case "JobDuplicate":
            return f"was asked for again; the first answer stands (wish {body.get('first_wish')})"
        case "JobPendingReasonChanged":
            return f"waits: {row['cause']}{_numbers(body)}{_hint(body)}"
        case "RunPlaced":
            price = f", at a market price of {body['price_micro']} micro" if body.get("price_micro") else ""
            return f"{_run(row)} was placed on {row['node_id']}: {_slices(body)}{_chosen(body)}{price}"
        case "RunStarted":
            return f"{_run(row)} started on {row['node_id']} as process {body.get('pid')}{_enforced(body)}"
        case "PreemptionDecided":
            nodes = ", ".join(body.get("nodes", ()))
            return f"has {', '.join(body.get('victims', ()))} stopped ({body.get('rule', '')}): kept for it is {nodes}"
        case "NodesReserved":
            nodes = ", ".join(body.get("nodes", ()))
            return f"has nodes kept for it: {nodes}" if nodes else "has nothing kept for it any more"
        case "GangResized":
            why = ", as there is room"
            if body.get("after", 0) < body.get("before", 0):
                why = f" for {body['for_job']}" if body.get("for_job") else ", as a limit takes back what is beyond it"
            return f"goes on with {body.get('after')} replicas instead of {body.get('before')}{why}"
        case "RunStopOrdered":
            grace = f", with {body['grace_s']} s to end by itself" if body.get("grace_s") else ""
            return f"{_run(row)} was told to stop by {row['actor']}: {_because(row, body)}{grace}"
        case "RunFinished":
            return f"{_run(row)} ended: {_end(row, body)}"
        case "RunReleased":
            return f"{_run(row)} gave back its slices: nothing of it is left on {row['node_id']}"
        case (
            "FaultInjected"
            | "FaultCleared"
            | "ControlPlaneFrozen"
            | "ControlPlaneThawed"
            | "LeaseClaimed"
            | "NodeSuspected"
            | "NodeTrusted"
            | "NodeLost"
            | "NodeRecovered"
            | "NodeDraining"
            | "NodeCordoned"
            | "DeviceHealthChanged"
        ):
            return f"meanwhile: {_around(row, body)}"
        case "NodeFenced":
            return f"{_run(row)} was lost: node {row['node_id']} was fenced ({body.get('reason', '')})"
        case "JobStopping":
            end = "it waits again afterwards" if body.get("requeue", True) else "it ends with that"
            return f"has to stop, as {row['actor']} wants: {_because(row, body)}; {end}"
        case "JobRequeued":
            back = "at once" if not body.get("not_before_at") else "after a pause"
            left = body.get("retries_left", 0)
            return f"waits again ({back}) as attempt {body.get('attempt')}: {row['cause']}; {left} retries left"
        case "MigrationCompleted":
            there, here = ", ".join(body.get("from_nodes", ())), ", ".join(body.get("to_nodes", ()))
            down_s = body.get("downtime_ms", 0) / 1000
            kept_s = body.get("kept_work_s", 0)
            kept = f", {kept_s} s kept by its checkpoint" if kept_s else ""
            return (
                f"has moved from {there} to {here} ({row['cause']}): down for {down_s:.1f} s,"
                f" {body.get('lost_work_s', 0)} s of work to do again{kept}"
            )
        case "JobHeld":
            return f"is held by {row['actor']}{_reason(body)}"
        case "JobReleased":
            return f"may be placed again, says {row['actor']}{_reason(body)}"
        case "JobSuspended":
            return f"is to stand still, as {row['actor']} wants{_reason(body)}"
        case "JobResumed":
            return f"may go on, says {row['actor']}{_reason(body)}"
        case "JobCheckpointing":
            return f"is to checkpoint, as {row['actor']} wants{_reason(body)}"
        case "RunActionOrdered":
            return f"{_run(row)} was told by {row['actor']} to {body.get('action')}{_reason(body)}"
        case "RunSuspended":
            return f"{_run(row)} stands still on {row['node_id']}, with {body.get('processes')} process(es)"
        case "RunResumed":
            return f"{_run(row)} goes on, on {row['node_id']}, with {body.get('processes')} process(es)"
        case "RunCheckpointed":
            return f"{_run(row)} {_checkpoint(body)}"
        case "JobReprioritized":
            return (
                f"has priority {body.get('priority')} now, was {body.get('before')}, by {row['actor']}{_reason(body)}"
            )
        case "JobWaitExceeded":
            return f"has waited longer than the {body.get('max_wait_s')} s that it said it could, and waits on"
        case "JobResized":
            now = f"{body.get('compute_milli')} milli-GPU and {body.get('memory_mib', 0)} MiB"
            was = f"{body.get('compute_milli_before')} and {body.get('memory_mib_before', 0)}"
            return f"asks for {now} of each device now, was {was}, by {row['actor']}{_reason(body)}"
        case "JobSucceeded":
            return (
                f"SUCCEEDED after {body.get('attempts')} attempt(s): waited {_ms(body.get('wait_ms'))}, "
                f"ran {_ms(body.get('run_ms'))}"
            )
        case "JobFailed":
            return f"FAILED after {body.get('attempts')} attempt(s): {_end(row, body)}"
        case "JobCancelled":
            return f"was CANCELLED by {row['actor']}{_reason(body)}"
        case "JobExpired":
            return "EXPIRED: its deadline passed before it succeeded"
        case "LegalHoldPlaced":
            return f"what is said of it is kept by {body.get('hold_id')}, of {row['actor']}{_reason(body)}"
        case "PayloadEraseOrdered":
            what = f"{body.get('stream')} {body.get('stream_seq')}"
            return f"what {what} said is to be erased from the log, by {row['actor']}{_reason(body)}"
        case "PayloadsEraseOrdered":
            return f"what jobs that had ended long before had said is to be erased, by {row['actor']}{_reason(body)}"
        case "LateFactIgnored":
            return f"something came too late to count: {body.get('why')}"
        case "WishRejected":
            return f"{body.get('wish_type')} was refused: {_because(row, body)}{_refusal(body)}"
        case "WishJudged":
            return f"{body.get('wish_type')} was tried: it would be {body.get('verdict')} ({body.get('fact')})"
        case kind if kind is not None and kind.endswith("Requested"):
            return f"{kind} by {row['actor'] or row['said_by']}{_reason(body)}"
        case kind:
            return f"{kind or 'an unreadable message'}{': ' + str(row['cause']) if row['cause'] else ''}"


def _checkpoint(body: Mapping[str, Any]) -> str:
    if not body.get("is_done"):
        return f"was told to checkpoint and didn't: {body.get('detail')}"
    step = f" at step {body['step']}" if body.get("step") is not None else ""
    where = f" to {body['uri']}" if body.get("uri") else ""
    return f"has checkpointed{step}{where}, in {_ms(body.get('duration_ms'))}"


def _around(row: Row, body: Mapping[str, Any]) -> str:
    """What befell the pool, or a node of the job's."""
    node = row["node_id"]
    silent = f" after {_ms(body.get('silent_ms'))} of silence"
    match row["kind"]:
        case "FaultInjected":
            what = f"{body.get('kind')} {body.get('target', '')}".rstrip()
            return f"{what} was broken on purpose for {body.get('for_s')} s, by {row['actor']}{_reason(body)}"
        case "FaultCleared":
            what = f"{body.get('kind')} {body.get('target', '')}".rstrip()
            return f"{what} was mended ({body.get('why')})"
        case "ControlPlaneFrozen":
            return (
                f"nothing was placed or fenced any more: {body.get('silent')} of {body.get('nodes')} nodes were silent"
            )
        case "ControlPlaneThawed":
            return f"the pool was decided for again, after {_ms(body.get('frozen_ms'))}"
        case "LeaseClaimed":
            return f"a standby took over as {body.get('author')}{silent}"
        case "NodeSuspected":
            return f"nothing new was placed on {node}{silent}"
        case "NodeLost":
            return f"{node} was given up{silent}"
        case "DeviceHealthChanged":
            change = f"{body.get('before')} to {body.get('after')}"
            return f"device {body.get('device_uuid')} of {node} went from {change} ({body.get('code')})"
        case "NodeDraining" | "NodeCordoned":
            verb = "drained" if row["kind"] == "NodeDraining" else "cordoned"
            return f"{node} was {verb} by {row['actor']}{_reason(body)}"
        case _:
            return f"{node} is heard again"


def _run(row: Row) -> str:
    """``replica 0, attempt 2`` of a run's id."""
    _, _, last = str(row["run_id"]).partition("/")
    parts = last.split("/")
    return f"replica {parts[1]} (attempt {parts[2]})" if len(parts) == 3 else f"run {row['run_id']}"


def _resources(body: Mapping[str, Any]) -> str:
    asked = body.get("resources") or {}
    said = [f"{name} {value}" for name, value in asked.items() if not isinstance(value, dict)]
    gang = body.get("gang") or {}
    if gang.get("size", 1) > 1:
        said.append(f"{gang['size']} replicas")
    return ", ".join(said) or "with the defaults"


def _spec(spec: Mapping[str, Any]) -> str:
    replicas, devices = spec.get("replicas", 1), spec.get("devices", 1)
    share = (
        f"{spec.get('compute_milli', 1000)} milli-GPU and {spec.get('memory_mib') or 'all'} MiB of {devices} device(s)"
    )
    if spec.get("host_memory_mib"):
        share += f", {spec['host_memory_mib']} MiB of host memory"
    order = f"class {spec.get('service_class', 'batch')}, priority {spec.get('priority', 500)}"
    return f"{share}, {replicas} replica(s), {order}, queue {spec.get('queue')}"


def _slices(body: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{piece['compute_milli']} milli-GPU and {piece['memory_mib']} MiB of {piece['device_uuid']} ({piece['mode']})"
        for piece in body.get("slices", ())
    )


def _chosen(body: Mapping[str, Any]) -> str:
    candidates = body.get("candidates", ())
    excluded = sum(body.get("excluded", {}).values())
    if not candidates:
        return ""
    rest = f", {excluded} nodes were out" if excluded else ""
    return f"; the best of {len(candidates)} candidates with {candidates[0]['score']} points{rest}"


def _enforced(body: Mapping[str, Any]) -> str:
    kept = body.get("enforced", ())
    if not kept:
        return ""
    said = ", ".join(f"{one['what']} {one['observed']} by {one['by']}" for one in kept)
    return f"; enforced: {said}"


def _numbers(body: Mapping[str, Any]) -> str:
    wanted, there = body.get("requested") or {}, body.get("available") or {}
    pairs = [f"{name} {value} wanted, {there[name]} there" for name, value in wanted.items() if name in there]
    pairs += [f"{name} {value} wanted" for name, value in wanted.items() if name not in there]
    return f" ({'; '.join(pairs)})" if pairs else ""


def _hint(body: Mapping[str, Any]) -> str:
    return f": {body['hint']}" if body.get("hint") else ""


def _because(row: Row, body: Mapping[str, Any]) -> str:
    return f"{row['cause'] or 'no cause given'}{_reason(body)}"


def _reason(body: Mapping[str, Any]) -> str:
    return f" ({body['reason']})" if body.get("reason") else ""


def _refusal(body: Mapping[str, Any]) -> str:
    where = f" at {body['field']}" if body.get("field") else ""
    wanted = f": expected {body['expected']}, found {body.get('found')}" if body.get("expected") else ""
    return where + wanted


def _end(row: Row, body: Mapping[str, Any]) -> str:
    said = [str(row["cause"])]
    if body.get("exit_code") is not None:
        said.append(f"exit code {body['exit_code']}")
    if body.get("signal") is not None:
        said.append(f"signal {body['signal']}")
    if body.get("peak_memory_mib") is not None:
        said.append(f"at most {body['peak_memory_mib']} MiB used")
    if body.get("detail"):
        said.append(str(body["detail"]))
    return ", ".join(said)


def _ms(value: object) -> str:
    return duration_text(value / 1000) if isinstance(value, int) else "?"
