"""The service's own rules on the openb fleet, where nothing is published: memory apart from compute, jobs that leave.

The whole core decides: each task is admitted, decided and folded, and one that fits nowhere is cancelled at once. In
two dimensions a share of a device asks for the compute of its task and for the memory of another shared task, drawn by
the seed; with churn, arrivals are Poisson, each task stays for an exponential time, and offered load is held. What a
policy knows of the workload is what it has seen of it.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, WorkloadKind
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import ADMISSION, PLACER, Author, DeviceUuid, JobId, NodeId, QueueId, RunId, TenantId
from apportion.contracts.ids import agent_author as author_of
from apportion.placer import core
from apportion.placer.bench_openb import LOADS_PERCENT, Trace, arrivals, run_seed
from apportion.placer.packing.demand import WHOLE_DEVICE_MILLI, Shape

POLICIES: Final = {
    "best-fit": "best_fit",
    "fragmentation-gradient": "fragmentation_gradient",
    "headroom": "headroom",
    "pack": "pack",
}
"""The names of the benchmark, and the service's."""
DEVICE_MIB: Final = 40_000
"""Memory of every device: a thousandth of a device's memory is a whole number of MiB."""
WARM_UP: Final = 3.0
MEASURED: Final = 3.0
"""In mean stays of a task."""
NODES_EVERY: Final = 4
"""With churn and in two dimensions so many nodes are one: the figures of a quarter of the fleet take a minute."""
_MEMORY_STEP_MILLI: Final = 50
_NOON: Final = 1_788_264_000_000_000_000
_TENANT: Final = TenantId("acme")


class Task(NamedTuple):
    """A task, and what it asks of a device's memory, in thousandths."""

    shape: Shape
    memory_milli: int

    @property
    def is_share(self) -> bool:
        """Whether it shares its device."""
        return self.shape.devices == 1 and self.shape.device_milli < WHOLE_DEVICE_MILLI


class Outcome(NamedTuple):
    """What one run measured; shares are in % of the pool's devices."""

    compute_pct: dict[str, float]
    memory_pct: dict[str, float]
    served_pct: float
    """Of the compute-time that was asked, what was placed; arrivals without churn: what is allocated of what came."""
    decision_ns: list[int]


def registered(trace: Trace, seed: int) -> list[ev.NodeRegistered]:
    """The fleet's nodes, named so that the order that breaks ties is another for each seed."""
    nodes = list(trace.nodes)
    random.Random(seed + 1_000_003).shuffle(nodes)  # noqa: S311 — the order that breaks ties
    return [
        ev.NodeRegistered(
            node_id=NodeId(f"n{at:05}"),
            session="s",
            boot_id="b",
            epoch=0,
            devices=tuple(
                ev.Device(
                    uuid=DeviceUuid(f"GPU-{at:05}-{index}"),
                    index=index,
                    model=node.model,
                    memory_mib=DEVICE_MIB,
                    modes=(Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE),
                )
                for index in range(node.devices)
            ),
            cpu_milli=node.cpu_milli,
            memory_mib=node.memory_mib,
            simulated=True,
        )
        for at, node in enumerate(nodes)
    ]


