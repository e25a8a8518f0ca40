"""The static SM partitions of one device, and which run has which; what the control tool lists is what counts.

A partition is made before there is any client and kept while its daemon lives, so the split is an operator's choice
(``mps_sm_partitions``) and a run takes the smallest part that holds what it asked for.
"""

from typing import Final

import msgspec

from apportion.contracts.ids import DeviceUuid, RunId
from apportion.contracts.units import MILLI_PER_DEVICE
from apportion.node_agent.enforce.slices import EnforcementFailed

SMS_A_CHUNK: Final = 8
"""What boards for servers are split in; the listing says what it came to."""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the tool's listing."""

    name: str
    sms: int
    clients: frozenset[int]


def listed(text: str) -> dict[str, Listed]:
    r"""The partitions in what ``lspart`` printed, by name.

    >>> listed("PARTITION CHUNKS SMS CLIENTS\\nGPU-1/1 4 32 17,18\\nGPU-1/2 4 32 -")["GPU-1/1"].sms
    32
    """
    found = {}
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) == 4 and words[2].isdecimal():
            clients = frozenset(int(pid) for pid in words[3].split(",") if pid.isdecimal())
            found[words[0]] = Listed(name=words[0], sms=int(words[2]), clients=clients)
    return found


class PartitionBook:
    """Who has which partition of one device."""

    def __init__(self, device: DeviceUuid, sms: int, text: str) -> None:
        self._device = device
        self._sms = sms
        self._parts = listed(text)
        self._taken: dict[RunId, str] = {}

    @staticmethod
    def chunks_of(milli: int, sms: int) -> int:
        """How many chunks such a share of the device is, rounded down, and one at least.

        >>> PartitionBook.chunks_of(500, 132)
        8
        """
        return max(1, milli * sms // MILLI_PER_DEVICE // SMS_A_CHUNK)

    def take(self, run: RunId, milli: int) -> str:
        """Give the run the smallest free partition of its size; raises EnforcementFailed where there is none."""
        free = [part for part in self._parts.values() if part.name not in self._taken.values() and not part.clients]
        # As asked for: a partition that was to be half of the device is half, though its SMs came to a little less.
        wanted = self.chunks_of(milli, self._sms) * SMS_A_CHUNK
        fits = sorted((part.sms, part.name) for part in free if part.sms >= wanted)
        if run not in self._taken:
            if not fits:
                sizes = ",".join(str(part.sms) for part in self._parts.values())
                raise EnforcementFailed(
                    self._device, "SM partition", asked=f"{wanted} SMs", observed=f"none free of {sizes}"
                )
            self._taken[run] = fits[0][1]
        return self._taken[run]

    def give_back(self, run: RunId) -> None:
        """The run has ended."""
        self._taken.pop(run, None)

    def keep(self, run: RunId, name: str) -> None:
        """A run that an earlier agent started has this one."""
        if name in self._parts:
            self._taken[run] = name

    def read_back(self, run: RunId, text: str) -> tuple[str, int, int]:
        """Name, applied and observed milli of the run's partition; raises EnforcementFailed where it isn't listed."""
        name = self._taken[run]
        found = listed(text).get(name)
        if found is None or found.sms != self._parts[name].sms:
            raise EnforcementFailed(self._device, "SM partition", asked=name, observed=found)
        milli = MILLI_PER_DEVICE * found.sms // self._sms
        return name, milli, milli
