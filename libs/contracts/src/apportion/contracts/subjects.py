"""Every subject on the bus, built and parsed. No other file holds one as a string.

From wide to narrow: pool, kind, author or tenant, entity::

    apportion.v1.<pool>.wish.<tenant>.<WishType>
    apportion.v1.<pool>.ask.<tenant>.<WishType>
    apportion.v1.<pool>.fact.<author>.job.<tenant>.<name>
    apportion.v1.<pool>.fact.<author>.run.<node>.<tenant>.<name>.<replica>.<attempt>
    apportion.v1.<pool>.fact.<author>.node.<node>
    apportion.v1.<pool>.fact.<author>.queue.<queue>
    apportion.v1.<pool>.fact.<author>.wish.<tenant>
    apportion.v1.<pool>.fact.<author>.pool
    apportion.v1.<pool>.fact.<author>.audit
    apportion.v1.<pool>.fact.<author>.rates
    apportion.v1.<pool>.lease.<author>
    apportion.v1.<pool>.sample.<node>.<what>
    apportion.v1.<pool>.alive.<author>[.<process>]
    apportion.v1.<pool>.query.<name>
    apportion.v1.<pool>.dlq.<service>.<stream>.<seq>

An agent follows its own node with a handful of filters; a tenant's credential opens its own wishes and jobs alone.
"""

from typing import Final

from apportion.contracts import events as ev
from apportion.contracts.causes import DONE_BY_ITSELF
from apportion.contracts.ids import ADMISSION, MONITOR, PLACER, Author, JobId, NodeId, PoolId, RunId, TenantId

ROOT: Final = "apportion.v1"
_PREFIX: Final = ROOT + "."


class SubjectInvalid(ValueError):
    """A subject that is none of ours."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(f"not a subject of Apportion: {subject!r}")


def wishes_stream(pool: PoolId) -> str:
    """Name of the pool's stream of wishes."""
    return f"APPORTION_{pool.upper()}_WISHES"


def facts_stream(pool: PoolId) -> str:
    """Name of the pool's stream of facts."""
    return f"APPORTION_{pool.upper()}_FACTS"


def dead_letters_stream(pool: PoolId) -> str:
    """Name of the pool's stream of dead letters."""
    return f"APPORTION_{pool.upper()}_DLQ"


def all_wishes(pool: PoolId) -> str:
    """The pattern that the stream of wishes captures."""
    return f"{ROOT}.{pool}.wish.>"


def all_facts(pool: PoolId) -> tuple[str, str]:
    """The patterns that the stream of facts captures: facts and leases."""
    return f"{ROOT}.{pool}.fact.>", f"{ROOT}.{pool}.lease.>"


def wish(pool: PoolId, tenant: TenantId, kind: type[ev.Wish]) -> str:
    """Where a tenant publishes this kind of wish.

    >>> wish(PoolId("main"), TenantId("acme"), ev.JobRequested)
    'apportion.v1.main.wish.acme.JobRequested'
    """
    return f"{ROOT}.{pool}.wish.{tenant}.{ev.type_name(kind).partition('.')[0]}"


def tenant_and_type_of_wish(subject: str) -> tuple[TenantId, str]:
    """The tenant and the type that a wish's subject names.

    >>> tenant_and_type_of_wish("apportion.v1.main.wish.acme.JobRequested")
    ('acme', 'JobRequested')
    """
    parts = subject.split(".")
    if len(parts) < 5 or parts[3] != "wish" or not subject.startswith(_PREFIX):
        raise SubjectInvalid(subject)
    return TenantId(parts[4]), ".".join(parts[5:])


def ask(pool: PoolId, tenant: TenantId, kind: type[ev.Wish]) -> str:
    """Where a tenant sends this kind of wish as a request that is answered inline.

    >>> ask(PoolId("main"), TenantId("acme"), ev.JobRequested)
    'apportion.v1.main.ask.acme.JobRequested'
    """
    return f"{ROOT}.{pool}.ask.{tenant}.{ev.type_name(kind).partition('.')[0]}"


