"""Packages from npm for a test: installed once by their lock file, outside the repository."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest


def installed(source: Path, *, without: str) -> Path:
    """A folder with the packages of ``source``'s lock file; skips the test where they can't be had.

    ``without`` says what then did not run.
    """
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip(f"node and npm are not installed: {without} did not run")
    lock = (source / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "apportion-tests" / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not (folder / "ready").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(source / name, folder)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        try:
            made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm ci took too long: {without} did not run")
        if made.returncode != 0:
            pytest.skip(f"npm ci failed, so {without} did not run: {made.stderr[-300:]}")
        (folder / "ready").touch()
    return folder
