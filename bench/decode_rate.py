"""How many wishes a second one core reads and validates: from bytes, headers and subject to a verdict.

``decode_and_validate`` is the whole of it: envelope, identity, digest, types, ranges, grammars, names that occur twice,
and the rules of what may be asked together. ``and_fill_in`` goes on to what the placer reads, with every default filled
in. ``msgspec_alone`` is the library's JSON to plain objects, no rule checked, and beside it how much longer we take.
``ns_by_stage`` says where a request's time goes: what the library needs to read it typed and to write it anew, the
digest, and our own looks at it; ``between`` is the calls from one to the next.

Counts CPU seconds of this process, so that other work on the machine changes little; still, other work takes caches
and clock: each figure is the best of its rounds, and the rounds of all figures take turns. Prints one JSON object.
``python -m bench.decode_rate [--requests N] [--rounds N]``.
"""

import argparse
import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from apportion.admission import validate
from apportion.contracts import cloudevents, codec, diagnosis, subjects
from apportion.contracts import events as ev
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import PoolId, TenantId
from apportion.contracts.testing import NOON

SUBJECT = subjects.wish(PoolId("main"), TenantId("acme"), ev.JobRequested)
TYPE = "io.apportion.JobRequested.v1"

SMALL = '{"queue":"main","workload":{"command":["/bin/true"]},"resources":{"gpu_milli":250,"gpu_memory_mib":4096}}'
ORDINARY = (
    '{"queue":"main","job_id":"train-%d","workload":{"kind":"training","command":["/usr/bin/python3","train.py","--epochs",'
    '"3"],"env":{"LEVEL":"debug"}},"resources":{"gpu_milli":250,"gpu_memory_mib":4096,"mode":"mps"},"priority":600,'
    '"labels":{"team":"vision"},"retry":{"limit":2}}'
)
ESCAPED = '{"queue":"main","workload":{"command":["/bin/sh","-c","echo \\"%d\\" && true"]},"resources":{"gpu":1}}'
HOSTILE = (
    '{"queue":"main","workload":{"command":["a"]},"gpus":%d}',
    '{"queue":"main","workload":{"command":["a"]},"priority":-%d1}',
    '{"queue":"main","workload":{"command":["a"],"env":{"A B":"%d"}}}',
    '{"queue":"main","queue":"main","workload":{"command":["%d"]}}',
    '{"queue":"main","workload":{"command":["%d"]',
    "[" * 2000 + "%d",
)

ENTRY_FIELDS = (
    "stream", "seq", "recorded_at", "event", "event_id", "tenant", "source", "digest", "expires_at", "actor",
    "subject_type", "traceparent", "ingress",
)  # fmt: skip
"""What the codec says of a wish."""

Message = tuple[dict[str, str], bytes]


def messages(texts: Sequence[str], count: int) -> list[Message]:
    """Binary-mode messages, each with an id and a body of its own."""
    return [
        (
            {
                "Nats-Msg-Id": f"acme /acme/ci e-{index}",
                "ce-specversion": "1.0",
                "ce-id": f"e-{index}",
                "ce-source": "/acme/ci",
                "ce-type": TYPE,
            },
            (text % index if "%d" in (text := texts[index % len(texts)]) else text).encode(),
        )
        for index in range(count)
    ]


def seconds_each(work: Mapping[str, tuple[Callable[[Any], object], Sequence[Any]]], rounds: int) -> dict[str, float]:
    """The best round's CPU seconds for each item of each kind of work."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(rounds):
        for name, (do, items) in work.items():
            began = time.process_time()
            for item in items:
                do(item)
            best[name] = min(best[name], (time.process_time() - began) / len(items))
    return best


def read(message: Message) -> Entry:
    """Bytes to entry."""
    headers, body = message
    return codec.decode_wish(SUBJECT, headers, body, seq=1, recorded_at=NOON)


def read_and_validate(message: Message) -> object:
    """And on to a verdict."""
    headers, body = message
    event = codec.decode_wish(SUBJECT, headers, body, seq=1, recorded_at=NOON).event
    return validate.refusal(event, NOON) if isinstance(event, ev.JobRequested) else event


def read_and_fill_in(message: Message) -> object:
    """And on to a spec with every default filled in, or to the reason why there is none."""
    headers, body = message
    event = codec.decode_wish(SUBJECT, headers, body, seq=1, recorded_at=NOON).event
    return validate.job_spec(event, NOON) if isinstance(event, ev.JobRequested) else event


def measured(sent: Sequence[Message], rounds: int, *, is_good: bool) -> dict[str, Any]:
    """The rates of one kind of request, and the stages of one that is good."""
    bodies = [body for _, body in sent]
    work: dict[str, tuple[Callable[[Any], object], Sequence[Any]]] = {
        "nothing": (lambda _: None, bodies),
        "decode": (read, sent),
        "decode_and_validate": (read_and_validate, sent),
        "and_fill_in": (read_and_fill_in, sent),
    }
    if is_good:
        entry = read(sent[-1])
        event, body = entry.event, sent[-1][1]
        assert isinstance(event, ev.JobRequested), event
        values = {name: getattr(entry, name) for name in ENTRY_FIELDS}
        work |= {
            "msgspec_alone": (msgspec.json.Decoder().decode, bodies),
            "read typed": (msgspec.json.Decoder(ev.JobRequested).decode, bodies),
            "write anew": (lambda _: codec.encode_body(event), bodies),
            "digest": (lambda each: hashlib.sha256(each).hexdigest(), bodies),
            "entry": (lambda _: Entry(**values), bodies),
            "headers": (lambda message: cloudevents.opened(*message), sent),
            "names and texts": (lambda _: diagnosis.fault_of_event(body, event), bodies),
            "rules": (lambda _: validate.refusal(event, NOON), bodies),
        }
    spent = seconds_each(work, rounds)
    nothing = spent.pop("nothing")
    found: dict[str, Any] = {"bytes": round(sum(map(len, bodies)) / len(bodies))}
    for name in ("decode", "decode_and_validate", "and_fill_in"):
        found[name] = round(1 / spent.pop(name))
    if is_good:
        found["msgspec_alone"] = round(1 / spent.pop("msgspec_alone"))
        found["times_msgspec_alone"] = round(found["msgspec_alone"] / found["decode_and_validate"], 2)
        stages = {name: round((each - nothing) * 1e9) for name, each in spent.items()}
        stages["names and texts"] -= stages["write anew"]  # which is a part of it
        stages["between"] = round(1e9 / found["decode_and_validate"]) - sum(stages.values())
        found["ns_by_stage"] = stages
        floor_ns = sum(stages[name] for name in ("read typed", "write anew", "digest", "entry"))
        found["with_no_look_of_ours"] = round(1e9 / floor_ns)
    return found


def main() -> None:
    """Measure each kind of request, and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "unit": "requests per second of CPU time, one core, best round",
    }
    for name, texts in (("small", (SMALL,)), ("ordinary", (ORDINARY,)), ("escaped", (ESCAPED,)), ("hostile", HOSTILE)):
        is_good = name != "hostile"
        sent = messages(texts, options.requests if is_good else options.requests // 10)
        found[name] = measured(sent, options.rounds, is_good=is_good)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
