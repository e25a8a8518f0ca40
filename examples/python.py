"""Asks for a job with nothing but nats-py, and prints the answer: python examples/python.py [URL [ID [KEY]]].

KEY is the file of the tenant's seed, where the bus asks for one: <data dir>/keys/tenant-default.nk. Ends with 8 and one
line where no pool answers.
"""

import asyncio
import json
import sys
from typing import NoReturn

import nats
import nats.errors


def unanswered(why: str) -> NoReturn:
    """Say why there is no answer, and end."""
    print(why, file=sys.stderr)
    sys.exit(8)


async def kept_quiet(_: Exception) -> None:
    """What fails is said once, above; the library would print it with its stack as well."""


async def main(url: str = "nats://127.0.0.1:4222", wish_id: str = "order-17", key: str = "") -> None:
    """One request, one answer. Send it again under the same id, and it is the same job."""
    # Replies to a tenant come under a prefix of its own, so that nobody else can listen to them.
    options = {"nkeys_seed": key, "inbox_prefix": "_INBOX_tenant-default"} if key else {}
    try:
        client = await nats.connect(url, max_reconnect_attempts=1, error_cb=kept_quiet, **options)
    except (OSError, nats.errors.Error) as err:
        unanswered(f"no nats-server lets us in at {url} ({err or type(err).__name__}): `apportion up` starts a pool")
    headers = {
        "Nats-Msg-Id": f"default /shop {wish_id}",
        "ce-specversion": "1.0",
        "ce-id": wish_id,
        "ce-source": "/shop",
        "ce-type": "io.apportion.JobRequested.v1",
    }
    request = {"queue": "main", "workload": {"command": ["/bin/true"]}, "resources": {"gpu_milli": 250}}
    subject = "apportion.v1.main.ask.default.JobRequested"
    try:
        reply = await client.request(subject, json.dumps(request).encode(), timeout=10, headers=headers)
    except nats.errors.NoRespondersError:
        unanswered(f"nobody answers requests at {url}: admission doesn't run; nothing was asked")
    except nats.errors.TimeoutError:
        unanswered("no answer in 10 s: the outcome is unknown, send it again under the same id")
    print(reply.data.decode())
    await client.close()


asyncio.run(main(*sys.argv[1:]))
