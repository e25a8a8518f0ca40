"""The keys of a pool: one file each, readable by its owner alone, and the list of who they belong to.

Under ``<data_dir>/keys``: ``<principal>.nk`` holds a seed; ``principals.json`` says whose public keys the bus lets in.
The server reads ``<data_dir>/bus/access.conf``, which is made from that list. A seed leaves the machine by hand only.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
import nkeys
from msgspec import Struct

from apportion.contracts.ids import PoolId, is_name
from apportion.runtime.access import OF_SOMEBODY, Principal, Role, configuration, inbox_prefix
from apportion.runtime.private_files import write_private

FOLDER: Final = "keys"
_LIST: Final = "principals.json"


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


class Listed(Struct, frozen=True, kw_only=True):
    """``principals.json``."""

    pool: str
    keys: list[Held] = []


class KeyRing:
    """The keys of one data directory. Changing it rewrites what the server reads; telling the server is the caller's.

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

    def ensure(self, wanted: Iterable[tuple[Role, str]]) -> None:
        """A key for each of these that has none, and the server's file."""
        held = self.held()
        have = {(one.role, one.of) for one in held}
        for role, of in wanted:
            seed_is_there = self.seed_path(_name(role, of)).is_file()
            if (role, of) not in have or not seed_is_there:
                held = [one for one in held if (one.role, one.of) != (role, of)]
                held.append(self._made(role, of))
        self._write(held)

    def new(self, role: Role, of: str = "") -> Path:
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
        self._write(held)
        return self.seed_path(_name(role, of))

    def rotate(self, name: str) -> Path:
        """A second key for a principal. The old one is let in until ``retire``. Raises PrincipalInvalid."""
        held = self.held()
        mine = self._of(held, name)
        held.append(self._made(mine[0].role, mine[0].of))
        self._write(held)
        return self.seed_path(name)

    def retire(self, name: str) -> int:
        """Revoke every key of a principal save its newest; how many those were."""
        held = self.held()
        old = self._of(held, name)[1:]
        self._write([one for one in held if one not in old])
        return len(old)

    def revoke(self, name: str) -> int:
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
        self._write(left)
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

    def _write(self, held: list[Held]) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        listed = Listed(pool=self._pool, keys=sorted(held, key=lambda one: (one.principal.name, -one.created_at)))
        write_private(self.folder / _LIST, msgspec.json.format(msgspec.json.encode(listed), indent=2) + b"\n")
        self.access_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = configuration(self._pool, (one.principal for one in listed.keys))
        write_private(self.access_path, text.encode())


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
