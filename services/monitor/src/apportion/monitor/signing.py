"""Signed checkpoints: which row the chain had reached, said under a key, so that a rewritten chain shows.

The key signs and nothing else; its public half is what others check with, and should be kept where the log's own
administrator can't replace it. Signatures are Ed25519, by PyNaCl.
"""

import contextlib
import os
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import nacl.signing
from msgspec import Struct

from apportion.monitor import signed
from apportion.monitor.manifest import Manifest

_DOMAIN: Final = b"apportion-checkpoint/1\n"
_SEED_BYTES: Final = 32


class KeyUnusable(Exception):
    """The log's key can't be used; the message says what to do about it."""

    exit_code = 2


class Checkpoint(Struct, frozen=True, kw_only=True):
    """The head of a log's chain at an instant, signed."""

    pool: str
    ordinal: int
    """The row that it names; by the chain it speaks for every row before it."""
    hash: str
    """The row's hash in the chain, in hex."""
    wishes_seq: int
    facts_seq: int
    """How far the log had got with each stream."""
    signed_at: int
    """Ns since the Unix epoch, by the signer's clock."""
    public_key: str
    """Whose signature it is, in hex."""
    signature: str = ""
    """In hex, over everything else."""

    def statement(self) -> bytes:
        """What is signed."""
        return signed.statement(_DOMAIN, self)

    @property
    def is_signed(self) -> bool:
        """True where its own key signed it. Whose key that is, is another question."""
        return signed.holds(self.statement(), public_key=self.public_key, signature=self.signature)


_S = TypeVar("_S", Checkpoint, Manifest)


class Signer:
    """The holder of a log's key."""

    def __init__(self, seed: bytes) -> None:
        self._key = nacl.signing.SigningKey(seed)
        self.public_key = self._key.verify_key.encode().hex()

    def sign(self, whole: _S) -> _S:
        """The same under this key: a checkpoint, or a manifest of sealed segments."""
        named = msgspec.structs.replace(whole, public_key=self.public_key, signature="")
        return msgspec.structs.replace(named, signature=self._key.sign(named.statement()).signature.hex())


def key_path(data_dir: Path) -> Path:
    """Where the log's key lies; its public half is beside it."""
    return data_dir / "keys" / "log.key"


def public_key_path(key: Path) -> Path:
    """Where the public half of a key is written."""
    return key.with_suffix(".pub")


def signer_at(path: Path) -> Signer:
    """The key's holder; the key is made where there is none. Raises KeyUnusable where others may read it."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_once(path, os.urandom(_SEED_BYTES).hex())
    try:
        mode = path.stat().st_mode & 0o777
        seed = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as err:
        raise KeyUnusable(f"{path}: expected the log's key, 64 hex digits; found {err}") from err
    if mode & 0o077:
        raise KeyUnusable(
            f"{path}: expected a key that its owner alone may read (mode 0600), found mode {mode:04o}. "
            f"Make it private with 'chmod 600 {path}'; if others could have read it, move it aside for a new one."
        )
    if len(seed) != _SEED_BYTES:
        raise KeyUnusable(f"{path}: expected 64 hex digits, found {2 * len(seed)}")
    signer = Signer(seed)
    public = public_key_path(path)
    if not public.exists():
        public.write_text(signer.public_key + "\n", encoding="ascii")
    return signer


def public_key_of(text_or_path: str) -> str:
    """A public key given in hex or as a file that holds it. Raises KeyUnusable."""
    text = text_or_path
    if len(text) != 2 * _SEED_BYTES:
        try:
            text = Path(text_or_path).read_text(encoding="ascii")
        except (OSError, ValueError) as err:
            raise KeyUnusable(f"expected a public key, 64 hex digits or a file with them; found {err}") from err
    text = text.strip().lower()
    try:
        if len(bytes.fromhex(text)) == _SEED_BYTES:
            return text
    except ValueError:
        pass
    raise KeyUnusable(f"expected a public key of 64 hex digits, found {text[:80]!r}")


def _write_once(path: Path, text: str) -> None:
    """Make the file, whole and readable by its owner alone; whoever is first wins."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()
