"""What must hold at every step, and what must hold once faults stop.

Written without the pool's fold and without any core: a rule checked by the code that it judges would prove nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, PreemptionKind, RunAction, RunCause, ServiceClass, StopCause
from apportion.contracts.envelope import Basis, Entry, Stream, Undecodable
from apportion.contracts.ids import (
    ADMISSION,
    MONITOR,
    PLACER,
    Author,
    DeviceUuid,
    JobId,
    NodeId,
    QueueId,
    RunId,
    TenantId,
    attempt_of_run,
    job_of_run,
    node_of_author,
    replica_of_run,
)

ENDS = tuple(kind.__name__ for kind in ev.TERMINAL)


ORDERED_S_MAX = 30
"""Of virtual time, with faults: among 210 stops of six runs the slowest order came after 4 s."""
NS_PER_S = 1_000_000_000


class Violation(AssertionError):
    """A rule was broken; the seed repeats it."""


def must(holds: bool, rule: str, *what: object) -> None:
    """Raise where the rule is broken."""
    if not holds:
        raise Violation(f"{rule}: {' '.join(str(w) for w in what)}")


class Checker:
    """An independent ledger of who holds what, kept from the messages alone."""

    def __init__(self) -> None:
        self.world: Any = None
        self.events = 0
        self.epochs: dict[NodeId, int] = {}
        self.registered: dict[NodeId, int] = {}
        self.closed: set[NodeId] = set()
        """Nodes that were fenced and have not registered again."""
        self.devices: dict[DeviceUuid, ev.Device] = {}
        self.held: dict[DeviceUuid, dict[RunId, ev.Slice]] = {}
        self.holding: dict[RunId, ev.RunPlaced] = {}
        self.placed: dict[RunId, ev.RunPlaced] = {}
        self.void: set[RunId] = set()
        self.processes: Counter[RunId] = Counter()
        self.stated: Counter[tuple[str, RunId]] = Counter()
        self.admitted: dict[JobId, ev.JobAdmitted] = {}
        self.holds: dict[JobId, int] = {}
        """Jobs that are held, and the fact that said so."""
        self.suspended: dict[JobId, bool] = {}
        """Jobs that somebody suspended, and whether they are."""
        self.still: dict[RunId, bool] = {}
        """Runs that were ordered to stand still, or to go on since."""
        self.told_still: dict[RunId, bool] = {}
        self.checkpoint_orders: set[str] = set()
        """Orders that a run may answer by saying that it has checkpointed."""
        self.avoided: dict[JobId, tuple[NodeId, ...]] = {}
        self.policies: dict[TenantId, ev.PolicyUpserted] = {}
        self.let_in: dict[TenantId, list[int]] = {}
        """When jobs of each tenant that has a policy were admitted, since that."""
        self.sizes: dict[JobId, tuple[int, int, int]] = {}
        """Where it isn't the first: milli-GPU and MiB that the job has now, and the fact that said so."""
        self.priorities: dict[JobId, int] = {}
        """Where it isn't the first."""
        self.terminal: dict[JobId, str] = {}
        self.ended_at: dict[JobId, int] = {}
        self.answers: Counter[tuple[str, int]] = Counter()
        self.wishes: dict[int, Entry] = {}
        self.claims: dict[JobId, ev.PreemptionDecided] = {}
        """By the job for which others were stopped."""
        self.stopped_for: set[tuple[JobId, JobId]] = set()
        self.placer_policy = ""
        self.shrunk: set[RunId] = set()
        """Replicas that were told to leave an elastic gang."""
        self.to_stop: dict[RunId, int] = {}
        """By when runs must have been ordered to stop, of jobs that were told to; the earliest first."""
        self.told: set[RunId] = set()
        self.ending: set[RunId] = set()
        """Runs that were told to stop, or ended, and may still hold something."""
        self.stopping: set[JobId] = set()
        self.placed_seq: dict[RunId, int] = {}
        self.limits: dict[QueueId, ev.QueueUpserted] = {}
        self.bounds: dict[str, list[tuple[int, ev.QueueUpserted | ev.PolicyUpserted]]] = {}
        """What was said of each queue and tenant, the latest last, with the fact that said it."""
        self.cores: dict[Author, list[int]] = {}
        self.last_author_claim: dict[Author, int] = {}

    # At every step

    def stored(self, entry: Entry) -> None:
        """One more message in a stream."""
        self.events += 1
        if entry.stream is Stream.WISHES:
            self.wishes[entry.seq] = entry
            return
        event = entry.event
        must(not isinstance(event, Undecodable), "facts decode", event)
        self._orders_come(entry)
        if isinstance(event, ev.RunStopOrdered | ev.RunFinished):
            self.ending.add(event.run_id)
            if isinstance(event, ev.RunStopOrdered):
                self.checkpoint_orders.add(entry.event_id)
        elif isinstance(event, ev.JobStopping):
            self.stopping.add(event.job_id)
        elif isinstance(event, ev.JobRequeued):
            self.stopping.discard(event.job_id)
        answers = getattr(event, "answers", 0)
        if answers:
            self.answers[str(entry.author), answers] += 1
            must(self.answers[str(entry.author), answers] == 1, "a wish is answered once", answers, event)
        match event:
            case ev.NodeRegistered():
                must(node_of_author(entry.author or Author("")) == event.node_id, "an agent registers its own node")
                self.epochs.setdefault(event.node_id, event.epoch)
                if event.epoch == self.epochs[event.node_id]:
                    self.closed.discard(event.node_id)
                for device in event.devices:
                    self.devices[device.uuid] = device
            case ev.NodeFenced():
                must(event.epoch == self.epochs[event.node_id] + 1, "epochs grow by one", event)
                self.epochs[event.node_id] = event.epoch
                self.closed.add(event.node_id)
                for run_id in [r for r, p in self.holding.items() if p.node_id == event.node_id]:
                    self._free(run_id)
            case ev.RunPlaced():
                self.placed_seq[event.run_id] = entry.seq
                self._placed(event)
            case ev.RunReleased():
                self._once("released", event.run_id)
                self._free(event.run_id)
            case ev.RunStarted():
                self._once("started", event.run_id)
                must(event.run_id in self.placed, "nothing starts unplaced", event)
                must(self.processes[event.run_id] == 1, "a stated start is a process", event)
            case ev.RunFinished():
                self._once("finished", event.run_id)
            case ev.LeaseClaimed() if entry.author == PLACER:
                self.placer_policy = str(event.config["policy"])
            case ev.PriceSet():
                self._market(event)
            case ev.PreemptionDecided():
                self._preempted(entry, event)
            case ev.GangResized() if event.after < event.before and not event.for_job:
                must(self.ending >= set(event.runs), "who leaves a gang for a limit was told to", event)
                self._keeps_its_least(event.job_id)
            case ev.RunStopOrdered() if event.cause is StopCause.PREEMPTED and event.actor == "service:placer":
                must(event.run_id in self.told, "who is stopped for others was decided on", event.run_id)
            case ev.JobAdmitted():
                must(event.job_id not in self.admitted, "a job is admitted once", event.job_id)
                self.admitted[event.job_id] = event
                self._let_in(event.tenant, entry.recorded_at)
                open_ = tuple(each.job_id for each in event.spec.depends_on if each.job_id not in self.terminal)
                must(event.waits_for == open_, "a job waits for those it follows that have not ended", event)
            case ev.JobSucceeded() | ev.JobFailed() | ev.JobCancelled() | ev.JobExpired():
                must(event.job_id in self.admitted, "only admitted jobs end", event.job_id)
                must(event.job_id not in self.terminal, "a job is terminal once", event.job_id)
                self.terminal[event.job_id] = type(event).__name__
                self.ended_at[event.job_id] = entry.seq
                if isinstance(event, ev.JobFailed) and event.cause is RunCause.DEPENDENCY_FAILED:
                    must(not self._has_its_turn(event.job_id), "only a dependency that failed fails a job so", event)
            case ev.JobRequeued():
                self._lives(event.job_id)
                self.avoided[event.job_id] = event.avoid_nodes
                if event.memory_mib:
                    compute, memory = self.size(event.job_id)
                    most = max(device.memory_mib for device in self.devices.values())
                    must(event.memory_mib_before == memory < event.memory_mib <= most, "memory is raised", event)
                    self.sizes[event.job_id] = (compute, event.memory_mib, entry.seq)
            case ev.JobHeld():
                self._lives(event.job_id)
                self.holds.setdefault(event.job_id, entry.seq)
            case ev.JobReleased():
                self._lives(event.job_id)
                must(event.job_id in self.holds, "only held jobs are released", event.job_id)
                del self.holds[event.job_id]
            case ev.JobSuspended():
                self._lives(event.job_id)
                self.suspended[event.job_id] = True
            case ev.JobResumed():
                self._lives(event.job_id)
                must(self.suspended.get(event.job_id, False), "only suspended jobs are resumed", event.job_id)
                self.suspended[event.job_id] = False
            case ev.JobCheckpointing():
                self._lives(event.job_id)
                spec = self.admitted[event.job_id].spec
                must(spec.checkpoint is not None, "only who said how is told to checkpoint", event.job_id)
            case ev.RunActionOrdered():
                self._acted(entry, event)
            case ev.RunSuspended() | ev.RunResumed():
                is_still = isinstance(event, ev.RunSuspended)
                must(self.still.get(event.run_id) is not None, "nobody stands still unasked", event.run_id)
                must(self.told_still.get(event.run_id, False) is not is_still, "it is told as it changes", event.run_id)
                must(not self.stated["finished", event.run_id], "what has ended neither stands nor goes", event.run_id)
                self.told_still[event.run_id] = is_still
            case ev.RunCheckpointed():
                must(event.caused_by in self.checkpoint_orders, "one answer to one order to checkpoint", event)
                self.checkpoint_orders.discard(event.caused_by)
            case ev.JobReprioritized():
                self._lives(event.job_id)
                must(event.before == self.priority(event.job_id), "what it was before is what was said last", event)
                self.priorities[event.job_id] = event.priority
            case ev.JobResized():
                self._lives(event.job_id)
                before = self.size(event.job_id)
                must((event.compute_milli_before, event.memory_mib_before) == before, "resized from what it had", event)
                if (event.compute_milli, event.memory_mib) != before:
                    self.sizes[event.job_id] = (event.compute_milli, event.memory_mib, entry.seq)
            case ev.JobStopping():
                self._lives(event.job_id)
            case ev.QueueUpserted():
                self.limits[event.queue] = event
                self.bounds.setdefault(event.queue, []).append((entry.seq, event))
            case ev.PolicyUpserted(for_tenant=None):
                pass
            case ev.PolicyUpserted():
                assert event.for_tenant is not None
                self.policies[event.for_tenant] = event
                self.bounds.setdefault(f"tenant:{event.for_tenant}", []).append((entry.seq, event))
                self.let_in[event.for_tenant] = []
            case _:
                pass

    def _orders_come(self, entry: Entry) -> None:
        """Who was told to stop gets the order in bounded time, whatever crashes meanwhile."""
        event = entry.event
        match event:
            case ev.RunStopOrdered() | ev.RunFinished() | ev.RunReleased():
                self.to_stop.pop(event.run_id, None)
            case ev.NodeFenced():
                for run_id in [r for r in self.to_stop if self.placed[r].node_id == event.node_id]:
                    del self.to_stop[run_id]
            case ev.JobStopping():
                self._is_to_stop([r for r in self.holding if job_of_run(r) == event.job_id], entry.recorded_at)
            case ev.PreemptionDecided():
                self._is_to_stop(event.runs, entry.recorded_at)
            case _:
                pass
        for run_id, until in self.to_stop.items():
            must(entry.recorded_at <= until, f"an order to stop comes within {ORDERED_S_MAX} s", run_id)
            break

    def _is_to_stop(self, runs: Iterable[RunId], at: int) -> None:
        for run_id in runs:
            if run_id in self.holding and run_id not in self.ending:
                self.to_stop.setdefault(run_id, at + ORDERED_S_MAX * NS_PER_S)

    def _acted(self, entry: Entry, event: ev.RunActionOrdered) -> None:
        job_id = job_of_run(event.run_id)
        must(event.run_id in self.placed, "only runs that were placed are asked anything", event.run_id)
        if event.action is RunAction.CHECKPOINT:
            must(self.placed[event.run_id].checkpoint is not None, "who checkpoints was told how", event.run_id)
            self.checkpoint_orders.add(entry.event_id)
            return
        is_still = event.action is RunAction.SUSPEND
        must(self.still.get(event.run_id, False) is not is_still, "nobody is asked what was asked", event)
        must(job_id in self.suspended, "only runs of jobs that were suspended", event)
        self.still[event.run_id] = is_still

    def _lives(self, job_id: JobId) -> None:
        must(job_id in self.admitted, "only admitted jobs are changed", job_id)
        must(job_id not in self.terminal, "what has ended stays as it was", job_id)

    def _let_in(self, tenant: TenantId, at: int) -> None:
        policy = self.policies.get(tenant)
        if policy is None or policy.rate_per_min is None:
            return
        times = self.let_in[tenant]
        times.append(at)
        for before, since in enumerate(reversed(times)):
            most = (policy.burst or policy.rate_per_min) + (at - since) * policy.rate_per_min // 60_000_000_000 + 1
            must(before + 1 <= most, "no tenant comes faster than its rate, over any stretch", tenant, before + 1, most)

    def _has_its_turn(self, job_id: JobId) -> bool:
        """True where every job that this one follows has ended as it asked."""
        wanted = {"succeeded": {"JobSucceeded"}, "failed": {"JobFailed"}, "ended": set(ENDS)}
        return all(
            self.terminal.get(each.job_id) in wanted[each.condition] for each in self.admitted[job_id].spec.depends_on
        )

    def size(self, job_id: JobId) -> tuple[int, int]:
        """Milli-GPU and MiB that the job asks of each device now."""
        spec = self.admitted[job_id].spec
        found = self.sizes.get(job_id)
        return (spec.compute_milli, spec.memory_mib) if found is None else found[:2]

    def priority(self, job_id: JobId) -> int:
        """The job's priority now."""
        return self.priorities.get(job_id, self.admitted[job_id].spec.priority)

    def _once(self, what: str, run_id: RunId) -> None:
        self.stated[what, run_id] += 1
        must(self.stated[what, run_id] == 1, f"a run is {what} once", run_id)

    def _preempted(self, entry: Entry, event: ev.PreemptionDecided) -> None:
        """Only for a class that comes first, only who agreed to it and had a moment at least, and gangs whole."""
        must(event.job_id in self.admitted, "others are stopped for admitted jobs", event.job_id)
        ranks = list(ServiceClass)
        mine = ranks.index(self.admitted[event.job_id].spec.service_class)
        if event.kind is PreemptionKind.RECLAIM:
            self._owed(event)
        before = self.claims.get(event.job_id)
        must(
            before is None or not self.holding.keys() & set(before.runs),
            "nobody more is stopped while victims have not left",
            event.job_id,
        )
        if event.kind is PreemptionKind.SHRINK:
            self._shrink(event)
            return
        for victim in event.victims:
            spec = self.admitted[victim].spec
            must(spec.preemptible, "only those who agreed are stopped for others", victim)
            if event.kind is PreemptionKind.RECLAIM:
                must(spec.queue != self.admitted[event.job_id].spec.queue, "nobody takes back from itself", victim)
            elif event.kind is PreemptionKind.MARKET:
                must(ranks.index(spec.service_class) == mine, "only of its own class", event.job_id, victim)
                must(spec.bid_micro < self.admitted[event.job_id].spec.bid_micro, "who bids less", event.job_id, victim)
            elif ranks.index(spec.service_class) == mine:
                must(self._is_strict(), "within a class where that is the policy", event.job_id, victim)
            else:
                must(ranks.index(spec.service_class) > mine, "only of a class that comes after", event.job_id, victim)
            # Under strict priority, somebody may have changed priorities in between.
            if event.kind is not PreemptionKind.RECLAIM and not self._is_strict():
                must(
                    (victim, event.job_id) not in self.stopped_for, "nobody is stopped for whom it was stopped", victim
                )
                self.stopped_for.add((event.job_id, victim))
            runs = {run_id for run_id, placed in self.holding.items() if placed.job_id == victim}
            known = {run_id for run_id in runs if self.placed_seq[run_id] <= (entry.basis.facts if entry.basis else 0)}
            must(known <= set(event.runs), "a gang is stopped whole", victim, known)
        self.told |= set(event.runs)
        self.claims[event.job_id] = event

    def _shrink(self, event: ev.PreemptionDecided) -> None:
        """Each gang keeps its least: those of its replicas that hold something and weren't told to stop."""
        self.shrunk |= set(event.runs)
        for victim in event.victims:
            self._keeps_its_least(victim)
        self.claims[event.job_id] = event

    def _keeps_its_least(self, gang: JobId) -> None:
        spec = self.admitted[gang].spec
        left = [
            run_id
            for run_id, run in self.holding.items()
            if run.job_id == gang and run_id not in self.shrunk | self.ending
        ]
        must(bool(spec.replicas_min), "only elastic gangs shrink", gang)
        must(len(left) >= spec.replicas_least or gang in self.stopping, "a gang keeps its least", gang, left)

    def _is_strict(self) -> bool:
        return self.placer_policy.startswith("strict_priority")

    def _market(self, event: ev.PriceSet) -> None:
        """No more than any of those has bid who run in the market and were not told to go."""
        running = {run.job_id for run_id, run in self.holding.items() if run_id not in self.ending | self.told}
        bids = [
            bid
            for job_id in running - self.stopping - self.terminal.keys()
            if (bid := self.admitted[job_id].spec.bid_micro)
        ]
        must(event.price_micro <= min(bids, default=event.price_micro), "a price that all who run have bid", event)

    def _owed(self, event: ev.PreemptionDecided) -> None:
        """What is taken back is guaranteed: with the job, the queue holds no more, but for what is on its way out."""
        queue = self.limits[self.admitted[event.job_id].spec.queue]
        held = sum(
            piece.compute_milli
            for run_id, run in self.holding.items()
            if self.admitted[run.job_id].spec.queue == queue.queue
            and run_id not in self.ending
            and run.job_id not in self.stopping
            and run.job_id not in self.terminal
            for piece in run.slices
        )
        needs = event.needs
        asked = needs.get("compute_milli", 0) * needs.get("devices", 0) * needs.get("replicas", 1)
        must(
            held + asked <= (queue.guaranteed_compute_milli or 0), "only what is guaranteed is taken back", event, held
        )

    def _slips_in(self, event: ev.RunPlaced) -> None:
        """Whether it takes what is kept for somebody else whose victims have not left."""
        for job_id, claim in list(self.claims.items()):
            if job_id == event.job_id or job_id in self.terminal or job_id in self.holds:
                del self.claims[job_id]
            elif event.node_id in claim.nodes and self.holding.keys() & set(claim.runs):
                one, other = self.admitted[event.job_id].spec, self.admitted[job_id].spec
                must(
                    (one.queue, one.devices, one.replicas) == (other.queue, other.devices, other.replicas),
                    "nobody slips into what is kept for another",
                    event.run_id,
                    job_id,
                )

    def _placed(self, event: ev.RunPlaced) -> None:
        must(event.run_id not in self.placed, "a run is placed once", event.run_id)
        must(event.job_id in self.admitted, "only admitted jobs are placed", event.job_id)
        must(self._has_its_turn(event.job_id), "nothing is placed before those it follows have ended", event.job_id)
        must(event.node_id not in self.avoided.get(event.job_id, ()), "a node that a job avoids gets none of it", event)
        self.placed[event.run_id] = event
        self._slips_in(event)
        if event.node_epoch != self.epochs.get(event.node_id):
            # Stored after a fencing that the placer had not seen: it holds nothing, and must never start.
            self.void.add(event.run_id)
            return
        must(event.node_id not in self.closed, "nothing is placed on a fenced node", event.run_id, event.node_id)
        self.holding[event.run_id] = event
        for piece in event.slices:
            held = self.held.setdefault(piece.device_uuid, {})
            held[event.run_id] = piece
            device = self.devices[piece.device_uuid]
            compute = sum(s.compute_milli for s in held.values())
            memory = sum(s.memory_mib for s in held.values())
            must(compute <= device.compute_milli, "compute is never over-allocated", piece.device_uuid, compute)
            must(memory <= device.memory_mib, "memory is never over-allocated", piece.device_uuid, memory)
            modes = {s.mode for s in held.values()}
            must(len(modes) == 1, "one mode a device", piece.device_uuid, modes)
            must(modes != {Mode.EXCLUSIVE} or len(held) == 1, "exclusive is alone", piece.device_uuid)

    def _free(self, run_id: RunId) -> None:
        placed = self.holding.pop(run_id, None)
        if placed is not None:
            for piece in placed.slices:
                self.held[piece.device_uuid].pop(run_id, None)

    def batch_stored(self, entries: list[Entry]) -> None:
        """One atomic batch: gangs are whole in it, and queues are within their limits after it."""
        placed = [e.event for e in entries if isinstance(e.event, ev.RunPlaced)]
        if not placed:
            return
        attempts = Counter((p.job_id, attempt_of_run(p.run_id)) for p in placed)
        for (job_id, attempt), count in attempts.items():
            spec = self.admitted[job_id].spec
            have = sum(
                run.job_id == job_id and attempt_of_run(run_id) == attempt and run_id not in self.shrunk
                for run_id, run in self.holding.items()
            )
            must(have <= spec.replicas, "no gang is larger than it may be", job_id, attempt, have)
            is_first = any(replica_of_run(p.run_id) == 0 for p in placed if p.job_id == job_id)
            least = spec.replicas_least if is_first else spec.replicas_step
            must(least <= count <= spec.replicas, "a gang is placed whole", job_id, attempt, f"{count} of {least}")
            near = {run.node_id for run_id, run in self.holding.items() if run.job_id == job_id} if have else set()
            must(not spec.topology_required or len(near) == 1, "a gang is on one node, where it must be", job_id, near)
            must((count - least) % spec.replicas_step == 0, "a gang grows by its step", job_id, attempt, count)
            # The end may be stored while the batch is on its way; but whoever knew of it must not place.
            basis = next(e.basis for e in entries if isinstance(e.event, ev.RunPlaced) and e.event.job_id == job_id)
            ended = self.ended_at.get(job_id, basis.facts + 1 if basis else 0)
            must(basis is not None and basis.facts < ended, "nothing is placed after the end is known", job_id)
            known = basis.facts if basis else 0
            must(known < self.holds.get(job_id, known + 1), "nothing is placed once its hold is known", job_id)
            compute, memory, seq = self.sizes.get(job_id, (0, 0, known + 1))
            for piece in (s for p in placed if p.job_id == job_id for s in p.slices):
                must(
                    known < seq or (piece.compute_milli == compute and piece.memory_mib >= memory),
                    "what is placed once its size is known has that size",
                    job_id,
                    piece,
                )
        used: dict[str, Counter[str]] = {}
        jobs: dict[str, set[JobId]] = {}
        for run in self.holding.values():
            for holder in self._bounded(run.job_id):
                amounts = used.setdefault(holder, Counter())
                amounts["cpu_milli"] += run.cpu_milli
                for piece in run.slices:
                    amounts["compute_milli"] += piece.compute_milli
                    amounts["memory_mib"] += piece.memory_mib
                    amounts[self.devices[piece.device_uuid].model] += piece.compute_milli
                jobs.setdefault(holder, set()).add(run.job_id)
        # Of those that get something: who held more before a limit was lowered may go on.
        basis = next(e.basis for e in entries if e.basis is not None)
        for name in sorted({holder for one in placed for holder in self._bounded(one.job_id)}):
            said = [told for seq, told in self.bounds[name] if seq <= basis.facts]
            if not said:
                continue
            told, amounts = said[-1], used[name]
            for what, most in (
                ("compute_milli", told.limit_compute_milli),
                ("memory_mib", told.limit_memory_mib),
                ("cpu_milli", told.limit_cpu_milli),
                *told.limit_model_milli.items(),
            ):
                must(most is None or amounts[what] <= most, "nobody above a limit", name, what, amounts[what])
            most = told.limit_jobs
            must(most is None or len(jobs[name]) <= most, "nobody above a limit", name, "jobs", len(jobs[name]))

    def _bounded(self, job_id: JobId) -> Iterator[str]:
        """Whose limits what the job holds counts for: its queue's, those above, and its tenant's."""
        admitted = self.admitted[job_id]
        queue: QueueId | None = admitted.spec.queue
        while queue is not None:
            yield queue
            queue = self.limits[queue].parent
        if admitted.tenant in self.policies:
            yield f"tenant:{admitted.tenant}"

    def started(self, run_id: RunId, node_id: NodeId) -> None:
        """A machine began to start the run's process."""
        self.processes[run_id] += 1
        must(self.processes[run_id] == 1, "a run starts at most once", run_id)
        must(run_id in self.placed, "nothing starts unplaced", run_id)
        must(self.placed[run_id].node_id == node_id, "a run starts where it was placed", run_id, node_id)
        must(run_id not in self.void, "a placement that a fencing overtook never starts", run_id)

    # Once faults stop

    def at_rest(self) -> None:
        """Everything that was asked has its answer and its end, and nothing is held."""
        for seq, entry in self.wishes.items():
            event = entry.event
            author = event.ANSWERED_BY if isinstance(event, ev.Wish) else None
            if author is None:
                author = (
                    MONITOR
                    if entry.subject_type.startswith(
                        ("Node", "ControlPlane", "RateCard", "Alert", "Fault", "Log", "LegalHold", "Payload", "Key")
                    )
                    else ADMISSION
                )
            must(self.answers[str(author), seq] == 1, "every wish has one answer", seq, event)
        for job_id in self.admitted:
            must(job_id in self.terminal, "every feasible job ends", job_id)
        must(not self.holds.keys() - self.terminal.keys(), "no job that lives is held at rest", self.holds)
        must(not self.holding, "nothing is held at rest", list(self.holding)[:5])
        world = self.world
        for machine in world.machines:
            running = [p.run_id for p in machine.processes.values() if p.is_running]
            must(not running, "no process outlives its job", machine.node_id, running)

    def replay(self, author: Author, core: Any) -> tuple[int, Any]:
        """Fold the streams anew and make every decision again; the number made, and the state at the end."""
        streams = self.world.bus.streams
        facts = [s.entry for s in streams[Stream.FACTS]]
        wishes = [s.entry for s in streams[Stream.WISHES]]
        state = core.initial()
        folded = {Stream.FACTS: 0, Stream.WISHES: 0}
        decisions = 0
        index = 0
        while index < len(facts):
            entry = facts[index]
            if entry.author != author or entry.basis is None:
                index += 1
                continue
            batch = [entry]
            while index + len(batch) < len(facts) and _same(facts[index + len(batch)], entry):
                batch.append(facts[index + len(batch)])
            state = _fold_to(core, state, facts, wishes, folded, entry.basis)
            recorded = [e.event for e in batch]
            if hasattr(core, "redecide"):
                again = list(core.redecide(state, entry.basis.decided_at, recorded))
            else:
                again = list(core.decide(state, entry.basis.decided_at))
            must(again == recorded, f"{author} decides the same again at fact {entry.seq}", _first(again, recorded))
            decisions += 1
            index += len(batch)
        end = Basis(facts=len(facts), wishes=len(wishes) if author != PLACER else 0, decided_at=0, policy="")
        return decisions, _fold_to(core, state, facts, wishes, folded, end)


def _same(a: Entry, b: Entry) -> bool:
    return a.author == b.author and a.basis == b.basis


def _fold_to(  # noqa: PLR0917 - the fold's own loop variables, passed along
    core: Any, state: Any, facts: list[Entry], wishes: list[Entry], folded: dict[Stream, int], basis: Basis
) -> Any:
    for entry in facts[folded[Stream.FACTS] : basis.facts]:
        state = core.evolve(state, entry)
    for entry in wishes[folded[Stream.WISHES] : basis.wishes]:
        state = core.evolve(state, entry)
    folded[Stream.FACTS] = max(folded[Stream.FACTS], basis.facts)
    folded[Stream.WISHES] = max(folded[Stream.WISHES], basis.wishes)
    return state


def _first(again: list[ev.Fact], recorded: list[Any]) -> str:
    for position, (a, b) in enumerate(zip(again, recorded, strict=False)):
        if a != b:
            return f"event {position}: again {msgspec.json.encode(a)!r}, recorded {msgspec.json.encode(b)!r}"
    return f"{len(again)} events again, {len(recorded)} recorded"


__all__ = ["Checker", "Violation", "job_of_run", "must"]
