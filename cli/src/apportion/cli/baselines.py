"""What sharing is compared with: the recorded work decided anew by the real cores on a pool that doesn't share. Pure.

``whole-cards``: each job has its devices to itself, for as long as it runs. ``static-partition``: besides, half of each
node's devices belongs to online work and half to all the rest, whatever each of them needs just then; only where there
is work of both kinds.

Each run takes the work that its record had in it; as the record's devices were shared, that is taken for the slowed
form of less work, by the speeds that others measured (``whatif.sharing``). So both are given the benefit of the doubt:
they are faster than they would be where the neighbours had not slowed the run at all.
"""

from pathlib import Path
from typing import Final

from msgspec.structs import replace

from apportion.cli.whatif import stretch as stretches
from apportion.cli.whatif.engine import NODE_FACTS, Simulation, about
from apportion.cli.whatif.figures import Figures, Reckoning
from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, ServiceClass
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import DeviceUuid, NodeId, agent_author
from apportion.monitor.history import History

NS_PER_S: Final = 1_000_000_000
PATIENCE_NS: Final = 3_600 * NS_PER_S
"""What a baseline may take longer than the record before what is left counts as not ended."""
_PART: Final = "part"
_ONLINE, _REST = "online", "rest"
_ENDS: Final = (ev.JobSucceeded, ev.JobFailed, ev.JobCancelled, ev.JobExpired)


def baselines(log: Path) -> dict[str, Figures]:
    """The record, its own model (so that the model's error is seen), and both baselines, each up to its last end."""
    with History.open(log, folds=None) as history:
        last = history.last_seq
    recorded = stretches.read(log, None, 0, last)
    patient = replace(recorded, end=recorded.end + PATIENCE_NS)
    whole = replace(patient, wishes=[_whole(wish) for wish in patient.wishes])
    histories: dict[str, list[Entry]] = {
        "recorded": recorded.facts,
        "resimulated": _decided(patient).entries,
        "whole-cards": _decided(whole).entries,
    }
    if {_is_online(wish.event) for wish in whole.wishes if isinstance(wish.event, ev.JobRequested)} == {True, False}:
        halves = _Halves()
        parted = replace(
            whole,
            wishes=[_of_part(wish) for wish in whole.wishes],
            facts=[part for fact in whole.facts for part in halves.of(fact)],
        )
        histories["static-partition"] = _decided(parted).entries
    return {
        name: Reckoning(recorded.pool, recorded.begin, ()).reckon(entries, recorded.asked_at, _end_of(entries))
        for name, entries in histories.items()
    }


def _decided(stretch: stretches.Stretch) -> Simulation:
    return stretches.simulated(stretch, config={}, fleet=stretches.Fleet())


def _end_of(entries: list[Entry]) -> int:
    """When the last job ended, as far as any did."""
    return max((entry.recorded_at for entry in entries if isinstance(entry.event, _ENDS)), default=0) + 1


def _is_online(wish: ev.JobRequested) -> bool:
    return wish.service_class is ServiceClass.ONLINE


def _whole(wish: Entry) -> Entry:
    """The wish for as many whole devices as it has parts of."""
    if not isinstance(wish.event, ev.JobRequested):
        return wish
    asked = wish.event.resources
    alone = replace(
        asked, gpu=asked.gpu or 1, gpu_milli=None, gpu_memory_mib=None, mig_profile=None, mode=Mode.EXCLUSIVE
    )
    return replace(wish, event=replace(wish.event, resources=alone))


def _of_part(wish: Entry) -> Entry:
    """The wish kept to its part of the pool."""
    if not isinstance(wish.event, ev.JobRequested):
        return wish
    part = _ONLINE if _is_online(wish.event) else _REST
    where = wish.event.placement or ev.Placement()
    where = replace(where, required={**where.required, _PART: part})
    return replace(wish, event=replace(wish.event, placement=where))


class _Halves:
    """Facts about nodes as facts about the two parts of each."""

    def __init__(self) -> None:
        self._devices: dict[NodeId, frozenset[DeviceUuid]] = {}

    def of(self, entry: Entry) -> list[Entry]:
        """A fact about a node as one about each of its parts; any other as it is."""
        fact = entry.event
        node = about(fact) if isinstance(fact, NODE_FACTS) else None
        if node is None or not isinstance(fact, ev.Fact):
            return [entry]
        if isinstance(fact, ev.NodeRegistered):
            self._divide(fact)
        return [
            replace(
                entry, event=said, author=agent_author(part) if entry.author == agent_author(node) else entry.author
            )
            for name in (_ONLINE, _REST)
            if (said := self._said(fact, part := _part_of(node, name), name)) is not None
        ]

    def _divide(self, fact: ev.NodeRegistered) -> None:
        online, rest = (_part_of(fact.node_id, name) for name in (_ONLINE, _REST))
        if online in self._devices:
            return  # it registers anew, and what is whose is settled
        uuids = [device.uuid for device in fact.devices]
        # The odd device goes to whoever has less so far.
        held = [
            sum(len(devices) for node, devices in self._devices.items() if node.endswith(f"-{name}"))
            for name in (_ONLINE, _REST)
        ]
        half = (len(uuids) + (held[0] <= held[1])) // 2
        self._devices[online], self._devices[rest] = frozenset(uuids[:half]), frozenset(uuids[half:])

    def _said(self, fact: ev.Event, part: NodeId, name: str) -> ev.Event | None:
        """The fact, of a part; None where it is about a device that the part doesn't have."""
        if isinstance(fact, ev.NodeRegistered):
            devices = tuple(device for device in fact.devices if device.uuid in self._devices[part])
            return replace(fact, node_id=part, devices=devices, labels={**fact.labels, _PART: name})
        if isinstance(fact, ev.DeviceHealthChanged) and fact.device_uuid not in self._devices.get(part, ()):
            return None
        said: ev.Event = replace(fact, node_id=part)
        return said


def _part_of(node: NodeId, name: str) -> NodeId:
    return NodeId(f"{node}-{name}")
