"""The event log: every message of both streams, one row each, append-only, exactly once. The only importer of DuckDB.

One process writes (EventLog); nobody else can open the file meanwhile, so it also makes the copies that others read.
Past days may lie in sealed segments beside the file (``segments``): then ``events`` is both, wherever a log is opened.
Rows and the position they reach are one transaction: whatever is killed when, the next life goes on at the right
message. Nothing is indexed and nothing is unique by constraint: positions make it so, and indexes are what breaks.

What a row says is decided by ``projections``; how rows are chained by ``chain``; who asks by ``sql`` and ``queries``.
"""

# ruff: noqa: S608 - what is put into SQL text here is our own column list; values are always parameters

import contextlib
import importlib.resources
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import duckdb
import msgspec
from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.contracts.events import type_name
from apportion.contracts.ids import PoolId
from apportion.monitor import chain, manifest, settled
from apportion.monitor.projections import ENVELOPE_COLUMNS, Recorded, columns_of

SCHEMA: Final = 1
STORAGE: Final = "v1.4.0"
"""The oldest DuckDB that can open what we write: auditors bring their own."""

_LEADING: Final = (("ordinal", "BIGINT NOT NULL"), ("stream", "VARCHAR NOT NULL"), ("stream_seq", "BIGINT NOT NULL"))
_TRAILING: Final = (
    ("payload", "BLOB"),
    ("payload_sha256", "BLOB NOT NULL"),
    ("envelope_hash", "BLOB NOT NULL"),
    ("prev_hash", "BLOB NOT NULL"),
    ("hash", "BLOB NOT NULL"),
)
_COLUMNS: Final = (*_LEADING, *((c.name, c.sql) for c in ENVELOPE_COLUMNS), *_TRAILING)
_NAMES: Final = ", ".join(name for name, _ in _COLUMNS)
_FIRST_ENVELOPE: Final = len(_LEADING)
_PAYLOAD: Final = len(_LEADING) + len(ENVELOPE_COLUMNS)
_EVENT_ID: Final = next(i for i, c in enumerate(ENVELOPE_COLUMNS) if c.name == "event_id")

_EVENTS_BODY: Final = ", ".join(f"{name} {sql}" for name, sql in _COLUMNS) + (
    ", recorded TIMESTAMP_NS GENERATED ALWAYS AS (make_timestamp_ns(recorded_at))"
)
_APPLIED_BODY: Final = (
    "stream VARCHAR NOT NULL, last_seq BIGINT NOT NULL, last_ordinal BIGINT NOT NULL, last_event_id VARCHAR, "
    "last_payload_sha256 BLOB, last_hash BLOB NOT NULL"
)

_META_BODY: Final = "key VARCHAR NOT NULL, value VARCHAR NOT NULL"
_CHECKPOINTS_BODY: Final = "ordinal BIGINT NOT NULL, checkpoint VARCHAR NOT NULL"

VIEWS: Final = (
    "v_event",
    "v_job",
    "v_run",
    "v_job_timeline",
    "v_pending_now",
    "v_decisions",
    "v_stops",
    "v_wish_answers",
    "v_queries",
    "v_preemptions",
    "v_migrations",
    "v_reservations",
    "v_isolation",
    "v_alerts",
    "v_waits",
    "v_memory",
    "v_queue_share",
    "v_health",
    "v_changes",
    "v_keeping",
    "v_usage",
    "v_double_slice",
    "v_rates",
    "v_orphans",
    "v_contradictions",
    "v_reconciliation",
)
"""Named questions, one file each in ``queries/``, in the order in which they build on each other."""

LOCKED_DOWN: Final[dict[str, str | bool | int]] = {
    "enable_external_access": False,
    "autoload_known_extensions": False,
    "autoinstall_known_extensions": False,
    "allow_community_extensions": False,
    "memory_limit": "256MB",
    "max_temp_directory_size": "0B",
    "threads": 2,
    "lock_configuration": True,
}
"""How a file is opened for other people's SQL: no files, no network, no extensions, and no way to change that."""

_VERIFY_ROWS: Final = 20_000
_VIEW_NAME: Final = re.compile(r"\bv_[a-z_]+")


class LogError(Exception):
    """Something about the event log that an operator has to know."""

    exit_code = 1


class LogAhead(LogError):
    """The log holds what the bus does not (any more): the bus came back shorter, or is another one."""

    exit_code = 9

    def __init__(self, *, stream: Stream, log_seq: int, bus_seq: int, detail: str) -> None:
        self.stream = stream
        self.log_seq = log_seq
        self.bus_seq = bus_seq
        self.detail = detail
        super().__init__(
            f"the log is ahead of the bus: it has {stream.value} up to {log_seq}, the bus stands at {bus_seq} "
            f"({detail}); nothing is written until an operator has looked: restore the bus's store, or move the log "
            "aside"
        )


class LogBehind(LogError):
    """The bus no longer holds what the log still needs."""

    exit_code = 9

    def __init__(self, *, stream: Stream, log_seq: int, bus_first: int) -> None:
        self.stream = stream
        self.log_seq = log_seq
        self.bus_first = bus_first
        super().__init__(
            f"the log has {stream.value} up to {log_seq} and the bus begins at {bus_first}: what lies between is gone, "
            "and going on would leave a hole"
        )


class SequenceGap(LogError):
    """A message came that does not follow the last one: the bus lost what lies between."""

    exit_code = 9

    def __init__(self, *, stream: Stream, expected: int, found: int) -> None:
        self.stream = stream
        self.expected = expected
        self.found = found
        super().__init__(f"{stream.value}: expected sequence {expected}, and {found} came")


class LogUnavailable(LogError):
    """The file can't be opened: another process has it, or it is damaged."""

    def __init__(self, *, path: Path, detail: str) -> None:
        self.path = path
        self.detail = detail
        super().__init__(f"the event log {path} can't be opened: {detail}")


class LogDamaged(LogUnavailable):
    """The file was opened, and rows of it can't be read."""

    exit_code = 9

    def __init__(self, *, path: Path, detail: str) -> None:
        LogError.__init__(
            self,
            f"the event log {path} is damaged: {detail}. `apportion log verify --file {path}` names the first bad row",
        )
        self.path = path
        self.detail = detail


class LogWriteFailed(LogError):
    """A batch was not committed; nothing of it is in the log."""

    def __init__(self, *, rows: int, detail: str) -> None:
        self.rows = rows
        self.detail = detail
        super().__init__(f"{rows} rows were not committed: {detail}")


class NotACopy(LogError):
    """The file is no copy of this log: it can be deleted."""

    def __init__(self, *, path: Path, ordinal: int) -> None:
        self.path = path
        self.ordinal = ordinal
        super().__init__(f"{path} holds another log's row {ordinal}")


