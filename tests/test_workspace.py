"""The workspace: every member is installed, siblings are declared, and the verbs set themselves up."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PATHS = sorted(
    [*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml"), ROOT / "cli/pyproject.toml"]
)
MEMBERS: dict[str, dict[str, Any]] = {
    str(path.parent.relative_to(ROOT)): tomllib.loads(path.read_text()) for path in PATHS
}


def test_plain_pip_installs_every_member() -> None:
    """A member that is forgotten here is missing on every machine but the author's."""
    named = re.findall(r"^-e \./(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(MEMBERS)
    assert "-r requirements.txt" in (ROOT / "requirements-dev.txt").read_text().splitlines()


@pytest.mark.parametrize("member", MEMBERS)
def test_siblings_are_declared_for_pip_and_for_uv(member: str) -> None:
    """What is imported is a dependency, and what is a sibling is found in the workspace by uv too."""
    content = MEMBERS[member]
    names = {other["project"]["name"] for other in MEMBERS.values()}
    declared = {re.split(r"[<>=\[ ]", text)[0] for text in content["project"]["dependencies"]} & names
    sources = content.get("tool", {}).get("uv", {}).get("sources", {})
    assert {name for name, source in sources.items() if source == {"workspace": True}} == declared
    imported = set()
    for path in (ROOT / member / "src").rglob("*.py"):
        imported |= set(re.findall(r"^\s*(?:from|import) apportion\.([a-z_]+)", path.read_text(), re.MULTILINE))
    own = content["project"]["name"]
    assert {f"apportion-{name.replace('_', '-')}" for name in imported} - {own} <= declared


def locked(name: str) -> dict[str, str]:
    """Version by package, of a lock in which every package has its hashes."""
    pinned: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / name).read_text()):
        if entry.startswith("#"):
            continue
        found = re.match(r"([\w.-]+)==(\S+)", entry)
        assert found is not None, entry
        assert "--hash=sha256:" in entry, f"{found[1]} has no hash in {name}"
        pinned[canonicalize_name(found[1])] = found[2]
    return pinned


def test_locks_agree_with_what_members_ask_for() -> None:
    """A dependency that is added is pinned with it: `make lock` writes both files."""
    runtime, dev = locked("requirements.lock"), locked("requirements-dev.lock")
    assert runtime.items() <= dev.items()
    wanted = [(line, runtime) for content in MEMBERS.values() for line in content["project"]["dependencies"]]
    tools = [line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line[0] not in "-#"]
    for line, lock in [*wanted, *((line, dev) for line in tools)]:
        asked = Requirement(line)
        if asked.name.startswith("apportion-"):
            continue
        found = lock.get(canonicalize_name(asked.name))
        assert found is not None, f"{line} is in no lock: run `make lock`"
        assert found in asked.specifier, f"{line}, but {found} is locked: run `make lock`"


def test_locks_name_no_place() -> None:
    """Where packages come from is pip's own configuration."""
    for name in ("requirements.lock", "requirements-dev.lock"):
        assert not re.search(r"://|--(extra-)?index|--find-links|--trusted", (ROOT / name).read_text())


@pytest.mark.parametrize("member", [name for name in MEMBERS if name.startswith("services/")])
def test_a_service_has_one_console_script_named_like_itself(member: str) -> None:
    """Images, units and people start it by its name."""
    name = member.removeprefix("services/")
    module = name.replace("-", "_")
    assert MEMBERS[member]["project"]["scripts"].get(f"apportion-{name}") == f"apportion.{module}.__main__:main"


@pytest.mark.parametrize("verb", ["venv", "demo", "test", "check", "sim", "e2e", "bench"])
def test_every_verb_sets_up_its_environment_first(verb: str, tmp_path: Path) -> None:
    """A newcomer types one command."""
    # A dry run in a place without .venv; nothing is executed.
    argv = ["make", "--dry-run", verb, f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert f"-m venv {tmp_path / 'venv'}" in done.stdout
    assert re.search(r"install --quiet --require-hashes -r requirements(-dev)?\.lock", done.stdout)
    assert "install --quiet --no-build-isolation --no-deps -r requirements.txt" in done.stdout


def test_ci_calls_the_verb_and_nothing_else() -> None:
    """What passes here passes there."""
    path = ROOT / ".ci/run"
    assert os.access(path, os.X_OK)
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "set -euo pipefail"
    assert lines[-1] == "make test"


def test_what_keeps_a_process_is_marked_as_live() -> None:
    """Only what is marked may be tried again where CI's machine stood still; all else has one answer."""
    keeps = re.compile(r"subprocess\.Popen\(|create_subprocess_exec\(|EmbeddedBus\(")
    unmarked = [
        str(path.relative_to(ROOT))
        for base in ("libs", "services", "cli", "tests")
        for path in (ROOT / base).rglob("test_*.py")
        if keeps.search(text := path.read_text()) and not re.search(r"pytest\.mark\.(integration|e2e)", text)
    ]
    assert unmarked == []
