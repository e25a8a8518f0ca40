"""Commands about jobs and nodes: ask for a job, list them, and hear why they are as they are."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import (
    ago,
    output_option,
    print_object,
    print_rows,
    printable,
    say,
    table,
)

if TYPE_CHECKING:
    from apportion.cli.places import Place
    from apportion.client import Answer
    from apportion.client.aio import Wait
    from apportion.contracts.events import JobAdmitted

TIMELINE_MAX: Final = 2_000
"""Facts of one job that `show` prints at most."""
_WAITS: Final = ("stored", "admitted", "started", "finished")


# Wishes -------------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--tenant", metavar="NAME", help="On whose behalf. Default: the setting `tenant`, else 'default'.")
@click.option("--wait", type=click.Choice(_WAITS), default="admitted", show_default=True, help="How far to wait.")
@click.option(
    "--timeout", type=float, default=60.0, show_default=True, metavar="S", help="How long to wait, in seconds."
)
@click.option("--dry-run", is_flag=True, help="Ask what would be answered, and do nothing.")
@click.option("--id", "event_id", metavar="ID", help="The request's id: the same id again is the same request.")
@click.option("--raw", is_flag=True, help="Send the bytes as they are; admission judges them.")
@click.option("--job-exit-code", is_flag=True, help="With --wait finished: end with the job's own exit code.")
@output_option
@pool_options
def submit(
    *,
    file: str,
    tenant: str | None,
    wait: str,
    timeout: float,
    dry_run: bool,
    event_id: str | None,
    raw: bool,
    job_exit_code: bool,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> int:
    """Ask for a job: FILE is one request in JSON or TOML, - reads standard input.

    Ends with 6 where it is refused, 3 where it is not as far as --wait within --timeout, 4 where the job fails.
    """
    place = place_of(data_dir, pool, bus_url)
    data = sys.stdin.buffer.read() if file == "-" else read_file(file)
    body = data if raw else request_body(data, name=file, dry_run=dry_run)
    answer = run(
        submitted(
            place,
            body=body,
            tenant=tenant or place.settings.tenant,
            event_id=event_id,
            wait=cast("Wait", wait),
            timeout_s=timeout,
        )
    )
    _print_answer(answer, output)
    if answer["outcome"] == "refused":
        return Exit.REFUSED
    if answer["outcome"] == "dry run":
        return Exit.OK
    if (
        wait not in {"stored", "admitted"}
        and answer["reached"] != wait
        and answer["outcome"] not in {"succeeded", "failed"}
    ):
        say(
            f"apportion: {answer['job_id']} is {answer['outcome']}, not {wait}, after {timeout:g} s;"
            " `apportion why` says why"
        )
        return Exit.NOT_PLACED
    if answer["outcome"] == "failed":
        own = answer.get("exit_code")
        return int(own) if job_exit_code and own else Exit.JOB_FAILED
    return Exit.OK


def request_body(data: bytes, *, name: str, dry_run: bool) -> bytes:
    """The request as JSON bytes. What was JSON stays byte for byte as it came, unless ``dry_run`` is put in."""
    import tomllib

    try:
        content = json.loads(data)
    except ValueError as not_json:
        try:
            content = tomllib.loads(data.decode())
        except ValueError as not_toml:
            is_json = name.endswith(".json") or (not name.endswith(".toml") and data.lstrip().startswith(b"{"))
            meant, why = ("JSON", not_json) if is_json else ("TOML", not_toml)
            raise CommandFailed(
                f"{name}: expected one job request, found no {meant}: {why}",
                code=Exit.USAGE,
                hint="A request is one object in JSON or TOML; --raw sends the bytes as they are.",
            ) from not_toml
        data = json.dumps(content).encode()
    if not isinstance(content, dict):
        raise CommandFailed(f"{name}: expected one object, found {type(content).__name__}", code=Exit.USAGE)
    return json.dumps({**content, "dry_run": True}).encode() if dry_run else data


def read_file(file: str) -> bytes:
    """What the file holds. Raises CommandFailed."""
    try:
        with open(file, "rb") as opened:  # noqa: PTH123  pathlib is a tenth of the time of --help
            return opened.read()
    except OSError as err:
        raise CommandFailed(f"{file}: expected a readable file, found: {err.strerror}", code=Exit.USAGE) from err


async def submitted(
    place: "Place", *, body: bytes, tenant: str, event_id: str | None, wait: "Wait", timeout_s: float
) -> dict[str, Any]:
    """What was answered to a request, as far as was waited for. Raises CommandFailed where nobody answers."""
    from apportion.cli.client import CONNECT_S, SOURCE, actor
    from apportion.client import Client, ClientError, NotLetIn, RequestInvalid, Unanswered
    from apportion.client import NotStored as BusRefused

    try:
        async with await Client.connect(
            place.bus_url,
            tenant=tenant,
            pool=place.pool,
            source=SOURCE,
            actor=actor(),
            timeout_s=CONNECT_S,
            key_file=place.key_file,
        ) as client:
            began = time.perf_counter()
            answer = await client.submit(body, id=event_id, wait=wait, timeout_s=timeout_s)
            took_ms = round((time.perf_counter() - began) * 1000, 1)
    except ClientError as err:
        code = (
            Exit.USAGE
            if isinstance(err, RequestInvalid)
            else Exit.REFUSED
            if isinstance(err, BusRefused)
            else Exit.NOT_PERMITTED
            if isinstance(err, NotLetIn)
            else Exit.BUS_UNREACHABLE
        )
        raise CommandFailed(f"expected {err.expected}, found {err.found}", code=code, hint=err.next_step) from err
    if isinstance(answer, Unanswered):
        raise CommandFailed(
            f"request {answer.id} is stored (wish {answer.wish_seq}), and nobody answered in {timeout_s:g} s",
            code=Exit.NOT_PLACED,
            hint="It will be answered once admission runs: `apportion doctor`.",
        )
    said = {"wish_seq": None, "outcome": "", "reached": "", "job_id": None, **answer_fields(answer)}
    return said if wait not in {"admitted", "stored"} else {**said, "answered_ms": took_ms}


def answer_fields(answer: "Answer") -> dict[str, Any]:
    """What the command prints of an answer, by name."""
    import msgspec

    from apportion.client import Admitted, Duplicate, Finished, Judged, Rejected, Started, Stored
    from apportion.contracts import events as ev
    from apportion.contracts.causes import Verdict

    match answer:
        case Stored():
            return {"wish_seq": answer.wish_seq, "outcome": "stored", "reached": "stored", "id": answer.id}
        case Admitted():
            return {
                "wish_seq": answer.wish_seq,
                "outcome": "admitted",
                "reached": "admitted",
                "job_id": answer.job_id,
                "replicas": answer.replicas,
                **_advised(answer.fact),
            }
        case Duplicate():
            return {
                "wish_seq": answer.wish_seq,
                "outcome": "duplicate",
                "reached": "admitted",
                "job_id": answer.job_id,
                "first_wish": answer.fact.first_wish,
            }
        case Judged(fact=judged) if judged.verdict is Verdict.ACCEPTED:
            return {
                "wish_seq": answer.wish_seq,
                "outcome": "dry run",
                "job_id": judged.job_id,
                "fact": judged.fact,
                "would": list(judged.would),
                "spec": msgspec.to_builtins(judged.spec),
            }
        case Rejected(fact=no) | Judged(fact=no):
            return {
                "wish_seq": answer.wish_seq,
                "outcome": "refused",
                "job_id": getattr(no, "job_id", None),
                "code": str(no.code),
                "field": no.field,
                "expected": no.expected,
                "found": no.found,
                "message": no.message,
                **({"retry_after_s": no.retry_after_s} if isinstance(no, ev.JobRejected) and no.retry_after_s else {}),
            }
        case Started():
            first = {} if answer.first is None else answer_fields(answer.first)
            return {**first, "outcome": "started", "reached": "started", "node": " ".join(answer.nodes)}
        case Finished(fact=end):
            first = {} if answer.first is None else answer_fields(answer.first)
            said = {**first, "reached": "finished", "outcome": "succeeded" if answer.is_success else "failed"}
            if answer.nodes:
                said["node"] = " ".join(answer.nodes)
            match end:
                case ev.JobSucceeded():
                    return {**said, "wait_ms": end.wait_ms, "run_ms": end.run_ms}
                case ev.JobFailed():
                    why = {"cause": str(end.cause), "exit_code": end.exit_code, "signal": end.signal}
                    detail = answer.detail or end.reason
                    return {**said, **why, **({"detail": detail} if detail else {})}
                case _:
                    return {**said, "cause": type(end).__name__}
        case _:
            raise AssertionError(f"an answer without a text: {answer!r}")


def _advised(admitted: "JobAdmitted") -> dict[str, str]:
    advice = admitted.advice
    return {} if advice is None else {"advice": f"{advice.text}; {advice.suggested_mib} MiB would do"}


def _print_answer(answer: dict[str, Any], output: str) -> None:
    if output == "name":
        print(answer["job_id"] or answer.get("id") or "")
        return
    print_object(answer, kind="submission", output=output, text=lambda: answer_text(answer))


def answer_text(answer: dict[str, Any]) -> str:
    """What people read of an answer; ``answer`` as ``answer_fields`` has it."""
    if answer["outcome"] == "refused":
        if answer.get("message"):
            return printable(f"refused: {answer['code']}") + f"\n  {printable(answer['message'])}"
        where = f" at {answer['field']}" if answer.get("field") else ""
        numbers = f": expected {answer['expected']}, found {answer['found']}" if answer.get("expected") else ""
        return printable(f"refused: {answer['code']}{where}{numbers}")
    if answer["outcome"] == "dry run":
        name = f" {answer['job_id']}" if answer["job_id"] else ""
        lines = (f"dry run: would be answered {answer['fact']}{name}", *answer["would"])
        return printable(lines[0]) + "".join(f"\n  {printable(line)}" for line in lines[1:])
    took = f" (answered in {answer['answered_ms']} ms)" if "answered_ms" in answer else ""
    more = "".join(
        f", {name} {answer[name]}"
        for name in ("node", "cause", "detail", "exit_code", "signal", "run_ms")
        if answer.get(name)
    )
    repeat = ""
    if answer.get("first_wish"):
        repeat = f"\n  asked before, as wish {answer['first_wish']}: no second job was made"
    advice = f"\n  {printable(answer['advice'])}" if answer.get("advice") else ""
    return f"{answer['job_id'] or 'request ' + answer['id']} {answer['outcome']}{more}{took}{repeat}{advice}"


# Lists and answers --------------------------------------------------------------------------------------------------

_JOBS: Final = """
SELECT job.job_id, job.tenant, job.queue, job.workload, job.service_class,
    CASE WHEN job.outcome <> 'live' THEN job.outcome WHEN run.states IS NULL OR pending.code IS NOT NULL THEN 'waiting'
         WHEN list_contains(run.states, 'started') THEN 'running' ELSE 'placed' END AS state,
    CASE WHEN job.outcome <> 'live' THEN job.cause ELSE pending.code END AS reason,
    job.replicas, job.devices, job.compute_milli, job.memory_mib, run.nodes, job.attempts,
    epoch_ns(job.requested) AS requested_at, epoch_ns(job.first_started) AS started_at, epoch_ns(job.ended) AS ended_at,
    job.wait_ms, job.run_ms, admitted.advice
