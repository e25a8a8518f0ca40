"""``make bench``: the whole chain, the log and its answers, going back, starting a process, and reading a request.

Of requests the good ones alone, and the good ones among as many hostile ones, and what admission remembers of each.
And how long nobody decides after an author was killed or paused.
"""

import sys

from bench import (
    admission_memory,
    admission_rate,
    chain,
    decode_rate,
    failover,
    freshness,
    history,
    hostile_half,
    ingest,
    sampling,
    sizing,
    spawn_rate,
    start_latency,
)

if __name__ == "__main__":
    for name, measurement in (
        ("chain", chain),
        ("freshness", freshness),
        ("ingest", ingest),
        ("history", history),
        ("spawn_rate", spawn_rate),
        ("start_latency", start_latency),
        ("sampling", sampling),
        ("decode_rate", decode_rate),
        ("hostile_half", hostile_half),
        ("sizing", sizing),
        ("admission_memory", admission_memory),
        ("admission_rate", admission_rate),
        ("failover", failover),
    ):
        sys.stdout.write(f"# bench.{name}: {(measurement.__doc__ or '').splitlines()[0]}\n")
        sys.stdout.flush()
        measurement.main()
