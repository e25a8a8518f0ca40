"""A stretch of a log, made ready to be decided anew: what happened by itself, and how much work each run had in it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median_low
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from apportion.cli.whatif.engine import NODE_FACTS, NS_PER_MS, START_NS, Fate, Happening, Simulation, replica_of
from apportion.cli.whatif.sharing import ALONE, speed
from apportion.contracts import events as ev
from apportion.contracts.causes import RunCause
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import ADMISSION, MONITOR, PLACER, Author, DeviceUuid, JobId, NodeId, RunId, agent_author
from apportion.monitor.history import History
from apportion.monitor.log import messages_of
from apportion.monitor.projections import entry_of
from apportion.node_agent.core import CAUSE_OF_STOP
from apportion.pool.state import Pool

NOT_ITS_OWN: Final = frozenset(CAUSE_OF_STOP.values()) | {
    RunCause.NODE_LOST,
    RunCause.SHIM_LOST,
    RunCause.STALE,
    RunCause.UNKNOWN,
    RunCause.DEVICE_FAULT,
    RunCause.FAULT_DOMAIN_FAILED,
    RunCause.ENFORCEMENT_FAILED,
    RunCause.GANG_BROKEN,
}
"""Ends that say nothing of how long the run would have taken."""

Replica = tuple[JobId, str]


class Fleet(Struct, frozen=True, kw_only=True):
    """Another fleet than the recorded one."""

    nodes: int | None = None
    """So many: the first by name, or copies of the last one beside all of them."""
    drop: frozenset[NodeId] = frozenset()


class Stretch(Struct, kw_only=True):
    """What is decided anew, and from where."""

    path: Path
    before: list[Entry]
    """Wishes and facts up to the beginning, in the order in which they were recorded."""
    wishes: list[Entry]
    facts: list[Entry]
    """As they were recorded in the stretch."""
    begin: int
    end: int
    pool: Pool
    """As it was at the beginning."""
    asked_at: dict[int, int]
    """When each wish was recorded."""
    configs: dict[Author, dict[str, int | str]]
    works: dict[Replica, list[Fate]]
    """How each replica's runs ended that ended by themselves, in order."""
    partly: dict[Replica, int]
    """The longest that was seen of a replica whose runs never ended by themselves."""
    done: dict[RunId, int]
    """What live runs had done at the beginning."""
    ends: dict[Replica, int]
    start_ns: int
    """From an order to a running process, and from its end to the release of its slices: the middle of the record."""
    release_ns: int
    typical: int
    """The middle of all works: what is assumed where nothing is known."""

    def fate(self, run_id: RunId, ended: int) -> Fate:
        """The fate of a run of whose replica so many earlier ones had ended by themselves."""
        replica = replica_of(run_id)
        known = self.works.get(replica)
        if known:
            return known[min(ended, len(known) - 1)]
        return Fate(work=max(self.typical, self.partly.get(replica, 0)), is_assumed=True)


def read(path: Path, folds: Path | None, first: int, last: int) -> Stretch:
    """The stretch after the fact ``first`` up to the fact ``last`` of a log that nobody writes."""
    wishes = [entry_of(message) for message in messages_of(path, Stream.WISHES)]
    with History.open(path, folds=folds) as history:
        pool = history.at_seq(first)
        begin, end = pool.at, history.at_seq(last).at + 1
        survey = _Survey()
        before: list[Entry] = []
        facts: list[Entry] = []
        for entry in history.entries(after=0, to=history.last_seq):
            survey.see(entry, is_before=entry.seq <= first)
            if entry.seq <= first:
                before.append(entry)
            elif entry.seq <= last:
                facts.append(entry)
    early = [wish for wish in wishes if first and wish.recorded_at <= begin]
    if not first and facts:
        begin = min([facts[0].recorded_at, *(wish.recorded_at for wish in wishes[:1])])
    return Stretch(
        path=path,
        before=sorted([*before, *early], key=lambda entry: (entry.recorded_at, entry.stream is Stream.FACTS)),
        wishes=[wish for wish in wishes[len(early) :] if wish.recorded_at < end],
        facts=facts,
        begin=begin,
        end=end,
        pool=pool,
        asked_at={wish.seq: wish.recorded_at for wish in wishes},
        configs=_configs(before, facts),
        works=survey.works,
        partly=survey.partly,
        done=survey.done_before,
        ends=survey.ends_before,
        start_ns=median_low(survey.starts) if survey.starts else START_NS,
        release_ns=median_low(survey.releases) if survey.releases else 0,
        typical=survey.typical(),
    )


