"""Makes a pool's queues and policies as a file has them: what differs is asked for, what is so already is left alone.

Each change is one wish, and so one fact with an actor and a reason; doing it again publishes nothing. What the file
doesn't name stays as it is.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from apportion.cli.queues import DEFAULT
from apportion.contracts.causes import Refusal
from apportion.contracts.events import Fact, PolicyUpserted, PolicyUpsertRequested, QueueUpserted, QueueUpsertRequested
from apportion.pool.quota import guaranteed_of

if TYPE_CHECKING:
    from apportion.runtime.stream import Bus

PolicyWish = QueueUpsertRequested | PolicyUpsertRequested
Upserted = QueueUpserted | PolicyUpserted
Newest = Callable[[PolicyWish], Awaitable[Upserted | None]]
Ask = Callable[[Sequence[PolicyWish]], Awaitable[list[Fact]]]

_MAY_COME_RIGHT: Final = frozenset({Refusal.FIELD_CONFLICT, Refusal.QUEUE_NOT_FOUND})
"""Refusals that another change of the same file may lift: guarantees grow from above and shrink from below."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of one queue or policy of the file."""

    kind: str
    """``queue`` or ``policy``."""
    name: str
    """The queue's, or the tenant's whose policy it is; the pool's has none."""
    result: str
    """``unchanged``, ``new``, ``changed``, ``would be new``, ``would be changed`` or ``refused``."""
    code: str = ""
    field: str = ""
    message: str = ""
    note: str = ""
    """What admission had to say of what it let through."""


async def declare_on(bus: "Bus", wanted: Sequence[PolicyWish]) -> list[Outcome]:
    """``declare`` on a pool's bus, in the operator's name."""
    from apportion.cli.client import answers_of, newest_policy, newest_queue

    async def newest(wish: PolicyWish) -> Upserted | None:
        if isinstance(wish, QueueUpsertRequested):
            return await newest_queue(bus, wish.queue)
        return await newest_policy(bus, wish.for_tenant)

    return await declare(wanted, newest=newest, ask=partial(answers_of, bus))


async def declare(wanted: Sequence[PolicyWish], *, newest: Newest, ask: Ask) -> list[Outcome]:
    """What became of each, in the order given, which has queues behind those above them.

    Refused ones are asked for again as long as others get through, as one change of a file may need another.
    """
    before = {id(wish): await newest(wish) for wish in wanted}
    found: dict[int, Outcome] = {}
    left: list[PolicyWish] = []
    for wish in wanted:
        if _is_so(before[id(wish)], wish):
            found[id(wish)] = _outcome(wish, "unchanged", {})
        else:
            left.append(wish)
    # From below where guarantees shrink, and then from above: in another order, each would be refused at first.
    shrinking = [wish for wish in left if _only_shrinks(before[id(wish)], wish)]
    left = [*reversed(shrinking), *(wish for wish in left if wish not in shrinking)]
    while left:
        again: list[PolicyWish] = []
        for wish, fact in zip(left, await ask(left), strict=True):
            answer: dict[str, Any] = msgspec.to_builtins(fact)
            done = "new" if before[id(wish)] is None else "changed"
            result = "refused" if answer.get("code") else f"would be {done}" if wish.dry_run else done
            found[id(wish)] = _outcome(wish, result, answer)
            if answer.get("code") in _MAY_COME_RIGHT and not wish.dry_run:
                again.append(wish)
        if len(again) == len(left):
            break
        left = again
    return [found[id(wish)] for wish in wanted]


def as_wish(before: Upserted) -> dict[str, Any]:
    """What a wish would say that asks for the queue or policy as it is; nothing of its reason."""
    asked = QueueUpsertRequested if isinstance(before, QueueUpserted) else PolicyUpsertRequested
    shared = (set(asked.__struct_fields__) & set(before.__struct_fields__)) - {"reason"}
    found = {name: msgspec.to_builtins(getattr(before, name)) for name in sorted(shared)}
    return {name: value for name, value in found.items() if value not in (None, [], ())}


def is_alike(before: Upserted, wish: PolicyWish) -> bool:
    """Whether the queue or policy is as the wish wants it, whatever the reason."""
    as_is = msgspec.convert({**as_wish(before), "reason": wish.reason}, type(wish))
    return replace(wish, dry_run=False) == as_is


def _is_so(before: Upserted | None, wish: PolicyWish) -> bool:
    # The default queue is there for those who said nothing: whatever an operator made of it stays.
    return before is not None and (wish in DEFAULT or is_alike(before, wish))


def _only_shrinks(before: Upserted | None, wish: PolicyWish) -> bool:
    if not isinstance(before, QueueUpserted) or not isinstance(wish, QueueUpsertRequested):
        return False
    was, will = guaranteed_of(before), guaranteed_of(wish)
    return was != will and all(amount <= was.get(name, 0) for name, amount in will.items())


def _outcome(wish: PolicyWish, result: str, answer: dict[str, Any]) -> Outcome:
    is_queue = isinstance(wish, QueueUpsertRequested)
    return Outcome(
        kind="queue" if is_queue else "policy",
        name=wish.queue if isinstance(wish, QueueUpsertRequested) else wish.for_tenant or "",
        result=result,
        code=answer.get("code", ""),
        field=answer.get("field", ""),
        message=answer.get("message", ""),
        note="" if answer.get("code") else answer.get("note", ""),
    )
