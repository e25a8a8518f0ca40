"""Asks for a job with nothing but nats-py, and prints the answer: python examples/python.py [URL [ID]]."""

import asyncio
import json
import sys

import nats


async def main(url: str = "nats://127.0.0.1:4222", wish_id: str = "order-17") -> None:
    """One request, one answer. Send it again under the same id, and it is the same job."""
    client = await nats.connect(url)
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