def simulated(stretch: Stretch, *, config: Mapping[str, int | str], fleet: Fleet) -> Simulation:
    """The stretch decided anew: the recorded settings, and over them those of ``config`` for the placer."""
    configs: dict[str, Mapping[str, int | str]] = {str(author): given for author, given in stretch.configs.items()}
    configs[PLACER] = {**stretch.configs.get(PLACER, {}), **config}
    simulation = Simulation(stretch.fate, config=configs, start_ns=stretch.start_ns, release_ns=stretch.release_ns)
    for entry in stretch.before:
        simulation.fold(entry)
    simulation.begin(stretch.begin, stretch.done, stretch.ends)
    happenings = [Happening(at=wish.recorded_at, wish=wish) for wish in stretch.wishes]
    happenings += _of_nodes(stretch, fleet)
    happenings.sort(key=lambda one: one.at)
    simulation.run(happenings, stretch.end - 1)
    return simulation


def _configs(before: Iterable[Entry], facts: Iterable[Entry]) -> dict[Author, dict[str, int | str]]:
    """The settings that each author had at the beginning, or else those that it had first."""
    found: dict[Author, dict[str, int | str]] = {}
    for entry in before:
        if isinstance(entry.event, ev.LeaseClaimed) and entry.author in {ADMISSION, PLACER}:
            found[entry.author] = dict(entry.event.config)
    for entry in facts:
        if isinstance(entry.event, ev.LeaseClaimed) and entry.author in {ADMISSION, PLACER}:
            found.setdefault(entry.author, dict(entry.event.config))
    return found


def _of_nodes(stretch: Stretch, fleet: Fleet) -> list[Happening]:
    """What happens to the nodes of the fleet: as recorded, without those that are not in it, with those added."""
    first: dict[NodeId, tuple[int, ev.NodeRegistered]] = {}
    for entry in (*(entry for entry in stretch.before if entry.stream is Stream.FACTS), *stretch.facts):
        if isinstance(entry.event, ev.NodeRegistered):
            first.setdefault(entry.event.node_id, (max(entry.recorded_at, stretch.begin), entry.event))
    kept = sorted(node for node in first if node not in fleet.drop)
    if fleet.nodes is not None:
        kept = kept[: fleet.nodes]
    found = [
        Happening(at=entry.recorded_at, fact=entry.event, author=entry.author or MONITOR)
        for entry in stretch.facts
        if isinstance(entry.event, NODE_FACTS) and getattr(entry.event, "node_id", kept[0] if kept else None) in kept
    ]
    for node_id, node in sorted(stretch.pool.nodes.items()):
        if node_id not in kept:
            gone = ev.NodeFenced(node_id=node_id, epoch=node.epoch + 1, reason="not in this fleet")
            found.append(Happening(at=stretch.begin, fact=gone, author=MONITOR))
    for number in range(0 if fleet.nodes is None or not kept else fleet.nodes - len(kept)):
        at, model = first[kept[-1]]
        found.append(_copied(at, model, number + 1))
    return found


def _copied(at: int, model: ev.NodeRegistered, number: int) -> Happening:
    node_id = NodeId(f"{model.node_id}-copy-{number}")
    devices = tuple(replace(d, uuid=DeviceUuid(f"{d.uuid}-copy-{number}")) for d in model.devices)
    fact = replace(model, node_id=node_id, devices=devices, session=f"{model.session}-{number}", epoch=0)
    return Happening(at=at, fact=fact, author=agent_author(node_id))


