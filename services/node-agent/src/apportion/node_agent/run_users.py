"""As whom runs are started: as the agent's own user, as one other, or each as one of its own out of a range.

A user of its own is what keeps runs from reading and signalling each other where nothing else does. A number is given
to one run at a time, and to another once nothing of the first is left.
"""

import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from apportion.contracts.ids import RunId
from apportion.node_agent.run_records import RunAs

USER: Final = r"^([a-z_][a-z0-9_-]{0,31}|[0-9]{1,10}(:[0-9]{1,10})?|[0-9]{1,10}-[0-9]{1,10})?$"
"""A name, ``uid``, ``uid:gid``, or ``first-last``: a range of which each run has one, as user and as group."""
_ID_MAX: Final = 2**32 - 2
_TRAVERSE: Final = 0o001


class UserInvalid(Exception):
    """The setting names nobody whom runs could be started as."""


class NoUserFree(Exception):
    """Every user of the range has a run."""


class RunUsers:
    """Whom runs are started as; changed by what is given and given back."""

    def __init__(self, first: RunAs | None = None, count: int = 1) -> None:
        """``first`` is None where runs have the agent's own user; above 1, ``count`` is the size of a range."""
        self._first = first
        self._count = count
        self._runs: dict[RunId, int] = {}

    @property
    def is_other(self) -> bool:
        """Whether runs have another user than the agent's."""
        return self._first is not None

    def take(self, run: RunId) -> RunAs | None:
        """The run's user, the same however often it is asked for. Raises NoUserFree."""
        if self._first is None or self._count == 1:
            return self._first
        if run not in self._runs:
            taken = set(self._runs.values())
            first = self._first.uid
            free = next((uid for uid in range(first, first + self._count) if uid not in taken), None)
            if free is None:
                raise NoUserFree(f"all {self._count} users from {first} on have a run")
            self._runs[run] = free
        uid = self._runs[run]
        return RunAs(uid=uid, gid=uid)

    def found(self, run: RunId, user: RunAs | None) -> None:
        """An earlier agent started the run as this user, and it lives."""
        if user is not None and self._count > 1:
            self._runs[run] = user.uid

    def give_back(self, run: RunId) -> None:
        """Nothing of the run is left."""
        self._runs.pop(run, None)


def users_of(setting: str) -> RunUsers:
    """The users that the setting names. Raises UserInvalid.

    >>> users_of("20000-20009").take(RunId("acme/a/0/1"))
    RunAs(uid=20000, gid=20000)
    """
    if not setting:
        return RunUsers()
    first_text, dash, last_text = setting.partition("-")
    if dash and first_text.isdecimal():
        first, last = int(first_text), int(last_text)
        if not 0 < first < last <= _ID_MAX:
            raise UserInvalid(f"expected a range of two users or more, none of them root, found {setting}")
        return RunUsers(RunAs(uid=first, gid=first), last - first + 1)
    uid_text, _, gid_text = setting.partition(":")
    if uid_text.isdecimal():
        uid = int(uid_text)
        user = RunAs(uid=uid, gid=int(gid_text) if gid_text else uid)
    else:
        try:
            known = pwd.getpwnam(setting)
        except KeyError as err:
            raise UserInvalid(f"expected a user of this machine, found {setting}") from err
        user = RunAs(uid=known.pw_uid, gid=known.pw_gid)
    if user.uid == 0 or max(user.uid, user.gid) > _ID_MAX:
        raise UserInvalid(f"expected another user than root, found {setting}")
    return RunUsers(user)


def closed_above(directory: Path) -> Path | None:
    """The first directory on the way there that other users can't go through; None where they can all the way."""
    above = [*reversed(directory.absolute().parents)]
    return next((one for one in above if not one.stat().st_mode & _TRAVERSE), None)


def variables_of(user: RunAs | None, home: Path) -> Mapping[str, str]:
    """What a run of another user is told of itself: its private directory is its home."""
    if user is None:
        return {}
    try:
        name = pwd.getpwuid(user.uid).pw_name
    except KeyError:
        name = str(user.uid)
    return {"HOME": str(home), "USER": name, "LOGNAME": name}