class StatementRefused(LogError):
    """A statement that is not answered, and why."""


class Position(Struct, frozen=True, kw_only=True):
    """How far the log has got with one stream."""

    stream: Stream
    last_seq: int = 0
    last_ordinal: int = 0
    last_event_id: str | None = None
    last_payload_sha256: bytes | None = None
    last_hash: bytes = chain.GENESIS


class Head(Struct, frozen=True, kw_only=True):
    """The newest row: what a checkpoint or an anchor would name."""

    ordinal: int = 0
    recorded_at: int = 0
    hash: bytes = chain.GENESIS


class BadRow(Struct, frozen=True, kw_only=True):
    """The first place where the log is not what was written."""

    ordinal: int
    stream: str
    stream_seq: int
    what: str


class Verdict(Struct, frozen=True, kw_only=True):
    """What a check of the whole log found."""

    ok: bool
    rows: int
    """Rows that were checked and are good."""
    head_ordinal: int
    head_hash: str
    first_bad: BadRow | None = None
    checkpoints: int = 0
    """Signed heads that the log holds, all of them good; as far as they were looked at (attest.py)."""
    signed_ordinal: int = 0
    """The newest row that one of them speaks for."""
    public_key: str = ""
    """Whose signature the newest one is, in hex."""
    anchors: int = 0
    """Signed heads that were kept elsewhere and fit."""


class Erased(Struct, frozen=True, kw_only=True):
    """A payload that the log forgot: what the row says of it still."""

    sha256: str
    """In hex."""
    job_id: str | None


class Stored(Struct, frozen=True, kw_only=True):
    """One message as the log keeps it; reads like one that the bus delivered."""

    ordinal: int
    stream: Stream
    seq: int
    recorded_at: int
    subject: str
    headers: dict[str, str] | None
    body: bytes
    erased: Erased | None = None
    """What is known of a payload that was erased by order; the body is empty then, and wasn't."""


