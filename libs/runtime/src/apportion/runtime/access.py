"""Who may say and hear what on the bus: one table.

The server's configuration is made from it, and so is the test that tries every cell of it on a real server. Pure: keys
and files are ``keys``'s.

What an allowance means is the server's rule: a subject that no allowance matches is refused, and the client hears of
it as a permissions violation. A principal listens under an inbox prefix of its own: nobody reads another's replies.
"""

import json
from collections.abc import Iterable
from enum import StrEnum, unique
from typing import Final

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts import subjects
from apportion.contracts.ids import ADMISSION, AGENT_PREFIX, MONITOR, OPERATOR, PLACER, Author, NodeId, PoolId, TenantId


@unique
class Role(StrEnum):
    """What a principal is to the pool."""

    ADMISSION = "admission"
    PLACER = "placer"
    MONITOR = "monitor"
    AGENT = "agent"
    """One node's agent: its facts, its samples, its lease."""
    ADMIN = "admin"
    """What an operator may, and to say who is let in."""
    OPERATOR = "operator"
    """Runs the pool: any wish but of keys, any question, the streams themselves; no fact."""
    VIEWER = "viewer"
    """Sees what happens: questions of ours, not in SQL; the streams of wishes and facts; wishes nothing."""
    TENANT = "tenant"
    """Its own wishes and their answers; nothing of anybody else's."""
    GATEWAY = "gateway"
    """A system that submits for many tenants and vouches for whom it names: jobs of any tenant, no operator's wish."""
    AUDITOR = "auditor"
    """Reads everything and asks in SQL; wishes nothing."""
    REPLAYER = "replayer"
    """Reads the streams; has no right to act, which is what makes a replay harmless."""


OF_SOMEBODY: Final = frozenset({Role.AGENT, Role.TENANT})
"""Roles of which there are many: the principal names its node or its tenant."""


class Principal(Struct, frozen=True, kw_only=True):
    """Somebody with a key."""

    role: Role
    of: str = ""
    """The node of an agent, the tenant of a tenant; for other roles what tells two of them apart, or nothing."""
    public: str
    """The public nkey, ``U…``."""

    @property
    def name(self) -> str:
        """Such as ``placer``, ``agent-node-1``, ``tenant-acme``.

        >>> Principal(role=Role.AGENT, of="node-1", public="U").name
        'agent-node-1'
        """
        return f"{self.role}-{self.of}" if self.of else str(self.role)


