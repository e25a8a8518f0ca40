"""Publish wishes to a pool and hear what becomes of them.

>>> from apportion.client import SyncClient
>>> with SyncClient.connect("nats://127.0.0.1:4222", tenant="acme") as pool:  # doctest: +SKIP
...     answer = pool.submit({"queue": "main", "workload": {"command": ["true"]}}, id="order-17", wait="finished")
"""

from apportion.client.aio import Client
from apportion.client.answers import (
    Admitted,
    Answer,
    CancelAnswer,
    Cancelled,
    Duplicate,
    Finished,
    Judged,
    Rejected,
    Started,
    Stopping,
    Stored,
    Unanswered,
)
from apportion.client.errors import (
    BusUnreachable,
    ClientError,
    JobNotFound,
    NotLetIn,
    NotStored,
    OutcomeUnknown,
    PoolNotFound,
    RequestInvalid,
    TimedOut,
)
from apportion.client.jobs import JobStage, JobStatus
from apportion.client.sync import SyncClient

__all__ = [
    "Admitted",
    "Answer",
    "BusUnreachable",
    "CancelAnswer",
    "Cancelled",
    "Client",
    "ClientError",
    "Duplicate",
    "Finished",
    "JobNotFound",
    "JobStage",
    "JobStatus",
    "Judged",
    "NotLetIn",
    "NotStored",
    "OutcomeUnknown",
    "PoolNotFound",
    "Rejected",
    "RequestInvalid",
    "Started",
    "Stopping",
    "Stored",
    "SyncClient",
    "TimedOut",
    "Unanswered",
]
