"""What is installed and what is known against it: ``make audit``, in an environment of its own.

Writes ``build/sbom.json`` (CycloneDX) from the lock of what runs, then asks the vulnerability service about each.
Exit codes: 0 nothing known, or the service can't be asked (said, package by package); 1 something is known.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Write the list, then ask."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    target = build / "sbom.json"
    argv = [sys.executable, "-m", "cyclonedx_py", "requirements", "requirements.lock", "--output-file", str(target)]
    subprocess.run(argv, cwd=ROOT, check=True)
    components = json.loads(target.read_text())["components"]
    print(f"sbom    {len(components)} packages in {target.relative_to(ROOT)} (CycloneDX)")

    argv = [
        sys.executable,
        "-m",
        "pip_audit",
        "--requirement",
        "requirements.lock",
        "--require-hashes",
        "--disable-pip",
    ]
    asked = subprocess.run([*argv, "--format", "json"], cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(asked.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"audit   SKIPPED: the vulnerability service can't be asked ({last})")
        return 0
    known = [(package["name"], flaw["id"]) for package in packages for flaw in package.get("vulns", ())]
    skipped = [package for package in packages if "skip_reason" in package]
    print(f"audit   {len(packages) - len(skipped)} packages asked about, {len(known)} flaws known")
    for name, flaw in known:
        print(f"        {name}: {flaw}")
    if skipped:
        print(f"audit   SKIPPED for {len(skipped)} packages, the first: {skipped[0]['skip_reason']}")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
