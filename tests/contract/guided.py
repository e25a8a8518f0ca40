"""Coverage-guided mutations of the corpus by atheris: ``make fuzz [RUNS=1000000]``, in an environment of its own.

An input is one byte that chooses subject and headers from the corpus, and the body. libFuzzer changes both, and keeps
what reaches new code. Whatever it makes must be read without an exception and answered exactly once.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["apportion.contracts", "apportion.admission"]):
    from tests.contract.fuzz import POOL_AGE, check_texts
    from tests.contract.judge import Bench, groups

BODY_BYTES_MAX = 4096
"""Longer bodies teach nothing that shorter ones don't, save that they are too long, which the corpus has."""

_envelopes: list[tuple[str, dict[str, str]]] = []


class Target:
    """One input after the other, in a pool that starts anew now and then."""

    def __init__(self) -> None:
        self._bench = Bench()
        self._read = 0

    def __call__(self, data: bytes) -> None:
        """Judge one input; raises where a rule is broken, which atheris reports with the input."""
        if not data:
            return
        subject, headers = _envelopes[data[0] % len(_envelopes)]
        # Ids that repeat are repeats: what is looked for here is what the body does.
        headers = {**headers, **({"ce-id": f"guided-{self._read}"} if "ce-id" in headers else {})}
        entry = self._bench.read(subject, headers, data[1:])
        check_texts(entry)
        facts = self._bench.answer_all([entry]).get(entry.seq, [])
        assert len(facts) == 1, f"{len(facts)} answers to {subject} {headers} {data[1:]!r}"
        self._read += 1
        if self._read % POOL_AGE == 0:
            self._bench = Bench()


def main() -> None:
    """Write the corpus as libFuzzer wants it, and run."""
    folder = Path(tempfile.mkdtemp(prefix="apportion-fuzz-"))
    for number, case in enumerate(case for group in groups() for case in group.cases):
        envelope = (case.subject, case.headers)
        if envelope not in _envelopes and len(_envelopes) < 256:
            _envelopes.append(envelope)
        body = case.bytes()
        if envelope in _envelopes and len(body) <= BODY_BYTES_MAX:
            (folder / f"{number:04}").write_bytes(bytes([_envelopes.index(envelope)]) + body)
    print(f"{len(list(folder.iterdir()))} seeds, {len(_envelopes)} envelopes", flush=True)
    atheris.Setup([sys.argv[0], f"-max_len={BODY_BYTES_MAX}", *sys.argv[1:], str(folder)], Target())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
