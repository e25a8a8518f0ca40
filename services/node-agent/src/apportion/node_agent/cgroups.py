"""Where the unified cgroup hierarchy is, and which group a process is in; reading alone, no group is made here."""

from pathlib import Path


def unified_mount(mountinfo: str) -> Path | None:
    """Where the unified hierarchy is mounted, by the text of ``/proc/self/mountinfo``.

    >>> unified_mount("41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    PosixPath('/sys/fs/cgroup')
    >>> unified_mount("41 31 0:38 / /proc rw - proc proc rw") is None
    True
    """
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split()[4])
    return None


def mount_here() -> Path | None:
    """Where it is mounted on this machine; None where it isn't."""
    try:
        return unified_mount(Path("/proc/self/mountinfo").read_text())
    except OSError:
        return None


def group_of(pid: int) -> str:
    """The path of a process's group below the mount, as in ``/apportion/run-1``; ``/`` where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return "/"
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
