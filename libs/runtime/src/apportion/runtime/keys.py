"""The keys of a pool: one file each, readable by its owner alone, and the list of who they belong to.

Under ``<data_dir>/keys``: ``<principal>.nk`` holds a seed; ``principals.json`` says whose public keys the bus lets in,
and ``unsaid.json`` what of its changes the log hasn't got yet.
The server reads ``<data_dir>/bus/access.conf``, which is made from that list. A seed leaves the machine by hand only.
"""

import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import nkeys
from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import KeyChange
from apportion.contracts.codec import Message, encode_wish
from apportion.contracts.ids import OPERATOR, PoolId, is_name
from apportion.runtime.access import OF_SOMEBODY, Principal, Role, configuration, inbox_prefix
from apportion.runtime.private_files import write_private

FOLDER: Final = "keys"
_LIST: Final = "principals.json"
_UNSAID: Final = "unsaid.json"


class KeyProblem(Exception):
    """A key can't be used; the message says what to do about it."""

    exit_code = 2


class KeyUnsafe(KeyProblem):
    """Others may read the seed."""

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(
            f"{path}: expected a seed that its owner alone may read (mode 0600), found mode {mode:04o}. "
            f"Make it private with 'chmod 600 {path}', and rotate the key if others could have read it."
        )


class KeyInvalid(KeyProblem):
    """The file holds no user's seed, or can't be read."""

    def __init__(self, path: Path, found: str) -> None:
        super().__init__(
            f"{path}: expected the seed of a user's nkey (SU…), found {found}. "
            "`apportion keys new` makes one; the pool's operator has the pool's keys."
        )


class PrincipalInvalid(KeyProblem):
    """There can be no such principal, or there is none, or there is one already."""

    def __init__(self, *, expected: str, found: str, next_step: str) -> None:
        super().__init__(f"expected {expected}, found {found}. {next_step}")


class Held(Struct, frozen=True, kw_only=True):
    """One key on the pool's list."""

    role: Role
    of: str = ""
    public: str
    created_at: int
    """Ns since the Unix epoch, by this machine's clock."""

    @property
    def principal(self) -> Principal:
        """Whose key it is."""
        return Principal(role=self.role, of=self.of, public=self.public)


class By(Struct, frozen=True, kw_only=True):
    """Who changes who is let in, and why: for the log."""

    actor: str = "service:keys"
    reason: str = "none was given"


class Unsaid(Struct, frozen=True, kw_only=True):
    """A change of the list that the log hasn't got yet."""

    id: str
    """Of the wish that says it: said twice, it is one."""
    change: KeyChange
    role: Role
    of: str = ""
    public: str
    actor: str
    reason: str

    def message(self, pool: PoolId) -> Message:
        """The wish that says it."""
        wish = ev.KeyChangeRequested(
            change=self.change, role=str(self.role), of=self.of, public=self.public, reason=self.reason
        )
        like = encode_wish(pool, wish, tenant=OPERATOR, event_id=self.id, source="/apportion/keys")
        return Message(subject=like.subject, headers={**like.headers, "ce-actor": self.actor}, body=like.body)


NOBODY: Final = By()


class Listed(Struct, frozen=True, kw_only=True):
    """``principals.json``."""

    pool: str
    keys: list[Held] = []


