"""Pins every dependency with the hashes of all its files: ``make lock``, in an environment of its own.

``requirements.lock`` is what runs; ``requirements-dev.lock`` adds what builds, checks and tests. Neither names where
packages come from: that is pip's own configuration.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
BACKEND = ("hatchling>=1.27", "editables")
_HEADER = "# Written by `make lock`; edits are lost.\n"


def runtime_requirements() -> list[str]:
    """What the members ask for, without one another."""
    found: set[str] = set()
    for path in [
        *ROOT.glob("libs/*/pyproject.toml"),
        *ROOT.glob("services/*/pyproject.toml"),
        ROOT / "cli/pyproject.toml",
    ]:
        project = tomllib.loads(path.read_text())["project"]
        found |= {line for line in project.get("dependencies", []) if not line.startswith("apportion-")}
    return sorted(found | set(BACKEND))


def dev_requirements() -> list[str]:
    """What builds, checks and tests."""
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("-", "#"))]


def main() -> int:
    """Write both files."""
    for name, wanted in (
        ("requirements.lock", runtime_requirements()),
        ("requirements-dev.lock", [*runtime_requirements(), *dev_requirements()]),
    ):
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "in.txt", Path(folder) / "out.txt"
            source.write_text("\n".join(wanted) + "\n")
            if name != "requirements.lock":
                # The same versions as what runs has.
                source.write_text(source.read_text() + _pins(ROOT / "requirements.lock"))
            subprocess.run(
                [
                    sys.executable, "-m", "piptools", "compile", "--generate-hashes", "--allow-unsafe", "--quiet",
                    "--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host", "--no-header",
                    "--no-annotate", "--strip-extras", "--output-file", str(target), str(source),
                ],
                check=True,
            )  # fmt: skip
            (ROOT / name).write_text(_HEADER + target.read_text())
    return 0


def _pins(path: Path) -> str:
    return "".join(line.split(" ")[0] + "\n" for line in path.read_text().splitlines() if "==" in line)


if __name__ == "__main__":
    sys.exit(main())
