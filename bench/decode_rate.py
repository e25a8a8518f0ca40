"""How many wishes a second one core reads and validates: from bytes, headers and subject to a spec that can be placed.

Counts CPU seconds of this process, so that other work on the machine changes little; still, other work takes caches
and clock, and the best of several rounds is what is printed. Prints one JSON object.
``python bench/decode_rate.py [--requests N] [--rounds N]``.
"""

import argparse
import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from apportion.admission import validate
from apportion.contracts import codec, subjects
from apportion.contracts import events as ev
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


def rate(rounds: int, work: Callable[[], int]) -> int:
    """The best round's items a second of this process's CPU time."""
    best = 0.0
    for _ in range(rounds):
        began = time.process_time()
        done = work()
        best = max(best, done / (time.process_time() - began))
    return round(best)


def read(sent: list[Message]) -> int:
    """Bytes to entry: envelope, identity, digest, types, ranges, grammars, repeated names."""
    decode = codec.decode_wish
    for seq, (headers, body) in enumerate(sent, 1):
        decode(SUBJECT, headers, body, seq=seq, recorded_at=NOON)
    return len(sent)


def read_and_validate(sent: list[Message]) -> int:
    """And on to a spec with every default filled in, or to the reason why there is none."""
    decode, job_spec = codec.decode_wish, validate.job_spec
    for seq, (headers, body) in enumerate(sent, 1):
        event = decode(SUBJECT, headers, body, seq=seq, recorded_at=NOON).event
        if isinstance(event, ev.JobRequested):
            job_spec(event, NOON)
    return len(sent)


def bodies_only(sent: list[Message]) -> int:
    """Typed decoding of the body alone."""
    decode = codec.decode_body
    for _, body in sent:
        decode("JobRequested.v1", body)
    return len(sent)


def bare_msgspec(sent: list[Message]) -> int:
    """The library's own part of it: JSON to plain objects, with no rule checked."""
    decode = msgspec.json.Decoder().decode
    for _, body in sent:
        decode(body)
    return len(sent)


def digests(sent: list[Message]) -> int:
    """The digest alone: what this machine's core does without any code of ours."""
    for _, body in sent:
        hashlib.sha256(body).hexdigest()
    return len(sent)


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
        sent = messages(texts, options.requests if name != "hostile" else options.requests // 10)
        found[name] = {
            "bytes": round(sum(len(body) for _, body in sent) / len(sent)),
            "decode_wish": rate(options.rounds, lambda sent=sent: read(sent)),  # type: ignore[misc]
            "decode_wish_and_job_spec": rate(options.rounds, lambda sent=sent: read_and_validate(sent)),  # type: ignore[misc]
            "body_only": rate(options.rounds, lambda sent=sent: bodies_only(sent)),  # type: ignore[misc]
            "sha256_only": rate(options.rounds, lambda sent=sent: digests(sent)),  # type: ignore[misc]
        }
        if name != "hostile":
            found[name]["msgspec_without_rules"] = rate(options.rounds, lambda sent=sent: bare_msgspec(sent))  # type: ignore[misc]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
