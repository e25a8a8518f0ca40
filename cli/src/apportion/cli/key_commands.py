"""Who is let in on the bus of this machine's pool: keys listed, made, rotated, revoked."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import ago, output_option, print_object, print_rows, say

if TYPE_CHECKING:
    from apportion.cli.places import Place
    from apportion.runtime.keys import By, KeyRing

_ROLES = (
    *("viewer", "auditor", "operator", "admin", "tenant", "gateway"),
    *("agent", "replayer", "admission", "placer", "monitor"),
)
_NS_PER_DAY = 86_400 * 1_000_000_000


@cli.group()
def keys() -> None:
    """Who is let in on the bus: list the keys, make, rotate and revoke them."""


@keys.command(name="ls")
@output_option
@pool_options
def ls(*, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """Every key that the bus lets in, and how old it is."""
    _, ring = _ring(data_dir, pool, bus_url)
    now = time.time_ns()
    rows: list[dict[str, Any]] = [
        {
            "principal": held.principal.name,
            "role": str(held.role),
            "public": held.public,
            "created_at": datetime.fromtimestamp(held.created_at / 1e9, UTC).isoformat(timespec="seconds"),
            "age": ago(held.created_at, now) if output in {"table", "wide"} else (now - held.created_at) // _NS_PER_DAY,
            "seed_file": str(ring.seed_path(held.principal.name)),
        }
        for held in ring.held()
    ]
    print_rows(
        rows,
        kind="keys",
        output=output,
        columns=("principal", "role", "age", "public"),
        wide=("created_at", "seed_file"),
        name="principal",
    )
    if not rows and output in {"table", "wide"}:
        say("No keys: this pool has not been started yet, or lets everybody on this machine in.")


_reason = click.option("--reason", required=True, help="Why; kept in the log.")


@keys.command()
@click.argument("role", type=click.Choice(_ROLES))
@click.argument("of", default="")
@_reason
@output_option
@pool_options
def new(
    role: str, of: str, *, reason: str, output: str, data_dir: str | None, pool: str | None, bus_url: str | None
) -> None:
    """A key for ROLE, such as `tenant acme`, `viewer jane` or `agent node-7`; prints where its seed lies."""
    from apportion.runtime.access import Role

    place, ring = _ring(data_dir, pool, bus_url)
    path = ring.new(Role(role), of, by=_by(reason))
    _tell_server(place, ring)
    _print(path, path.name.removesuffix(".nk"), output)


@keys.command()
@click.argument("principal")
@click.option(
    "--overlap",
    type=click.FloatRange(0, 3600),
    default=0.0,
    show_default=True,
    help="For how many seconds the old key is let in beside the new one.",
)
@_reason
@output_option
@pool_options
def rotate(
    principal: str,
    *,
    overlap: float,
    reason: str,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> None:
    """A new key for PRINCIPAL in place of the old one, which is cut off after the overlap.

    A service of this machine reads its new key when it is restarted; `apportion up` restarts one that is cut off.
    """
    place, ring = _ring(data_dir, pool, bus_url)
    path = ring.rotate(principal, by=_by(reason))
    _tell_server(place, ring)
    if overlap:
        say(f"the old key of {principal} is let in for {overlap:g} s more")
        time.sleep(overlap)
    ring.retire(principal, by=_by(reason))
    _tell_server(place, ring)
    _print(path, principal, output)


@keys.command()
@click.argument("principal")
@_reason
@output_option
@pool_options
def revoke(
    principal: str, *, reason: str, output: str, data_dir: str | None, pool: str | None, bus_url: str | None
) -> None:
    """Let PRINCIPAL in no more: its connections are cut off, and its seed is removed."""
    place, ring = _ring(data_dir, pool, bus_url)
    count = ring.revoke(principal, by=_by(reason))
    _tell_server(place, ring)
    print_object(
        {"principal": principal, "revoked": count},
        kind="key_revoked",
        output=output,
        text=lambda: f"{principal} is let in no more ({count} keys)",
    )


def _ring(data_dir: str | None, pool: str | None, bus_url: str | None) -> "tuple[Place, KeyRing]":
    from apportion.contracts.ids import PoolId
    from apportion.runtime.keys import KeyRing

    place = place_of(data_dir, pool, bus_url)
    if place.note is not None and not place.note.key_file:
        raise CommandFailed(
            f"expected a pool with keys, found the pool in {place.data_dir} started with --open",
            code=Exit.USAGE,
            hint="Start it again without --open: the bus then lets in whom it knows.",
        )
    return place, KeyRing(place.data_dir, PoolId(place.pool))


def _by(reason: str) -> "By":
    from apportion.cli.client import actor
    from apportion.runtime.keys import By

    if not reason.strip():
        raise CommandFailed("--reason: expected why, found nothing", code=Exit.USAGE, hint="It is kept in the log.")
    return By(actor=actor(), reason=reason)


def _tell_server(place: "Place", ring: "KeyRing") -> None:
    """Have the running server read who is let in, and the log know of it; at its next start both are done anyway."""
    import contextlib
    import os
    import signal

    for name, pid in ({} if place.note is None else place.note.pids).items():
        if name.startswith("nats-server"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)
    if place.note is None:
        return
    try:
        run(_say_changes(place, ring))
    except CommandFailed as err:
        say(f"the log hears of it when the pool starts next ({err.message})")


async def _say_changes(place: "Place", ring: "KeyRing") -> None:
    from apportion.cli.key_changes import say_changes
    from apportion.contracts.ids import PoolId
    from apportion.runtime.access import Role
    from apportion.runtime.stream import Bus, BusError

    key = ring.seed_path(str(Role.ADMIN))
    try:
        bus = await Bus.connect(place.bus_url, pool=PoolId(place.pool), name="apportion-keys", key=key)
        try:
            await say_changes(bus, ring)
        finally:
            await bus.close()
    except BusError as err:
        raise CommandFailed(str(err)) from err


def _print(path: Path, principal: str, output: str) -> None:
    from apportion.runtime.access import inbox_prefix

    print_object(
        {"principal": principal, "seed_file": str(path), "inbox_prefix": inbox_prefix(principal)},
        kind="key",
        output=output,
        text=lambda: f"{principal}: {path}   (keep it private; replies to {inbox_prefix(principal)})",
    )