FROM v_job AS job
LEFT JOIN (
    SELECT job_id, body ->> '$.advice.text' AS advice FROM v_event WHERE kind = 'JobAdmitted'
) AS admitted USING (job_id)
LEFT JOIN v_pending_now AS pending USING (job_id)
LEFT JOIN (
    SELECT job_id, list(DISTINCT state) FILTER (state IN ('placed', 'started')) AS states,
        string_agg(DISTINCT node_id, ' ') FILTER (state IN ('placed', 'started')) AS nodes
    FROM v_run GROUP BY job_id
) AS run USING (job_id)
"""


@cli.command()
@click.option("--all", "everything", is_flag=True, help="Ended ones too.")
@click.option("--tenant", help="Only this tenant's.")
@click.option(
    "--state", type=click.Choice(("waiting", "placed", "running", "succeeded", "failed", "cancelled", "expired"))
)
@click.option("--limit", type=click.IntRange(1, 50_000), default=200, show_default=True)
@output_option
@pool_options
def jobs(
    *,
    everything: bool,
    tenant: str | None,
    state: str | None,
    limit: int,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> None:
    """The pool's jobs, newest first: what each asked for, where it is, and why it waits."""
    from apportion.cli.question import ask_sql, literal

    place = place_of(data_dir, pool, bus_url)
    where = ["true"]
    if tenant:
        where.append(f"tenant = {literal(tenant)}")
    if state:
        where.append(f"state = {literal(state)}")
    elif not everything:
        where.append("state IN ('waiting', 'placed', 'running')")
    statement = f"SELECT * FROM ({_JOBS}) WHERE {' AND '.join(where)} ORDER BY requested_at DESC, job_id"  # noqa: S608  quoted
    found = run(ask_sql(place, statement, limit=limit))
    rows = [{**row, "age": ago(row["requested_at"]), "ask": _ask_text(row)} for row in found.rows]
    print_rows(
        rows,
        kind="jobs",
        output=output,
        columns=("job_id", "state", "reason", "ask", "nodes", "age"),
        wide=("queue", "service_class", "attempts", "wait_ms", "run_ms", "advice"),
        name="job_id",
        extra={"freshness": found.freshness, "truncated": found.truncated},
    )
    if not rows and output in {"table", "wide"}:
        say(
            "No jobs"
            + ("" if everything else " that live (--all shows ended ones)")
            + ": `apportion submit FILE` asks for one."
        )
    _say_truncated(found.truncated, limit)


