"""How soon a revoked key is let in no more, on each of three servers, and that others notice nothing."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, Final

import nats
import nats.errors
from nats.aio.client import Client

from apportion.runtime.access import Role
from apportion.runtime.cluster import Cluster
from apportion.runtime.keys import KeyRing, options_of
from tests.cluster.writing import POOL

ROUNDS: Final = 5
REFUSED_S_MAX: Final = 5.0


async def _nothing(_: Exception) -> None:
    """An error of the connection: being cut off is what is waited for."""


async def _refused(url: str, options: dict[str, Any]) -> bool:
    client = Client()
    try:
        await client.connect(url, allow_reconnect=False, error_cb=_nothing, **options)
    except (nats.errors.Error, OSError):
        return True
    else:
        return False
    finally:
        with contextlib.suppress(nats.errors.Error):
            await client.close()


async def measure(data_dir: Path) -> dict[str, Any]:
    """The longest time from revoking a key until each server had cut off its connections and refused it anew."""
    ring = KeyRing(data_dir, POOL)
    ring.ensure([(Role.ADMIN, ""), (Role.OPERATOR, "")])
    worst, others_cut = 0.0, 0
    async with Cluster(data_dir, port=0, access=ring.access_path) as cluster:
        urls = cluster.url.split(",")
        staying = [await nats.connect(url, error_cb=_nothing, **options_of(ring.seed_path("operator"))) for url in urls]
        try:
            for number in range(ROUNDS):
                name = f"viewer-{number}"
                options = options_of(ring.new(Role.VIEWER, str(number)))
                cluster.reload()
                async with asyncio.timeout(60):
                    for url in urls:
                        while await _refused(url, options):
                            await asyncio.sleep(0.02)
                going = [await nats.connect(url, allow_reconnect=False, error_cb=_nothing, **options) for url in urls]
                try:
                    began = time.monotonic()
                    ring.revoke(name)
                    cluster.reload()
                    async with asyncio.timeout(60):
                        while any(client.is_connected for client in going):
                            await asyncio.sleep(0.005)
                        for url in urls:
                            while not await _refused(url, options):
                                await asyncio.sleep(0.005)
                    worst = max(worst, time.monotonic() - began)
                finally:
                    for client in going:
                        with contextlib.suppress(nats.errors.Error):
                            await client.close()
            others_cut = sum(client.stats["reconnects"] for client in staying)
        finally:
            for client in staying:
                await client.close()
    return {
        "rounds": ROUNDS,
        "refused_everywhere_after_s_max": round(worst, 2),
        "others_cut": others_cut,
        "holds": worst <= REFUSED_S_MAX and others_cut == 0,
    }
