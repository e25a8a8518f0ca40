"""A moment of the log as people write it: a sequence, an instant, a span after the first event or before the last."""

import re
from datetime import UTC, datetime
from typing import Final

from apportion.cli.exits import CommandFailed, Exit

NS_PER_S: Final = 1_000_000_000
_SPAN: Final = re.compile(
    r"^(?P<sign>[+-])(?:(?P<number>[0-9]+)(?P<unit>[smhd])|(?P<clock>[0-9]{1,3}(?::[0-9]{2}){1,2}))$"
)
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
EXPECTED: Final = (
    "a sequence (1234), an instant (2026-09-01T03:12:00Z), +00:10 after the first event, or -15m before the last"
)


def instant(text: str, *, first_at: int, last_at: int, option: str) -> int:
    """The instant that ``text`` names, in ns since the Unix epoch. Without a zone it is UTC. Raises CommandFailed.

    >>> [instant(t, first_at=0, last_at=7_200 * NS_PER_S, option="--at") // NS_PER_S for t in ("+00:10", "+90s", "-1h")]
    [10, 90, 3600]
    >>> instant("1970-01-02", first_at=0, last_at=0, option="--at") // NS_PER_S
    86400
    """
    span = _SPAN.match(text)
    if span is not None:
        seconds = _seconds(span)
        return first_at + seconds * NS_PER_S if span["sign"] == "+" else last_at - seconds * NS_PER_S
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as err:
        raise CommandFailed(f"{option}: expected {EXPECTED}; found {text!r}", code=Exit.USAGE) from err
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * NS_PER_S + since.microseconds * 1_000


def sequence(text: str) -> int | None:
    """The sequence that ``text`` is; None where it is something else.

    >>> sequence("17"), sequence("2026-09-01")
    (17, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _seconds(span: "re.Match[str]") -> int:
    if span["clock"] is None:
        return int(span["number"]) * _UNITS[span["unit"]]
    total = 0
    for part in span["clock"].split(":"):
        total = total * 60 + int(part)
    return total
