"""Faults of a simulated node, made on purpose: what a chaos test or an operator's drill asks for."""

from pathlib import Path
from typing import Self

from apportion.node_agent.simgpu.nvml import Link


class Faults:
    """A way to break the boards of the simulated node at one socket; errors come as pynvml's exceptions."""

    def __init__(self, socket_path: Path) -> None:
        self._link = Link(socket_path)

    def __enter__(self) -> Self:
        """Nothing is opened before it is needed."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the node."""
        self._link.close()

    def xid(self, index: int, xid: int) -> None:
        """Let the board report a fault. Some end the work of all its processes; 79 takes it off the bus too."""
        self._link.ask("inject_xid", index=index, xid=xid)

    def heat(self, index: int, celsius: int) -> None:
        """Make the board hotter by so many degrees than its load explains."""
        self._link.ask("inject_heat", index=index, celsius=celsius)

    def ecc(self, index: int, *, corrected: int = 0, uncorrected: int = 0) -> None:
        """Count memory errors; an uncorrectable one leaves a row to be replaced at the next reset."""
        self._link.ask("inject_ecc", index=index, corrected=corrected, uncorrected=uncorrected)

    def remap_failure(self, index: int) -> None:
        """Let the board run out of spare memory rows, for good."""
        self._link.ask("inject_remap_failure", index=index)

    def reset(self, index: int) -> None:
        """Bring the board back to health; IN_USE while a process has a context on it."""
        self._link.ask("reset", index=index)

    def set_mig(self, index: int, *, enabled: bool) -> None:
        """Switch MIG mode, as an operator does; on Ampere it takes a reset."""
        self._link.ask("set_mig", index=index, enabled=enabled)