class Answer(Struct, frozen=True, kw_only=True):
    """Columns and rows of one question."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class EventLog:
    """The one writer of a log file. ``append`` may run in a thread, one call at a time; ``ask`` beside it."""

    def __init__(self, path: Path, connection: "duckdb.DuckDBPyConnection") -> None:
        self.path = path
        self._connection = connection
        self._reading = connection.cursor()
        self._reading_lock = threading.Lock()
        self._copying = connection.cursor()
        self._copying_lock = threading.Lock()
        self.positions = {stream: Position(stream=stream) for stream in Stream}
        self.head = Head()
        self.signed_ordinal = 0
        """The newest row that a checkpoint speaks for."""
        self.sealed_ordinal = 0
        """Rows up to here are in segments, and in the file no more."""
        self.generation = 0
        """One more with each change of rows that were written before: copies of an earlier one are no copies."""

    @classmethod
    def open(cls, path: Path, *, memory_limit: str = "512MB") -> Self:
        """The log at ``path``, made where there is none. Raises LogUnavailable."""
        path.parent.mkdir(parents=True, exist_ok=True)
        config: dict[str, str | bool | int | float | list[str]] = {
            # A checkpoint stops the writer; at the default of 16 MB it did so for a quarter of the time under load.
            "checkpoint_threshold": "256MB",
            "memory_limit": memory_limit,
            "threads": 1,
            "storage_compatibility_version": STORAGE,
            "autoload_known_extensions": False,
            "autoinstall_known_extensions": False,
        }
        try:
            connection = duckdb.connect(str(path), config=config)
        except duckdb.Error as err:
            raise LogUnavailable(path=path, detail=_first_line(err)) from err
        log = cls(path, connection)
        try:
            log._migrate()
            log._load()
        except LogUnavailable:
            connection.close()
            raise
        except duckdb.Error as err:
            connection.close()
            raise LogUnavailable(path=path, detail=_first_line(err)) from err
        return log

    @classmethod
    def without_what_was_erased(cls, path: Path) -> Self:
        """The log at ``path``; where payloads were erased since, its file was written anew before.

        DuckDB leaves what was erased in blocks of the file until it uses them again. Raises LogUnavailable.
        """
        log = cls.open(path)
        if not log.has_remains():
            return log
        generation = log.generation
        log.close()
        if write_ahead(path).exists():
            return cls.open(path)  # the file isn't all of it; another time
        fresh = path.with_suffix(".anew")
        for left in (fresh, write_ahead(fresh)):
            left.unlink(missing_ok=True)
        with cls.open(fresh) as new:
            new.take_all(path, generation)
        fresh.replace(path)
        manifest.sync_folder(path.parent)
        return cls.open(path)

    def has_remains(self) -> bool:
        """True where the file may hold bytes of payloads that were erased."""
        return self.generation != noted_in(self._connection, self._catalog, "written_anew")

    def take_all(self, old: Path, generation: int) -> None:
        """Fill an empty log with what another file holds, as it stands. Raises LogUnavailable."""
        connection = self._connection
        try:
            connection.execute(f"ATTACH {_quoted(str(old))} AS old (READ_ONLY)")
            connection.execute(f"INSERT INTO events({_NAMES}) SELECT {_NAMES} FROM old.main.events ORDER BY ordinal")
            for table in ("applied", "checkpoints", "meta"):
                connection.execute(f"DELETE FROM {table}")
                connection.execute(f"INSERT INTO {table} SELECT * FROM old.main.{table}")
            connection.execute("DETACH old")
        except duckdb.Error as err:
            raise LogUnavailable(path=old, detail=_first_line(err)) from err
        self._change(written_anew=generation)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write everything into the file and let go of it, so that others can open it."""
        with self._copying_lock, self._reading_lock:
            self._copying.close()
            self._reading.close()
            with contextlib.suppress(duckdb.Error):  # then the write-ahead log keeps what was committed
                self._connection.execute("CHECKPOINT")
            self._connection.close()

    def append(self, messages: Sequence[Recorded]) -> int:
        """Write what is new of ``messages``, in this order, as one transaction; how many rows that was.

        What the log has already is passed over. Raises SequenceGap before anything is written, and LogWriteFailed after
        nothing was.
        """
        seqs = {stream: position.last_seq for stream, position in self.positions.items()}
        newest: dict[Stream, tuple[Any, ...]] = {}
        ordinal, previous = self.head.ordinal, self.head.hash
        rows: list[tuple[Any, ...]] = []
        for message in messages:
            stream, seq = message.stream, message.seq
            if seq <= seqs[stream]:
                continue
            if seq != seqs[stream] + 1:
                raise SequenceGap(stream=stream, expected=seqs[stream] + 1, found=seq)
            seqs[stream] = seq
            columns = columns_of(message)
            payload = chain.payload_hash(message.body)
            envelope = chain.envelope_hash(columns)
            hash_ = chain.link(previous, stream, seq, envelope, payload)
            ordinal += 1
            row = (ordinal, stream.value, seq, *columns, message.body, payload, envelope, previous, hash_)
            rows.append(row)
            newest[stream] = row
            previous = hash_
        if rows:
            reached = {stream: _position(row) for stream, row in newest.items()}
            self._commit(rows, list(reached.values()))
            self.positions.update(reached)
            self.head = Head(ordinal=ordinal, recorded_at=rows[-1][_FIRST_ENVELOPE], hash=previous)
        return len(rows)

    def add_checkpoint(self, ordinal: int, checkpoint: str) -> None:
        """Keep what was signed over the row with this ordinal. Between two appends. Raises LogWriteFailed."""
        try:
            self._connection.execute("INSERT INTO checkpoints VALUES (?, ?)", [ordinal, checkpoint])
        except duckdb.Error as err:
            raise LogWriteFailed(rows=1, detail=_first_line(err)) from err
        self.signed_ordinal = ordinal

    def take_segments(self, files: Sequence[Path], checkpoints: Sequence[tuple[int, str]]) -> None:
        """Fill an empty log with the rows in ``files``, in their order, and with what was signed over them.

        Nothing is checked here. Raises LogUnavailable.
        """
        connection = self._connection
        try:
            for file in files:
                connection.execute(
                    f"INSERT INTO events({_NAMES}) "
                    f"SELECT {_NAMES} FROM read_parquet({_quoted(str(file))}) ORDER BY ordinal"
                )
            for row in checkpoints:
                connection.execute("INSERT INTO checkpoints VALUES (?, ?)", row)
            for stream in Stream:
                newest = connection.execute(
                    f"SELECT {_NAMES} FROM events WHERE stream = ? ORDER BY stream_seq DESC LIMIT 1", [stream.value]
                ).fetchone()
                if newest is not None:
                    self._update(_position(newest))
            self._load()
        except duckdb.Error as err:
            raise LogUnavailable(path=self.path, detail=_first_line(err)) from err

    def beside(self) -> "LogFile":
        """The rows of the file itself, without sealed ones, for reading in another thread. To be closed."""
        return LogFile(self.path, self._connection.cursor())

    def let_go(self, last: int) -> None:
        """Rows up to this one are in segments from here on, which the folder's manifest names, and in the file no more.

        Between two appends. Raises LogWriteFailed; then the file has them still.
        """
        with self._copying_lock, self._reading_lock:  # nobody asks between the two
            self._change(("DELETE FROM events WHERE ordinal <= ?", [last]), sealed=last)
            self.sealed_ordinal = last
            self._span()

    def erase(self, ordinals: Sequence[int], *, rewrite: Callable[[list[int]], None]) -> None:
        """Forget the payloads of rows for good; their digests stay. ``rewrite`` does it to the segments of sealed rows.

        Between two appends, and never of the newest row of a stream, by which the bus is known again. Raises
        LogWriteFailed.
        """
        sealed = [ordinal for ordinal in ordinals if ordinal <= self.sealed_ordinal]
        live = [ordinal for ordinal in ordinals if ordinal > self.sealed_ordinal]
        forget = "UPDATE events SET payload = NULL WHERE ordinal IN (SELECT unnest(CAST(? AS BIGINT[])))"
        with self._copying_lock, self._reading_lock:
            # Copies first: whoever dies in between finds the payloads again, and erases them then.
            self._change(*([(forget, [live])] if live else []), generation=self.generation + 1)
            self.generation += 1
            if sealed:
                rewrite(sealed)
                self._span()
        with contextlib.suppress(duckdb.Error):  # then the next one writes over the old blocks
            self._connection.execute("CHECKPOINT")

    def _change(self, *statements: tuple[str, list[Any]], **notes: int) -> None:
        """Change rows and what is noted of them, in one transaction. Raises LogWriteFailed."""
        with self._transaction(rows=1) as connection:
            for statement, parameters in statements:
                connection.execute(statement, parameters)
            for key, value in notes.items():
                connection.execute("DELETE FROM meta WHERE key = ?", [key])
                connection.execute("INSERT INTO meta VALUES (?, ?)", [key, str(value)])

    def _span(self) -> None:
        """Have the readers' ``events`` be the file's rows and the sealed ones."""
        for cursor in (self._reading, self._copying):
            span(cursor, self._catalog, self.path, self.sealed_ordinal)

    def ask(self, question: str, parameters: Sequence[object] = ()) -> Answer:
        """The answer to one of our own questions, as of the last commit. Not for other people's SQL (see sql.py)."""
        with self._reading_lock:
            found = self._reading.execute(question, list(parameters))
            return Answer(columns=tuple(d[0] for d in found.description or ()), rows=found.fetchall())

    def copy_into(self, path: Path) -> Head:
        """Bring the copy at ``path`` up to the last commit, made where there is none; the newest row that it holds.

        Only new rows are copied. Raises LogUnavailable where somebody reads that copy, or it can't be written, and
        NotACopy where it was made from another log.
        """
        with self._copying_lock:
            cursor = self._copying
            try:
                # ATTACH takes no parameters, and the path is ours: quoted for good measure.
                cursor.execute(f"ATTACH {_quoted(str(path))} AS replica (STORAGE_VERSION {_quoted(STORAGE)})")
            except duckdb.Error as err:
                raise LogUnavailable(path=path, detail=_first_line(err)) from err
            try:
                return self._copy(cursor, path)
            except duckdb.Error as err:
                raise LogUnavailable(path=path, detail=_first_line(err)) from err
            finally:
                cursor.execute("DETACH replica")

    def _copy(self, cursor: "duckdb.DuckDBPyConnection", path: Path) -> Head:
        return fill_copy(cursor, self._catalog, path, sealed=self.sealed_ordinal)

    def _commit(self, rows: list[tuple[Any, ...]], reached: list[Position]) -> None:
        with self._transaction(rows=len(rows)) as connection:
            with connection.appender("events") as appender:
                appender.append_rows(rows)
            for position in reached:
                self._update(position)

    @contextlib.contextmanager
    def _transaction(self, *, rows: int) -> Iterator[duckdb.DuckDBPyConnection]:
        """All of it or nothing. Raises LogWriteFailed, which says how many ``rows`` were not written."""
        connection = self._connection
        try:
            connection.begin()
            try:
                yield connection
                connection.commit()
            except BaseException:
                with contextlib.suppress(duckdb.Error):  # it may have ended the transaction by itself
                    connection.rollback()
                raise
        except duckdb.Error as err:
            raise LogWriteFailed(rows=rows, detail=_first_line(err)) from err

    def _update(self, position: Position) -> None:
        self._connection.execute(
            "UPDATE applied SET last_seq = ?, last_ordinal = ?, last_event_id = ?, "
            "last_payload_sha256 = ?, last_hash = ? WHERE stream = ?",
            [
                position.last_seq,
                position.last_ordinal,
                position.last_event_id,
                position.last_payload_sha256,
                position.last_hash,
                position.stream.value,
            ],
        )

    def _migrate(self) -> None:
        connection = self._connection
        self._catalog = f'"{_one(connection.execute("SELECT current_database()"))}"'
        known = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
        wanted = {"schema": str(SCHEMA), "views": _views_digest()}
        changed = False
        if "events" not in known:
            connection.execute("BEGIN")
            connection.execute(f"CREATE TABLE events({_EVENTS_BODY})")
            connection.execute(f"CREATE TABLE applied({_APPLIED_BODY})")
            connection.execute(f"CREATE TABLE meta({_META_BODY})")
            for stream in Stream:
                connection.execute("INSERT INTO applied VALUES (?, 0, 0, NULL, NULL, ?)", [stream.value, chain.GENESIS])
            connection.execute("INSERT INTO meta VALUES ('schema', ?), ('views', '')", [wanted["schema"]])
            connection.execute("COMMIT")
            changed = True
        if "checkpoints" not in known:
            connection.execute(f"CREATE TABLE checkpoints({_CHECKPOINTS_BODY})")
            changed = True
        # Copies didn't always say what they are; all that there were before they did are of the first schema.
        found = {"schema": "1", "views": "", **dict(connection.execute("SELECT key, value FROM meta").fetchall())}
        if found["schema"] != wanted["schema"]:
            raise LogUnavailable(
                path=self.path, detail=f"its schema is {found['schema']}, and this version writes {SCHEMA}"
            )
        if settled.OPEN in known:  # a copy that is a log from here on: what it kept is true of its rows of now alone
            connection.execute("BEGIN")
            settled.forget(connection, known)
            connection.execute("COMMIT")
            changed = True
        if found["views"] != wanted["views"]:
            connection.execute("BEGIN")
            for name, text in views():
                connection.execute(f"CREATE OR REPLACE VIEW {name} AS {text}")
            connection.execute("DELETE FROM meta WHERE key IN ('schema', 'views')")
            connection.execute(
                "INSERT INTO meta VALUES ('schema', ?), ('views', ?)", [wanted["schema"], wanted["views"]]
            )
            connection.execute("COMMIT")
            changed = True
        if changed:
            # Definitions never stay in the write-ahead log: those are the entries that fail to replay.
            connection.execute("CHECKPOINT")

    def _load(self) -> None:
        self.sealed_ordinal = sealed_in(self._connection, self._catalog)
        self.generation = noted_in(self._connection, self._catalog, "generation")
        self._span()
        self.signed_ordinal = int(_one(self._connection.execute("SELECT coalesce(max(ordinal), 0) FROM checkpoints")))
        for row in self._connection.execute(
            "SELECT stream, last_seq, last_ordinal, last_event_id, last_payload_sha256, last_hash FROM applied"
        ).fetchall():
            position = Position(
                stream=Stream(row[0]),
                last_seq=row[1],
                last_ordinal=row[2],
                last_event_id=row[3],
                last_payload_sha256=row[4],
                last_hash=row[5],
            )
            self.positions[position.stream] = position
            if position.last_ordinal > self.head.ordinal:
                (at,) = self._connection.execute(
                    "SELECT recorded_at FROM events WHERE ordinal = ?", [position.last_ordinal]
                ).fetchone() or (0,)
                self.head = Head(ordinal=position.last_ordinal, recorded_at=at, hash=position.last_hash)


