"""Figures of several histories side by side, for people and for programs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from apportion.cli.output import duration_text
from apportion.cli.usage import money
from apportion.cli.whatif.figures import Figures, Spread
from apportion.contracts.codec import encode_body
from apportion.contracts.envelope import Entry, Undecodable


def rows(histories: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """One object a figure, each history's value beside the others'."""
    groups = sorted({group for figures in histories.values() for group in (*figures.waits, *figures.completions)})
    lines: list[tuple[str, list[str]]] = [
        ("jobs asked for", [str(f.requested) for f in histories.values()]),
        ("  started", [str(f.started) for f in histories.values()]),
        ("  succeeded", [str(f.succeeded) for f in histories.values()]),
        ("  ended otherwise", [str(f.ended_otherwise) for f in histories.values()]),
        ("  not ended yet", [str(f.unfinished) for f in histories.values()]),
    ]
    for title, attribute in (("wait", "waits"), ("completion", "completions")):
        for group in sorted(groups, key=lambda name: (name != "all", name)):
            spreads = [getattr(figures, attribute).get(group) for figures in histories.values()]
            lines.append((f"{title} p50/p95, {group}", [_spread(each) for each in spreads]))
    lines += [
        ("promises kept", [_kept(f) for f in histories.values()]),
        ("runs preempted", [str(f.preempted_runs) for f in histories.values()]),
        ("utilisation", [_percent(f.utilisation_ppm) for f in histories.values()]),
        ("fragmentation of the rest", [_percent(f.fragmentation_ppm) for f in histories.values()]),
        ("GPU-hours held", [f"{f.held_milli_ms / 3.6e9:.2f}" for f in histories.values()]),
        ("cost", [money(f.cost_micro) or "-" for f in histories.values()]),
    ]
    return [{"figure": title, **dict(zip(histories, values, strict=True))} for title, values in lines]


def plain(figures: Figures) -> dict[str, Any]:
    """One history for programs: whole numbers."""
    return {
        **msgspec.to_builtins(figures),
        "kept_ppm": figures.kept_ppm,
        "utilisation_ppm": figures.utilisation_ppm,
        "fragmentation_ppm": figures.fragmentation_ppm,
    }


def export(folder: Path, histories: Mapping[str, Sequence[Entry]]) -> None:
    """Each history's facts as JSON, one a line, with when they were stated and by whom."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, entries in histories.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for entry in entries:
                event = entry.event
                said = msgspec.Raw(encode_body(event)) if not isinstance(event, Undecodable) else None
                head = {"seq": entry.seq, "recorded_at": entry.recorded_at, "author": entry.author}
                kind = type(event).__name__
                file.write(msgspec.json.encode({**head, "kind": kind, "body": said}).decode() + "\n")


def _kept(figures: Figures) -> str:
    if figures.kept_ppm is None:
        return "-"
    return f"{_percent(figures.kept_ppm)} ({figures.kept} of {figures.promised})"


def _spread(spread: Spread | None) -> str:
    if spread is None or spread.p50_ms is None or spread.p95_ms is None:
        return "-"
    return f"{duration_text(spread.p50_ms / 1000)} / {duration_text(spread.p95_ms / 1000)} (of {spread.count})"


def _percent(ppm: int) -> str:
    return f"{ppm / 10_000:.1f} %"
