"""Tells others of alerts: a webhook of one's own, and Alertmanager by its API. Decides nothing.

At least once: a monitor that takes over, or starts, tells again of what is firing, so receivers go by ``id``. What is
silenced is told to nobody until the silence ends, but the end of what receivers may have heard of is. A receiver
that is away costs nothing but the news: what is firing is told to Alertmanager again and again, which is how it
works, and to a webhook a few times over.
"""

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import stamina
import structlog

from apportion.contracts import events as ev
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import PoolId
from apportion.monitor.alerts import Alerts, Firing, key_of, silenced_by
from apportion.runtime.clock import Clock
from apportion.runtime.settings import Secret

QUEUED_MAX: Final = 1_000
TIMEOUT_S: Final = 5.0
ATTEMPTS: Final = 4
REPEAT_S: Final = 60.0
"""Alertmanager forgets what it isn't told again, after five minutes by default."""
_MANAGER_PATH: Final = "/api/v2/alerts"

_News = tuple[str, ev.AlertRaised, int, int]
"""(status, alert, when it was raised, when it was cleared or 0)."""

log = structlog.get_logger(__name__)


class Notifier:
    """Follows what the monitor states, and tells it on while this monitor is the active one."""

    def __init__(
        self,
        *,
        pool: PoolId,
        webhook_url: str,
        alertmanager_url: str,
        token: Secret | None,
        alerts: Callable[[], Alerts],
        clock: Clock,
        repeat_s: float = REPEAT_S,
    ) -> None:
        self._pool = pool
        self._webhook = webhook_url
        self._manager = alertmanager_url.rstrip("/")
        self._token = token
        self._alerts = alerts
        self._clock = clock
        self._repeat_s = repeat_s
        self._queue: deque[_News] = deque(maxlen=QUEUED_MAX)
        self._news = asyncio.Event()
        self._known: dict[str, Firing] = {}
        self._held: dict[str, _News] = {}
        """What fires and is silenced, by id."""
        self._unheard: set[str] = set()
        """Those of which nobody was told, as they were silenced when they were raised."""
        self._is_active = False
        self.delivered = 0
        self.failed = 0
        """Deliveries that were given up."""

    @property
    def is_wanted(self) -> bool:
        """True where somebody is to be told."""
        return bool(self._webhook or self._manager)

    def saw(self, entry: Entry) -> None:
        """A fact was folded: remember it, and tell it where that is our task."""
        event = entry.event
        if isinstance(event, ev.AlertRaised):
            firing = Firing(fact=event, raised_seq=entry.seq, raised_at=entry.recorded_at)
            self._known[key_of(event.rule, event.about)] = firing
            if self._is_silenced(event):
                self._unheard.add(self._id_of(event, entry.recorded_at))
            self._tell("firing", event, entry.recorded_at, 0)
        elif isinstance(event, ev.AlertCleared):
            known = self._known.pop(key_of(event.rule, event.about), None)
            if known is not None:
                self._tell("resolved", known.fact, known.raised_at, entry.recorded_at)

    def begin(self) -> None:
        """This monitor is the active one from here on: tell of all that is firing."""
        self._is_active = True
        self._known = dict(self._alerts().firing)
        for firing in self._known.values():
            self._tell("firing", firing.fact, firing.raised_at, 0)

    async def cry(self, alert: ev.AlertRaised) -> None:
        """Tell of what can't be stated as a fact, as it is the bus that is wrong; before this process ends."""
        at = self._clock.now()
        if self._webhook:
            await self._deliver(self._webhook, self._webhook_body("firing", alert, at, 0))
        if self._manager:
            await self._deliver(self._manager + _MANAGER_PATH, [self._manager_body("firing", alert, at, 0)])

    def _tell(self, status: str, alert: ev.AlertRaised, raised_at: int, cleared_at: int) -> None:
        if self._is_active and self.is_wanted:
            if len(self._queue) == QUEUED_MAX:
                self.failed += 1
            self._queue.append((status, alert, raised_at, cleared_at))
            self._news.set()

    async def run(self) -> None:
        """Deliver, for ever."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), self._repeat_s)
            is_repeat = not self._news.is_set()
            self._news.clear()
            news = self._worth_telling(self._drained())
            if self._webhook:
                for one in news:
                    await self._deliver(self._webhook, self._webhook_body(*one))
            if self._manager and self._is_active:
                told = news or ([] if not is_repeat else self._still_firing())
                if told:
                    body = [self._manager_body(*one) for one in told]
                    await self._deliver(self._manager + _MANAGER_PATH, body)

    def _worth_telling(self, news: list[_News]) -> list[_News]:
        """Of the news, and of what was silenced until now, what receivers are to hear."""
        found: list[_News] = []
        for one in [*self._held.values(), *news]:
            status, alert, raised_at, _ = one
            name = self._id_of(alert, raised_at)
            if status == "firing" and self._is_silenced(alert):
                self._held[name] = one
                continue
            self._held.pop(name, None)
            # Who heard that it fires would hold it open for ever, whatever is silenced by now.
            if status == "firing" or name not in self._unheard:
                found.append(one)
            self._unheard.discard(name)
        return found

    def _id_of(self, alert: ev.AlertRaised, raised_at: int) -> str:
        return f"{self._pool}/{key_of(alert.rule, alert.about)}/{raised_at}"

    def _drained(self) -> list[_News]:
        found = list(self._queue)
        self._queue.clear()
        return found

    def _still_firing(self) -> list[_News]:
        firing = self._alerts().firing.values()
        return [("firing", one.fact, one.raised_at, 0) for one in firing if not self._is_silenced(one.fact)]

    def _is_silenced(self, alert: ev.AlertRaised) -> bool:
        return silenced_by(self._alerts(), alert.rule, alert.about, self._clock.now()) is not None

    def _webhook_body(self, status: str, alert: ev.AlertRaised, raised_at: int, cleared_at: int) -> dict[str, Any]:
        return {
            "schema": "apportion.alert.v1",
            "id": self._id_of(alert, raised_at),
            "status": status,
            "pool": self._pool,
            "rule": alert.rule,
            "about": alert.about,
            "severity": alert.severity.value,
            "value": alert.value,
            "threshold": alert.threshold,
            "unit": alert.unit,
            "summary": alert.summary,
            "action": alert.action,
            "raised_at": raised_at,
            "cleared_at": cleared_at or None,
        }

    def _manager_body(self, status: str, alert: ev.AlertRaised, raised_at: int, cleared_at: int) -> dict[str, Any]:
        del status
        labels = {
            "alertname": alert.rule,
            "severity": alert.severity.value,
            "pool": self._pool,
            **({"about": alert.about} if alert.about else {}),
        }
        return {
            "labels": labels,
            "annotations": {
                "summary": alert.summary,
                "action": alert.action,
                "value": f"{alert.value} {alert.unit} (raised at {alert.threshold})",
            },
            "startsAt": _timestamp(raised_at),
            **({"endsAt": _timestamp(cleared_at)} if cleared_at else {}),
        }

    async def _deliver(self, url: str, body: object) -> None:
        try:
            async for attempt in stamina.retry_context(on=_is_worth_a_retry, attempts=ATTEMPTS, timeout=60):
                with attempt:
                    await asyncio.to_thread(self._post, url, json.dumps(body).encode())
        except (OSError, ValueError) as err:
            self.failed += 1
            log.warning("alert_not_delivered", url=url, error=f"{type(err).__name__}: {err}")
        else:
            self.delivered += 1

    def _post(self, url: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "apportion-monitor"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.reveal()}"
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")  # noqa: S310 - checked where it is set
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - as above
            answer.read(1024)


def _is_worth_a_retry(error: Exception) -> bool:
    # What it won't have it won't have the next time, except that it is asked too often.
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code == 429
    return isinstance(error, OSError)


def _timestamp(at: int) -> str:
    return datetime.fromtimestamp(at / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
