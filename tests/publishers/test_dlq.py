"""Submitting by the command, and the operator's way with what could not be read, against real processes."""

import asyncio
import json
import sys

import pytest

from apportion.cli.job_commands import answer_text
from apportion.contracts.cloudevents import STRUCTURED
from apportion.contracts.envelope import Stream
from tests.publishers.conftest import Pool

pytestmark = pytest.mark.integration

SUBJECT = "apportion.v1.main.wish.default.JobRequested"
REQUEST = {"queue": "main", "workload": {"command": ["/bin/true"]}, "resources": {"gpu_milli": 250}}


async def unreadable(pool: Pool, count: int) -> None:
    """Returns once so many letters lie in the pool's stream."""
    async with asyncio.timeout(60):
        while True:
            state = (await pool.bus.jetstream.stream_info("APPORTION_MAIN_DLQ")).state
            if state.messages >= count:
                return
            await asyncio.sleep(0.05)


async def test_submit_is_answered_inline_and_again_under_the_same_id(pool: Pool) -> None:
    """Stored, admitted, repeated, refused: what scripts branch on."""
    body = json.dumps({**REQUEST, "job_id": "one"}).encode()
    code, stored, _ = await pool.command("submit", "-", "--id", "a", "--wait", "stored", stdin=body)
    assert (code, stored["outcome"], stored["wish_seq"]) == (0, "stored", 2)
    for _ in range(2):
        code, admitted, _ = await pool.command("submit", "-", "--id", "a", stdin=body)
        assert (code, admitted["outcome"], admitted["job_id"]) == (0, "admitted", "default/one")
    code, refused, _ = await pool.command("submit", "-", stdin=json.dumps({**REQUEST, "gpus": 1}).encode())
    assert (code, refused["outcome"], refused["code"], refused["field"]) == (6, "refused", "FieldUnknown", "gpus")
    code, _, err = await pool.command("submit", "-", "--tenant", "Not A Name", stdin=body)
    assert (code, "tenant 'Not A Name'" in err) == (2, True)


async def test_who_asks_twice_under_one_key_is_told_so(pool: Pool) -> None:
    """Another id, the same key: the answer names the first, and people see at once that nothing new runs."""
    request = {**REQUEST, "job_id": "once", "idempotency_key": "order-17"}
    code, first, _ = await pool.command("submit", "-", "--id", "a", stdin=json.dumps(request).encode())
    assert (code, first["outcome"]) == (0, "admitted")
    code, again, _ = await pool.command("submit", "-", "--id", "b", stdin=json.dumps(request).encode())
    assert (code, again["outcome"], again["first_wish"]) == (0, "duplicate", first["wish_seq"])
    text = answer_text(again)
    assert text.startswith("default/once duplicate")
    assert f"asked before, as wish {first['wish_seq']}: no second job was made" in text


async def test_letters_are_listed_shown_retried_and_dropped(pool: Pool) -> None:
    """And whoever looks later sees what was done, by whom, and how it was answered."""
    await pool.bus.jetstream.publish(SUBJECT, b"{oops", headers={"ce-specversion": "1.0"})
    envelope = {
        "specversion": "1.0",
        "id": "their-1",
        "source": "/theirs",
        "type": "io.apportion.JobCancelRequested.v1",
        "data": {**REQUEST, "gpus": 1},
    }
    await pool.bus.jetstream.publish(
        SUBJECT, json.dumps(envelope).encode(), headers={"content-type": f"{STRUCTURED}+json"}
    )
    await unreadable(pool, 2)
    code, listed, _ = await pool.command("dlq", "ls")
    assert code == 0
    first, second = listed["dead_letters"]
    assert [(row["state"], row["origin"], row["subject"]) for row in (first, second)] == [
        ("open", "wish 2", SUBJECT),
        ("open", "wish 3", SUBJECT),
    ]
    assert (second["code"], second["field"]) == ("TypeMismatch", "type")
    code, shown, _ = await pool.command("dlq", "show", str(first["seq"]))
    assert (code, shown["body"], shown["headers"]) == (0, "{oops", {"ce-specversion": "1.0"})

    code, dropped, _ = await pool.command("dlq", "drop", str(first["seq"]), "--reason", "a test of theirs")
    assert (code, dropped["fate"]) == (0, "dropped")
    # As its subject says it is read, and refused for a field, which is no letter; mended it is a job of the tenant's.
    code, same, _ = await pool.command("dlq", "retry", str(second["seq"]))
    assert (code, same["answer"], same["code"], same["wish_seq"]) == (6, "JobRejected", "FieldUnknown", 4)
    await unreadable(pool, 4)  # two letters, and what was done about each
    mended = json.dumps({**REQUEST, "job_id": "mended"}).encode()
    code, _, err = await pool.command("dlq", "retry", str(second["seq"]), "--edit", "-", stdin=mended)
    assert (code, "--again" in err) == (1, True)
    code, done, err = await pool.command("dlq", "retry", str(second["seq"]), "--edit", "-", "--again", stdin=mended)
    assert (code, done["answer"], done["job_id"]) == (0, "JobAdmitted", "default/mended"), err
    wish = await pool.bus.jetstream.get_msg(pool.bus.stream_name(Stream.WISHES), done["wish_seq"])
    assert (wish.headers or {})["ce-id"] == f"dlq-{second['seq']}-2"

    _, still, _ = await pool.command("dlq", "ls")
    assert still["dead_letters"] == []
    _, everything, _ = await pool.command("dlq", "ls", "--all")
    assert [(row["state"], row["reason"], row["answer"]) for row in everything["dead_letters"]] == [
        ("dropped", "a test of theirs", ""),
        ("retried", "", "JobAdmitted"),
    ]
    code, _, err = await pool.command("dlq", "show", "99")
    assert (code, "dlq ls --all" in err) == (5, True)


async def test_a_body_that_was_cut_is_retried_whole(pool: Pool) -> None:
    """The copy is short, the log has all of it."""
    large = json.dumps({**REQUEST, "job_id": "large", "annotations": {"x": "y" * 70_000}}).encode()
    await pool.bus.jetstream.publish(SUBJECT, large, headers={"ce-specversion": "1.0"})
    await unreadable(pool, 1)
    code, out, _ = await pool.program(
        sys.executable, "-m", "apportion.cli", "dlq", "show", "1", "--body",
        "--bus-url", pool.url, "--data-dir", str(pool.data_dir),
    )  # fmt: skip
    assert (code, out.encode()) == (0, large)
    code, again, _ = await pool.command("dlq", "retry", "1")
    assert (code, again["code"]) == (6, "TooLarge")
