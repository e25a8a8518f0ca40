"""Which row a damaged block spoils: DuckDB refuses such a block as a whole, and the chain knows every row.

Works on a copy of the log whose damaged blocks were given the checksums that their bytes have, so that they are read.
What DuckDB makes of damaged bytes may be the end of the process: hence one of its own.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from apportion.monitor import log
from apportion.monitor.log import BadRow, LogError, Verdict
from apportion.monitor.manifest import sealed_folder

SECONDS_MAX: Final = 600.0
_BLOCKS_MAX: Final = 1_000
_CHECKSUM: Final = re.compile(
    r"computed checksum (?P<computed>\d+) does not match stored checksum (?P<stored>\d+) "
    r"in block at location (?P<at>\d+)"
)
_WIDTH: Final = 8


def verify(path: Path) -> Verdict:
    """``log.verify``, which names the row also where the file was changed past DuckDB. Raises LogUnavailable."""
    verdict = log.verify(path)
    if verdict.first_bad is None or _CHECKSUM.search(verdict.first_bad.what) is None:
        return verdict
    closer = looked_into(path)
    if closer is None or closer.first_bad is None:
        return verdict
    bad = closer.first_bad
    what = f"{bad.what}, in the file itself: DuckDB refuses the block that holds it"
    return msgspec.structs.replace(closer, first_bad=msgspec.structs.replace(bad, what=what))


def looked_into(path: Path) -> Verdict | None:
    """The verdict on what damaged blocks and segments hold; None where that can't be told."""
    with tempfile.TemporaryDirectory(prefix="apportion-verify-") as folder:
        try:
            copy = Path(shutil.copyfile(path, Path(folder) / path.name))
            if log.write_ahead(path).exists():
                shutil.copyfile(log.write_ahead(path), log.write_ahead(copy))
            sealed_folder(copy).symlink_to(sealed_folder(path).absolute())
            found = subprocess.run(
                [sys.executable, "-I", "-m", "apportion.monitor.damage", str(copy)],
                capture_output=True,
                check=False,
                timeout=SECONDS_MAX,
            )
            return msgspec.json.decode(found.stdout, type=Verdict)
        except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError):
            return None


def verify_despite_damage(copy: Path) -> Verdict:
    """The verdict on a log's copy, whose wrong checksums are made to fit. Only in a process that may end over it."""
    for _ in range(_BLOCKS_MAX):
        verdict = log.verify(copy)
        if verdict.first_bad is None or not _accepted(copy, verdict.first_bad):
            break
    return verdict


def _accepted(copy: Path, bad: BadRow) -> bool:
    """True where a block's checksum was in the way, and fits now."""
    said = _CHECKSUM.search(bad.what)
    if said is None:
        return False
    with copy.open("r+b") as opened:
        opened.seek(int(said["at"]))
        if int.from_bytes(opened.read(_WIDTH), "little") != int(said["stored"]):
            return False
        opened.seek(int(said["at"]))
        opened.write(int(said["computed"]).to_bytes(_WIDTH, "little"))
    return True


def main() -> int:
    """The verdict on the copy that the first argument names, as JSON."""
    try:
        verdict = verify_despite_damage(Path(sys.argv[1]))
    except LogError as err:
        sys.stderr.write(f"{err}\n")
        return err.exit_code
    sys.stdout.buffer.write(msgspec.json.encode(verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
