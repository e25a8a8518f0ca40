"""Identifiers: their types, their grammar, and how one is made from another.

Every id is safe as a NATS subject token and as text anywhere; none is ever used as a path.
"""

import re
from typing import Final, NewType

PoolId = NewType("PoolId", str)
TenantId = NewType("TenantId", str)
QueueId = NewType("QueueId", str)
NodeId = NewType("NodeId", str)
DeviceUuid = NewType("DeviceUuid", str)
JobId = NewType("JobId", str)
"""``<tenant>/<name>``: the tenant's own name for the job, unique in the pool by its prefix."""
RunId = NewType("RunId", str)
"""``<job id>/<replica>/<attempt>``: replica from 0, attempt from 1."""
Author = NewType("Author", str)
"""Who states facts: ``admission``, ``placer``, ``monitor`` or ``agent-<node id>``."""

NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$(?!\n)"
"""The grammar of each part of an id: 1 to 63 lower-case letters, digits, ``-`` and ``_``, with no sign at an end."""

_NAME: Final = re.compile(NAME_PATTERN)

ADMISSION: Final = Author("admission")
PLACER: Final = Author("placer")
MONITOR: Final = Author("monitor")
AGENT_PREFIX: Final = "agent-"

OPERATOR: Final = TenantId("_operator")
"""The principal of people and tools who run the pool; its underscore keeps it out of the tenants' grammar."""


def is_name(text: str) -> bool:
    """True where ``text`` may be a part of an id (see NAME_PATTERN)."""
    return _NAME.match(text) is not None


def job_id(tenant: TenantId, name: str) -> JobId:
    """The pool-wide id of a tenant's job.

    >>> job_id(TenantId("acme"), "train-7")
    'acme/train-7'
    """
    return JobId(f"{tenant}/{name}")


def tenant_of_job(job: JobId) -> TenantId:
    """The tenant whose job it is."""
    return TenantId(job.partition("/")[0])


def run_id(job: JobId, replica: int, attempt: int) -> RunId:
    """The id of one attempt of one replica.

    >>> run_id(JobId("acme/train-7"), 0, 1)
    'acme/train-7/0/1'
    """
    return RunId(f"{job}/{replica}/{attempt}")


def job_of_run(run: RunId) -> JobId:
    """The job that the run is an attempt of."""
    return JobId(run.rsplit("/", 2)[0])


def replica_of_run(run: RunId) -> int:
    """Which replica of its job the run is, from 0."""
    return int(run.rsplit("/", 2)[1])


def attempt_of_run(run: RunId) -> int:
    """Which attempt of its job the run belongs to, from 1."""
    return int(run.rsplit("/", 2)[2])


def agent_author(node: NodeId) -> Author:
    """The author name of a node's agent."""
    return Author(f"{AGENT_PREFIX}{node}")


def node_of_author(author: Author) -> NodeId | None:
    """The node whose agent this author is; None for the other services."""
    return NodeId(author.removeprefix(AGENT_PREFIX)) if author.startswith(AGENT_PREFIX) else None
