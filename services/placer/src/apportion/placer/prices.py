"""What the pool's market asks: one price for all who run in it, from the bids of those who are left out.

The highest bid of those who wait for room that others hold is what the next GPU would fetch. Nobody who runs pays more
than he has bid: where the highest bidder that is left out can use nothing of what lower ones hold, the lowest of their
bids is the price. Whoever others were stopped for isn't left out: it waits for them to leave.
"""

from collections.abc import Iterable
from itertools import islice

from apportion.contracts import events as ev
from apportion.contracts.causes import StopCause
from apportion.contracts.ids import job_of_run
from apportion.placer.rooms import NEVER
from apportion.placer.rounds import GANG_MAX, Line, Round
from apportion.placer.state import has_market, is_bidding


def price_set(round_: Round, facts: Iterable[ev.Fact]) -> ev.PriceSet | None:
    """The new price, once the round has placed all that it can; None where it is what it was.

    ``facts`` are all of the decision: who is told to stop in it is in the market no more.
    """
    state = round_.state
    if round_.is_full or state.pool.frozen or not (state.kept.price_micro or has_market(state)):
        return None
    inside = list(state.bidders)
    inside += [
        (job.spec.bid_micro, job_id) for job_id in round_.placed if is_bidding(state, job := state.pool.jobs[job_id])
    ]
    highest = max((_left_out(round_, line) for line in round_.lines), default=0)
    if not inside and not highest and not state.kept.price_micro:
        return None
    gone = {
        job_of_run(fact.run_id)
        for fact in facts
        if isinstance(fact, ev.RunStopOrdered) and fact.cause is not StopCause.SHRUNK
    }
    bids_in = [bid for bid, job_id in inside if job_id not in gone]
    lowest = min(bids_in, default=0)
    price = min(highest, lowest) if bids_in else highest
    before = state.kept.price_micro
    if price == before:
        return None
    return ev.PriceSet(
        price_micro=price,
        before_micro=before,
        bids_in=len(bids_in),
        lowest_in_micro=lowest,
        highest_out_micro=highest,
    )


def _left_out(round_: Round, line: Line) -> int:
    """The highest bid of the line's jobs that wait for room that others hold; 0 where none of them does."""
    state, block, demand = round_.state, line.block, line.shape.demand
    if block is None or not block.is_for_room or demand.replicas > GANG_MAX:
        return 0
    if line.at < len(line.keys) and not is_bidding(state, state.pool.jobs[line.keys[line.at][3]]):
        return 0
    if line.at >= len(line.keys) or not is_bidding(state, state.pool.jobs[line.keys[line.at][3]]):
        return 0  # the first of a line bids most
    counts = round_.ranking(demand).counts
    if len(state.rooms) == sum(count for why, count in counts.items() if why in NEVER):
        return 0
    for key in islice(line.keys, line.at, None):
        job = state.pool.jobs[key[3]]
        if not is_bidding(state, job):
            return 0
        if job.not_before_at <= round_.now and not round_.is_awaited(job):
            return job.spec.bid_micro
    return 0
