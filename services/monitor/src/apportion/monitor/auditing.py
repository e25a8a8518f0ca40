"""Who asked the log what: each question becomes a fact of the monitor's before its answer is given.

The core states it like anything else, so that it is fenced, logged and chained; here a question waits for that.
"""

import asyncio
import uuid
from collections.abc import Callable
from hashlib import sha256
from typing import Final

from apportion.contracts import events as ev
from apportion.contracts.envelope import Entry
from apportion.monitor.core import Asked
from apportion.monitor.log import LogError
from apportion.runtime.stream import RawMessage

STATEMENT_CHARS: Final = 4_096
"""As much of a statement is recorded; its digest covers the rest."""
REFUSAL_CHARS: Final = 1_024
RECORD_S_MAX: Final = 10.0
"""A bus that elects a leader takes nothing for about as long."""


class NotRecorded(LogError):
    """A question could not be recorded, so its answer is kept back."""


class Recorder:
    """Has the core state questions, and knows when it has. A reactor's witness; use it from its event loop."""

    def __init__(self, *, wait_s: float = RECORD_S_MAX) -> None:
        self.feed: Callable[[Asked], None] | None = None
        """Tells the core; set before the first question, by whoever made the reactor that this is the witness of."""
        self._wait_s = wait_s
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def record(
        self,
        *,
        statement: str,
        actor: str,
        rows: int,
        truncated: bool,
        elapsed_ms: int,
        age_ms: int,
        log_ordinal: int,
        refused: str,
    ) -> str:
        """The question's id, once the stream of facts holds that it was asked. Raises NotRecorded."""
        query_id = uuid.uuid4().hex
        whole = statement.encode("utf-8", "backslashreplace")
        fact = ev.AuditQueryRun(
            query_id=query_id,
            actor=actor,
            statement=statement[:STATEMENT_CHARS].encode("utf-8", "backslashreplace").decode(),
            statement_sha256=sha256(whole).hexdigest(),
            rows=rows,
            truncated=truncated,
            elapsed_ms=elapsed_ms,
            age_ms=age_ms,
            log_ordinal=log_ordinal,
            refused=refused[:REFUSAL_CHARS].encode("utf-8", "backslashreplace").decode(),
        )
        stated = self._waiting[query_id] = asyncio.get_running_loop().create_future()
        try:
            assert self.feed is not None, "a recorder without a core"
            self.feed(Asked(record=fact))
            await asyncio.wait_for(stated, self._wait_s)
        except TimeoutError as err:
            raise NotRecorded(
                f"the question was not recorded within {self._wait_s:g} s, so its answer is kept back; ask again"
            ) from err
        finally:
            del self._waiting[query_id]
        return query_id

    def saw(self, raw: RawMessage, entry: Entry) -> None:
        """Let the question go on whose fact this is."""
        del raw
        if isinstance(entry.event, ev.AuditQueryRun):
            stated = self._waiting.get(entry.event.query_id)
            if stated is not None and not stated.done():
                stated.set_result(None)

    def is_settled(self) -> bool:
        """True always: a process that ends gives no answers."""
        return True
