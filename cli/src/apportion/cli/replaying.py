"""Every decision of admission and placer made again from the log file alone, as a report for people and programs."""

from pathlib import Path
from typing import Any

import msgspec

from apportion.admission import core as admission
from apportion.contracts.ids import ADMISSION, PLACER
from apportion.monitor.replay import replay_verify
from apportion.placer import core as placer


def replay_all(path: Path) -> dict[str, Any]:
    """What a replay of the log at ``path`` found. A decision that could not be made again counts as a difference.

    Raises LogUnavailable.
    """
    report = replay_verify(path, {ADMISSION: admission, PLACER: placer})
    return {
        "path": str(path),
        "decisions": report.decisions,
        "facts": report.facts,
        "differences": report.differences + sum(report.unchecked.values()),
        "by_author": report.by_author,
        "unchecked": report.unchecked,
        "first": None if report.first is None else msgspec.to_builtins(report.first),
        "entries": report.entries,
    }


def replay_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = [f"{author:<10} {count:>6} decisions" for author, count in report["by_author"].items()]
    lines += [f"{count} decisions NOT CHECKED: {why}" for why, count in report["unchecked"].items()]
    first = report["first"]
    if first is not None:
        index = first["index"]
        lines.append(f"FIRST DIFFERENCE: {first['author']}, the decision stored from fact {first['first_seq']} on:")
        for side in ("recorded", "recomputed"):
            texts = first[side]
            lines.append(f"  {side:<10} {texts[index][:600] if index < len(texts) else '(nothing more)'}")
    if report["differences"]:
        lines.append(
            f"{report['differences']} of {report['decisions']} decisions came out OTHERWISE ({report['path']})"
        )
    else:
        lines.append(
            f"same: {report['decisions']} decisions with {report['facts']} facts, 0 differences ({report['path']})"
        )
    return lines