def span(cursor: "duckdb.DuckDBPyConnection", catalog: str, path: Path, sealed: int) -> None:
    """Have ``events`` mean, on this connection alone, the rows of ``catalog`` and of the segments beside ``path``.

    Raises LogUnavailable where a segment isn't there.
    """
    if not sealed:
        return
    files = [str(file) for file in sealed_files(path, sealed)]
    try:
        cursor.execute(
            f"CREATE OR REPLACE TEMP VIEW events AS SELECT {_NAMES}, make_timestamp_ns(recorded_at) AS recorded "
            f"FROM read_parquet([{', '.join(_quoted(file) for file in files)}]) WHERE ordinal <= {sealed} "
            f"UNION ALL SELECT * FROM {catalog}.main.events WHERE ordinal > {sealed}"
        )
    except duckdb.Error as err:
        raise LogUnavailable(path=path, detail=_first_line(err)) from err


def sealed_files(path: Path, sealed: int) -> list[Path]:
    """The segments of the log at ``path`` that hold its rows up to ``sealed``, in order. Raises LogUnavailable."""
    folder = manifest.sealed_folder(path)
    try:
        whole = manifest.read(folder)
    except (OSError, msgspec.MsgspecError) as err:
        raise LogUnavailable(
            path=path, detail=f"rows up to {sealed} are in {folder}, which can't be read: {err}"
        ) from err
    return [folder / one.file for one in whole.segments if one.last_ordinal <= sealed]


def sealed_in(connection: "duckdb.DuckDBPyConnection", catalog: str) -> int:
    """The last row of an opened log that is in a segment; 0 where none is, and of copies, which have all rows."""
    return noted_in(connection, catalog, "sealed")


def noted_in(connection: "duckdb.DuckDBPyConnection", catalog: str, key: str) -> int:
    """A number that an opened log keeps of itself; 0 where it doesn't."""
    if not connection.execute(
        "SELECT 1 FROM duckdb_tables() WHERE table_name = 'meta' AND concat('\"', database_name, '\"') = ?", [catalog]
    ).fetchall():
        return 0
    found = connection.execute(f"SELECT value FROM {catalog}.main.meta WHERE key = ?", [key]).fetchone()
    return 0 if found is None else int(found[0])


def sealed_of(path: Path) -> int:
    """The last row of a log that nobody writes which is in a segment; 0 where none is. Raises LogUnavailable."""
    connection = _opened(path)
    try:
        return sealed_in(connection, f'"{_one(connection.execute("SELECT current_database()"))}"')
    except duckdb.Error:
        return 0  # what is wrong with it, the chain tells
    finally:
        connection.close()