class Rights(Struct, frozen=True, kw_only=True):
    """What a principal may do, as patterns of subjects."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    never_publish: tuple[str, ...] = ()
    """What is refused although an allowance takes it."""
    may_respond: bool = False
    """Whether it may answer the requests that it hears, wherever their replies go."""


def inbox_prefix(who: str) -> str:
    """Under which a principal hears replies; ``who`` is its public key, or its name, which people find easier to say.

    >>> inbox_prefix("tenant-acme")
    '_INBOX_tenant-acme'
    """
    return f"_INBOX_{who}"


def rights(pool: PoolId, principal: Principal) -> Rights:
    """What the principal may say and hear in this pool."""
    inbox = (f"{inbox_prefix(principal.public)}.>", f"{inbox_prefix(principal.name)}.>")
    prefix = f"{subjects.ROOT}.{pool}"
    wishes, facts = subjects.wishes_stream(pool), subjects.facts_stream(pool)
    letters = subjects.dead_letters_stream(pool)
    match principal.role:
        case Role.ADMISSION:
            return Rights(
                publish=(
                    *_as_author(pool, ADMISSION),
                    *_alive(pool, ADMISSION),
                    # What is asked by request it stores under the very subject that the broker let the asker use.
                    subjects.all_wishes(pool),
                    *_reading(wishes, facts, letters),
                    *_making(wishes, facts, letters),
                ),
                subscribe=(*inbox, subjects.all_asks(pool), *_alive(pool, ADMISSION)),
                may_respond=True,
            )
        case Role.PLACER:
            return Rights(
                publish=(
                    *_as_author(pool, PLACER),
                    *_alive(pool, PLACER),
                    *_reading(wishes, facts, letters),
                    *_making(wishes, facts, letters),
                ),
                subscribe=(*inbox, f"{prefix}.query.>", *_alive(pool, PLACER)),
                may_respond=True,
            )
        case Role.MONITOR:
            return Rights(
                publish=(
                    *_as_author(pool, MONITOR),
                    *_alive(pool, MONITOR),
                    *_reading(wishes, facts, letters),
                    *_making(wishes, facts, letters),
                ),
                subscribe=(
                    *inbox,
                    f"{prefix}.query.>",
                    f"{prefix}.read.>",
                    f"{prefix}.sample.>",
                    f"{prefix}.alive.>",
                ),
                may_respond=True,
            )
        case Role.AGENT:
            node = NodeId(principal.of)
            return Rights(
                publish=(
                    *_as_author(pool, Author(AGENT_PREFIX + node)),
                    subjects.sample(pool, node, ">"),
                    *_reading(facts),
                    f"$JS.API.STREAM.INFO.{wishes}",
                    f"$JS.API.STREAM.INFO.{letters}",
                ),
                subscribe=(*inbox, f"{prefix}.node.{node}.>"),
                may_respond=True,
            )
        case Role.OPERATOR | Role.ADMIN:
            return Rights(
                publish=(
                    subjects.all_wishes(pool),
                    f"{prefix}.ask.>",
                    subjects.all_dead_letters(pool),
                    f"{prefix}.query.>",
                    f"{prefix}.read.>",
                    f"{prefix}.node.>",
                    "$JS.API.>",
                    "$JS.FC.>",
                ),
                never_publish=() if principal.role is Role.ADMIN else _of_keys(pool),
                subscribe=(*inbox, f"{prefix}.>"),
            )
        case Role.TENANT:
            tenant = TenantId(principal.of)
            return Rights(
                publish=(
                    f"{prefix}.wish.{tenant}.*",
                    f"{prefix}.ask.{tenant}.*",
                    f"{prefix}.read.{tenant}.*",
                    subjects.logs_of_tenant(pool, "*", tenant),
                    subjects.query(pool, "schemas"),
                    subjects.query(pool, "asyncapi"),
                ),
                subscribe=inbox,
            )
        case Role.GATEWAY:
            kinds = (ev.JobRequested, ev.JobCancelRequested)
            any_tenant = TenantId("*")
            return Rights(
                publish=(
                    *(subjects.wish(pool, any_tenant, kind) for kind in kinds),
                    *(subjects.ask(pool, any_tenant, kind) for kind in kinds),
                ),
                never_publish=(f"{prefix}.wish.{OPERATOR}.>", f"{prefix}.ask.{OPERATOR}.>"),
                subscribe=inbox,
            )
        case Role.VIEWER:
            return Rights(
                publish=(f"{prefix}.query.>", *_reading(wishes, facts)),
                never_publish=(subjects.query(pool, "sql"),),
                subscribe=(*inbox, *(f"{prefix}.{what}.>" for what in ("wish", "fact", "sample", "lease", "alive"))),
            )
        case Role.AUDITOR:
            return Rights(
                publish=(f"{prefix}.query.>", *_reading(wishes, facts, letters)),
                subscribe=(*inbox, f"{prefix}.>"),
            )
        case Role.REPLAYER:
            return Rights(publish=_reading(wishes, facts), subscribe=inbox)


def _of_keys(pool: PoolId) -> tuple[str, ...]:
    """What says that who is let in has changed."""
    return (
        subjects.wish(pool, OPERATOR, ev.KeyChangeRequested),
        subjects.ask(pool, OPERATOR, ev.KeyChangeRequested),
    )


def _as_author(pool: PoolId, author: Author) -> tuple[str, ...]:
    """What an author of facts says: facts in its own name, its lease, copies of what it could not read."""
    return (
        f"{subjects.ROOT}.{pool}.fact.{author}.>",
        subjects.lease(pool, author),
        f"{subjects.ROOT}.{pool}.dlq.{author}.>",
    )


def _alive(pool: PoolId, author: Author) -> tuple[str, ...]:
    """Where the processes of one author tell one another that they live, and hear it."""
    return subjects.alive(pool, author), subjects.own_voice(pool, author, "*")


def _reading(*streams: str) -> tuple[str, ...]:
    """The requests by which a stream is followed and looked up. None of them changes it."""
    found: list[str] = []
    for stream in streams:
        found += [
            f"$JS.API.STREAM.INFO.{stream}",
            f"$JS.API.STREAM.MSG.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}.>",
            f"$JS.API.CONSUMER.CREATE.{stream}",
            f"$JS.API.CONSUMER.CREATE.{stream}.>",
            f"$JS.API.CONSUMER.INFO.{stream}.*",
            f"$JS.API.CONSUMER.DELETE.{stream}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
        ]
    # Flow control is answered where the server says; with a domain and an account's hash in front in its newer form.
    return (*found, "$JS.FC.>")


def _making(*streams: str) -> tuple[str, ...]:
    """Making a stream that isn't there. One that is can't be changed by it, and may not be deleted by anybody."""
    return tuple(f"$JS.API.STREAM.CREATE.{stream}" for stream in streams)


def configuration(pool: PoolId, principals: Iterable[Principal]) -> str:
    """The server's ``authorization`` block: these principals, and nobody else."""
    users = [_user(rights(pool, principal), principal) for principal in sorted(principals, key=lambda one: one.name)]
    assert users, "an empty list of users would let everybody in"
    return "authorization {\n  users: [\n" + ",\n".join(users) + "\n  ]\n}\n"


def _user(granted: Rights, principal: Principal) -> str:
    deny = f", deny: {json.dumps(granted.never_publish)}" if granted.never_publish else ""
    # Publishing is refused unless allowed; where replies are answered, one answer a request and for two minutes.
    respond = '\n        allow_responses: { max: 1, expires: "2m" }' if granted.may_respond else ""
    return (
        f"    {{ # {principal.name}\n"
        f"      nkey: {principal.public}\n"
        f"      permissions: {{\n"
        f"        publish: {{ allow: {json.dumps(granted.publish)}{deny} }}\n"
        f"        subscribe: {{ allow: {json.dumps(granted.subscribe)} }}{respond}\n"
        f"      }}\n"
        f"    }}"
    )


def matches(pattern: str, subject: str) -> bool:
    """Whether a pattern of an allowance takes a subject; a wildcard in the subject is taken by a wildcard alone.

    >>> matches("a.*.c", "a.b.c"), matches("a.>", "a"), matches("a.*", "a.*"), matches("a.b", "a.*")
    (True, False, True, False)
    """
    wanted, given = pattern.split("."), subject.split(".")
    for place, part in enumerate(wanted):
        if part == ">":
            return len(given) > place
        if place >= len(given) or (given[place] == ">") or (part not in {"*", given[place]}):
            return False
    return len(given) == len(wanted)


def may_publish(granted: Rights, subject: str) -> bool:
    """Whether the server lets the principal publish there."""
    if any(matches(pattern, subject) for pattern in granted.never_publish):
        return False
    return any(matches(pattern, subject) for pattern in granted.publish)


def may_subscribe(granted: Rights, subject: str) -> bool:
    """Whether the server lets the principal listen there."""
    return any(matches(pattern, subject) for pattern in granted.subscribe)