class _Run(Struct):
    """A run of the record: what it holds, and how far it has got."""

    devices: tuple[DeviceUuid, ...]
    is_running: bool = False
    done: int = 0
    since: int = 0
    speed: int = ALONE


class _Survey:
    """How much work each run had in it, by the speeds that its neighbours left it."""

    def __init__(self) -> None:
        self.works: dict[Replica, list[Fate]] = {}
        self.partly: dict[Replica, int] = {}
        self.done_before: dict[RunId, int] = {}
        self.ends_before: dict[Replica, int] = {}
        self.starts: list[int] = []
        self.releases: list[int] = []
        self._placed: dict[RunId, int] = {}
        self._ended: dict[RunId, int] = {}
        self._runs: dict[RunId, _Run] = {}
        self._sharing: defaultdict[DeviceUuid, set[RunId]] = defaultdict(set)
        self._ends: defaultdict[Replica, int] = defaultdict(int)
        self._is_before = True
        self._begin = 0

    def typical(self) -> int:
        """The middle of all works that are known; a minute where none is."""
        known = [fate.work for fates in self.works.values() for fate in fates if fate.work]
        return median_low(known) if known else 60_000 * ALONE

    def see(self, entry: Entry, *, is_before: bool) -> None:
        """Take in a fact."""
        if self._is_before and not is_before:
            self._remember()
        self._is_before = is_before
        self._begin = entry.recorded_at if is_before else self._begin
        event: Any = entry.event
        at = entry.recorded_at
        match event:
            case ev.RunPlaced():
                self._runs[event.run_id] = _Run(tuple(piece.device_uuid for piece in event.slices))
                self._placed[event.run_id] = at
            case ev.RunStarted():
                if event.run_id in self._placed:
                    self.starts.append(at - self._placed.pop(event.run_id))
                self._join(event.run_id, at)
            case ev.RunFinished():
                self._ended[event.run_id] = at
                self._end(event, at)
            case ev.RunReleased():
                if event.run_id in self._ended:
                    self.releases.append(at - self._ended.pop(event.run_id))
            case ev.NodeFenced():
                for run_id in event.runs:
                    self._stop(run_id, at)
            case _:
                pass

    def _remember(self) -> None:
        """What live runs have done where the stretch begins."""
        self._pace(list(self._sharing), self._begin)
        self.done_before = {run_id: run.done for run_id, run in self._runs.items() if run.is_running}
        self.ends_before = dict(self._ends)

    def _join(self, run_id: RunId, at: int) -> None:
        run = self._runs.get(run_id)
        if run is None or run.is_running:
            return
        run.is_running, run.since = True, at
        for device in run.devices:
            self._sharing[device].add(run_id)
        self._pace(run.devices, at)

    def _leave(self, run_id: RunId, at: int) -> int:
        run = self._runs.pop(run_id, None)
        if run is None or not run.is_running:
            return 0
        done = run.done + (at - run.since) // NS_PER_MS * run.speed
        for device in run.devices:
            self._sharing[device].discard(run_id)
        self._pace(run.devices, at)
        return done

    def _pace(self, devices: Iterable[DeviceUuid], at: int) -> None:
        for run_id in {run_id for device in devices for run_id in self._sharing[device]}:
            run = self._runs[run_id]
            run.done += (at - run.since) // NS_PER_MS * run.speed
            run.since = at
            run.speed = min(speed(len(self._sharing[device])) for device in run.devices)

    def _end(self, event: ev.RunFinished, at: int) -> None:
        if event.run_id not in self._runs:
            return
        if event.cause in NOT_ITS_OWN:
            self._stop(event.run_id, at)
            return
        replica = replica_of(event.run_id)
        fate = Fate(work=self._leave(event.run_id, at), cause=event.cause, exit_code=event.exit_code)
        self.works.setdefault(replica, []).append(fate)
        self._ends[replica] += 1

    def _stop(self, run_id: RunId, at: int) -> None:
        replica = replica_of(run_id)
        self.partly[replica] = max(self.partly.get(replica, 0), self._leave(run_id, at))