def fill_copy(cursor: "duckdb.DuckDBPyConnection", catalog: str, path: Path, *, sealed: int) -> Head:
    """Bring the copy that is attached as ``replica`` up to date with the log ``catalog``; the newest row that it holds.

    A copy has all rows, sealed ones among them. Raises duckdb.Error and NotACopy.
    """
    cursor.execute(f"CREATE TABLE IF NOT EXISTS replica.events({_EVENTS_BODY})")
    cursor.execute(f"CREATE TABLE IF NOT EXISTS replica.applied({_APPLIED_BODY})")
    cursor.execute(f"CREATE TABLE IF NOT EXISTS replica.checkpoints({_CHECKPOINTS_BODY})")
    cursor.execute(f"CREATE TABLE IF NOT EXISTS replica.meta({_META_BODY})")
    generation = noted_in(cursor, catalog, "generation")
    cursor.execute("BEGIN")
    try:
        last = _one(cursor.execute("SELECT coalesce(max(ordinal), 0) FROM replica.events"))
        if last and noted_in(cursor, '"replica"', "generation") != generation:
            raise NotACopy(path=path, ordinal=last)
        if not last:
            cursor.execute(
                "INSERT INTO replica.meta VALUES ('generation', ?), ('schema', ?)", [str(generation), str(SCHEMA)]
            )
        # Segments are opened only for a copy that lacks rows of theirs.
        rows = "temp.main.events" if last < sealed or (last and last <= sealed) else f"{catalog}.main.events"
        if last and not _is_of(cursor, rows, last):
            raise NotACopy(path=path, ordinal=last)
        cursor.execute(
            f"INSERT INTO replica.events({_NAMES}) SELECT {_NAMES} FROM {rows} WHERE ordinal > ? ORDER BY ordinal",
            [last],
        )
        # Not those of rows that came since: the copy would seem to lack its tail.
        cursor.execute(
            f"INSERT INTO replica.checkpoints SELECT * FROM {catalog}.main.checkpoints "
            "WHERE ordinal > (SELECT coalesce(max(ordinal), 0) FROM replica.checkpoints) "
            "AND ordinal <= (SELECT coalesce(max(ordinal), 0) FROM replica.events)"
        )
        cursor.execute("DELETE FROM replica.applied")
        cursor.execute(f"INSERT INTO replica.applied SELECT * FROM {catalog}.main.applied")
        newest = cursor.execute(
            "SELECT ordinal, recorded_at, hash FROM replica.events ORDER BY ordinal DESC LIMIT 1"
        ).fetchone()
        if newest is not None:
            settled.settle(cursor, dict(views()), digest=_views_digest(), last=newest[0], columns=_EVENTS_BODY)
        cursor.execute("COMMIT")
    except (duckdb.Error, LogError):
        cursor.execute("ROLLBACK")
        raise
    cursor.execute("CHECKPOINT replica")
    return Head() if newest is None else Head(ordinal=newest[0], recorded_at=newest[1], hash=newest[2])


def _is_of(cursor: "duckdb.DuckDBPyConnection", rows: str, last: int) -> bool:
    """True where the copy's last row is a row of this log: by the chain, so is everything before it."""
    return bool(
        _one(
            cursor.execute(
                f"SELECT count(*) FROM replica.events AS theirs JOIN {rows} AS ours "
                "ON ours.ordinal = theirs.ordinal AND ours.hash = theirs.hash "
                "WHERE theirs.ordinal = ? AND ours.ordinal = ?",
                [last, last],
            )
        )
    )


def whole(path: Path) -> Path:
    """A file with all rows of a log that nobody writes: itself, or a copy beside it where some of its rows are sealed.

    The copy is brought up to date. Raises LogUnavailable.
    """
    if not manifest.sealed_folder(path).exists():
        return path
    copy = path.parent / "copies" / f"{path.stem}-whole.duckdb"
    for _ in range(2):
        try:
            return _copied_whole(path, copy)
        except NotACopy:
            copy.unlink(missing_ok=True)
    raise LogUnavailable(path=copy, detail="it can't be made")


def _copied_whole(path: Path, copy: Path) -> Path:
    connection = duckdb.connect(":memory:", config={"threads": 1, "memory_limit": "1GB"})
    catalog = '"log"'
    try:
        connection.execute(f"ATTACH {_quoted(str(path))} AS {catalog} (READ_ONLY)")
        sealed = sealed_in(connection, catalog)
        if not sealed:
            return path
        span(connection, catalog, path, sealed)
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        connection.execute(f"ATTACH {_quoted(str(copy))} AS replica (STORAGE_VERSION {_quoted(STORAGE)})")
        fill_copy(connection, catalog, copy, sealed=sealed)
        connection.execute("DETACH replica")
    except duckdb.Error as err:
        raise LogUnavailable(path=copy, detail=_first_line(err)) from err
    finally:
        connection.close()
    return copy


def log_path(data_dir: Path, pool: PoolId) -> Path:
    """Where a pool's log is, on the machine whose data directory this is."""
    return data_dir / "log" / f"{pool}.duckdb"


def write_ahead(path: Path) -> Path:
    """Where DuckDB has what was committed last and isn't in the log's file yet; there is none after an orderly end."""
    return path.with_name(f"{path.name}.wal")


def check_bus(position: Position, *, first_seq: int, last_seq: int, at_last: Recorded | None) -> None:
    """Raise LogAhead or LogBehind unless the bus goes on where the log stands.

    ``at_last`` is what the bus holds at the log's last sequence; None where it holds nothing there (any more).
    """
    stream, applied = position.stream, position.last_seq
    if last_seq < applied:
        raise LogAhead(stream=stream, log_seq=applied, bus_seq=last_seq, detail="the bus is shorter than the log")
    if first_seq > applied + 1:
        raise LogBehind(stream=stream, log_seq=applied, bus_first=first_seq)
    if applied == 0 or at_last is None:
        return
    if chain.payload_hash(at_last.body) != position.last_payload_sha256:
        event_id = columns_of(at_last)[_EVENT_ID]
        raise LogAhead(
            stream=stream,
            log_seq=applied,
            bus_seq=last_seq,
            detail=f"at {applied} the log has event {position.last_event_id}, the bus another: {event_id}",
        )


def open_read_only(path: Path) -> "duckdb.DuckDBPyConnection":
    """A log that nobody writes, or a copy of one, for our own reading; ``events`` has the sealed rows, too.

    Raises LogUnavailable.
    """
    connection = _opened(path)
    try:
        catalog = f'"{_one(connection.execute("SELECT current_database()"))}"'
        span(connection, catalog, path, sealed_in(connection, catalog))
    except duckdb.Error as err:
        connection.close()
        raise LogUnavailable(path=path, detail=_first_line(err)) from err
    except LogUnavailable:
        connection.close()
        raise
    return connection


def _opened(path: Path) -> "duckdb.DuckDBPyConnection":
    if not path.exists():
        raise LogUnavailable(path=path, detail="there is no such file")
    try:
        return duckdb.connect(str(path), read_only=True, config={"threads": 1, "memory_limit": "1GB"})
    except duckdb.Error as err:
        raise LogUnavailable(path=path, detail=_first_line(err)) from err


