"""A bus of three servers, each in a network of its own, cut in two: the smaller half writes nothing, and nothing forks.

The placer is on the smaller half, with the server that led. Another session of it takes over on the larger one. Needs
the right to make network namespaces (``unshare -n``); says so where there is none.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import structlog

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.codec import Message
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PLACER
from apportion.contracts.testing import a_placement
from apportion.runtime.embedded import Membership, find_binary
from apportion.runtime.stream import Bus, Fenced, Lease
from tests.cluster.gaps import leader_of
from tests.cluster.writing import POOL, Writer, lost, until_written

NUMBERS: Final = (1, 2, 3)
CUT_S: Final = 15.0
"""Longer than the larger half takes to choose another leader."""
CONVERGED_S_MAX: Final = 30.0
UNSHARE: Final = ("unshare", "--net", "--mount", "--propagation", "private")
_BRIDGE: Final = "bus"


async def measure(folder: Path) -> dict[str, Any]:
    """What each half wrote, and how long it took to be one again."""
    if why := await asyncio.to_thread(why_not):
        return {"holds": True, "skipped": f"no network namespaces can be made here: {why}"}
    ended = await asyncio.to_thread(
        subprocess.run,
        [*UNSHARE, sys.executable, "-m", "tests.cluster.partition", str(folder)],
        stdout=subprocess.PIPE,
        check=False,
    )
    if ended.returncode:
        return {"holds": False, "exit_code": ended.returncode}
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def why_not() -> str:
    """Why no network of our own can be made; empty where it can."""
    for tool in ("unshare", "ip"):
        if shutil.which(tool) is None:
            return f"no {tool} here"
    return subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False).stderr.strip()


def sh(*argv: str) -> None:
    """One command of the network's set-up."""
    subprocess.run(argv, check=True, capture_output=True)


