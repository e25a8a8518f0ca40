"""Asks for a job with nothing but nats-py, and prints the answer: python examples/python.py [URL [ID [KEY]]].

KEY is the file of the tenant's seed, where the bus asks for one: <data dir>/keys/tenant-default.nk.
"""

import asyncio
import json
import sys

import nats


async def main(url: str = "nats://127.0.0.1:4222", wish_id: str = "order-17", key: str = "") -> None:
    """One request, one answer. Send it again under the same id, and it is the same job."""
    # Replies to a tenant come under a prefix of its own, so that nobody else can listen to them.
    options = {"nkeys_seed": key, "inbox_prefix": "_INBOX_tenant-default"} if key else {}
    client = await nats.connect(url, **options)
    headers = {
        "Nats-Msg-Id": f"default /shop {wish_id}",
        "ce-specversion": "1.0",
        "ce-id": wish_id,
        "ce-source": "/shop",
        "ce-type": "io.apportion.JobRequested.v1",
    }
    request = {"queue": "main", "workload": {"command": ["/bin/true"]}, "resources": {"gpu_milli": 250}}
    subject = "apportion.v1.main.ask.default.JobRequested"
    reply = await client.request(subject, json.dumps(request).encode(), timeout=10, headers=headers)
    print(reply.data.decode())
    await client.close()


asyncio.run(main(*sys.argv[1:]))