def _ask_text(row: dict[str, Any]) -> str:
    share = f"{row['devices']} gpu" if row["compute_milli"] == 1000 else f"{row['compute_milli']}m"
    memory = f" {row['memory_mib']} MiB" if row["memory_mib"] else ""
    replicas = f"{row['replicas']} x " if row["replicas"] > 1 else ""
    return f"{replicas}{share}{memory}" if row["devices"] else f"{replicas}no gpu"


def _say_truncated(truncated: bool, limit: int) -> None:
    if truncated:
        say(f"There are more: these are the first {limit} (--limit).")


@cli.command()
@click.argument("job")
@output_option
@pool_options
def show(job: str, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """Everything about JOB: what was asked, each run, and each fact in order."""
    from apportion.cli.reasons import memory_text

    place = place_of(data_dir, pool, bus_url)
    content = run(story_of(place, job))

    def text() -> str:
        row = content["job"]
        head = (
            f"{row['job_id']}  {row['state']}{' (' + row['reason'] + ')' if row['reason'] else ''}\n"
            f"  queue {row['queue']}, {row['workload']}, {row['service_class']};"
            f" asks {_ask_text(row)}{' of GPU memory' if row['memory_mib'] else ''}; attempts {row['attempts']}\n"
        )
        head += "".join(f"  {line}\n" for line in memory_text(content["memory"]))
        runs = table(
            content["runs"],
            ("run_id", "node_id", "state", "cause", "exit_code", "signal", "compute_milli", "memory_mib"),
        )
        promises = table(content["enforced"], ("run_id", "device_uuid", "what", "asked", "applied", "observed", "by"))
        if content["enforced"]:
            runs = f"{runs}\n\n{promises}"
        facts = table(content["timeline"], ("at", "kind", "run_id", "node_id", "cause", "said_by"))
        return f"{head}\n{runs if content['runs'] else '(no runs yet)'}\n\n{facts}"

    print_object(content, kind="job", output=output, text=text)


def enforced_of(timeline: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each promise of each run that started: what was asked, set and read back, and who holds it."""
    return [
        {"run_id": fact["run_id"], "applied": 0, **one, "device_uuid": one.get("device_uuid") or "host"}
        for fact in timeline
        if fact["kind"] == "RunStarted"
        for one in json.loads(fact["body"]).get("enforced", ())
    ]


async def story_of(place: "Place", name: str) -> dict[str, Any]:
    """A job's row, runs, reason to wait and facts, by SQL. Raises CommandFailed where there is no such job."""
    from apportion.cli.question import ask_sql, job_named, literal

    job = literal(await job_named(place, name))
    # One statement: each question costs a process of its own at the monitor.
    found = await ask_sql(
        place,
        f"""
        SELECT
            (SELECT list(row) FROM ({_JOBS}) AS row WHERE job_id = {job}) AS job,
            (SELECT list(row ORDER BY placed_seq, run_id) FROM v_run AS row WHERE job_id = {job}) AS runs,
            (SELECT list(row) FROM v_pending_now AS row WHERE job_id = {job}) AS pending,
            (SELECT list(row) FROM v_memory AS row WHERE job_id = {job}) AS memory,
            (SELECT list(row ORDER BY ordinal) FROM (
                SELECT ordinal, strftime(recorded, '%H:%M:%S.%g') AS at, recorded, kind, run_id, node_id, cause, actor,
                    said_by, body
                FROM v_job_timeline WHERE job_id = {job} ORDER BY ordinal LIMIT {TIMELINE_MAX}
            ) AS row) AS timeline
        """,  # noqa: S608  quoted
    )
    answer = {name: each or [] for name, each in found.rows[0].items()}
    if not answer["job"]:
        refused = next((fact for fact in answer["timeline"] if fact["kind"] == "JobRejected"), None)
        if refused is not None:
            raise CommandFailed(f"{name} was refused: {refused['cause']}: {refused['body']}", code=Exit.REFUSED)
        raise CommandFailed(f"{name} was never admitted", code=Exit.NOT_FOUND)
    return {
        "job": answer["job"][0],
        "runs": answer["runs"],
        "enforced": enforced_of(answer["timeline"]),
        "pending": answer["pending"][0] if answer["pending"] else None,
        "memory": answer["memory"][0] if answer["memory"] else None,
        "timeline": answer["timeline"],
        "freshness": found.freshness,
    }


@cli.command()
@click.argument("job")
@output_option
@pool_options
def why(job: str, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """Why JOB waits, runs where it runs, or ended as it did."""
    from apportion.cli.reasons import stopped_text, why_text

    place = place_of(data_dir, pool, bus_url)
    content = run(story_of(place, job))
    now = None
    if content["job"]["state"] == "waiting":
        from apportion.cli.plan_commands import why_now

        now = run(why_now(place, content["job"]["job_id"]))
    lines = why_text(content) if now is None else [printable(now["text"])]
    if content["job"]["state"] == "waiting":
        lines += stopped_text(content["timeline"])
    answer = {
        "job": content["job"],
        "pending": content["pending"],
        "now": now,
        "answer": lines,
        "freshness": content["freshness"],
    }
    print_object(answer, kind="why", output=output, text=lambda: "\n".join(lines))


_NODES: Final = """
WITH registered AS (
    SELECT node_id, arg_max(body, ordinal) AS body, max(ordinal) AS ordinal
    FROM v_event WHERE kind = 'NodeRegistered' GROUP BY node_id
), said AS (
    SELECT node_id, arg_max(kind, ordinal) AS kind, max(ordinal) AS ordinal,
        arg_max(body ->> '$.reason', ordinal) AS reason
    FROM v_event WHERE kind IN ('NodeSuspected', 'NodeTrusted', 'NodeLost', 'NodeFenced', 'NodeRecovered')
    GROUP BY node_id
), use AS (
    SELECT node_id, arg_max(kind, ordinal) AS kind, arg_max(body ->> '$.reason', ordinal) AS reason
    FROM v_event WHERE kind IN ('NodeCordoned', 'NodeDraining', 'NodeUncordoned') GROUP BY node_id
), held AS (
    SELECT node_id, count(*) AS runs, sum(compute_milli) AS compute_milli, sum(memory_mib) AS memory_mib
    FROM v_run WHERE state IN ('placed', 'started', 'finished') GROUP BY node_id
)
SELECT registered.node_id,
    CASE WHEN said.kind IN ('NodeLost', 'NodeFenced') THEN 'fenced'
         WHEN said.kind = 'NodeSuspected' AND said.ordinal > registered.ordinal THEN 'suspected'
         WHEN use.kind = 'NodeDraining' THEN 'draining' WHEN use.kind = 'NodeCordoned' THEN 'cordoned'
         ELSE 'ready' END AS state,
    coalesce(CAST(registered.body -> '$.epoch' AS BIGINT), 0) AS epoch,
    json_array_length(registered.body -> '$.devices') AS devices,
    registered.body ->> '$.devices[0].model' AS model,
    coalesce(held.runs, 0) AS runs,
    CAST(coalesce(held.compute_milli, 0) AS BIGINT) AS held_milli,
    json_array_length(registered.body -> '$.devices') * 1000 AS total_milli,
    CAST(coalesce(held.memory_mib, 0) AS BIGINT) AS held_mib,
    CAST(list_sum(CAST(json_extract(registered.body, '$.devices[*].memory_mib') AS BIGINT[])) AS BIGINT)
        AS total_mib,
    coalesce(CAST(registered.body -> '$.simulated' AS BOOLEAN), false) AS simulated,
    registered.body ->> '$.driver_version' AS driver,
    CASE WHEN said.kind IN ('NodeLost', 'NodeFenced') THEN said.reason ELSE use.reason END AS reason
FROM registered LEFT JOIN said USING (node_id) LEFT JOIN use USING (node_id) LEFT JOIN held USING (node_id)
ORDER BY registered.node_id
"""


@cli.command()
@output_option
@pool_options
def nodes(output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """The pool's nodes: what each has, holds, and whether it is used."""
    from apportion.cli.question import ask_sql

    place = place_of(data_dir, pool, bus_url)
    found = run(ask_sql(place, _NODES))
    skews = run(_clock_skews(place)) if output in {"wide", "json", "jsonl"} and place.note is not None else {}
    print_rows(
        [{**row, "clock_skew_ms": skews.get(row["node_id"])} for row in found.rows],
        kind="nodes",
        output=output,
        columns=(
            "node_id",
            "state",
            "devices",
            "model",
            "runs",
            "held_milli",
            "total_milli",
            "held_mib",
            "total_mib",
            "simulated",
        ),
        wide=("epoch", "driver", "clock_skew_ms", "reason"),
        name="node_id",
        extra={"freshness": found.freshness},
    )
    if not found.rows and output in {"table", "wide"}:
        say("No node has registered: `apportion doctor` says why.")


async def _clock_skews(place: "Place") -> dict[str, int | None]:
    """By how many ms each node's clock is ahead of the monitor's: no fact, so only a monitor that hears them knows."""
    from apportion.cli.client import ask, bus_of

    async with bus_of(place) as bus:
        answer = await ask(bus, "nodes", {})
    return {node["node_id"]: node["clock_skew_ms"] for node in answer["nodes"]}


@cli.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("--job", metavar="JOB", help="Only what is said of this job (<tenant>/<name>) and its runs.")
@click.option("--from", "after", type=click.IntRange(0), default=None, metavar="SEQ", help="Facts after this sequence.")
@click.option(
    "-n", "--last", type=click.IntRange(0), default=20, show_default=True, help="Facts from the past to begin with."
)
@output_option
@pool_options
def events(
    *,
    follow: bool,
    job: str | None,
    after: int | None,
    last: int,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> None:
    """Wishes and facts as the bus has them, decoded. Each line: stream and sequence, who, what."""
    if job is not None and "/" not in job:
        raise CommandFailed(f"{job!r} is no full job id: expected <tenant>/<name>", code=Exit.USAGE)
    place = place_of(data_dir, pool, bus_url)
    run(_events(place, follow=follow, job=job, after=after, last=last, output=output))


async def _events(place: "Place", *, follow: bool, job: str | None, after: int | None, last: int, output: str) -> None:
    from apportion.cli.client import bus_of, decoded
    from apportion.cli.reasons import event_json, event_line, is_about
    from apportion.contracts import subjects
    from apportion.contracts.envelope import Stream
    from apportion.contracts.ids import JobId

    async with bus_of(place) as bus:
        facts, wishes = await bus.position(Stream.FACTS), await bus.position(Stream.WISHES)
        begin = after if after is not None else 0 if job else max(0, facts.last_seq - last)
        filters = () if job is None else subjects.facts_of_job(bus.pool, JobId(job))
        readers = [await bus.reader(Stream.FACTS, after=begin, filters=filters)]
        if follow or job is not None:
            readers.append(await bus.reader(Stream.WISHES, after=0 if job is not None else wishes.last_seq))
        import asyncio

        quiet_s = None if follow else 0.5
        while True:
            waits = [asyncio.ensure_future(reader.ready.wait()) for reader in readers]
            done, pending = await asyncio.wait(waits, timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED)
            for each in pending:
                each.cancel()
            if not done:
                return
            raws = sorted(
                (raw for reader in readers for raw in reader.take()), key=lambda raw: (raw.recorded_at, raw.seq)
            )
            for raw in raws:
                entry = decoded(raw)
                if job is not None and not is_about(entry, job):
                    continue
                print(event_json(entry, raw) if output in {"json", "jsonl"} else event_line(entry), flush=follow)
