"""The long run: ``python -m tests.contract.fuzz --mutations 1000000 [--seed 1]``.

Each message is a small change to one of the corpus. It must be read without an exception, be answered exactly once by
admission or monitor, and the answer must be storable. What the decoder accepts the published schema must accept too,
and a share of what it refuses is held against the schema as well.
"""

import argparse
import sys
import time
from collections import Counter

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.envelope import Entry, Undecodable
from tests.contract.judge import Bench, verdict_of
from tests.contract.mutations import Mutator, decoder_takes, schema_takes

BATCH = 100
"""Messages folded before the cores answer them, all at once, as they do on a busy bus."""
POOL_AGE = 2000
"""Messages until the pool starts anew: the cores keep every identity for ever."""
REFUSALS_CHECKED = 20
"""Of the bodies that are refused, one in this many is held against the schema."""

NAMES = {kind.__name__: ev.type_name(kind) for kind in ev.WISHES}


def check_schema(entry: Entry, body: bytes, *, thorough: bool) -> bool:
    """Hold the decoder's verdict on the body against the schema's; True where it was done."""
    name = NAMES.get(entry.subject_type)
    if name is None or len(body) > codec.EVENT_BYTES_MAX:
        return False
    taken = decoder_takes(name, body)
    if not taken and not thorough:
        return False
    assert schema_takes(name, body) == taken, f"decoder says {taken}, and the schema says otherwise"
    return True


def check_texts(entry: Entry) -> None:
    """Whatever a stranger wrote is fit to be stored and printed."""
    texts = [entry.event_id, entry.source, entry.actor, entry.subject_type, str(entry.tenant), entry.traceparent]
    if isinstance(entry.event, Undecodable):
        event = entry.event
        for text in (event.field, event.found, event.expected):
            assert text.isprintable(), f"it would not print: {text!a}"
            assert len(text) <= 4096, f"{len(text)} characters"
        texts += [event.field, event.found, event.expected, event.type]
    for text in texts:
        text.encode("utf-8")


def run(mutations: int, seed: int) -> Counter[str]:
    """Judge this many messages; raises at the first that breaks a rule, with the message beside it."""
    mutator = Mutator(seed)
    counts: Counter[str] = Counter()
    bench = Bench()
    done = 0
    while done < mutations:
        batch: list[tuple[Entry, tuple[str, dict[str, str], bytes]]] = []
        for _ in range(min(BATCH, mutations - done)):
            message = mutator.message()
            try:
                entry = bench.read(*message)
                check_texts(entry)
                thorough = (done + len(batch)) % REFUSALS_CHECKED == 0
                counts["held against the schema"] += check_schema(entry, message[2], thorough=thorough)
            except Exception as err:
                raise AssertionError(f"message {done + len(batch)} of seed {seed}: {message!r}") from err
            batch.append((entry, message))
        try:
            answers = bench.answer_all([entry for entry, _ in batch])
        except Exception as err:
            raise AssertionError(f"messages {done} to {done + len(batch)} of seed {seed}") from err
        for entry, message in batch:
            facts = answers.get(entry.seq, [])
            assert len(facts) == 1, f"{len(facts)} answers to {message!r}"
            verdict = verdict_of(facts[0])
            counts[verdict.verdict] += 1
            if verdict.code is not None:
                counts[f"rejected: {verdict.code}"] += 1
        done += len(batch)
        if done % POOL_AGE == 0:
            bench = Bench()
    return counts


def main() -> int:
    """Run, and print what was answered how often."""
    parser = argparse.ArgumentParser(prog="python -m tests.contract.fuzz", description=__doc__)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{options.mutations} mutations of seed {options.seed}", flush=True)
    began = time.perf_counter()
    counts = run(options.mutations, options.seed)
    for name, count in sorted(counts.items()):
        print(f"{count:>9}  {name}")
    print(f"0 exceptions, 0 verdicts that differ, in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