@contextlib.contextmanager
def own_questions(path: Path) -> Iterator[Callable[[str], list[tuple[Any, ...]]]]:
    """Asks a log that nobody writes our own SQL, views included. It may spill to disk, which a stranger's may not.

    Raises LogUnavailable.
    """
    connection = open_read_only(path)
    made: set[str] = set()
    is_kept = _keeps_settled(connection)

    def ask(question: str) -> list[tuple[Any, ...]]:
        for name, text in views_in(question, is_kept=is_kept):
            if name not in made:
                connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {text}")
                made.add(name)
        return connection.execute(question).fetchall()

    try:
        yield ask
    finally:
        connection.close()


def write_parquet(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows as a Parquet file, each column of the type that its first value has. Raises LogWriteFailed."""
    types = [
        next((_parquet_type(row[i]) for row in rows if row[i] is not None), "VARCHAR") for i in range(len(columns))
    ]
    connection = duckdb.connect(":memory:", config={"threads": 1})
    try:
        fields = ", ".join(f"{_name(name)} {type_}" for name, type_ in zip(columns, types, strict=True))
        connection.execute(f"CREATE TABLE content({fields})")
        with connection.appender("content") as appender:
            appender.append_rows([tuple(row) for row in rows])
        connection.execute(f"COPY content TO {_quoted(str(path))} (FORMAT parquet, COMPRESSION zstd)")
    except duckdb.Error as err:
        raise LogWriteFailed(rows=len(rows), detail=_first_line(err)) from err
    finally:
        connection.close()


def _parquet_type(value: object) -> str:
    if isinstance(value, int):
        return "BIGINT"
    return "DECIMAL(38, 9)" if isinstance(value, Decimal) else "VARCHAR"


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def ask_locked_down(path: Path, statement: str, *, limit: int, seconds: float) -> Answer:
    """The answer to a stranger's statement, at most ``limit`` rows. Raises StatementRefused or LogUnavailable.

    Only for a process of its own that has given up its rights before (sql_worker.py): the statement's type is checked,
    and that alone is no guard, as a common table expression may write and still be called a SELECT.
    """
    try:
        connection = duckdb.connect(str(path), read_only=True, config=dict(LOCKED_DOWN))
    except duckdb.Error as err:
        raise LogUnavailable(path=path, detail=_first_line(err)) from err
    timer = threading.Timer(seconds, connection.interrupt)
    timer.daemon = True
    try:
        # Made here and not in the copy: always those of this version. Binding one costs more than many an answer.
        for name, text in views_in(statement, is_kept=_keeps_settled(connection)):
            connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {text}")
        statements = connection.extract_statements(statement)
        if len(statements) != 1:
            raise StatementRefused(f"exactly one statement, please: there are {len(statements)}")
        if statements[0].type not in {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}:
            raise StatementRefused(f"only SELECT and EXPLAIN are answered, not {statements[0].type.name}")
        timer.start()
        found = connection.execute(statements[0])
        return Answer(columns=tuple(d[0] for d in found.description or ()), rows=found.fetchmany(limit))
    except duckdb.InterruptException as err:
        raise StatementRefused(f"it took longer than {seconds:g} s and was stopped") from err
    except duckdb.Error as err:
        raise StatementRefused(str(err)) from err
    finally:
        timer.cancel()
        connection.close()


def verify(path: Path) -> Verdict:
    """Recompute every hash of a log that nobody writes, and name the first row that is not what was written.

    Finds an edit of any column, a missing, doubled or moved row, and a tail that was cut without its position. Raises
    LogUnavailable.
    """
    connection = open_read_only(path)
    try:
        return _verified(connection)
    finally:
        connection.close()


def _verified(connection: "duckdb.DuckDBPyConnection") -> Verdict:
    good = 0
    previous = chain.GENESIS
    last = dict.fromkeys(Stream, 0)

    def bad(ordinal: int, stream: str, seq: int, what: str) -> Verdict:
        row = BadRow(ordinal=ordinal, stream=stream, stream_seq=seq, what=what)
        return Verdict(ok=False, rows=good, head_ordinal=good, head_hash=previous.hex(), first_bad=row)

    at_once = _VERIFY_ROWS
    may_be_erased = _Orders(connection).cover
    while True:
        try:
            rows = connection.execute(
                f"SELECT {_NAMES} FROM events WHERE ordinal > ? AND ordinal <= ? ORDER BY ordinal",
                [good, good + at_once],
            ).fetchall()
        except duckdb.Error as err:
            if at_once > 1:
                at_once //= 2  # a damaged block spoils many rows: the first of them is found by halves
                continue
            return bad(good + 1, *_place(connection, good + 1), f"it can't be read: {_first_line(err)}")
        for row in rows:
            what = _wrong(row, good + 1, previous, last, may_be_erased)
            if what is not None:
                return bad(row[0], row[1], row[2], what)
            good += 1
            previous = row[-1]
            last[Stream(row[1])] = row[2]
        if len(rows) < at_once:
            following = connection.execute(
                "SELECT ordinal, stream, stream_seq FROM events WHERE ordinal > ? ORDER BY ordinal LIMIT 1", [good]
            ).fetchone()
            if following is None:
                break
            return bad(following[0], following[1], following[2], f"row {good + 1} is missing")
    count = _one(connection.execute("SELECT count(*) FROM events"))
    if count != good:
        return bad(good + 1, "", 0, f"{count} rows are stored, and {good} of them follow each other")
    for stream, seq, ordinal, hash_ in connection.execute(
        "SELECT stream, last_seq, last_ordinal, last_hash FROM applied ORDER BY stream"
    ).fetchall():
        if seq != last[Stream(stream)]:
            return bad(
                ordinal, stream, last[Stream(stream)] + 1, f"{stream} were written up to {seq}: the tail is gone"
            )
        if ordinal == good and hash_ != previous:
            return bad(ordinal, stream, seq, "the last row is not the one that was written last")
    return Verdict(ok=True, rows=good, head_ordinal=good, head_hash=previous.hex())


def _place(connection: "duckdb.DuckDBPyConnection", ordinal: int) -> tuple[str, int]:
    """Stream and sequence of a row that can't be read as a whole, where these can."""
    try:
        row = connection.execute("SELECT stream, stream_seq FROM events WHERE ordinal = ?", [ordinal]).fetchone()
    except duckdb.Error:
        return "", 0
    return ("", 0) if row is None else (row[0], row[1])


def _position(row: Sequence[Any]) -> Position:
    """How far the log has got with a stream whose newest row this is."""
    return Position(
        stream=Stream(row[1]),
        last_seq=row[2],
        last_ordinal=row[0],
        last_event_id=row[_FIRST_ENVELOPE + _EVENT_ID],
        last_payload_sha256=row[_PAYLOAD + 1],
        last_hash=row[-1],
    )


class _Orders:
    """What a log says was ordered to be erased."""

    def __init__(self, connection: "duckdb.DuckDBPyConnection") -> None:
        self._connection = connection
        try:
            named = [msgspec.json.decode(one, type=ev.PayloadEraseOrdered) for one in self._of(ev.PayloadEraseOrdered)]
            due = [msgspec.json.decode(one, type=ev.PayloadsEraseOrdered) for one in self._of(ev.PayloadsEraseOrdered)]
            self._rows = {(one.stream.value, one.stream_seq) for one in named}
            self._before_at = max((one.before_at for one in due), default=0)
        except (duckdb.Error, msgspec.MsgspecError):
            self._rows, self._before_at = set(), 0  # what is wrong with these rows, the chain tells
        self._forgettable: set[int] | None = None

    def cover(self, stream: str, seq: int, ordinal: int) -> bool:
        """True where the row's payload may be gone: by its name, or as what a job said that had ended long before."""
        if (stream, seq) in self._rows:
            return True
        if not self._before_at:
            return False
        if self._forgettable is None:  # asked once, and of few logs
            try:
                found = self._connection.execute(forgettable(self._before_at, "true", "ordinal")).fetchall()
            except duckdb.Error:
                found = []
            self._forgettable = {row[0] for row in found}
        return ordinal in self._forgettable

    def _of(self, kind: type[ev.Fact]) -> list[bytes]:
        return [
            payload
            for (payload,) in self._connection.execute(
                f"SELECT payload FROM events WHERE type = '{type_name(kind)}' AND stream = 'facts' "
                "AND parse_error IS NULL AND payload IS NOT NULL"
            ).fetchall()
        ]


def forgettable(before_at: int, condition: str, columns: str) -> str:
    """SQL for the rows in which jobs that had ended by an instant, or were refused, said what they are.

    Later facts take no row away from it, so that what was erased once stays covered.
    """
    kind = "split_part(type, '.', 1)"
    before = f"recorded_at < {int(before_at)}"
    ended = f"SELECT job_id FROM events WHERE {kind} IN {tuple(one.__name__ for one in ev.TERMINAL)} AND {before}"
    # A wish need not name its job: admission's answer does.
    asked = (
        f"SELECT answers FROM events WHERE {before} AND answers IS NOT NULL AND ({kind} = 'JobRejected' OR "
        f"({kind} IN ('JobAdmitted', 'JobDuplicate') AND job_id IN ({ended} AND job_id IS NOT NULL)))"
    )
    return (
        f"SELECT {columns} FROM events WHERE {before} AND ("
        f"({kind} IN ('JobRequested', 'JobAdmitted', 'RunPlaced') AND job_id IN ({ended} AND job_id IS NOT NULL)) OR "
        f"(stream = 'wishes' AND stream_seq IN ({asked}))) AND {condition} ORDER BY ordinal"
    )


def _wrong(
    row: Sequence[Any],
    ordinal: int,
    previous: bytes,
    last: dict[Stream, int],
    may_be_erased: Callable[[str, int, int], bool],
) -> str | None:
    """What is wrong with a row, given what precedes it; None where nothing is."""
    stream, seq = row[1], row[2]
    payload, payload_sha256, envelope, prev_hash, hash_ = row[_PAYLOAD:]
    if row[0] != ordinal:
        return f"row {ordinal} is missing" if row[0] > ordinal else f"row {row[0]} is there twice"
    if stream not in {s.value for s in Stream}:
        return "its stream was changed"
    if payload is None and not may_be_erased(stream, seq, ordinal):
        return "its payload is gone, and nobody ordered that"
    if payload is not None and chain.payload_hash(payload) != payload_sha256:
        return "its payload was changed"
    if chain.envelope_hash(row[_FIRST_ENVELOPE:_PAYLOAD]) != envelope:
        return "its envelope was changed (headers, or a column that tells what is in them)"
    if prev_hash != previous:
        return "it does not follow the row before it"
    if chain.link(previous, Stream(stream), seq, envelope, payload_sha256) != hash_:
        return "its hash does not follow from its content (a hash or its sequence was changed)"
    if seq != last[Stream(stream)] + 1:
        return f"{stream} {last[Stream(stream)] + 1} is missing"
    return None


_STORED_COLUMNS: Final = "ordinal, stream_seq, recorded_at, subject, headers, payload, payload_sha256, job_id"


def _stored(stream: Stream, row: Sequence[Any]) -> Stored:
    ordinal, seq, at, subject, headers, payload, digest, job = row
    return Stored(
        ordinal=ordinal,
        stream=stream,
        seq=seq,
        recorded_at=at,
        subject=subject,
        headers=None if headers is None else json.loads(headers),
        body=payload or b"",
        erased=None if payload is not None else Erased(sha256=digest.hex(), job_id=job),
    )


def messages_of(path: Path, stream: Stream, *, rows: int = 20_000) -> Iterator[Stored]:
    """Every message of one stream that the log at ``path`` holds, in stream order.

    Raises LogUnavailable, and LogDamaged where a row can't be read.
    """
    connection = open_read_only(path)
    try:
        after = 0
        while True:
            found = connection.execute(
                f"SELECT {_STORED_COLUMNS} FROM events "
                "WHERE stream = ? AND stream_seq > ? AND stream_seq <= ? ORDER BY stream_seq",
                [stream.value, after, after + rows],
            ).fetchall()
            for row in found:
                yield _stored(stream, row)
            if not found:
                return
            after += rows
    except duckdb.Error as err:
        raise LogDamaged(path=path, detail=_first_line(err)) from err
    finally:
        connection.close()


FactRow = tuple[
    int, int, str, str | None, str, int | None, int | None, int | None, str | None, str | None, bytes | None
]
"""A fact's row, as far as a fold needs it: _FACT_COLUMNS."""
_FACT_COLUMNS: Final = (
    "stream_seq, recorded_at, type, event_id, author, basis_facts, basis_wishes, decided_at, policy, parse_error, "
    "payload"
)


class LogFile:
    """A log that nobody writes, kept open for several readings."""

    def __init__(self, path: Path, connection: "duckdb.DuckDBPyConnection") -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises LogUnavailable."""
        return cls(path, open_read_only(path))

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def ask(self, question: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Rows of one of our own questions. Raises LogDamaged."""
        try:
            return self._connection.execute(question, list(parameters)).fetchall()
        except duckdb.Error as err:
            raise LogDamaged(path=self.path, detail=_first_line(err)) from err

    def last_seq(self, stream: Stream, *, until: int | None = None) -> int:
        """The stream's newest sequence, or its newest that was recorded at ``until`` or before; 0 for none."""
        question = "SELECT coalesce(max(stream_seq), 0) FROM events WHERE stream = ?"
        if until is None:
            return int(self.ask(question, [stream.value])[0][0])
        return int(self.ask(f"{question} AND recorded_at <= ?", [stream.value, until])[0][0])

    def span(self, stream: Stream) -> tuple[int, int]:
        """When the stream's first and last message were recorded; 0, 0 for none."""
        ((first, last),) = self.ask(
            "SELECT coalesce(min(recorded_at), 0), coalesce(max(recorded_at), 0) FROM events WHERE stream = ?",
            [stream.value],
        )
        return int(first), int(last)

    def hash_of(self, stream: Stream, seq: int) -> bytes | None:
        """The chain's hash at a row; None where there is none."""
        found = self.ask("SELECT hash FROM events WHERE stream = ? AND stream_seq = ?", [stream.value, seq])
        return bytes(found[0][0]) if found else None

    def last_ordinal(self) -> int:
        """The newest row; 0 for none."""
        return int(self.ask("SELECT coalesce(max(ordinal), 0) FROM events")[0][0])

    def hash_at(self, ordinal: int) -> bytes | None:
        """The chain's hash at a row; None where there is none."""
        found = self.ask("SELECT hash FROM events WHERE ordinal = ?", [ordinal])
        return bytes(found[0][0]) if found else None

    def place_of(self, ordinal: int) -> tuple[str, int] | None:
        """Stream and sequence of a row; None where there is none."""
        found = self.ask("SELECT stream, stream_seq FROM events WHERE ordinal = ?", [ordinal])
        return (str(found[0][0]), int(found[0][1])) if found else None

    def checkpoints(self) -> list[tuple[int, str]]:
        """What was signed, by row; nothing of a log that was never signed."""
        if not self.ask("SELECT 1 FROM duckdb_tables() WHERE table_name = 'checkpoints'"):
            return []
        return [(int(o), str(text)) for o, text in self.ask("SELECT * FROM checkpoints ORDER BY ordinal")]

    def facts(self, *, after: int, to: int, rows: int = 20_000) -> "Iterator[FactRow]":
        """Facts after one sequence up to another, in order. Raises LogDamaged."""
        while after < to:
            upto = min(to, after + rows)
            yield from self.ask(
                f"SELECT {_FACT_COLUMNS} FROM events WHERE stream = 'facts' AND stream_seq > ? AND stream_seq <= ? "
                "ORDER BY stream_seq",
                [after, upto],
            )
            after = upto

    def recorded_at(self, ordinal: int) -> int:
        """When a row that is there was recorded."""
        return int(self.ask("SELECT recorded_at FROM events WHERE ordinal = ?", [ordinal])[0][0])

    def first_ordinal_from(self, instant: int, *, after: int) -> int | None:
        """The first row after another that was recorded at an instant or later; None where there is none."""
        question = "SELECT min(ordinal) FROM events WHERE recorded_at >= ? AND ordinal > ?"
        found = self.ask(question, [instant, after])[0][0]
        return None if found is None else int(found)

    def write_segment(self, path: Path, first: int, last: int) -> None:
        """Rows from one ordinal to another, whole, as a Parquet file, which was read back. Raises LogDamaged."""
        rows = f"FROM events WHERE ordinal BETWEEN {int(first)} AND {int(last)}"
        self.ask(
            f"COPY (SELECT {_NAMES} {rows} ORDER BY ordinal) TO {_quoted(str(path))} (FORMAT parquet, COMPRESSION zstd)"
        )
        same = f"SELECT count(*), bit_xor(hash({_NAMES}))"
        if self.ask(f"{same} {rows}") != self.ask(f"{same} FROM read_parquet({_quoted(str(path))})"):
            raise LogDamaged(path=path, detail="the segment doesn't hold what was written into it")

    def rewrite_segment(self, old: Path, new: Path, erased: Sequence[int]) -> None:
        """The rows of a segment as another file, some of them without their payload. Raises LogDamaged."""
        self.ask("CREATE OR REPLACE TEMP TABLE erased AS SELECT unnest(CAST(? AS BIGINT[])) AS ordinal", [list(erased)])
        is_erased = "ordinal IN (SELECT ordinal FROM erased)"
        names = _NAMES.replace("payload,", f"CASE WHEN {is_erased} THEN NULL ELSE payload END AS payload,", 1)
        rows = f"FROM read_parquet({_quoted(str(old))})"
        self.ask(
            f"COPY (SELECT {names} {rows} ORDER BY ordinal) TO {_quoted(str(new))} (FORMAT parquet, COMPRESSION zstd)"
        )
        same = f"SELECT count(*), bit_xor(hash({_NAMES}))"
        if self.ask(f"{same} FROM (SELECT {names} {rows})") != self.ask(
            f"{same} FROM read_parquet({_quoted(str(new))})"
        ):
            raise LogDamaged(path=new, detail="the segment doesn't hold what was written into it")

    def message(self, stream: Stream, seq: int) -> Stored:
        """One message as it came."""
        (row,) = self.ask(
            f"SELECT {_STORED_COLUMNS} FROM events WHERE stream = ? AND stream_seq = ?", [stream.value, seq]
        )
        return _stored(stream, row)


def views() -> list[tuple[str, str]]:
    """Name and text of each named question, in the order in which they build on each other."""
    folder = importlib.resources.files("apportion.monitor") / "queries"
    return [(name, (folder / f"{name}.sql").read_text(encoding="utf-8")) for name in VIEWS]


def views_in(statement: str, *, is_kept: bool = False) -> list[tuple[str, str]]:
    """Those of ``views`` that the statement names, and those that they build on, as they are made in a log.

    ``is_kept``: in a copy that keeps the rows of jobs that are over.
    """
    texts = dict(views())
    named = [name for name in _VIEW_NAME.findall(statement.lower()) if name in texts]
    if is_kept:
        return list(settled.joined(named, texts))
    return [(name, texts[name]) for name in settled.needed(named, texts)]


def _keeps_settled(connection: "duckdb.DuckDBPyConnection") -> bool:
    """True where what was opened is a copy that keeps the rows of these very views."""
    if not connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = ?", [settled.OPEN]).fetchall():
        return False
    return connection.execute("SELECT value FROM meta WHERE key = 'kept'").fetchall() == [(_views_digest(),)]


def _views_digest() -> str:
    return sha256("".join(f"{name}\0{text}\0" for name, text in views()).encode()).hexdigest()


def _one(found: "duckdb.DuckDBPyConnection") -> Any:
    row = found.fetchone()
    assert row is not None, "an aggregate has one row"
    return row[0]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:500]
