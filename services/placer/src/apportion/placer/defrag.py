"""Defragmentation: which few runs, moved, would leave the pool of more use to the work that it is asked for.

A plan and no more: a bounded list of moves, each with what it gains and what it costs, for an operator to look at and
carry out (``apportion preempt JOB`` has a job start again, and the policy places it). What the pool is worth is what
``headroom`` goes by: the share of it that work as it was asked for lately could still fill. Moved are only shares of
single devices, of jobs that agreed to be stopped and had their protected time; the emptiest devices are cleared first.
"""

from typing import Final, NamedTuple

from msgspec import Struct

from apportion.contracts.causes import Mode
from apportion.contracts.ids import DeviceUuid, JobId, NodeId, RunId
from apportion.placer.orders import S
from apportion.placer.outlook import Outlook
from apportion.placer.policies.headroom import HEADROOM
from apportion.placer.preempt import is_evictable
from apportion.placer.ranking import Ranking, follow
from apportion.placer.rooms import Demand, Fit, NodeRoom, Out, free_share, look, places_on, with_run, without_run
from apportion.placer.state import State, demand_of_job
from apportion.pool.state import JobView, NodeState, RunView

MOVES_MAX: Final = 20
CANDIDATES: Final = 256
"""Runs that are looked at: those on the devices with the least in use."""
TARGETS: Final = 32
"""Nodes that a run may go to: the tightest in which it fits."""
GAIN_MIN: Final = 100
"""A move is worth its trouble from here on: a twentieth of a device, in thousandths of both dimensions."""


class Move(Struct, frozen=True, kw_only=True):
    """One run that would go elsewhere."""

    job_id: JobId
    run_id: RunId
    from_node: NodeId
    from_device: DeviceUuid
    to_node: NodeId
    to_device: DeviceUuid
    compute_milli: int
    memory_mib: int
    gain_milli: int
    """What the pool is worth more afterwards: thousandths of a device, in both dimensions together (2000: one)."""
    frees_device: bool
    """Whether nothing is left on the device that it leaves."""
    ran_s: int
    """How long it has run: what it may have to do again, at most."""


class Defragmentation(Struct, frozen=True, kw_only=True):
    """The plan."""

    moves: tuple[Move, ...]
    """In the order in which they are to be made: each takes those before it as done."""
    considered: int
    """Runs that might have been moved."""
    gain_milli: int
    empty_devices: int
    """Healthy devices without a run, now."""
    empty_devices_after: int
    text: str


class _Piece(NamedTuple):
    job: JobView
    run: RunView
    demand: Demand


def defragmented(state: State, now: int, moves_max: int = MOVES_MAX) -> Defragmentation:
    """The plan for the pool as it is; it changes nothing."""
    outlook = Outlook(state.kept.mix)
    rooms = dict(state.rooms)
    rankings: dict[Demand, Ranking] = {}
    changed = dict.fromkeys(rooms, 0)
    for count, node_id in enumerate(changed, 1):
        changed[node_id] = count
    pieces = _movable(state, now)
    moves: list[Move] = []
    for piece in pieces[:CANDIDATES]:
        if len(moves) >= moves_max:
            break
        move, before, after = _best_move(piece, rooms, changed, rankings, outlook, now)
        if move is None:
            continue
        moves.append(move)
        for room in (before, after):
            rooms[room.node_id] = room
            changed.pop(room.node_id)
            changed[room.node_id] = max(changed.values(), default=0) + 1
    empty = sum(room.empty_devices for room in state.rooms.values() if room.state is NodeState.READY)
    left = sum(room.empty_devices for room in rooms.values() if room.state is NodeState.READY)
    gain = sum(move.gain_milli for move in moves)
    return Defragmentation(
        moves=tuple(moves),
        considered=min(len(pieces), CANDIDATES),
        gain_milli=gain,
        empty_devices=empty,
        empty_devices_after=left,
        text=_text(moves, len(pieces), gain, empty, left),
    )


def _movable(state: State, now: int) -> list[_Piece]:
    """Runs that may be moved, those on the devices with the least in use first."""
    pool = state.pool
    found = []
    for job_id in sorted(job_id for jobs in state.evictable.values() for job_id in jobs):
        job = pool.jobs[job_id]
        spec = job.spec
        runs = [run for run in job.runs.values() if run.holds]
        if (
            len(runs) != 1
            or spec.replicas != 1
            or spec.devices != 1
            or not is_evictable(job, now, state.settings.preempt_spares_s)
        ):
            continue
        [run] = runs
        demand = demand_of_job(state, job)
        node = pool.nodes.get(run.node_id)
        if demand.is_whole or run.slices[0].mode is Mode.MIG or node is None or node.state is not NodeState.READY:
            continue
        view = node.devices.get(run.slices[0].device_uuid)
        if view is not None:
            found.append(((len(view.runs), view.used_compute_milli, run.run_id), _Piece(job, run, demand)))
    return [piece for _, piece in sorted(found, key=lambda each: each[0])]


def _best_move(  # noqa: PLR0917 - the plan so far
    piece: _Piece,
    rooms: dict[NodeId, NodeRoom],
    changed: dict[NodeId, int],
    rankings: dict[Demand, Ranking],
    outlook: Outlook,
    now: int,
) -> tuple[Move | None, NodeRoom, NodeRoom]:
    job, run, demand = piece
    [held] = run.slices
    here = rooms[run.node_id]
    without = without_run(here, run.slices, run.cpu_milli, run.host_memory_mib)
    gained = outlook.worth(without) - outlook.worth(here)
    ranking = rankings.setdefault(demand, Ranking())
    follow(ranking, demand, rooms, changed, HEADROOM.choose)
    best: tuple[tuple[int, int], NodeRoom, Fit] | None = None
    targets = [rooms[node_id] for _, (_, node_id) in zip(range(TARGETS), ranking.in_order(), strict=False)]
    for room in (without, *(target for target in targets if target.node_id != here.node_id)):
        places = places_on(demand, room.kind)
        if isinstance(places, Out):
            continue
        fit = look(demand, room, places, lambda asked, at, fits: HEADROOM.weigh(outlook, asked, at, fits))
        if isinstance(fit, Fit):
            # Among equals the fullest device: what is brought together in one place need not be moved again.
            rank = (fit.score, -free_share(room.devices[fit.picks[0]]))
            if best is None or rank > best[0]:
                best = (rank, room, fit)
    if best is None or gained + best[0][0] < GAIN_MIN:
        return None, here, here
    _, room, fit = best
    target = room.devices[fit.picks[0]]
    if target.uuid == held.device_uuid:
        return None, here, here
    after = with_run(demand, room, fit.picks, job.tenant)
    source = next(device for device in without.devices if device.uuid == held.device_uuid)
    move = Move(
        job_id=job.job_id,
        run_id=run.run_id,
        from_node=run.node_id,
        from_device=held.device_uuid,
        to_node=room.node_id,
        to_device=target.uuid,
        compute_milli=held.compute_milli,
        memory_mib=held.memory_mib,
        gain_milli=gained + best[0][0],
        frees_device=not source.runs,
        ran_s=max(0, now - (run.started_at or now)) // S,
    )
    return move, without, after


def _text(moves: list[Move], movable: int, gain: int, empty: int, left: int) -> str:
    if not moves:
        return f"Nothing is worth moving: {movable} run(s) might be, and none gains a twentieth of a device."
    return (
        f"{len(moves)} move(s) of {movable} runs that might be moved leave the pool worth {gain / 2000:.2f} devices "
        f"more to what it is asked for, and {left} devices empty where {empty} are. Nothing was done."
    )