class _Pool:
    """A placer's state, told one fact after the other."""

    def __init__(self, trace: Trace, policy: str, seed: int) -> None:
        self.state = core.initial()
        self._seq = 0
        self.decision_ns: list[int] = []
        config: dict[str, int | str] = {"policy": POLICIES[policy], "reserve_after_s": -1}
        self.tell(ev.LeaseClaimed(author=PLACER, session="s", core=core.POLICY, config=config), PLACER)
        for node in registered(trace, seed):
            self.tell(node, author_of(node.node_id))

    def tell(self, fact: ev.Fact, author: Author = ADMISSION) -> None:
        """One more fact."""
        self._seq += 1
        entry = Entry(
            stream=Stream.FACTS, seq=self._seq, recorded_at=_NOON, event=fact, event_id=f"f{self._seq}", author=author
        )
        self.state = core.evolve(self.state, entry)

    def decide(self) -> list[ev.Fact]:
        """One decision, timed and folded."""
        began_at = time.thread_time_ns()
        facts = core.decide(self.state, _NOON)
        self.decision_ns.append(time.thread_time_ns() - began_at)
        for fact in facts:
            self.tell(fact, PLACER)
        return facts

    def offer(self, number: int, task: Task) -> ev.RunPlaced | None:
        """The task's placement; None where it fits nowhere, and then it is gone."""
        job = _admitted(number, task)
        self.tell(job)
        for fact in self.decide():
            if isinstance(fact, ev.RunPlaced):
                return fact
        self.tell(ev.JobCancelled(job_id=job.job_id, actor="user:bench"))
        return None

    def leave(self, run: RunId, node: NodeId, job: JobId) -> None:
        """The task is done."""
        self.tell(ev.RunReleased(run_id=run, node_id=node, released_at=_NOON), author_of(node))
        self.tell(ev.JobSucceeded(job_id=job, attempts=1, wait_ms=0, run_ms=0))


def _admitted(number: int, task: Task) -> ev.JobAdmitted:
    shape = task.shape
    spec = ev.JobSpec(
        queue=QueueId("main"),
        kind=WorkloadKind.BATCH,
        command=("/bin/true",),
        devices=shape.devices,
        compute_milli=shape.device_milli if shape.devices else WHOLE_DEVICE_MILLI,
        memory_mib=task.memory_milli * DEVICE_MIB // 1000 if task.is_share else 0,
        models=shape.models,
        cpu_milli=shape.cpu_milli,
        host_memory_mib=shape.memory_mib,
    )
    return ev.JobAdmitted(job_id=JobId(f"acme/t{number}"), tenant=_TENANT, answers=1, wish_id="w", spec=spec)


