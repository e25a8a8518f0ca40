"""What holds whatever happens: histories that hypothesis makes up, checked by a ledger of their own."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.causes import (
    DeviceHealth,
    Mode,
    OnLowered,
    Pending,
    PreemptionKind,
    QueueOrder,
    RunCause,
    ServiceClass,
    StopCause,
)
from apportion.contracts.ids import DeviceUuid, JobId, NodeId, QueueId, RunId, TenantId, agent_author, attempt_of_run
from apportion.contracts.testing import NOON, a_board, a_device, a_job, a_node, a_queue, as_fact
from apportion.placer import core
from apportion.placer.rooms import NodeRoom
from apportion.placer.state import S, State, demand_of_job

MODELS: Final = ("h100-80", "a100-40", "l4-24")
MEMORY: Final = {"h100-80": 80_000, "a100-40": 40_000, "l4-24": 24_000}
TENANTS: Final = (TenantId("acme"), TenantId("beta"))
DICE: Final = st.integers(0, 2**20)
STEPS: Final = st.builds(
    # Nodes first, or most histories would be of jobs that wait for one.
    lambda nodes, rest: [(30, dice) for dice in nodes] + rest,
    st.lists(DICE, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 99), DICE), min_size=10, max_size=60),
)


@dataclass
class NodeLedger:
    """What this test believes of one node, from the facts it made up."""

    devices: dict[DeviceUuid, ev.Device]
    cpu_milli: int
    memory_mib: int
    labels: dict[str, str]
    epoch: int = 0
    is_fenced: bool = False
    is_suspected: bool = False
    cordon: str = ""
    sick: set[DeviceUuid] = field(default_factory=set)

    @property
    def is_usable(self) -> bool:
        return not self.is_fenced and not self.is_suspected and not self.cordon


class World:
    """Everybody but the placer, and the books that it is checked against."""

    def __init__(self, config: dict[str, int | str] | None = None) -> None:
        self.state = core.initial()
        self.now = NOON
        self.seq = 0
        self.facts: list[ev.Fact] = []
        self.reservations: dict[str, ev.ReservationAdmitted] = {}
        self.nodes: dict[NodeId, NodeLedger] = {}
        self.queues: dict[QueueId, ev.QueueUpserted] = {}
        self.policies: dict[TenantId, ev.PolicyUpserted] = {}
        self.specs: dict[JobId, ev.JobAdmitted] = {}
        self.queued: dict[JobId, int] = {}
        """Waiting jobs, and since which attempt."""
        self.not_before: dict[JobId, int] = {}
        self.runs: dict[RunId, ev.RunPlaced] = {}
        """Runs that hold something."""
        self.live: dict[RunId, str] = {}
        self.held: set[JobId] = set()
        self.stopping: set[JobId] = set()
        self.ordered: set[RunId] = set()
        self.started: dict[JobId, int] = {}
        self.preempted: dict[JobId, ev.PreemptionDecided] = {}
        """By the job for which others were stopped, while it waits."""
        self.pairs: set[tuple[JobId, JobId]] = set()
        """Who was stopped for whom, ever."""
        self.preemptions: list[int] = []
        if config is not None:
            self.tell(ev.LeaseClaimed(author="placer", session="s1", core=core.POLICY, config=config), author="placer")

    def tell(self, fact: ev.Fact, *, author: str = "") -> None:
        self.seq += 1
        if isinstance(fact, ev.NodeRegistered):
            author = agent_author(fact.node_id)
        self.state = core.evolve(self.state, as_fact(fact, self.seq, author=author, at=self.now))
        self.facts.append(fact)

    def step(self, what: int, dice: int) -> None:
        """One thing that happens to a pool, picked by ``what``, its details by ``dice``."""
        # Hypothesis likes small numbers, whose upper bits are all alike; every bit of these picks something.
        dice = dice * 2_654_435_761 % 2**32 >> 4
        if what < 30:
            self.admit(dice)
        elif what < 38:
            self.register(dice)
        elif what < 55:
            self.run_goes_on(dice)
        elif what < 62:
            self.job_stops(dice)
        elif what < 72:
            self.node_changes(dice)
        elif what < 75:
            self.limit(dice)
        elif what < 76:
            self.reserve(dice)
        elif what < 79:
            self.now += (dice % 40) * S
        elif what < 86:
            self.job_changes(dice)
        else:
            self.decide()

    def admit(self, dice: int) -> None:
        name = f"job-{len(self.specs)}"
        tenant = TENANTS[dice % 2]
        kind = (dice >> 1) % 6
        spec: dict[str, Any] = {
            "queue": QueueId(("main", "side")[(dice >> 4) % 2]),
            "compute_milli": (100, 250, 500, 1000)[(dice >> 5) % 4],
            "memory_mib": (0, 8_000, 20_000, 39_000)[(dice >> 7) % 4],
            "service_class": list(ServiceClass)[(dice >> 9) % 4],
            "priority": 500 + (dice >> 11) % 2,
            "cpu_milli": (0, 6000)[(dice >> 12) % 2],
            "not_before_at": (0, 0, 0, self.now + 20 * S)[(dice >> 13) % 4],
            "preemptible": (dice >> 18) % 4 > 0,
            "min_runtime_s": (0, 0, 0, 30)[(dice >> 20) % 4],
            "time_limit_s": (0, 20)[(dice >> 19) % 2],
        }
        if spec["service_class"] is ServiceClass.SPOT:
            spec["bid_micro"] = (0, 10, 20)[(dice >> 4) % 3]
        match kind:
            case 0:
                spec |= {"replicas": 1 + (dice >> 15) % 3, "distinct": bool((dice >> 17) % 2)}
                spec |= ({}, {"topology_key": "rack", "topology_required": bool((dice >> 22) % 2)})[(dice >> 21) % 2]
                if (dice >> 18) % 2:
                    least = 1 + (dice >> 19) % 2
                    spec |= {"replicas": least + 2, "replicas_min": least, "replicas_step": 1 + (dice >> 20) % 2}
            case 1:
                spec |= {"devices": 2, "compute_milli": 1000}
            case 2:
                spec |= {"models": ("a100-40", "h100-80")}
            case 3:
                spec |= {"mode": (Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE, None)[(dice >> 15) % 4]}
            case 4:
                spec |= {"devices": (dice >> 15) % 2}
                spec |= ({}, {"required": {"rack": "a"}}, {"avoid_nodes": ("node-0",)}, {"preferred": {"rack": "b"}})[
                    (dice >> 16) % 4
                ]
                spec |= ({}, {"encoders": 40})[spec["devices"] and (dice >> 18) % 2]
            case 5:
                spec |= (
                    {"modes": (Mode.MIG, Mode.EXCLUSIVE)},
                    {"modes": (Mode.MPS, Mode.MIG, Mode.TIMESLICE)},
                    {"mode": Mode.MIG},
                    {"mode": Mode.MIG, "mig_profile": ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb")[(dice >> 17) % 4]},
                )[(dice >> 15) % 4]
            case _:
                pass
        admitted = a_job(name, tenant=tenant, **spec)
        self.specs[admitted.job_id] = admitted
        self.queued[admitted.job_id] = 1
        self.not_before[admitted.job_id] = admitted.spec.not_before_at
        self.tell(admitted)

    def register(self, dice: int) -> None:
        number = dice % 4
        node_id = NodeId(f"node-{number}")
        ledger = self.nodes.get(node_id)
        if ledger is None:
            model = MODELS[(dice >> 2) % 3]
            modes = (
                (Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE),
                (Mode.EXCLUSIVE, Mode.TIMESLICE),
                (Mode.EXCLUSIVE,),
            )[(dice >> 4) % 3]
            devices = [
                a_device(i, node=node_id, model=model, memory_mib=MEMORY[model], modes=modes, encoders=100)
                for i in range(1 + (dice >> 6) % 3)
            ]
            if (dice >> 9) % 3 == 0:
                foreign = (ev.MigInstance(uuid="MIG-1", profile="1g.10gb", start=3, size=1),) * ((dice >> 11) % 2)
                devices = [
                    msgspec.structs.replace(device, memory_mib=80_984, modes=(Mode.MIG,), mig=a_board(foreign=foreign))
                    for device in devices
                ]
            cpu = (8000, 64_000)[(dice >> 8) % 2]
            labels = {"rack": "ab"[number % 2]}
            ledger = self.nodes[node_id] = NodeLedger({device.uuid: device for device in devices}, cpu, 256_000, labels)
        ledger.is_fenced = ledger.is_suspected = False
        ledger.sick.clear()
        self.tell(
            msgspec.structs.replace(
                a_node(node_id),
                epoch=ledger.epoch,
                devices=tuple(ledger.devices.values()),
                cpu_milli=ledger.cpu_milli,
                memory_mib=ledger.memory_mib,
                labels=ledger.labels,
            )
        )

    def run_goes_on(self, dice: int) -> None:
        if not self.runs:
            return
        run_id = sorted(self.runs)[dice % len(self.runs)]
        run = self.runs[run_id]
        node_id = run.node_id
        if self.live.get(run_id) == "placed" and dice % 3:
            self.live[run_id] = "started"
            self.started.setdefault(run.job_id, self.now)
            self.tell(ev.RunStarted(run_id=run_id, node_id=node_id, pid=1, started_at=self.now))
            return
        if run_id in self.live:
            del self.live[run_id]
            self.tell(ev.RunFinished(run_id=run_id, node_id=node_id, cause=RunCause.SUCCESS, finished_at=self.now))
        if dice % 2:
            del self.runs[run_id]
            self.tell(ev.RunReleased(run_id=run_id, node_id=node_id, released_at=self.now))
            self.settle(run.job_id, dice)

    def settle(self, job_id: JobId, dice: int) -> None:
        """Admission's part, once nothing of the job holds anything."""
        if job_id in self.queued or any(run.job_id == job_id for run in self.runs.values()):
            return
        self.stopping.discard(job_id)
        if dice % 3:
            self.tell(ev.JobSucceeded(job_id=job_id, attempts=1, wait_ms=0, run_ms=0))
            return
        placed = [fact for fact in self.facts if isinstance(fact, ev.RunPlaced) and fact.job_id == job_id]
        attempt = max(attempt_of_run(fact.run_id) for fact in placed) + 1
        self.queued[job_id] = attempt
        self.started.pop(job_id, None)
        self.not_before[job_id] = self.now + 5 * S
        self.tell(
            ev.JobRequeued(job_id=job_id, attempt=attempt, cause=RunCause.NODE_LOST, not_before_at=self.now + 5 * S)
        )

    def job_stops(self, dice: int) -> None:
        jobs = sorted({run.job_id for run in self.runs.values()} - self.stopping)
        if jobs and dice % 2:
            job_id = jobs[dice % len(jobs)]
            self.stopping.add(job_id)
            self.tell(ev.JobStopping(job_id=job_id, attempt=1, cause=StopCause.CANCELLED, actor="user:eva"))
        elif self.queued:
            job_id = sorted(self.queued)[dice % len(self.queued)]
            del self.queued[job_id]
            self.tell(ev.JobCancelled(job_id=job_id, actor="user:eva"))

    def job_changes(self, dice: int) -> None:
        """Somebody holds, releases, reprioritises or resizes a job that waits or runs."""
        jobs = sorted({*self.queued, *(run.job_id for run in self.runs.values())})
        if not jobs:
            return
        job_id = jobs[dice % len(jobs)]
        admitted = self.specs[job_id]
        spec = admitted.spec
        match (dice >> 4) % 6:
            case 0 | 1 | 2 if job_id not in self.held:
                self.held.add(job_id)
                self.tell(ev.JobHeld(job_id=job_id, actor="user:eva", answers=1))
            case 0 | 1 | 2 | 3:
                self.held.discard(job_id)
                self.tell(ev.JobReleased(job_id=job_id, actor="user:eva", answers=1))
            case 4:
                after = msgspec.structs.replace(spec, priority=499 + (dice >> 8) % 3)
                self.specs[job_id] = msgspec.structs.replace(admitted, spec=after)
                self.tell(
                    ev.JobReprioritized(
                        job_id=job_id, before=spec.priority, priority=after.priority, actor="user:eva", answers=1
                    )
                )
            case 5 if spec.devices == 1 and spec.mode is not Mode.EXCLUSIVE and not spec.mig_profile:
                after = msgspec.structs.replace(
                    spec, compute_milli=(100, 400, 900)[(dice >> 8) % 3], memory_mib=(5_000, 30_000)[(dice >> 10) % 2]
                )
                self.specs[job_id] = msgspec.structs.replace(admitted, spec=after)
                self.tell(
                    ev.JobResized(
                        job_id=job_id,
                        compute_milli=after.compute_milli,
                        memory_mib=after.memory_mib,
                        compute_milli_before=spec.compute_milli,
                        memory_mib_before=spec.memory_mib,
                        actor="user:eva",
                        answers=1,
                    )
                )
            case _:
                pass

    def node_changes(self, dice: int) -> None:
        if not self.nodes:
            return
        node_id = sorted(self.nodes)[dice % len(self.nodes)]
        node = self.nodes[node_id]
        match (dice >> 2) % 7:
            case 0:
                node.cordon = "cordoned"
                self.tell(ev.NodeCordoned(node_id=node_id, actor="op", reason="r"))
            case 1:
                node.cordon = "draining"
                self.tell(
                    ev.NodeDraining(node_id=node_id, actor="op", reason="r", deadline_at=self.now + (dice % 30) * S)
                )
            case 2:
                node.cordon = ""
                self.tell(ev.NodeUncordoned(node_id=node_id, actor="op", reason="r"))
            case 3 if not node.is_fenced:
                node.is_suspected = True
                self.tell(ev.NodeSuspected(node_id=node_id, epoch=node.epoch, silent_ms=1, lease_ms=2))
            case 4 if not node.is_fenced:
                node.is_suspected = False
                self.tell(ev.NodeTrusted(node_id=node_id, epoch=node.epoch, silent_ms=1))
            case 5:
                node.epoch += 1
                node.is_fenced = True
                lost = [run_id for run_id, run in self.runs.items() if run.node_id == node_id]
                self.tell(ev.NodeFenced(node_id=node_id, epoch=node.epoch))
                jobs = sorted({self.runs[run_id].job_id for run_id in lost})
                for run_id in lost:
                    del self.runs[run_id]
                    self.live.pop(run_id, None)
                for job_id in jobs:
                    self.settle(job_id, dice)
            case 6:
                uuid = sorted(node.devices)[(dice >> 5) % len(node.devices)]
                after = DeviceHealth.HEALTHY if uuid in node.sick else DeviceHealth.DEGRADED
                node.sick ^= {uuid}
                self.tell(
                    ev.DeviceHealthChanged(
                        node_id=node_id, device_uuid=uuid, before=DeviceHealth.HEALTHY, after=after, code="xid-63"
                    )
                )
            case _:
                pass

    def reserve(self, dice: int) -> None:
        name = f"r{dice % 3}"
        if name in self.state.pool.reservations:
            self.tell(ev.ReservationCancelled(reservation=name, answers=1, actor="op"))
            return
        start_at = self.now + ((dice >> 2) % 3) * 60 * S
        self.reservations[name] = ev.ReservationAdmitted(
            reservation=name,
            for_tenant=TENANTS[(dice >> 4) % 2],
            start_at=start_at,
            end_at=start_at + (1 + (dice >> 5) % 3) * 30 * S,
            nodes=1 + (dice >> 7) % 2,
            devices=(dice >> 8) % 3,
            answers=1,
            actor="op",
        )
        self.tell(self.reservations[name])

    def limit(self, dice: int) -> None:
        on_lowered = tuple(OnLowered)[(dice >> 20) % 2]
        if (dice >> 21) % 4 == 0:
            policy = ev.PolicyUpserted(
                for_tenant=TENANTS[dice % 2],
                limit_compute_milli=(None, 1000, 2000)[(dice >> 2) % 3],
                limit_memory_mib=(None, 60_000)[(dice >> 4) % 2],
                limit_jobs=(None, 2, 5)[(dice >> 6) % 3],
                limit_model_milli=({}, {"h100-80": 1500})[(dice >> 9) % 2],
                on_lowered=on_lowered,
                answers=0,
                actor="operator",
            )
            self.policies[TENANTS[dice % 2]] = policy
            self.tell(policy)
            return
        name = ("main", "side", "team")[dice % 3]
        is_below = name != "team" and QueueId("team") in self.queues and (dice >> 10) % 3
        queue = a_queue(
            name,
            tenants=TENANTS,
            parent=QueueId("team") if is_below else None,
            limit_compute_milli=(None, 1000, 3000)[(dice >> 2) % 3],
            limit_memory_mib=(None, 60_000, 100_000)[(dice >> 4) % 3],
            limit_jobs=(None, 2, 5)[(dice >> 6) % 3],
            limit_cpu_milli=(None, 20_000)[(dice >> 8) % 2],
            limit_model_milli=({}, {"h100-80": 1500})[(dice >> 9) % 2],
            guaranteed_compute_milli=(None, 1000)[(dice >> 12) % 2],
            weight=1 + (dice >> 13) % 2,
            weights=({}, {"memory_mib": 3, "h100-80": 2})[(dice >> 19) % 2],
            on_lowered=on_lowered,
            order=(None, *QueueOrder)[(dice >> 14) % 5],
            is_fair=(dice >> 17) % 2 == 0,
            is_cordoned=(dice >> 18) % 8 == 0,
        )
        if queue.queue not in self.queues and self.runs:
            return  # admission lets nobody into a queue that it never announced
        self.queues[queue.queue] = queue
        self.tell(queue)

    def decide(self) -> None:
        """One decision: checked, folded, checked again."""
        facts = core.decide(self.state, self.now)
        assert facts == core.decided(self.state, self.now, is_memo_used=False), "the memo changes what is decided"
        again = core.restore(core.snapshot(self.state))
        assert facts == core.decide(again, self.now), "a restart changes what is decided"
        gangs: dict[JobId, int] = defaultdict(int)
        for fact in facts:
            if isinstance(fact, ev.RunPlaced):
                self.check_placement(fact)
                gangs[fact.job_id] += 1
            elif isinstance(fact, ev.RunStopOrdered):
                self.check_stop(fact)
            elif isinstance(fact, ev.PreemptionDecided):
                self.check_preemption(fact)
            elif isinstance(fact, ev.GangResized):
                job = self.state.pool.jobs[fact.job_id]
                is_growth = not fact.for_job
                assert len(job.members()) == fact.after
                assert fact.replicas_min <= fact.after <= fact.replicas_max
                assert (fact.after > fact.before) is is_growth
                assert abs(fact.after - fact.before) == len(fact.runs)
            elif isinstance(fact, ev.NodesReserved):
                assert fact.job_id in self.specs or self.reservations[fact.reservation].end_at > 0
            elif isinstance(fact, ev.PriceSet):
                bids = [bid for bid, _ in self.state.bidders]
                assert fact.price_micro <= min(bids, default=fact.price_micro), "nobody pays more than it bid"
            else:
                assert isinstance(fact, ev.JobPendingReasonChanged)
                assert fact.job_id in self.queued
            self.tell(fact, author="placer")
        for job_id, count in gangs.items():
            spec = self.specs[job_id].spec
            starts = any(
                isinstance(fact, ev.RunPlaced) and fact.job_id == job_id and "/0/" in fact.run_id for fact in facts
            )
            assert count >= (spec.replicas_least if starts else 1), "a gang starts whole or not at all"
            runs = self.state.pool.jobs[job_id].members()
            racks = {self.nodes[run.node_id].labels["rack"] for run in runs}
            assert len(racks) == 1 or not spec.topology_required, "all of a gang in one rack, where it must be"
            members = len(runs)
            assert spec.replicas_least <= members <= spec.replicas
            assert (members - spec.replicas_least) % spec.replicas_step == 0
        for run_id in self.live:
            if self.must_stop(run_id):
                assert run_id in self.ordered, "a live run that must stop was not told"
        for job_id in self.queued:
            pending = self.state.pool.jobs[job_id].pending
            assert pending is not Pending.PENDING_EVALUATION, "a wait without a reason"
            assert (pending is Pending.HELD) == (job_id in self.held), "held is what holds a held job"
        assert core.decide(self.state, self.now) == [], "a decision that is made again says nothing"

    def must_stop(self, run_id: RunId) -> bool:
        run = self.runs[run_id]
        return run.job_id in self.stopping or self.nodes[run.node_id].cordon == "draining"

    def check_stop(self, fact: ev.RunStopOrdered) -> None:
        assert fact.run_id in self.live
        assert fact.run_id not in self.ordered, "each run is told once"
        if fact.cause is StopCause.PREEMPTED and "holds" in fact.reason:
            self.check_taken_back(self.runs[fact.run_id].job_id)
        elif fact.cause in {StopCause.PREEMPTED, StopCause.SHRUNK}:
            assert any(fact.run_id in decided.runs for decided in self.preempted.values())
        else:
            assert self.must_stop(fact.run_id)
        assert 0 <= fact.grace_s <= self.specs[self.runs[fact.run_id].job_id].spec.grace_s
        self.ordered.add(fact.run_id)

    def check_taken_back(self, job_id: JobId) -> None:
        """Only of somebody who holds more than a limit that takes back what is beyond; and only whoever agreed."""
        assert self.specs[job_id].spec.preemptible
        spec, tenant = self.specs[job_id].spec, self.specs[job_id].tenant
        lineage = [spec.queue] + [q.parent for q in self.queues.values() if q.queue == spec.queue and q.parent]
        found: list[tuple[ev.QueueUpserted | ev.PolicyUpserted, list[ev.RunPlaced]]] = []
        for queue in (self.queues[name] for name in lineage if name in self.queues):
            names = {queue.queue, *(each.queue for each in self.queues.values() if each.parent == queue.queue)}
            found.append((queue, [run for run in self.runs.values() if self.specs[run.job_id].spec.queue in names]))
        if tenant in self.policies:
            found.append((self.policies[tenant], [run for run in self.runs.values() if run.tenant == tenant]))
        assert any(told.on_lowered is OnLowered.RECLAIM and self.excess(told, mine) for told, mine in found)

    def excess(self, told: ev.QueueUpserted | ev.PolicyUpserted, mine: list[ev.RunPlaced]) -> bool:
        limits = self.limits_of(told)
        is_over = any(limit is not None and sum(map(amount, mine)) > limit for limit, amount in limits.values())
        return is_over or (told.limit_jobs is not None and len({run.job_id for run in mine}) > told.limit_jobs)

    def check_preemption(self, fact: ev.PreemptionDecided) -> None:
        """Only for a class that comes after, only whoever agreed and had its time, whole jobs, few, and never back."""
        assert fact.job_id in self.queued
        assert fact.job_id not in self.held
        before = self.preempted.get(fact.job_id)
        assert before is None or not self.runs.keys() & set(before.runs), "its victims have not left yet"
        self.preempted[fact.job_id] = fact
        if fact.kind is PreemptionKind.SHRINK:
            assert all(self.specs[victim].spec.replicas_min for victim in fact.victims)
            return
        classes = list(ServiceClass)
        mine = classes.index(self.specs[fact.job_id].spec.service_class)
        for victim in fact.victims:
            spec = self.specs[victim].spec
            assert spec.preemptible
            if fact.kind is PreemptionKind.RECLAIM:
                assert spec.queue != self.specs[fact.job_id].spec.queue
            elif fact.kind is PreemptionKind.MARKET:
                assert classes.index(spec.service_class) == mine
                assert 0 <= spec.bid_micro < self.specs[fact.job_id].spec.bid_micro
            elif classes.index(spec.service_class) == mine:
                assert spec.priority < self.specs[fact.job_id].spec.priority
                continue  # who is strict may be told another priority meanwhile
            else:
                assert classes.index(spec.service_class) > mine
            assert spec.min_runtime_s == 0 or self.started.get(victim, 0) + spec.min_runtime_s * S <= self.now
            if fact.kind is not PreemptionKind.RECLAIM:
                assert (victim, fact.job_id) not in self.pairs, "whoever was stopped for it never has it stopped"
                self.pairs.add((fact.job_id, victim))
            runs = {run_id for run_id, run in self.runs.items() if run.job_id == victim}
            assert runs <= self.live.keys() & set(fact.runs), "a gang is stopped whole"
        self.preemptions += [self.now] * len(fact.victims)
        settings = self.state.settings
        assert 0 < len(fact.victims) <= settings.preempt_victims_max
        assert sum(at > self.now - 60 * S for at in self.preemptions) <= settings.preempt_per_minute

    def check_placement(self, placed: ev.RunPlaced) -> None:
        admitted = self.specs[placed.job_id]
        spec = admitted.spec
        assert placed.run_id not in self.runs
        assert self.not_before[placed.job_id] <= self.now
        assert placed.job_id not in self.held, "a held job is not placed"
        if placed.run_id.split("/")[2] == "0":
            assert placed.run_id.endswith(f"/{self.queued.pop(placed.job_id)}")
        assert placed.candidates[0].node_id == placed.node_id
        assert all(sum(each.parts.values()) == each.score for each in placed.candidates)
        assert placed.candidates[0].score == max(each.score for each in placed.candidates) or self.is_limited(spec)
        self.preempted.pop(placed.job_id, None)
        for job_id, decided in self.preempted.items():
            if job_id in self.queued and job_id not in self.held and placed.node_id in decided.nodes:
                assert not self.runs.keys() & set(decided.runs) or self.is_alike(placed.job_id, job_id), "slipped in"
        node = self.nodes[placed.node_id]
        for view in self.state.pool.reservations.values():
            if placed.node_id in view.nodes and view.asked.end_at > self.now and view.asked.for_tenant != placed.tenant:
                assert spec.time_limit_s, "nobody without a limit is placed on what is reserved for another"
                ends_at = self.now + (spec.time_limit_s + spec.grace_s) * S
                assert ends_at <= view.asked.start_at, "who is placed there has left when it begins"
        assert node.is_usable
        assert placed.node_id not in spec.avoid_nodes
        assert all(node.labels[name] == value for name, value in spec.required.items())
        assert placed.node_epoch == node.epoch
        self.runs[placed.run_id] = placed
        self.live[placed.run_id] = "placed"
        here = [run for run in self.runs.values() if run.node_id == placed.node_id]
        assert sum(run.cpu_milli for run in here) <= node.cpu_milli
        assert sum(run.host_memory_mib for run in here) <= node.memory_mib
        assert len({piece.device_uuid for piece in placed.slices}) == len(placed.slices) == spec.devices
        for piece in placed.slices:
            device = node.devices[piece.device_uuid]
            assert piece.device_uuid not in node.sick
            assert not spec.models or device.model in spec.models
            assert piece.mode in device.modes
            assert spec.mode in {None, piece.mode}
            assert not spec.modes or piece.mode in spec.modes
            if not spec.mig_profile:
                assert piece.compute_milli >= spec.compute_milli
                assert piece.memory_mib >= (spec.memory_mib or device.memory_mib * 97 // 100)
            self.check_partition(spec, piece, device, here)
            beside = [other for run in here for other in run.slices if other.device_uuid == piece.device_uuid]
            own = [run for run in here if run.job_id == placed.job_id]
            assert not spec.distinct or sum(run.slices[0].device_uuid == piece.device_uuid for run in own) == 1
            assert sum(other.compute_milli for other in beside) <= device.compute_milli
            assert sum(other.encoders for other in beside) <= device.encoders
            assert sum(other.memory_mib for other in beside) <= device.memory_mib
            assert {other.mode for other in beside} == {piece.mode}
            if piece.mode is Mode.EXCLUSIVE or spec.devices > 1:
                assert len(beside) == 1
            if piece.mode is Mode.MPS and self.state.settings.mps_trust == "tenant":
                tenants = {run.tenant for run in here for other in run.slices if other.device_uuid == piece.device_uuid}
                assert tenants == {placed.tenant}
        self.check_limits(spec.queue)
        if (policy := self.policies.get(placed.tenant)) is not None:
            self.check_limits_of(policy, [run for run in self.runs.values() if run.tenant == placed.tenant])

    def check_partition(self, spec: ev.JobSpec, piece: ev.Slice, device: ev.Device, here: list[ev.RunPlaced]) -> None:
        """A MIG instance lies where its profile may, and over nothing else."""
        assert (piece.mode is Mode.MIG) == (device.mig is not None) == (piece.mig is not None)
        if device.mig is None or piece.mig is None:
            return
        profile = next(each for each in device.mig.profiles if each.name == piece.mig.profile)
        assert spec.mig_profile in {"", profile.name}
        assert piece.mig.start in profile.starts
        assert piece.mig.size == profile.size
        spans = [(each.start, each.size) for each in device.mig.foreign]
        spans += [
            (other.mig.start, other.mig.size)
            for run in here
            for other in run.slices
            if other.device_uuid == piece.device_uuid and other.mig is not None
        ]
        taken = [unit for start, size in spans for unit in range(start, start + size)]
        assert len(taken) == len(set(taken)), "instances never overlap"

    def is_alike(self, one: JobId, other: JobId) -> bool:
        specs = self.state.pool.jobs[one], self.state.pool.jobs[other]
        demands = [(job.spec.queue, demand_of_job(self.state, job)) for job in specs]
        return demands[0] == demands[1]

    def is_limited(self, spec: ev.JobSpec) -> bool:
        if spec.topology_key or spec.replicas_min:
            return True
        return spec.queue in self.queues or self.state.settings.reserve_after_s >= 0

    def check_limits(self, name: QueueId) -> None:
        above: QueueId | None = name
        while above is not None and (queue := self.queues.get(above)) is not None:
            names = {queue.queue, *(each.queue for each in self.queues.values() if each.parent == queue.queue)}
            self.check_limits_of(
                queue, [run for run in self.runs.values() if self.specs[run.job_id].spec.queue in names]
            )
            assert not queue.is_cordoned
            above = queue.parent

    def check_limits_of(self, told: ev.QueueUpserted | ev.PolicyUpserted, mine: list[ev.RunPlaced]) -> None:
        """Whatever the last placement adds to is within its limit; the rest may be older than the limit."""
        last = mine[-1]
        assert last is list(self.runs.values())[-1]
        for what, (limit, amount) in self.limits_of(told).items():
            if amount(last):
                assert limit is None or sum(map(amount, mine)) <= limit, what
        assert told.limit_jobs is None or len({run.job_id for run in mine}) <= told.limit_jobs

    def limits_of(
        self, told: ev.QueueUpserted | ev.PolicyUpserted
    ) -> dict[str, tuple[int | None, Callable[[ev.RunPlaced], int]]]:
        models = {device.uuid: device.model for node in self.nodes.values() for device in node.devices.values()}
        return {
            "compute": (told.limit_compute_milli, lambda run: sum(p.compute_milli for p in run.slices)),
            "memory": (told.limit_memory_mib, lambda run: sum(p.memory_mib for p in run.slices)),
            "cpu": (told.limit_cpu_milli, lambda run: run.cpu_milli),
            "h100-80": (
                told.limit_model_milli.get("h100-80"),
                lambda run: sum(p.compute_milli for p in run.slices if models[p.device_uuid] == "h100-80"),
            ),
        }


CONFIGS: Final = st.sampled_from(
    [
        None,
        {"mps_trust": "pool"},
        {"reserve_after_s": -1},
        {"reserve_after_s": 0},
        {"reserve_after_s": 10},
        {"preempt_victims_max": 0},
        {"preempt_victims_max": 2, "preempt_per_minute": 3},
        {"policy": "headroom"},
        {"policy": "fragmentation_gradient"},
        {"policy": "pack", "policy_by_queue": "side=headroom"},
        {"policy": "bidding"},
        {"policy": "strict_priority:pack", "policy_by_queue": "side=bidding:spread"},
    ]
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, config=CONFIGS)
def test_whatever_happens_nothing_is_oversold(
    steps: list[tuple[int, int]], config: dict[str, int | str] | None
) -> None:
    """Devices, hosts, modes, limits, gangs, stops, silence, restart and memo: all of it, after every decision."""
    world = World(config)
    for what, dice in steps:
        world.step(what, dice)
    world.decide()


def plain(room: NodeRoom) -> tuple[Any, ...]:
    """The room by its contents: a kind is one object only within one state."""
    kind = room.kind
    devices = tuple(msgspec.structs.replace(device, kind=None) for device in room.devices)
    kinds = [[getattr(device, name) for name in device.__slots__ if name != "board"] for device in kind.devices]
    return (
        *msgspec.structs.astuple(
            msgspec.structs.replace(room, kind=None, like=None, devices_like=None, devices=devices)
        ),
        kind.cpu_milli,
        kinds,
    )


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_indexes_say_the_same_after_a_restart(steps: list[tuple[int, int]]) -> None:
    """What is derived as facts come equals what is derived from the whole."""
    world = World()
    for what, dice in steps:
        world.step(what, dice)
    for queue_id, queue in world.state.pool.queues.items():
        names = {queue_id, *(each.queue for each in world.queues.values() if each.parent == queue_id)}
        mine = [run for run in world.runs.values() if world.specs[run.job_id].spec.queue in names]
        assert queue.used.get("compute_milli", 0) == sum(piece.compute_milli for run in mine for piece in run.slices)
        assert queue.used.get("jobs", 0) == len({run.job_id for run in mine})
    again = core.restore(core.snapshot(world.state))
    assert core.snapshot(again) == core.snapshot(world.state)
    for name in State.__slots__:
        if name not in {
            "kept",
            "changed",
            "changes",
            "ends_changed",
            "kinds",
            "memo",
            "device_fits",
            "boards",
            "outlook",
            "market",
        }:
            found, expected = getattr(world.state, name), getattr(again, name)
            if name == "queue_holders":
                found = {queue: keys for queue, keys in found.items() if keys}
            if name == "rooms":
                found, expected = ({at: plain(room) for at, room in rooms.items()} for rooms in (found, expected))
            assert found == expected, name


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, order=st.randoms(use_true_random=False))
def test_the_order_of_unrelated_facts_does_not_matter(steps: list[tuple[int, int]], order: Any) -> None:
    """Nodes register, are cordoned and freed in any order: who holds what is the same, and so is what follows."""
    world = World()
    for what, dice in steps:
        world.step(what, dice)
    jobs = [fact for fact in world.facts if isinstance(fact, ev.JobAdmitted)]
    by_node: dict[NodeId, list[ev.Fact]] = defaultdict(list)
    for fact in world.facts:
        if isinstance(fact, ev.NodeRegistered | ev.NodeCordoned | ev.NodeUncordoned | ev.DeviceHealthChanged):
            by_node[fact.node_id].append(fact)

    def told(turns: list[NodeId]) -> list[ev.Fact]:
        other = World()
        for job in jobs:
            other.tell(job)
        queues = {node_id: iter(facts) for node_id, facts in by_node.items()}
        for node_id in turns:
            other.tell(next(queues[node_id]))
        return core.decide(other.state, world.now)

    turns = [node_id for node_id, facts in by_node.items() for _ in facts]
    expected = told(turns)
    order.shuffle(turns)
    assert told(turns) == expected


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 4),
    large=st.sampled_from(
        [
            {"devices": 2, "compute_milli": 1000, "memory_mib": 0},
            {"compute_milli": 1000, "memory_mib": 0},
            {"compute_milli": 900, "memory_mib": 60_000},
            {"replicas": 2, "compute_milli": 1000, "memory_mib": 0},
        ]
    ),
    lengths=st.lists(st.integers(1, 8), min_size=5, max_size=20),
)
def test_the_wait_of_the_first_is_bounded_by_the_runs_it_waits_for(
    nodes: int, large: dict[str, Any], lengths: list[int]
) -> None:
    """Small jobs come faster than they end, for ever; the large one that came first still gets its turn."""
    world = World({"reserve_after_s": 5})
    for number in range(nodes):
        world.tell(a_node(f"node-{number}", devices=2))
    length = itertools.cycle(lengths)
    ends: dict[RunId, int] = {}
    names = itertools.count()
    placed_at = None
    # Six steps of small jobs fill the pool; the large one comes; then at most: its patience, and each node's runs once.
    bound = 6 + 5 + 9 * (nodes + 1)
    for tick in range(bound + 1):
        world.now = NOON + tick * S
        for run_id in sorted(run_id for run_id, end in ends.items() if end <= tick):
            del ends[run_id]
            node_id = world.runs.pop(run_id).node_id
            world.tell(ev.RunReleased(run_id=run_id, node_id=node_id, released_at=world.now))
        if tick == 6:
            world.tell(a_job("large", **large))
        for _ in range(4 * nodes):
            world.tell(a_job(f"small-{next(names)}", compute_milli=250, memory_mib=20_000))
        for fact in core.decide(world.state, world.now):
            world.tell(fact, author="placer")
            if isinstance(fact, ev.RunPlaced):
                world.runs[fact.run_id] = fact
                ends[fact.run_id] = tick + next(length)
                if fact.job_id == "acme/large":
                    placed_at = tick
        if placed_at is not None:
            break
    assert placed_at is not None, f"still waiting after {bound} steps"
