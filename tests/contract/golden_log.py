"""A whole log of each release, as it was exported: what later versions still have to read, verify and fold.

``python -m tests.contract.golden_log`` writes that of this version where there is none; it never rewrites one. A
version that was never released may still change: then delete its folder first. The history is that of the real cores of
admission and the placer, on the virtual clock of what-if; its head is signed.
"""

import sys
import tempfile
from pathlib import Path

import msgspec

from apportion.cli.whatif import trace as traces
from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.monitor import segments
from apportion.monitor.log import EventLog
from apportion.monitor.signing import Checkpoint, Signer
from apportion.monitor.testing import Recorded

FOLDER = Path(__file__).with_name("golden_logs")
VERSION = "0.1"
SIGNER = Signer(bytes(32))
JOBS = 16
_HEAD = "job_id,submit_s,duration_s,gpus,tenant,gpu_milli,gpu_memory_mib,service_class\n"


def messages() -> list[Recorded]:
    """Jobs of two tenants and three classes on two nodes of two devices, too many at once."""
    jobs = "".join(
        f"j{n},{n * 7 % 60},{20 + n * 13 % 50},{1 + n % 2},{('acme', 'globex')[n % 2]},"
        f"{'' if n % 3 else 400},{'' if n % 3 else 9000},{('batch', 'online', 'spot')[n % 3]}\n"
        for n in range(JOBS)
    )
    with tempfile.TemporaryDirectory(prefix="apportion-golden-") as folder:
        (Path(folder) / "jobs.csv").write_text(_HEAD + jobs)
        (Path(folder) / "fleet.csv").write_text("nodes,devices,model,memory_mib\n2,2,h100-80,80000\n")
        trace = traces.read(Path(folder) / "jobs.csv", Path(folder) / "fleet.csv")
    done = traces.simulated(trace, config={}, until=2**62)
    found = []
    for wish in trace.wishes:
        assert isinstance(wish.event, ev.Wish)
        made = codec.encode_wish(traces.POOL, wish.event, tenant=str(wish.tenant), event_id=wish.event_id, source="/t")
        found.append((wish.recorded_at, 0, Stream.WISHES, wish.seq, made))
    for entry in done.entries:
        assert isinstance(entry.event, ev.Fact)
        assert entry.author is not None
        fact = codec.encode_fact(traces.POOL, entry.author, entry.event, event_id=entry.event_id, basis=entry.basis)
        found.append((entry.recorded_at, 1, Stream.FACTS, entry.seq, fact))
    found.sort(key=lambda one: one[:4])
    return [
        Recorded(stream=stream, seq=seq, recorded_at=at, subject=m.subject, headers=m.headers, body=m.body)
        for at, _, stream, seq, m in found
    ]


def main() -> int:
    """Write this version's log, if it has none."""
    folder = FOLDER / VERSION
    if folder.exists():
        sys.stderr.write(f"{folder} is there: it is never rewritten\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="apportion-golden-") as scratch:
        path = Path(scratch) / "log.duckdb"
        with EventLog.open(path) as log:
            log.append(messages())
            unsigned = Checkpoint(
                pool=traces.POOL, ordinal=log.head.ordinal, hash=log.head.hash.hex(), signed_at=1, public_key="",
                wishes_seq=log.positions[Stream.WISHES].last_seq, facts_seq=log.positions[Stream.FACTS].last_seq,
            )  # fmt: skip
            log.add_checkpoint(log.head.ordinal, msgspec.json.encode(SIGNER.sign(unsigned)).decode())
        rows = segments.export(path, folder).rows
    sys.stdout.write(f"wrote {rows} rows to {folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
