"""The client for programs without asyncio: the same calls, each of which waits. Safe to use from several threads."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from apportion.client.aio import SOURCE, URL, Client, Request, Wait
from apportion.client.answers import Answer, CancelAnswer, Finished, Started
from apportion.client.jobs import JobStatus
from apportion.contracts.envelope import Entry

T = TypeVar("T")


class SyncClient:
    """One tenant's connection to one pool. Its bus lives in a thread of its own until ``close``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self._client: Client | None = None

    @classmethod
    def connect(
        cls,
        url: str = URL,
        *,
        tenant: str,
        pool: str = "main",
        source: str = SOURCE,
        actor: str = "",
        timeout_s: float = 5.0,
        **options: Any,
    ) -> Self:
        """See ``Client.connect``."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="apportion-client", daemon=True)
        thread.start()
        made = cls(loop, thread)
        try:
            made._client = made._wait(
                Client.connect(
                    url, tenant=tenant, pool=pool, source=source, actor=actor, timeout_s=timeout_s, **options
                )
            )
        except BaseException:
            made.close()
            raise
        return made

    def close(self) -> None:
        """Leave the bus and end the thread; a second time does nothing."""
        if self._loop.is_closed():
            return
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self,
        request: Request,
        *,
        id: str | None = None,  # noqa: A002 - CloudEvents' own name
        wait: Wait = "admitted",
        timeout_s: float = 60.0,
    ) -> Answer:
        """See ``Client.submit``."""
        return self._wait(self._open.submit(request, id=id, wait=wait, timeout_s=timeout_s))

    def cancel(
        self,
        job: str,
        reason: str = "",
        *,
        id: str | None = None,  # noqa: A002 - CloudEvents' own name
        timeout_s: float = 15.0,
    ) -> CancelAnswer:
        """See ``Client.cancel``."""
        return self._wait(self._open.cancel(job, reason, id=id, timeout_s=timeout_s))

    def wait(
        self, job: str, *, until: Literal["started", "finished"] = "finished", timeout_s: float = 3600.0
    ) -> Started | Finished:
        """See ``Client.wait``."""
        return self._wait(self._open.wait(job, until=until, timeout_s=timeout_s))

    def jobs(self) -> list[JobStatus]:
        """See ``Client.jobs``."""
        return self._wait(self._open.jobs())

    def watch(self, job: str, *, after: int = 0) -> Iterator[Entry]:
        """See ``Client.watch``."""
        facts = self._open.watch(job, after=after)

        async def following() -> Entry | None:
            return await anext(facts, None)

        async def over() -> None:
            await facts.aclose()

        try:
            while (entry := self._wait(following())) is not None:
                yield entry
        finally:
            if not self._loop.is_closed():
                self._wait(over())

    @property
    def _open(self) -> Client:
        if self._client is None or self._loop.is_closed():
            raise RuntimeError("the client is closed: connect again")
        return self._client

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
