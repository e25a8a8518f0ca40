"""Every decision of every author made again from the log file alone, as a report for people and programs."""

import json
from pathlib import Path
from typing import Any

import msgspec

from apportion.admission import core as admission
from apportion.contracts.ids import ADMISSION, MONITOR, PLACER
from apportion.monitor import redeciding
from apportion.monitor.replay import replay_verify
from apportion.placer import core as placer
from apportion.placer import plugins


def replay_all(path: Path) -> dict[str, Any]:
    """What a replay of the log at ``path`` found. A decision that could not be made again counts as a difference.

    Raises LogUnavailable.
    """
    plugins.load()
    report = replay_verify(path, {ADMISSION: admission, PLACER: placer, MONITOR: redeciding})
    return {
        "path": str(path),
        "decisions": report.decisions,
        "facts": report.facts,
        "differences": report.differences + sum(report.unchecked.values()),
        "by_author": report.by_author,
        "observed": report.observed,
        "unchecked": report.unchecked,
        "erased": msgspec.to_builtins(report.erased),
        "first": None if report.first is None else msgspec.to_builtins(report.first),
        "entries": report.entries,
    }


def replay_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = [f"{author:<10} {count:>6} decisions" for author, count in report["by_author"].items()]
    lines.append(f"{'agents':<10} {report['observed']:>6} facts, which are what they observed and did")
    lines += [f"{count} decisions NOT CHECKED: {why}" for why, count in report["unchecked"].items()]
    lines += [
        f"{one['author']:<10} the decision stored from fact {one['first_seq']} on RESTS ON AN ERASED PAYLOAD: "
        f"{', '.join(one['rests_on'])}"
        for one in report["erased"]
    ]
    first = report["first"]
    if first is not None:
        lines.append(f"FIRST DIFFERENCE: {first['author']}, the decision stored from fact {first['first_seq']} on")
        lines += _difference_lines(*(_fact(first[side], first["index"]) for side in ("recorded", "recomputed")))
    if report["differences"]:
        lines.append(
            f"{report['differences']} of {report['decisions']} decisions came out OTHERWISE ({report['path']})"
        )
    else:
        lines.append(
            f"same: {report['decisions'] - len(report['erased'])} decisions with {report['facts']} facts, 0 differences"
            f"{_erased_text(report['erased'])} ({report['path']})"
        )
    return lines


def _erased_text(erased: list[Any]) -> str:
    return f", {len(erased)} that rest on erased payloads" if erased else ""


def _fact(texts: list[str], index: int) -> dict[str, Any]:
    """The fact at ``index`` of one side; empty where that side has none."""
    return dict(json.loads(texts[index])) if index < len(texts) else {}


def _difference_lines(recorded: dict[str, Any], recomputed: dict[str, Any]) -> list[str]:
    """What both sides say where they differ, field by field."""
    names = ("type", "run_id", "job_id")
    about = " ".join(str(side[name]) for name in names for side in (recorded or recomputed,) if name in side)
    lines = [f"  {about}"]
    for name in sorted({*recorded, *recomputed}):
        if recorded.get(name) != recomputed.get(name):
            lines += [
                f"  {name}: recorded   {_shown(recorded, name)}",
                f"  {name}: recomputed {_shown(recomputed, name)}",
            ]
    return lines


def _shown(side: dict[str, Any], name: str) -> str:
    return json.dumps(side[name])[:400] if name in side else "(nothing)"