def tasks_of(shapes: Sequence[Shape], seed: int, dimensions: int) -> list[Task]:
    """The tasks with their memory: as much as compute, or in two dimensions that of another shared task."""
    shares = [shape.device_milli for shape in shapes if shape.devices == 1 and shape.device_milli < WHOLE_DEVICE_MILLI]
    draws = random.Random(seed + 2_000_003)  # noqa: S311 — a benchmark's draw, no secret
    tasks = []
    for shape in shapes:
        memory = shape.device_milli
        if dimensions > 1 and shape.devices == 1 and shape.device_milli < WHOLE_DEVICE_MILLI:
            drawn = draws.choice(shares)
            # In steps, as people ask for memory.
            memory = min(-(-drawn // _MEMORY_STEP_MILLI) * _MEMORY_STEP_MILLI, 1000)
        tasks.append(Task(shape, memory))
    return tasks


def _part(trace: Trace, seed: int, every: int) -> Trace:
    nodes = list(trace.nodes)
    random.Random(seed).shuffle(nodes)  # noqa: S311 — which nodes, no secret
    return Trace(nodes[::every], trace.tasks)


def run_arrivals(trace: Trace, policy: str, seed: int, dimensions: int) -> Outcome:
    """The protocol of the trace: none leaves, none waits."""
    part = _part(trace, seed, NODES_EVERY)
    pool = _Pool(part, policy, seed)
    capacity = sum(node.devices for node in part.nodes) * WHOLE_DEVICE_MILLI
    order = list(_arrivals(part, seed))
    asked = compute = memory = 0
    compute_pct: dict[str, float] = {}
    memory_pct: dict[str, float] = {}
    for number, task in enumerate(tasks_of(order, seed, dimensions)):
        asked += task.shape.total_milli
        if pool.offer(number, task) is not None:
            compute += task.shape.total_milli
            memory += task.memory_milli if task.is_share else task.shape.total_milli
        for load in LOADS_PERCENT:
            if str(load) not in compute_pct and asked * 100 >= load * capacity:
                compute_pct[str(load)] = 100 * compute / capacity
                memory_pct[str(load)] = 100 * memory / capacity
    return Outcome(compute_pct, memory_pct, 100 * compute / asked, pool.decision_ns)


def _arrivals(trace: Trace, seed: int) -> Iterator[Shape]:
    """The seed's arrivals, as far as they go on this fleet: a quarter of the tasks fills a quarter of it."""
    capacity = sum(node.devices for node in trace.nodes) * WHOLE_DEVICE_MILLI
    asked = 0
    for shape in arrivals(trace, seed):
        asked += shape.total_milli
        yield shape
        if asked * 100 > capacity * LOADS_PERCENT[-1]:
            return


def run_churn(trace: Trace, policy: str, seed: int, dimensions: int, load_pct: int) -> Outcome:
    """Arrivals and departures at an offered load, in % of the pool's compute; shares are means over time."""
    part = _part(trace, seed, NODES_EVERY)
    pool = _Pool(part, policy, seed)
    capacity = sum(node.devices for node in part.nodes) * WHOLE_DEVICE_MILLI
    tasks = tasks_of([shape for _, shape in sorted(part.tasks)], seed, dimensions)
    mean_milli = sum(task.shape.total_milli for task in tasks) / len(tasks)
    rate = capacity * load_pct / 100 / mean_milli
    draws = random.Random(seed)  # noqa: S311 — a benchmark's draw, no secret
    ends: list[tuple[float, int, ev.RunPlaced, Task]] = []
    now = held = held_memory = 0.0
    area = memory_area = offered = served = 0.0
    number = 0
    while now < WARM_UP + MEASURED:
        next_at = now + draws.expovariate(rate)
        while ends and ends[0][0] <= next_at:
            at, _, gone, task = heappop(ends)
            area, memory_area = _passed(now, at, held, area), _passed(now, at, held_memory, memory_area)
            now = at
            pool.leave(gone.run_id, gone.node_id, gone.job_id)
            held -= task.shape.total_milli
            held_memory -= task.memory_milli if task.is_share else task.shape.total_milli
        area, memory_area = _passed(now, next_at, held, area), _passed(now, next_at, held_memory, memory_area)
        now = next_at
        task = draws.choice(tasks)
        stay = draws.expovariate(1.0)
        placed = pool.offer(number, task)
        if now >= WARM_UP:
            offered += task.shape.total_milli * stay
            served += task.shape.total_milli * stay * (placed is not None)
        if placed is not None:
            heappush(ends, (now + stay, number, placed, task))
            held += task.shape.total_milli
            held_memory += task.memory_milli if task.is_share else task.shape.total_milli
        number += 1
    whole = capacity * MEASURED
    key = str(load_pct)
    shares = {key: 100 * area / whole}, {key: 100 * memory_area / whole}
    return Outcome(*shares, 100 * served / offered, pool.decision_ns)


def _passed(since: float, until: float, held: float, area: float) -> float:
    """The area with what was held for a while, as far as it is measured."""
    return area + held * max(0.0, min(until, WARM_UP + MEASURED) - max(since, WARM_UP))


def measure(
    trace: Trace, *, variant: str, policy: str, seeds: Sequence[int], dimensions: int, churn_pct: int | None
) -> dict[str, object]:
    """The benchmark's figures: means over the seeds, with the standard deviation of what is served."""
    runs = [
        run_arrivals(trace, policy, seed, dimensions)
        if churn_pct is None
        else run_churn(trace, policy, seed, dimensions, churn_pct)
        for seed in seeds
    ]
    times = sorted(ns for run in runs for ns in run.decision_ns)
    served = [run.served_pct for run in runs]
    return {
        "policy": policy,
        "variant": variant,
        "dimensions": dimensions,
        "churn_pct": churn_pct,
        "learn": True,
        "seeds": list(seeds),
        "allocated_pct": _means([run.compute_pct for run in runs]),
        "memory_allocated_pct": _means([run.memory_pct for run in runs]),
        "served_pct": round(statistics.fmean(served), 3),
        "served_pct_sd": round(statistics.stdev(served), 3) if len(served) > 1 else 0.0,
        "decisions_per_s": round(len(times) * 1e9 / sum(times), 1),
        "decision_us_p50": round(times[len(times) // 2] / 1000, 1),
        "decision_us_p99": round(times[len(times) * 99 // 100] / 1000, 1),
    }


def _means(curves: list[dict[str, float]]) -> dict[str, float]:
    return {
        load: round(statistics.fmean(curve[load] for curve in curves), 3)
        for load in curves[0]
        if all(load in curve for curve in curves)
    }


def scale(
    trace: Trace, *, policy: str, fleets: Sequence[int] = (1213, 2426, 4852, 8000), rounds: int = 60
) -> dict[str, object]:
    """What a decision costs as the fleet grows, and what a round costs as jobs wait: CPU time of one core, in us."""
    by_nodes, by_nodes_of_pool = [], []
    for count in fleets:
        grown = _grown(trace, count)
        times = sorted(run_seed(grown, grown.mix(), policy, 42, learn=True).decision_ns)
        by_nodes.append({"nodes": count, "decisions": len(times), **_micros(times)})
        times = sorted(_one_by_one(grown, policy, 20 * rounds))
        by_nodes_of_pool.append({"nodes": count, "decisions": len(times), **_micros(times)})
    by_waiting = []
    for waiting in (0, 1_000, 10_000, 50_000):
        times = sorted(_rounds(trace, policy, waiting, rounds))
        by_waiting.append({"waiting": waiting, "rounds": len(times), **_micros(times)})
    return {
        "policy": policy,
        "by_nodes": by_nodes,
        "by_nodes_of_service": by_nodes_of_pool,
        "by_waiting": by_waiting,
    }


def _grown(trace: Trace, count: int) -> Trace:
    """The trace on a fleet of so many nodes, with as many more tasks, so that each fleet is filled the same way."""
    copies = range(-(-count // len(trace.nodes)))
    nodes = [node._replace(name=f"{node.name}-{copy}") for copy in copies for node in trace.nodes][:count]
    return Trace(nodes, [(f"{name}-{copy}", shape) for copy in copies for name, shape in trace.tasks])


def _one_by_one(trace: Trace, policy: str, decisions: int) -> list[int]:
    """Times of the service's decisions on single tasks, once as many were placed."""
    pool = _Pool(trace, policy, 42)
    for number, shape in zip(range(2 * decisions), arrivals(trace, 42), strict=False):
        if number == decisions:
            pool.decision_ns.clear()
        pool.offer(number, Task(shape, shape.device_milli))
    return pool.decision_ns


def _rounds(trace: Trace, policy: str, waiting: int, rounds: int) -> list[int]:
    """Times of rounds in which one run has ended and one job is new, with so many waiting for a full pool."""
    part = _part(trace, 42, NODES_EVERY)
    pool = _Pool(part, policy, 42)
    shapes = [shape for _, shape in sorted(part.tasks) if shape.devices]
    draws = random.Random(42)  # noqa: S311 — a benchmark's draw, no secret
    tasks = tasks_of([draws.choice(shapes) for _ in range(waiting + 20_000)], 42, 1)
    placed: list[ev.RunPlaced] = []
    number = missed = 0
    while missed < 200:
        found = pool.offer(number, tasks[number])
        missed += found is None
        placed += [] if found is None else [found]
        number += 1
    for _ in range(waiting):
        pool.tell(_admitted(number, tasks[number]))
        number += 1
    while pool.decide():
        pass
    pool.decision_ns.clear()
    for _ in range(rounds):
        gone = placed.pop(draws.randrange(len(placed)))
        pool.leave(gone.run_id, gone.node_id, gone.job_id)
        pool.tell(_admitted(number, tasks[number % len(tasks)]))
        number += 1
        placed += [fact for fact in pool.decide() if isinstance(fact, ev.RunPlaced)]
    return pool.decision_ns


def _micros(times: list[int]) -> dict[str, float]:
    return {
        "decision_us_p50": round(times[len(times) // 2] / 1000, 1),
        "decision_us_p99": round(times[len(times) * 99 // 100] / 1000, 1),
        "decisions_per_s": round(len(times) * 1e9 / sum(times), 1),
    }
