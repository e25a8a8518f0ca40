"""Which requests the demo's publisher sends, and when: a day of a training cluster and an hour of LLM traffic, scaled.

Pure, and of the standard library alone: the publisher stands for somebody else's system, which knows no code of ours.

What the traces say is kept: order and rhythm of submissions, GPUs, tenants, who is long and who is short, token rates.
What is changed, all of it told by ``Plan.notes``: a day becomes ``window_s`` seconds and run times shrink by the same
factor, bounded below and above; every k-th job is taken, so that the GPU time asked for is ``load_pct`` of the pool's;
jobs of more than eight GPUs become gangs of one node each. Shares and memory, of which the traces say nothing, are
drawn from each job's id.
"""

import csv
import hashlib
import importlib.resources
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

DAY_S: Final = 86_400
SECONDS_MIN: Final = 0.3
SECONDS_MAX: Final = 10.0
"""Longer ones would outlast the demo: the trace's longest job takes a fortnight."""
DEVICES_OF_A_NODE: Final = 8
TOKENS_OF_A_REPLICA: Final = 2_500
"""Tokens a second that one inference replica is taken to serve."""
REPLICA_MILLI: Final = 200
REPLICA_MEMORY_MIB: Final = 18_432
SERVING_TENANT: Final = "chat"
TRAINING_QUEUE: Final = "training"
SERVING_QUEUE: Final = "serving"
LAB_QUEUE: Final = "lab"
LAB_TENANT: Final = "lab"
LAB_LIMIT_MILLI: Final = 4_000
SHARES_MILLI: Final = (250, 400, 500, 1000)
MEMORY_MIB_MIN: Final = 8_192
MEMORY_MIB_STEP: Final = 4_096
MEMORY_STEPS: Final = 15
"""8 to 64 GiB in steps of 4."""


@dataclass(frozen=True, kw_only=True)
class TraceJob:
    """One line of the training trace."""

    job_id: str
    submit_s: int
    duration_s: int
    gpus: int
    tenant: str


@dataclass(frozen=True, kw_only=True)
class Minute:
    """One line of the inference trace."""

    minute: int
    requests: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One request: when it is published, by whom, and its body. ``raw`` stands for the body where that is no JSON."""

    at_s: float
    tenant: str
    event_id: str
    body: dict[str, Any]
    raw: bytes | None = None
    gpu_s: float = 0.0
    """GPU-seconds that it asks for."""
    is_bad: bool = False
    """True for those that are sent to be refused."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is sent, in order of time, and what was done to the traces."""

    submissions: tuple[Submission, ...]
    notes: tuple[str, ...]


def training_jobs() -> list[TraceJob]:
    """The shipped day of Philly, in order of submission."""
    return [
        TraceJob(
            job_id=row["job_id"],
            submit_s=int(row["submit_s"]),
            duration_s=int(row["duration_s"]),
            gpus=int(row["gpus"]),
            tenant=f"vc-{row['tenant']}",
        )
        for row in _rows("philly-2017-10-25.csv")
    ]


def inference_minutes() -> list[Minute]:
    """The shipped hour of Azure's LLM conversations."""
    return [
        Minute(
            minute=int(row["minute"]),
            requests=int(row["requests"]),
            tokens=int(row["prompt_tokens"]) + int(row["output_tokens"]),
        )
        for row in _rows("azure-llm-2023-minutes.csv")
    ]


def training_tenants() -> list[str]:
    """Every virtual cluster of the trace, as tenants."""
    return sorted({job.tenant for job in training_jobs()})