class Network:
    """A bridge, and three namespaces on it; ours is on it, too."""

    def __init__(self) -> None:
        sh("mount", "-t", "tmpfs", "tmpfs", "/run")  # where `ip netns` keeps them: ours alone, and gone with us
        sh("ip", "link", "set", "lo", "up")
        sh("ip", "link", "add", _BRIDGE, "type", "bridge")
        sh("ip", "addr", "add", "10.77.0.254/24", "dev", _BRIDGE)
        sh("ip", "link", "set", _BRIDGE, "up")
        for number in NUMBERS:
            sh("ip", "netns", "add", f"s{number}")
            sh("ip", "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", f"s{number}")
            sh("ip", "link", "set", f"v{number}", "master", _BRIDGE)
            sh("ip", "link", "set", f"v{number}", "up")
            for command in (
                ("addr", "add", f"10.77.0.{number}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                sh("ip", "-n", f"s{number}", *command)

    @contextlib.contextmanager
    def cut(self, number: int) -> Iterator[None]:
        """One server apart from the other two; we still reach it, as a client beside it would."""
        others = [other for other in NUMBERS if other != number]
        routes = [(f"s{number}", f"10.77.0.{other}") for other in others]
        routes += [(f"s{other}", f"10.77.0.{number}") for other in others]
        for namespace, address in routes:
            sh("ip", "-n", namespace, "route", "add", "blackhole", f"{address}/32")
        try:
            yield
        finally:
            for namespace, address in routes:
                sh("ip", "-n", namespace, "route", "del", "blackhole", f"{address}/32")


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[None]:
    """Three servers as a fleet has them, one for each namespace."""
    secret = secrets.token_hex(16)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in NUMBERS:
            path = folder / f"{number}.conf"
            block = Membership(cluster="apportion", port=6222, ports=(6222,), secret=secret).config()
            routes = ", ".join(f'"nats-route://apportion:{secret}@10.77.0.{other}:6222"' for other in NUMBERS)
            block = block.replace("127.0.0.1:6222", f"10.77.0.{number}:6222", 1)
            head, _, _ = block.partition("  routes:")
            path.write_text(f"""\
server_name: apportion-{number}
listen: "10.77.0.{number}:4222"
ping_interval: "5s"
ping_max: 2
log_file: "{folder}/{number}.log"
jetstream {{ store_dir: "{folder}/{number}", sync_interval: always, strict: true, max_mem_store: 268435456 }}
{head}  routes: [{routes}]
}}
""")
            argv = ["ip", "netns", "exec", f"s{number}", str(find_binary(dict(os.environ))), "-c", str(path)]
            running.append(subprocess.Popen(argv))
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def url_of(*numbers: int) -> str:
    """The addresses of these servers."""
    return ",".join(f"nats://10.77.0.{number}:4222" for number in numbers)


def a_claim(session: str) -> Message:
    """That a session of the placer begins."""
    claim = ev.LeaseClaimed(author=PLACER, session=session, core="partition@1")
    return codec.encode_fact(POOL, PLACER, claim, event_id=f"claim-{session}")


class Placer:
    """A session that commits batches of three for as long as it may."""

    def __init__(self, bus: Bus, name: str, lease: Lease) -> None:
        self.bus, self.name, self.lease = bus, name, lease
        self.committed: dict[str, int] = {}
        """Last sequence by batch."""
        self.is_fenced = False

    async def run(self) -> None:
        """Until it is fenced or cancelled."""
        while True:
            batch = f"{self.name}-{len(self.committed)}"
            messages = [
                codec.encode_fact(POOL, PLACER, a_placement(job=f"acme/{batch}-{i}"), event_id=f"{batch}.{i}")
                for i in range(3)
            ]
            try:
                self.committed[batch] = await self.bus.publish_fenced(self.lease, messages)
            except Fenced:
                self.is_fenced = True
                return
            await asyncio.sleep(0.01)


async def play(folder: Path) -> dict[str, Any]:
    """The scenario itself, in a network of our own."""
    network = Network()
    with servers(folder):
        bus = await Bus.connect(url_of(*NUMBERS), pool=POOL, name="look", allow_plain=True, wait_s=30)
        try:
            await bus.provision(replicas=3)
            return await _cut_and_heal(network, bus)
        finally:
            await bus.close()


async def _cut_and_heal(network: Network, bus: Bus) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:

        async def connected(name: str, *numbers: int) -> Bus:
            found = await Bus.connect(url_of(*numbers), pool=POOL, name=name, allow_plain=True, wait_s=30)
            stack.push_async_callback(found.close)
            return found

        async def running(one: Placer | Writer) -> None:
            task = asyncio.create_task(one.run())

            async def end() -> None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            stack.push_async_callback(end)

        alone = int((await leader_of(bus, Stream.FACTS)).rpartition("-")[2])
        many = [number for number in NUMBERS if number != alone]
        there, here = await connected("minority", alone), await connected("majority", *many)
        old = Placer(there, "old", await there.claim(PLACER, a_claim("old")))
        writing = [Writer(there, "there"), Writer(here, "here")]
        await running(old)
        for writer in writing:
            await running(writer)
        await until_written(writing, 20)
        with network.cut(alone):
            began = time.monotonic()
            before = {"batches": len(old.committed), "wishes": len(writing[0].acked)}
            new = Placer(here, "new", await here.claim(PLACER, a_claim("new")))
            claimed_s = time.monotonic() - began
            await running(new)
            await asyncio.sleep(CUT_S)
            during = {"batches": len(old.committed), "wishes": len(writing[0].acked)}
            majority = {"batches": len(new.committed), "wishes": len(writing[1].acked)}
        healed = time.monotonic()
        async with asyncio.timeout(120):
            while not old.is_fenced:
                await asyncio.sleep(0.02)
        fenced_s = time.monotonic() - healed
        await until_written(writing, 20, wait_s=120)
        converged_s = time.monotonic() - healed
        await stack.aclose()
    wrong = await lost(bus, writing)
    wrong += await _epochs(bus, old, new)
    return {
        "minority_wrote": {name: during[name] - before[name] for name in before},
        "majority_wrote": majority,
        "majority_claimed_after_s": round(claimed_s, 2),
        "old_placer_fenced_after_healing_s": round(fenced_s, 2),
        "converged_after_healing_s": round(converged_s, 2),
        "wrong": wrong,
        # What was on its way when the cut came may still have been acknowledged: one of each at the most.
        "holds": not wrong
        and all(during[name] - before[name] <= 1 for name in before)
        and majority["batches"] > 0
        and converged_s <= CONVERGED_S_MAX,
    }


async def _epochs(bus: Bus, old: Placer, new: Placer) -> list[str]:
    """What of the placers' facts is not as it was acknowledged, is torn, or comes after the claim that ended it."""
    last = (await bus.position(Stream.FACTS)).last_seq
    reader = await bus.reader(Stream.FACTS, after=0)
    ids: list[str] = []
    async with asyncio.timeout(60):
        while len(ids) < last:
            await reader.ready.wait()
            ids += [(raw.headers or {}).get("ce-id", "") for raw in reader.take()]
    await reader.close()
    places = {event_id: seq for seq, event_id in enumerate(ids, start=1)}
    wrong = [] if len(places) == last else ["a fact is stored twice"]
    for placer in (old, new):
        for batch, seq in placer.committed.items():
            if [places.get(f"{batch}.{i}") for i in range(3)] != [seq - 2, seq - 1, seq]:
                wrong.append(f"{batch} at {seq}")
    ended = places["claim-new"]
    wrong += [f"{event_id} after the claim" for event_id in ids[ended:] if event_id.startswith("old-")]
    return wrong


def main() -> None:
    """Print what the scenario showed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    print(json.dumps(asyncio.run(play(parser.parse_args().folder))))


if __name__ == "__main__":
    main()