def all_asks(pool: PoolId) -> str:
    """The pattern of the requests that are answered inline."""
    return f"{ROOT}.{pool}.ask.>"


def wish_of_ask(subject: str) -> str:
    """Where a wish is stored that came as a request: the same tenant, which the broker checked, and the same type.

    >>> wish_of_ask("apportion.v1.main.ask.acme.JobRequested")
    'apportion.v1.main.wish.acme.JobRequested'
    """
    parts = subject.split(".")
    if len(parts) < 6 or parts[3] != "ask" or not subject.startswith(_PREFIX):
        raise SubjectInvalid(subject)
    return ".".join([*parts[:3], "wish", *parts[4:]])


def ask_of_wish(subject: str) -> str:
    """Where the wish that is stored there is asked as a request.

    >>> ask_of_wish("apportion.v1.main.wish.acme.JobRequested")
    'apportion.v1.main.ask.acme.JobRequested'
    """
    parts = subject.split(".")
    tenant_and_type_of_wish(subject)
    return ".".join([*parts[:3], "ask", *parts[4:]])


def dead_letter(pool: PoolId, service: str, stream: str, seq: int) -> str:
    """Where a service puts a copy of a message that it could not read, and where what became of it is said.

    >>> dead_letter(PoolId("main"), "admission", "wishes", 17)
    'apportion.v1.main.dlq.admission.wishes.17'
    """
    return f"{ROOT}.{pool}.dlq.{service}.{stream}.{seq}"


def all_dead_letters(pool: PoolId) -> str:
    """The pattern that the stream of dead letters captures."""
    return f"{ROOT}.{pool}.dlq.>"


def lease(pool: PoolId, author: Author) -> str:
    """Where an author claims the right to write."""
    return f"{ROOT}.{pool}.lease.{author}"


def run_entity(node: NodeId, run: RunId) -> str:
    """The entity part of a run's subject, its node first so that an agent can ask for its own."""
    return f"run.{node}.{run.replace('/', '.')}"


def job_entity(job: JobId) -> str:
    """The entity part of a job's subject."""
    return f"job.{job.replace('/', '.', 1)}"