def plan(
    *, seed: int, devices: int, window_s: float, program: Sequence[str], load_pct: int = 90, jobs_max: int = 300
) -> Plan:
    """What to send to a pool of ``devices`` within ``window_s``. ``program`` is the simulated GPU workload's argv."""
    serving = [_service(minute, window_s, program) for minute in inference_minutes()]
    budget = load_pct / 100 * devices * window_s - sum(each.gpu_s for each in serving)
    trace = training_jobs()
    everything = [_training(job, window_s, program) for job in trace]
    least = max(100, -(-100 * len(trace) // jobs_max))
    choices = [(hundredths, _every(len(trace), hundredths, seed)) for hundredths in range(least, 4 * least)]
    # Run times are heavy-tailed, so what a choice asks for jumps about: the fullest that fits is taken. Where none fits
    # (a small pool), the least demanding is, and the pool is busy for longer.
    demands = [sum(everything[index].gpu_s for index in taken) for _, taken in choices]
    fitting = [number for number, demand in enumerate(demands) if demand <= budget]
    best = max(fitting, key=demands.__getitem__) if fitting else min(range(len(demands)), key=demands.__getitem__)
    hundredths, taken = choices[best]
    chosen = [everything[index] for index in taken]
    bad = list(_bad(seed, window_s, program))
    ordered = sorted([*serving, *chosen, *bad], key=lambda each: (each.at_s, each.tenant, each.event_id))
    capped = sum(trace[index].duration_s * window_s / DAY_S > SECONDS_MAX for index in taken)
    asked = sum(each.gpu_s for each in ordered)
    return Plan(
        submissions=tuple(ordered),
        notes=(
            f"training: {len(chosen)} of {len(trace)} jobs of Microsoft Philly, 2017-10-25 (1 in {hundredths / 100:g})",
            f"inference: {len(serving)} minutes of Azure LLM conversations, 2023-11-16, one service a minute",
            f"time: a day in {window_s:g} s, run times {SECONDS_MIN:g} to {SECONDS_MAX:g} s ({capped} cut to that)",
            f"load: {asked:.0f} GPU-s, {100 * asked / (devices * window_s):.0f} % of {devices} GPUs for {window_s:g} s",
            "shares and memory are drawn from job ids: the traces don't tell them",
            f"{len(bad)} requests are wrong on purpose",
        ),
    )


def _every(count: int, hundredths: int, seed: int) -> list[int]:
    """Indexes below ``count``, evenly ``hundredths`` / 100 apart; the seed says where the first one lies.

    >>> _every(10, 250, 0)
    [1, 3, 6, 8]
    """
    first = _draw(f"first-{seed}") % hundredths
    return [position // 100 for position in range(first, 100 * count, hundredths)]


def _training(job: TraceJob, window_s: float, program: Sequence[str]) -> Submission:
    seconds = min(max(job.duration_s * window_s / DAY_S, SECONDS_MIN), SECONDS_MAX)
    draw = _draw(job.job_id)
    memory_mib = MEMORY_MIB_MIN + MEMORY_MIB_STEP * (draw % MEMORY_STEPS)
    replicas = -(-job.gpus // DEVICES_OF_A_NODE)
    gpus = -(-job.gpus // replicas)
    milli = SHARES_MILLI[draw // MEMORY_STEPS % len(SHARES_MILLI)] if job.gpus == 1 else 1000
    resources: dict[str, Any] = {"gpu": gpus} if milli == 1000 else {"gpu_milli": milli, "gpu_memory_mib": memory_mib}
    body: dict[str, Any] = {
        "job_id": job.job_id,
        "queue": TRAINING_QUEUE,
        "workload": {
            "kind": "training",
            "command": [*program, "train", "--seconds", f"{seconds:.2f}", "--memory-mib", str(memory_mib)],
        },
        "resources": resources,
        "labels": {"trace": "philly", "gpus": str(job.gpus)},
    }
    if replicas > 1:
        body["gang"] = {"size": replicas}
    return Submission(
        at_s=job.submit_s * window_s / DAY_S,
        tenant=job.tenant,
        event_id=f"philly-{job.job_id}",
        body=body,
        gpu_s=seconds * replicas * gpus * milli / 1000,
    )


def _service(minute: Minute, window_s: float, program: Sequence[str]) -> Submission:
    """The replicas that a minute's tokens need, for the minute and half of one more, to hand over."""
    minute_s = window_s / 60
    seconds = max(1.5 * minute_s, SECONDS_MIN)
    replicas = max(1, -(-minute.tokens // (60 * TOKENS_OF_A_REPLICA)))
    return Submission(
        at_s=minute.minute * minute_s,
        tenant=SERVING_TENANT,
        event_id=f"azure-{minute.minute:02d}",
        body={
            "job_id": f"chat-{minute.minute:02d}",
            "queue": SERVING_QUEUE,
            "workload": {
                "kind": "inference",
                "command": [
                    *program, "serve", "--seconds", f"{seconds:.2f}",
                    "--memory-mib", str(REPLICA_MEMORY_MIB), "--interval-ms", "200",
                ],
            },
            "resources": {"gpu_milli": REPLICA_MILLI, "gpu_memory_mib": REPLICA_MEMORY_MIB},
            "gang": {"size": replicas},
            "labels": {"trace": "azure-llm", "requests": str(minute.requests)},
        },
        gpu_s=seconds * replicas * REPLICA_MILLI / 1000,
    )  # fmt: skip


def _bad(seed: int, window_s: float, program: Sequence[str]) -> Iterator[Submission]:
    """Requests as real systems send them now and then: each is refused with the field and what was expected."""
    command = [*program, "train", "--seconds", "1"]
    good: dict[str, Any] = {
        "queue": TRAINING_QUEUE,
        "workload": {"command": command, "kind": "training"},
        "resources": {"gpu": 1},
    }
    tenant = training_tenants()[0]
    wrong: list[tuple[str, str, dict[str, Any], bytes | None]] = [
        ("not-json", tenant, {}, b'{"queue": "training", "workload": '),
        ("unknown-field", tenant, {**good, "gpus": 2}, None),
        ("negative-gpu", tenant, {**good, "resources": {"gpu": -1}}, None),
        ("gpu-as-text", tenant, {**good, "resources": {"gpu": "two"}}, None),
        ("no-command", tenant, {**good, "workload": {"kind": "training"}}, None),
        ("unknown-queue", tenant, {**good, "queue": "trainig"}, None),
        ("unknown-tenant", "nobody", good, None),
        ("over-quota", LAB_TENANT, {**good, "queue": LAB_QUEUE, "resources": {"gpu": 8}}, None),
        ("too-large", tenant, {**good, "annotations": {"notes": "x" * 200_000}}, None),
    ]
    for number, (name, who, body, raw) in enumerate(wrong, start=1):
        with_id = body if raw is not None else {"job_id": f"bad-{name}", **body}
        yield Submission(
            at_s=number * window_s / (len(wrong) + 1),
            tenant=who,
            event_id=f"bad-{name}-{seed}",
            body=with_id,
            raw=raw,
            is_bad=True,
        )


def _draw(text: str) -> int:
    """A number that the text alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _rows(name: str) -> list[dict[str, str]]:
    text = (importlib.resources.files("apportion.cli") / "workloads" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))
