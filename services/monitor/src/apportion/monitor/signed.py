"""What is said under a key: the bytes that are signed, and whether a signature over them holds. Ed25519, by PyNaCl."""

import msgspec
import nacl.exceptions
import nacl.signing


def statement(domain: bytes, whole: msgspec.Struct) -> bytes:
    """What is signed: all but the field ``signature``. ``domain`` keeps one kind's from passing for another's."""
    return domain + msgspec.json.encode(msgspec.structs.replace(whole, signature=""), order="deterministic")


def holds(said: bytes, *, public_key: str, signature: str) -> bool:
    """Whether the key, in hex, made the signature, in hex, over these bytes."""
    try:
        nacl.signing.VerifyKey(bytes.fromhex(public_key)).verify(said, bytes.fromhex(signature))
    except (ValueError, TypeError, nacl.exceptions.CryptoError):
        return False
    return True