def fact(pool: PoolId, author: Author, event: ev.Fact) -> str:
    """Where ``author`` states ``event``."""
    prefix = f"{ROOT}.{pool}.fact.{author}"
    match event:
        case ev.LeaseClaimed():
            return lease(pool, author)
        case (
            ev.RunPlaced()
            | ev.RunStopOrdered()
            | ev.RunActionOrdered()
            | ev.RunStarted()
            | ev.RunSuspended()
            | ev.RunResumed()
            | ev.RunCheckpointed()
            | ev.RunFinished()
            | ev.RunReleased()
        ):
            return f"{prefix}.{run_entity(event.node_id, event.run_id)}"
        case (
            ev.JobAdmitted()
            | ev.JobHeld()
            | ev.JobReleased()
            | ev.JobSuspended()
            | ev.JobResumed()
            | ev.JobCheckpointing()
            | ev.JobReprioritized()
            | ev.JobResized()
            | ev.JobStopping()
            | ev.JobRequeued()
            | ev.JobSucceeded()
            | ev.JobWaitExceeded()
            | ev.JobFailed()
            | ev.JobCancelled()
            | ev.JobExpired()
            | ev.JobPendingReasonChanged()
            | ev.PreemptionDecided()
            | ev.GangResized()
            | ev.MigrationCompleted()
        ):
            return f"{prefix}.{job_entity(event.job_id)}"
        case ev.LateFactIgnored():
            return f"{prefix}.late"
        case ev.PriceSet():
            return f"{prefix}.price"
        case (
            ev.JobRejected()
            | ev.JobDuplicate()
            | ev.WishRejected()
            | ev.WishJudged()
            | ev.NodeWishRejected()
            | ev.NodeWishJudged()
        ):
            return f"{prefix}.wish.{_token(event.tenant)}"
        case ev.ReservationAdmitted() | ev.ReservationCancelled():
            return f"{prefix}.reservation.{event.reservation}"
        case ev.NodesReserved():
            return f"{prefix}.reserved"
        case ev.QueueUpserted():
            return f"{prefix}.queue.{event.queue}"
        case ev.PolicyUpserted():
            return f"{prefix}.policy.{event.for_tenant or '_pool'}"
        case (
            ev.NodeRegistered()
            | ev.DeviceHealthChanged()
            | ev.NodeSuspected()
            | ev.NodeTrusted()
            | ev.NodeLost()
            | ev.NodeFenced()
            | ev.NodeRecovered()
            | ev.NodeCordoned()
            | ev.NodeDraining()
            | ev.NodeUncordoned()
            | ev.IsolationTestStarted()
            | ev.IsolationVerdict()
        ):
            return f"{prefix}.node.{event.node_id}"
        case ev.RateCardChanged():
            return f"{prefix}.rates"
        case ev.AuditQueryRun():
            return f"{prefix}.audit"
        case (
            ev.LogSealOrdered()
            | ev.LegalHoldPlaced()
            | ev.LegalHoldReleased()
            | ev.PayloadEraseOrdered()
            | ev.PayloadsEraseOrdered()
            | ev.LogRetentionChanged()
        ):
            return f"{prefix}.log"
        case ev.KeyChanged():
            return f"{prefix}.keys"
        case (
            ev.ControlPlaneFrozen()
            | ev.ControlPlaneThawed()
            | ev.AlertRaised()
            | ev.AlertCleared()
            | ev.AlertAcknowledged()
            | ev.AlertSilenced()
        ):
            return f"{prefix}.pool"
        case ev.FaultInjected() | ev.FaultCleared():
            # What an agent does to itself it must hear of, and it hears what is said of its node.
            is_agents = event.kind in DONE_BY_ITSELF and event.target not in {ADMISSION, PLACER, MONITOR}
            return f"{prefix}.node.{event.target}" if is_agents else f"{prefix}.pool"
        case _:
            raise AssertionError(f"a fact without a subject: {event!r}")


def _token(text: str) -> str:
    # A tenant that nobody knows may hold anything that the broker lets through; the answer's subject must still parse.
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in text)[:63] or "_"


def author_of_fact(subject: str) -> Author:
    """Who stated the fact, which the broker checked.

    >>> author_of_fact("apportion.v1.main.fact.agent-node-1.node.node-1")
    'agent-node-1'
    """
    parts = subject.split(".", 5)
    if len(parts) < 5 or parts[3] not in {"fact", "lease"} or not subject.startswith(_PREFIX):
        raise SubjectInvalid(subject)
    return Author(parts[4])


def is_fact_of(author: Author, subject: str) -> bool:
    """True where ``author`` states a fact on that subject.

    >>> is_fact_of(MONITOR, "apportion.v1.main.fact.monitor.pool")
    True
    >>> is_fact_of(MONITOR, "apportion.v1.main.wish.acme.JobRequested")
    False
    """
    return subject.startswith(_PREFIX) and subject.split(".", 5)[3:5] == ["fact", author]


def facts_for_agent(pool: PoolId, node: NodeId, author: Author) -> tuple[str, ...]:
    """What a node's agent follows: orders for its runs, what the monitor says of the node, and its own words."""
    return (
        f"{ROOT}.{pool}.fact.{PLACER}.run.{node}.>",
        f"{ROOT}.{pool}.fact.{MONITOR}.node.{node}",
        f"{ROOT}.{pool}.fact.{author}.>",
        lease(pool, author),
    )


def facts_of_job(pool: PoolId, job: JobId) -> tuple[str, ...]:
    """What is said of a job and of its runs, by anybody."""
    dotted = job.replace("/", ".", 1)
    return (f"{ROOT}.{pool}.fact.*.job.{dotted}", f"{ROOT}.{pool}.fact.*.run.*.{dotted}.*.*")


def facts_of_tenant(pool: PoolId, tenant: TenantId) -> tuple[str, ...]:
    """What is said of a tenant's jobs and of their runs, by anybody."""
    return (f"{ROOT}.{pool}.fact.*.job.{tenant}.*", f"{ROOT}.{pool}.fact.*.run.*.{tenant}.*.*.*")


