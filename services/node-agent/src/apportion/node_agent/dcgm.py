"""Job mapping files for dcgm-exporter: one for each device, named by its index, with one job id a line.

With ``--hpc-job-mapping-dir`` the exporter labels a device's metrics with the jobs in its file. A device without a job
has an empty file, so that an old label doesn't stay.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from apportion.contracts.ids import JobId


class JobMapping:
    """The directory that dcgm-exporter reads."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)  # The exporter is another user's.
        self._directory = directory
        self._written: dict[int, str] = {}

    def write(self, jobs: Mapping[int, Iterable[JobId]]) -> None:
        """The jobs of each device by its index; only what has changed is written, and each file whole or not at all."""
        for index, names in sorted(jobs.items()):
            text = "".join(f"{name}\n" for name in sorted(set(names)))
            if self._written.get(index) == text:
                continue
            new = self._directory / f".{index}.new"
            new.write_text(text)
            new.chmod(0o644)
            new.replace(self._directory / str(index))
            self._written[index] = text
