"""A message of the bus as a row of the event log. Pure: what a row says follows from the message alone.

The raw message (subject, headers, body) is kept as it came; the other columns say what is asked most, so that nobody
has to open the payload for it. A message that doesn't decode becomes a row as well, with the reason in
``parse_error``: the log has everything that the bus had.
"""

import json
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from apportion.contracts import salvage
from apportion.contracts.causes import Refusal
from apportion.contracts.envelope import Entry, Stream, Undecodable
from apportion.contracts.events import Wish, type_name
from apportion.contracts.ids import JobId, RunId, job_id, job_of_run, tenant_of_job


class Recorded(Protocol):
    """One message as a stream holds it."""

    @property
    def stream(self) -> Stream:
        """Which stream."""

    @property
    def seq(self) -> int:
        """Its sequence there."""

    @property
    def recorded_at(self) -> int:
        """When the stream stored it; ns since the Unix epoch."""

    @property
    def subject(self) -> str:
        """Where it was published."""

    @property
    def headers(self) -> Mapping[str, str] | None:
        """Its headers, as they came."""

    @property
    def body(self) -> bytes:
        """Its body, byte for byte."""


class Column(Struct, frozen=True):
    """One column of the log's table."""

    name: str
    sql: str


ENVELOPE_COLUMNS: Final = (
    Column("recorded_at", "BIGINT NOT NULL"),
    Column("subject", "VARCHAR NOT NULL"),
    Column("headers", "VARCHAR"),
    Column("type", "VARCHAR"),
    Column("event_id", "VARCHAR"),
    Column("tenant", "VARCHAR"),
    Column("job_id", "VARCHAR"),
    Column("run_id", "VARCHAR"),
    Column("node_id", "VARCHAR"),
    Column("author", "VARCHAR"),
    Column("actor", "VARCHAR"),
    Column("cause", "VARCHAR"),
    Column("answers", "BIGINT"),
    Column("caused_by", "VARCHAR"),
    Column("traceparent", "VARCHAR"),
    Column("basis_facts", "BIGINT"),
    Column("basis_wishes", "BIGINT"),
    Column("decided_at", "BIGINT"),
    Column("policy", "VARCHAR"),
    Column("parse_error", "VARCHAR"),
)
"""What a row says beside its place, its payload and its hashes; the order is part of chain.envelope_hash."""

Cell = str | int | None


def columns_of(message: Recorded) -> tuple[Cell, ...]:
    """The values of ENVELOPE_COLUMNS for a message. Never raises."""
    entry = entry_of(message)
    event = entry.event
    headers = message.headers
    basis = entry.basis
    type_: str | None
    tenant: str | None
    job: str | None
    run: str | None = None
    node: str | None = None
    actor: str | None = entry.actor or None
    cause: str | None = None
    answers: int | None = None
    caused_by: str | None = None
    error: str | None = None
    if isinstance(event, Undecodable):
        type_ = event.type or entry.subject_type or None
        tenant = entry.tenant
        job = event.job_id
        if job is not None and tenant is not None and "/" not in job:
            job = f"{tenant}/{job}"
        cause = event.code.value
        error = described(event)
    else:
        type_ = type_name(type(event))
        run = getattr(event, "run_id", None)
        job = getattr(event, "job_id", None)
        if job is None:
            job = getattr(event, "original_job_id", None)
        if job is None and run is not None:
            job = _job_of(run)
        tenant = entry.tenant
        if isinstance(event, Wish):
            if job is not None and tenant is not None and "/" not in job:
                job = job_id(tenant, job)
        else:
            tenant = getattr(event, "tenant", None)
            if tenant is None and job is not None:
                tenant = tenant_of_job(JobId(job))
            actor = getattr(event, "actor", None)
            caused_by = getattr(event, "caused_by", None) or None
            answers = getattr(event, "answers", None) or None
        node = getattr(event, "node_id", None)
        found = getattr(event, "cause", None) or getattr(event, "code", None)
        cause = None if found is None else str(found)
    return (
        message.recorded_at,
        _storable(message.subject),
        None if headers is None else _headers_text(headers),
        _storable(type_),
        _storable(entry.event_id or None),
        _storable(tenant),
        _storable(job),
        _storable(run),
        _storable(node),
        _storable(entry.author),
        _storable(actor),
        _storable(cause),
        answers,
        _storable(caused_by),
        None if headers is None else _storable(headers.get("traceparent")),
        None if basis is None else basis.facts,
        None if basis is None else basis.wishes,
        None if basis is None else basis.decided_at,
        None if basis is None else _storable(basis.policy),
        _storable(error),
    )


def entry_of(message: Recorded) -> Entry:
    """What a core would fold of a message. Never raises: what can't be read at all is an Undecodable too."""
    where = {"seq": message.seq, "recorded_at": message.recorded_at}
    try:
        entry = salvage.decode(message.stream, message.subject, message.headers, message.body, **where)
        # What the log keeps may have lost its payload by order; what a stream delivers has it.
        erased = getattr(message, "erased", None)
        return entry if erased is None else _erased(entry, erased.sha256, erased.job_id)
    except Exception as err:  # noqa: BLE001 - as in the services: one unreadable message ends nothing
        return salvage.undecoded(message.stream, message.subject, message.body, **where, error=err)


def _erased(entry: Entry, sha256: str, job: str | None) -> Entry:
    """The entry of a message whose payload nobody has any more: as one that can't be read, which says why."""
    assert isinstance(entry.event, Undecodable), "nothing decodes without a payload"
    event = replace(
        entry.event, code=Refusal.ERASED, field="", expected="its payload", found="none: it was erased", job_id=job
    )
    return replace(entry, event=event, digest=sha256 if entry.digest else "")


def described(found: Undecodable) -> str:
    """Why a message didn't decode, in one line for people.

    >>> from apportion.contracts.causes import Refusal
    >>> described(Undecodable(code=Refusal.NOT_JSON, type="JobRequested", expected="an object", found="x", size=1))
    'NotJson: expected an object, found x'
    """
    where = f" at {found.field}" if found.field else ""
    return f"{found.code.value}{where}: expected {found.expected}, found {found.found}"


def _job_of(run: str) -> str | None:
    return job_of_run(RunId(run)) if run.count("/") == 3 else None


def _headers_text(headers: Mapping[str, str]) -> str:
    plain = headers if type(headers) is dict else dict(headers)
    try:
        return msgspec.json.encode(plain).decode()
    except UnicodeEncodeError:
        # Bytes that are no UTF-8 came as lone surrogates; as escapes they survive, and tell one header from another.
        return json.dumps(plain)


def _storable(text: str | None) -> str | None:
    if text is None:
        return None
    text = str(text)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


__all__ = [
    "ENVELOPE_COLUMNS",
    "Cell",
    "Column",
    "Recorded",
    "columns_of",
    "described",
    "entry_of",
]