def answers(pool: PoolId, tenant: TenantId) -> tuple[str, ...]:
    """Where a tenant's wishes are answered."""
    return (
        f"{ROOT}.{pool}.fact.{ADMISSION}.job.{tenant}.*",
        f"{ROOT}.{pool}.fact.{ADMISSION}.wish.{tenant}",
    )


def read_facts(pool: PoolId, tenant: TenantId) -> str:
    """Where a tenant asks for facts about its jobs and answers to its wishes, by request and reply."""
    return f"{ROOT}.{pool}.read.{tenant}.facts"


def all_reads(pool: PoolId) -> str:
    """The pattern of tenants' requests for facts."""
    return f"{ROOT}.{pool}.read.*.facts"


def tenant_of_read(subject: str) -> TenantId:
    """Whose request it is, which the broker checked."""
    parts = subject.split(".")
    if len(parts) != 6 or parts[3] != "read" or not subject.startswith(_PREFIX):
        raise SubjectInvalid(subject)
    return TenantId(parts[4])


def is_of_tenant(pool: PoolId, tenant: TenantId, pattern: str) -> bool:
    """Whether a pattern takes facts about this tenant alone: its jobs, their runs, the answers to its wishes.

    >>> main, acme = PoolId("main"), TenantId("acme")
    >>> all(is_of_tenant(main, acme, pattern) for pattern in (*facts_of_tenant(main, acme), *answers(main, acme)))
    True
    >>> is_of_tenant(main, acme, "apportion.v1.main.fact.*.job.*.train"), is_of_tenant(main, acme, all_facts(main)[0])
    (False, False)
    """
    parts = pattern.split(".")
    if parts[:4] != [*f"{ROOT}.{pool}".split("."), "fact"] or ">" in parts:
        return False
    match parts[5:]:
        case ["job", whose, _] | ["wish", whose] | ["run", _, whose, _, _, _]:
            return whose == tenant
        case _:
            return False


def sample(pool: PoolId, node: NodeId, what: str) -> str:
    """Where a node's agent publishes readings, on plain NATS."""
    return f"{ROOT}.{pool}.sample.{node}.{what}"


def all_samples(pool: PoolId, what: str) -> str:
    """One kind of reading, of every node."""
    return f"{ROOT}.{pool}.sample.*.{what}"


def node_of_sample(subject: str) -> NodeId:
    """The node that a reading is of."""
    return NodeId(subject.split(".")[4])


def alive(pool: PoolId, author: Author) -> str:
    """Where an author's active process says that it lives, on plain NATS."""
    return f"{ROOT}.{pool}.alive.{author}"


def own_voice(pool: PoolId, author: Author, process: str) -> str:
    """Where a process that stands by says something to itself, to know that it could hear others."""
    return f"{alive(pool, author)}.{process}"


def query(pool: PoolId, name: str) -> str:
    """Where the monitor answers questions, by request and reply."""
    return f"{ROOT}.{pool}.query.{name}"


def logs_of_tenant(pool: PoolId, node: NodeId | str, tenant: TenantId | str) -> str:
    """Where a tenant asks a node what runs of its own jobs wrote; ``*`` for any.

    >>> logs_of_tenant(PoolId("main"), "*", TenantId("acme"))
    'apportion.v1.main.node.*.logs.acme'
    """
    return f"{node_query(pool, NodeId(node), 'logs')}.{tenant}"


def tenant_of_logs(subject: str) -> TenantId:
    """Who asks for what its runs wrote, which the broker checked."""
    parts = subject.split(".")
    if len(parts) != 7 or parts[3] != "node" or parts[5] != "logs" or not subject.startswith(_PREFIX):
        raise SubjectInvalid(subject)
    return TenantId(parts[6])


def node_query(pool: PoolId, node: NodeId, name: str) -> str:
    """Where one node's agent answers questions about what it alone has, by request and reply."""
    return f"{ROOT}.{pool}.node.{node}.{name}"
