"""Write docs/events.md, docs/lifecycle.md, the schemas and the AsyncAPI document from the code.

``--check`` says whether they are current instead.
"""

import ast
import sys
from pathlib import Path

from apportion.contracts import events as ev
from apportion.contracts import schema
from apportion.pool.lifecycle import DIAGRAMS, Moves

ROOT = Path(__file__).resolve().parent.parent
READERS = {
    "admission": ["services/admission/src/apportion/admission"],
    "placer": ["services/placer/src/apportion/placer"],
    "node-agent": ["services/node-agent/src/apportion/node_agent"],
    "monitor": ["services/monitor/src/apportion/monitor"],
}
FOLDERS = ("admission", "placer", "monitor")
"""Who folds libs/pool, and so reads whatever it reads."""


def matched(folder: Path) -> set[str]:
    """Names of the event types that the code in ``folder`` matches on."""
    found: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.MatchClass):
                name = node.cls.attr if isinstance(node.cls, ast.Attribute) else getattr(node.cls, "id", "")
                found.add(name)
    return found


def readers() -> dict[str, list[str]]:
    """Event type name to the services that read it, by what their code matches."""
    pool = matched(ROOT / "libs/pool/src/apportion/pool")
    by_event: dict[str, list[str]] = {}
    for service, folders in READERS.items():
        names = set().union(*(matched(ROOT / folder) for folder in folders))
        if service in FOLDERS:
            names |= pool
        for name in names:
            by_event.setdefault(name, []).append(service)
    return {name: sorted(services) for name, services in by_event.items()}


def moves_of(kind: type[ev.Event]) -> str:
    """What the event moves, in words."""
    words = []
    for noun, moves in DIAGRAMS.items():
        steps = [f"{a or '∅'} → {b}" for (a, b), kinds in moves.items() if kind in kinds]
        if steps:
            words.append(f"{noun.lower()}: {', '.join(steps)}")
    return "; ".join(words)


def fields_table(kind: type[ev.Event]) -> list[str]:
    """The fields of an event, one row each."""
    rows = ["| field | type | default |", "|---|---|---|"]
    defaults = kind.__struct_defaults__
    names = kind.__struct_fields__
    required = len(names) - len(defaults)
    for position, name in enumerate(names):
        hint = str(kind.__annotations__.get(name, ev.Fact.__annotations__.get(name, ""))).replace("|", "\\|")
        hint = hint.replace("apportion.contracts.", "").replace("typing.", "")
        hint = hint.removeprefix("<class '").removesuffix("'>")
        if "Annotated" in hint or "Meta(" in hint:
            hint = _short(kind, name)
        default = "required" if position < required else _default(kind, name, defaults[position - required])
        rows.append(f"| `{name}` | `{hint}` | {default} |")
    return rows


def _short(kind: type[ev.Event], name: str) -> str:
    source = ast.parse((ROOT / "libs/contracts/src/apportion/contracts/events.py").read_text())
    for node in ast.walk(source):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and getattr(item.target, "id", "") == name:
                    return ast.unparse(item.annotation).replace("|", "\\|")
    return "str"


def _default(kind: type[ev.Event], name: str, value: object) -> str:
    del kind, name
    text = repr(value)
    if "NODEFAULT" in text:
        return "required"
    if text.startswith("Factory(") or "factory" in text.lower():
        return "empty"
    return f"`{text}`" if len(text) < 40 else "see type"


def events_page() -> str:
    """docs/events.md."""
    read_by = readers()
    lines = [
        "# Events",
        "",
        "Generated from `libs/contracts` and from what the services' code matches on: `make docs`. Don't edit.",
        "",
        "On the wire a message is a CloudEvent in binary mode: attributes are headers (`ce-id`, `ce-source`,",
        "`ce-type: io.apportion.<name>`), the body is the event as JSON. A decision's basis is in `ce-basisfacts`,",
        "`ce-basiswishes`, `ce-decidedat` and `ce-policy`. Wishes are read in structured mode as well, and without an",
        "envelope. Each event's JSON Schema is in `schemas/`, the whole as AsyncAPI in `asyncapi.json`.",
        "",
    ]
    for title, kinds in (("Wishes", ev.WISHES), ("Facts", ev.FACTS)):
        lines += [f"## {title}", "", "| event | written by | read by | moves |", "|---|---|---|---|"]
        for kind in kinds:
            author = (
                "anyone with permission" if issubclass(kind, ev.Wish) else str(getattr(kind, "AUTHOR", "each author"))
            )
            by = ", ".join(read_by.get(kind.__name__, [])) or "the log"
            name = ev.type_name(kind)
            lines.append(f"| [{name}](#{name.lower().replace('.', '')}) | {author} | {by} | {moves_of(kind)} |")
        lines.append("")
    for kind in (*ev.WISHES, *ev.FACTS):
        lines += [f"### {ev.type_name(kind)}", "", (kind.__doc__ or "").strip(), "", *fields_table(kind), ""]
    return "\n".join(lines)


def diagram(moves: Moves) -> list[str]:
    """One Mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for (before, after), kinds in moves.items():
        names = ", ".join(kind.__name__ for kind in kinds)
        lines.append(f"    {before or '[*]'} --> {after}: {names}")
    lines.append("```")
    return lines


def lifecycle_page() -> str:
    """docs/lifecycle.md."""
    lines = [
        "# Life of a job, a run, a node and a device",
        "",
        "Drawn from the tables in `libs/pool/src/apportion/pool/lifecycle.py`: `make docs`. Don't edit.",
        "A job that has ended, and a run that is released or lost, never move again.",
        "",
    ]
    for noun, moves in DIAGRAMS.items():
        lines += [f"## {noun}", "", *diagram(moves), ""]
    return "\n".join(lines)


def main() -> int:
    """Write the pages, or say which are stale."""
    stale = []
    for name, text in (("events.md", events_page()), ("lifecycle.md", lifecycle_page())):
        path = ROOT / "docs" / name
        if "--check" in sys.argv:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
    if "--check" in sys.argv:
        stale += schema.stale(ROOT / "docs")
    else:
        schema.write(ROOT / "docs")
    if stale:
        sys.stderr.write(f"docs/{', docs/'.join(stale)} differ from the code: run `make docs` and commit the result\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