class KeyRing:
    """The keys of one data directory. Changing it rewrites what the server reads; telling the server is the caller's.

    Each change is noted as ``unsaid`` before it is made, until somebody with a connection has said it on the bus.

    During a rotation a principal has two keys: the new one works before the old one is revoked.
    """

    def __init__(self, data_dir: Path, pool: PoolId) -> None:
        self._data_dir = data_dir
        self._pool = pool
        self.folder = data_dir / FOLDER

    @property
    def access_path(self) -> Path:
        """What the server includes in its configuration."""
        return self._data_dir / "bus" / "access.conf"

    def seed_path(self, name: str) -> Path:
        """Where the newest seed of a principal lies."""
        return self.folder / f"{name}.nk"

    def held(self) -> list[Held]:
        """Every key that the bus lets in, by principal, the newest first."""
        try:
            listed = msgspec.json.decode((self.folder / _LIST).read_bytes(), type=Listed)
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as err:
            raise KeyInvalid(self.folder / _LIST, str(err)) from err
        return sorted(listed.keys, key=lambda one: (one.principal.name, -one.created_at))

    def unsaid(self) -> list[Unsaid]:
        """Changes that the log hasn't got yet, in order."""
        try:
            return msgspec.json.decode((self.folder / _UNSAID).read_bytes(), type=list[Unsaid])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as err:
            raise KeyInvalid(self.folder / _UNSAID, str(err)) from err

    def said(self, done: Collection[str]) -> None:
        """The log has these changes."""
        left = [one for one in self.unsaid() if one.id not in done]
        write_private(self.folder / _UNSAID, msgspec.json.encode(left))

    def ensure(self, wanted: Iterable[tuple[Role, str]], *, by: By = NOBODY) -> None:
        """A key for each of these that has none, and the server's file."""
        held = self.held()
        have = {(one.role, one.of) for one in held}
        for role, of in wanted:
            seed_is_there = self.seed_path(_name(role, of)).is_file()
            if (role, of) not in have or not seed_is_there:
                held = [one for one in held if (one.role, one.of) != (role, of)]
                held.append(self._made(role, of))
        self._write(held, by)

    def new(self, role: Role, of: str = "", *, by: By = NOBODY) -> Path:
        """A key for a principal that has none; where its seed lies. Raises PrincipalInvalid."""
        _check(role, of)
        held = self.held()
        if any((one.role, one.of) == (role, of) for one in held):
            raise PrincipalInvalid(
                expected="a principal without a key",
                found=f"{_name(role, of)}, which has one",
                next_step=f"Replace it with 'apportion keys rotate {_name(role, of)}'.",
            )
        held.append(self._made(role, of))
        self._write(held, by)
        return self.seed_path(_name(role, of))

    def rotate(self, name: str, *, by: By = NOBODY) -> Path:
        """A second key for a principal. The old one is let in until ``retire``. Raises PrincipalInvalid."""
        held = self.held()
        mine = self._of(held, name)
        held.append(self._made(mine[0].role, mine[0].of))
        self._write(held, by)
        return self.seed_path(name)

    def retire(self, name: str, *, by: By = NOBODY) -> int:
        """Revoke every key of a principal save its newest; how many those were."""
        held = self.held()
        old = self._of(held, name)[1:]
        self._write([one for one in held if one not in old], by)
        return len(old)

    def revoke(self, name: str, *, by: By = NOBODY) -> int:
        """Let the principal in no more; how many keys that were. Its seed is removed. Raises PrincipalInvalid."""
        held = self.held()
        mine = self._of(held, name)
        left = [one for one in held if one not in mine]
        if not any(one.role is Role.OPERATOR for one in left):
            raise PrincipalInvalid(
                expected="an operator's key that remains",
                found=f"{name}, the only one",
                next_step="Make another operator's key first: nobody could let anybody in again.",
            )
        self._write(left, by)
        self.seed_path(name).unlink(missing_ok=True)
        return len(mine)

    def _of(self, held: list[Held], name: str) -> list[Held]:
        mine = [one for one in held if one.principal.name == name]
        if not mine:
            raise PrincipalInvalid(
                expected="a principal with a key",
                found=name,
                next_step="`apportion keys ls` lists them.",
            )
        return mine

    def _made(self, role: Role, of: str) -> Held:
        seed = bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
        pair = nkeys.from_seed(bytearray(seed))
        public = pair.public_key.decode()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self.seed_path(_name(role, of)), seed + b"\n")
        return Held(role=role, of=of, public=public, created_at=time.time_ns())

    def _write(self, held: list[Held], by: By) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Noted first: a change that was said and not made shows in the list, one that was made and not said nowhere.
        if changes := list(_changes(self.held(), held, by)):
            write_private(self.folder / _UNSAID, msgspec.json.encode([*self.unsaid(), *changes]))
        listed = Listed(pool=self._pool, keys=sorted(held, key=lambda one: (one.principal.name, -one.created_at)))
        write_private(self.folder / _LIST, msgspec.json.format(msgspec.json.encode(listed), indent=2) + b"\n")
        self.access_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = configuration(self._pool, (one.principal for one in listed.keys))
        write_private(self.access_path, text.encode())


def _changes(before: list[Held], after: list[Held], by: By) -> Iterator[Unsaid]:
    """What differs between two lists, as changes of keys: new ones first, as a rotation has it."""
    had, has = {one.principal.name for one in before}, {one.principal.name for one in after}
    known, kept = {one.public for one in before}, {one.public for one in after}
    for one, change in (
        *((one, KeyChange.ROTATED if one.principal.name in had else KeyChange.MADE) for one in after),
        *((one, KeyChange.RETIRED if one.principal.name in has else KeyChange.REVOKED) for one in before),
    ):
        if one.public in (kept if change in {KeyChange.RETIRED, KeyChange.REVOKED} else known):
            continue
        yield Unsaid(
            id=f"key.{one.public}.{change}", change=change, role=one.role, of=one.of, public=one.public,
            actor=by.actor, reason=by.reason,
        )  # fmt: skip


def options_of(seed_path: Path) -> dict[str, Any]:
    """What nats-py's ``connect`` takes to speak with this key. Raises KeyUnsafe, KeyInvalid."""
    try:
        mode = seed_path.stat().st_mode & 0o777
        seed = seed_path.read_bytes().strip()
    except OSError as err:
        raise KeyInvalid(seed_path, f"nothing that can be read ({err.strerror})") from err
    if mode & 0o077:
        raise KeyUnsafe(seed_path, mode)
    try:
        pair = nkeys.from_seed(bytearray(seed))
        public = pair.public_key.decode()
    except Exception as err:
        raise KeyInvalid(seed_path, f"something else ({type(err).__name__})") from err
    return {"nkeys_seed_str": seed.decode(), "inbox_prefix": inbox_prefix(public)}


def _name(role: Role, of: str) -> str:
    return f"{role}-{of}" if of else str(role)


def _check(role: Role, of: str) -> None:
    if of and not is_name(of):
        raise PrincipalInvalid(
            expected="a name of 1 to 63 lower-case letters, digits, - and _",
            found=repr(of),
            next_step="Choose another.",
        )
    if role in OF_SOMEBODY and not of:
        raise PrincipalInvalid(
            expected=f"whose {role} it is, such as {role}-acme", found=str(role), next_step="Name the node or tenant."
        )
