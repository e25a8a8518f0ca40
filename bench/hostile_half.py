"""What good wishes still get when every second wish is hostile: admission's rate on the good half.

From bytes, headers and subject to folded answers: ``decode_wish``, and admission's core, which folds, decides, and
folds what it stated, 300 wishes a round. Without the bus, and so without what it costs to write and read the facts,
which is less for a refusal than for an admission. Hostile wishes are the corpus of ``tests/contract``: every message
that admission has to refuse, in turn.

The figure: good wishes answered a second while half of all wishes are hostile, over half of the good wishes answered a
second while the same number of wishes is all good. 1.0 says that a hostile wish costs what a good one costs; above, it
costs less. A round measures both, one after the other, in CPU seconds of this process; each stretch of 300 wishes
counts with its best round, since other work on the machine takes caches and clock. Prints one JSON object, which has
each round's own figure as well.
``python -m bench.hostile_half [--good N] [--rounds N]``.
"""

import argparse
import gc
import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain, cycle, islice

from apportion.admission import core
from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.ids import ADMISSION, MONITOR
from apportion.contracts.testing import NOON, a_node, a_queue, as_fact
from bench.decode_rate import ORDINARY, SUBJECT, messages
from tests.contract.judge import groups

Message = tuple[str, dict[str, str], bytes]

_MONITORS = frozenset(kind.__name__ for kind in ev.WISHES if kind.ANSWERED_BY == MONITOR)
_IDS = ("e-1", "w-1")
"""The ids of the corpus's messages where the id is not what is wrong with them."""


def good_messages(count: int) -> list[Message]:
    """Requests that are admitted."""
    return [(SUBJECT, headers, body) for headers, body in messages((ORDINARY,), count)]


def hostile_messages(count: int) -> list[Message]:
    """The messages of the corpus that admission refuses, in turn, each with an id of its own where that is sound."""
    mix = [
        (case.subject, case.headers, case.bytes())
        for group in groups()
        for case in group.cases
        if case.expected.verdict == "rejected"
        and not case.before  # alone it would be a good one
        and case.subject.rpartition(".")[2] not in _MONITORS
    ]
    return [
        (subject, {**headers, "ce-id": f"h-{index}"} if headers.get("ce-id") in _IDS else headers, body)
        for index, (subject, headers, body) in enumerate(islice(cycle(mix), count))
    ]


class Measured:
    """One pool's admission, and what it answered."""

    def __init__(self) -> None:
        self.state = core.initial()
        self.answers: Counter[str] = Counter()
        self._facts = 0
        for fact, author in (
            (a_queue(), ADMISSION),
            (a_queue("small", limit_compute_milli=500, limit_memory_mib=8192), ADMISSION),
            (a_queue("theirs", tenants=("beta",)), ADMISSION),
            (a_node(), "agent-node-1"),
        ):
            self._fold(fact, str(author))

    def _fold(self, fact: ev.Fact, author: str) -> None:
        self._facts += 1
        core.evolve(self.state, as_fact(fact, self._facts, author=author))

    def answer(self, sent: Sequence[Message]) -> list[float]:
        """CPU seconds until every wish is answered and the answers are folded, stretch by stretch."""
        decode, evolve, decide, state = codec.decode_wish, core.evolve, core.decide, self.state
        gc.collect()
        seconds: list[float] = []
        for start in range(0, len(sent), 300):
            began = time.process_time()
            for seq, (subject, headers, body) in enumerate(sent[start : start + 300], start + 1):
                evolve(state, decode(subject, headers, body, seq=seq, recorded_at=NOON))
            while facts := decide(state, NOON):
                for fact in facts:
                    self._fold(fact, str(ADMISSION))
                    self.answers[type(fact).__name__] += 1
            seconds.append(time.process_time() - began)
        return seconds


def measured(sent: Sequence[Message], *, admitted: int) -> list[float]:
    """CPU seconds for these wishes, by stretch; they are all answered, and so many are admitted."""
    pool = Measured()
    seconds = pool.answer(sent)
    assert pool.answers["JobAdmitted"] == admitted, pool.answers
    assert pool.answers["JobRejected"] + pool.answers["WishRejected"] == len(sent) - admitted, pool.answers
    return seconds


def main() -> None:
    """Measure round by round, and print the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--good", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    count = options.good
    all_good = good_messages(2 * count)
    mixed = list(chain.from_iterable(zip(all_good[:count], hostile_messages(count), strict=True)))
    measured(mixed, admitted=count)  # what is compiled or cached once is done before the clock runs
    rounds = [(measured(all_good, admitted=2 * count), measured(mixed, admitted=count)) for _ in range(options.rounds)]
    good_s, mixed_s = (sum(map(min, zip(*each, strict=True))) for each in zip(*rounds, strict=True))
    shares = sorted(sum(good) / sum(mixed) for good, mixed in rounds)  # the spread
    print(
        json.dumps(
            {
                "python": platform.python_version(),
                "machine": platform.machine(),
                "good_wishes": count,
                "hostile_wishes": count,
                "good_a_second_all_good": round(2 * count / good_s),
                "good_a_second_half_hostile": round(count / mixed_s),
                "kept_share_of_the_good_half": round(good_s / mixed_s, 3),
                "a_hostile_one_costs_times_a_good_one": round(2 * mixed_s / good_s - 1, 2),
                "by_round": [round(share, 3) for share in shares],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
