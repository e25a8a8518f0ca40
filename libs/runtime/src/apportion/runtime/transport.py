"""How a connection to the bus is made safe: a key to speak with, and TLS wherever it leaves the machine."""

import ipaddress
import ssl
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from apportion.runtime.keys import options_of

_ENCRYPTED: Final = frozenset({"tls", "wss"})


class PlainTextRefused(Exception):
    """The bus isn't on this machine, and nothing says that the way to it is encrypted or trusted."""

    exit_code = 2

    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(
            f"the bus at {host} is not on this machine: expected TLS, found none asked for. "
            "Name the file of its certificate authority by APPORTION_BUS_CA_FILE, or bus_ca_file in apportion.toml "
            "(the server needs a tls block with 'handshake_first: true'), or take plain TCP on a network that you "
            "trust: APPORTION_BUS_PLAIN=true"
        )


class CertificateInvalid(Exception):
    """The certificate authority's file can't be used."""

    exit_code = 2

    def __init__(self, path: Path, found: str) -> None:
        super().__init__(f"{path}: expected the PEM file of a certificate authority, found {found}")


def options(url: str, *, key: Path | None, ca_file: Path | None, allow_plain: bool) -> dict[str, Any]:
    """What nats-py's ``connect`` takes beside the address. Raises PlainTextRefused, CertificateInvalid, KeyProblem.

    TLS begins with the first byte: a client that waited for the server's word on it could be told that there is none.
    """
    found = {} if key is None else options_of(key)
    servers = [urlsplit(server if "://" in server else f"nats://{server}") for server in url.split(",")]
    if ca_file is not None or all(server.scheme in _ENCRYPTED for server in servers):
        return {**found, "tls": _context(ca_file), "tls_handshake_first": True}
    for server in servers:
        if not allow_plain and not is_loopback(server.hostname or ""):
            raise PlainTextRefused(server.netloc.rpartition("@")[2])
    return found


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host stays on the machine, by the name alone: nobody is asked.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("127.0.0.1.example")
    (True, True, True, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _context(ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(cafile=ca_file)
        except (OSError, ssl.SSLError) as err:
            raise CertificateInvalid(ca_file, str(err)) from err
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
