"""Dead letters: messages that nobody could read, looked at, asked again, or dropped. What was done is on the bus."""

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import ago, output_option, print_object, print_rows, printable, say

if TYPE_CHECKING:
    from apportion.cli.places import Place
    from apportion.contracts.codec import Message
    from apportion.runtime.letters import Box, Letter, Mark
    from apportion.runtime.stream import Bus

BODY_SHOWN: int = 2_000
"""Characters of a body that ``show`` prints for people."""
SOURCE = "/apportion/dlq"


@cli.group()
def dlq() -> None:
    """Messages that could not be read: look at them, ask again, or drop them."""


@dlq.command(name="ls")
@click.option("--all", "everything", is_flag=True, help="Also those that were retried or dropped.")
@output_option
@pool_options
def ls(*, everything: bool, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """The pool's dead letters, oldest first. SEQ is what the other commands call one by."""
    box = run(_read(place_of(data_dir, pool, bus_url)))
    found = [letter for letter in box.letters() if everything or letter.fate == "open"]
    rows = [_row(letter) for letter in found]
    print_rows(
        rows,
        kind="dead_letters",
        output=output,
        columns=("seq", "state", "origin", "subject", "code", "field", "size", "age"),
        wide=("expected", "found", "sha256", "actor", "reason", "answer"),
        name="seq",
    )
    if not rows and output in {"table", "wide"}:
        say("No dead letters" + ("." if everything else " that are open (--all shows the others)."))


@dlq.command()
@click.argument("seq", type=click.IntRange(1))
@click.option("--body", "body_only", is_flag=True, help="Print the body alone, byte for byte, such as into a file.")
@output_option
@pool_options
def show(
    *, seq: int, body_only: bool, output: str, data_dir: str | None, pool: str | None, bus_url: str | None
) -> None:
    """Letter SEQ: why it could not be read, what it says, and what was done about it."""
    place = place_of(data_dir, pool, bus_url)
    letter, body = run(_whole(place, seq))
    if body_only:
        sys.stdout.buffer.write(body)
        sys.stdout.buffer.flush()
        return
    import msgspec

    content = {
        **_row(letter),
        "stream": letter.stream,
        "headers": letter.headers,
        "body": body.decode("utf-8", "backslashreplace"),
        "marks": [msgspec.to_builtins(mark) for mark in letter.marks],
    }

    def text() -> str:
        lines = [
            f"letter {letter.seq}: {letter.fate}",
            f"  {content['origin']} on {letter.subject}, {letter.size} bytes, sha256 {letter.sha256}",
            f"  {letter.code} at {letter.field or 'no field'}: expected {letter.expected}, found {letter.found}",
            *(f"  {name}: {value}" for name, value in sorted(letter.headers.items())),
            *(
                f"  {mark.fate} by {mark.actor} {ago(mark.at)} ago{': ' + mark.reason if mark.reason else ''}"
                + (f"; wish {mark.wish_seq}: {mark.answer or 'not answered yet'}" if mark.wish_seq else "")
                for mark in letter.marks
            ),
        ]
        shown = content["body"][:BODY_SHOWN]
        rest = "" if len(content["body"]) <= BODY_SHOWN else "\n… (--body prints all of it)"
        return "\n".join(printable(line) for line in lines) + "\n\n" + printable(shown) + rest

    print_object(content, kind="dead_letter", output=output, text=text)


@dlq.command()
@click.argument("seq", type=click.IntRange(1))
@click.option("--edit", "edited", type=click.Path(dir_okay=False, allow_dash=True), help="The request as it should be.")
@click.option("--reason", default="", help="Why; kept with the letter.")
@click.option("--again", is_flag=True, help="Also where it was retried or dropped before.")
@output_option
@pool_options
def retry(
    *,
    seq: int,
    edited: str | None,
    reason: str,
    again: bool,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> int:
    """Ask letter SEQ again: the same tenant and kind of wish, a new id, the same body or that of --edit FILE."""
    from apportion.cli.job_commands import read_file, request_body

    place = place_of(data_dir, pool, bus_url)
    body = None
    if edited is not None:
        data = sys.stdin.buffer.read() if edited == "-" else read_file(edited)
        body = request_body(data, name=edited, dry_run=False)
    answer = run(_retry(place, seq, body=body, reason=reason, again=again))

    def text() -> str:
        if not answer["answer"]:
            return f"letter {seq} is wish {answer['wish_seq']} now; nobody has answered it yet"
        why = f": {answer['code']}: {answer.get('message', '')}" if answer.get("code") else ""
        about = f" {answer['job_id']}" if answer.get("job_id") else ""
        return printable(f"letter {seq} is wish {answer['wish_seq']} now: {answer['answer']}{about}{why}")

    print_object(answer, kind="retry", output=output, text=text)
    if not answer["answer"]:
        return Exit.NOT_PLACED
    return Exit.REFUSED if answer.get("code") else Exit.OK


@dlq.command()
@click.argument("seq", type=click.IntRange(1))
@click.option("--reason", default="", help="Why; kept with the letter.")
@output_option
@pool_options
def drop(*, seq: int, reason: str, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """Say that nothing will be done about letter SEQ. The message stays in the log, as every message does."""
    mark = run(_drop(place_of(data_dir, pool, bus_url), seq, reason))
    import msgspec

    print_object(
        {"seq": seq, **msgspec.to_builtins(mark)}, kind="drop", output=output, text=lambda: f"letter {seq} is dropped"
    )


def _row(letter: "Letter") -> dict[str, Any]:
    last = letter.marks[-1] if letter.marks else None
    kind = "wish" if letter.is_wish else "fact"
    return {
        "seq": letter.seq,
        "state": str(letter.fate),
        "origin": f"{kind} {letter.origin_seq}",
        "origin_seq": letter.origin_seq,
        "subject": letter.subject,
        "code": letter.code,
        "field": letter.field,
        "expected": letter.expected,
        "found": letter.found,
        "size": letter.size,
        "sha256": letter.sha256,
        "at": letter.at,
        "age": ago(letter.at),
        "actor": last.actor if last else "",
        "reason": last.reason if last else "",
        "answer": last.answer if last else "",
    }


async def _read(place: "Place") -> "Box":
    from apportion.cli.client import bus_of

    async with bus_of(place) as bus:
        return await _box(bus)


async def _box(bus: "Bus") -> "Box":
    """The pool's letters as they are now."""
    from nats.js.errors import NotFoundError

    from apportion.contracts import subjects
    from apportion.runtime.letters import Box

    box = Box()
    stream = subjects.dead_letters_stream(bus.pool)
    try:
        state = (await bus.jetstream.stream_info(stream)).state
    except NotFoundError as err:
        raise CommandFailed(
            f"the bus at {bus.url} has no stream {stream}",
            code=Exit.NOT_FOUND,
            hint="Check the pool's name; its services make the stream when they start.",
        ) from err
    if not state.messages:
        return box
    subscription = await bus.jetstream.subscribe(
        subjects.all_dead_letters(bus.pool), stream=stream, ordered_consumer=True
    )
    while True:
        message = await subscription.next_msg(timeout=10)
        counts = message.metadata
        box.fold(
            seq=counts.sequence.stream,
            at=int(counts.timestamp.timestamp() * 1_000_000_000),
            subject=message.subject,
            headers=message.headers or {},
            body=message.data,
        )
        if counts.sequence.stream >= state.last_seq:
            break
    await subscription.unsubscribe()
    return box


async def _letter(bus: "Bus", seq: int) -> "Letter":
    letter = (await _box(bus)).letter(seq)
    if letter is None:
        raise CommandFailed(
            f"there is no dead letter {seq}",
            code=Exit.NOT_FOUND,
            hint="`apportion dlq ls --all` lists them; after 30 days, or beyond 64 MiB, the oldest are gone.",
        )
    return letter


async def _whole(place: "Place", seq: int) -> "tuple[Letter, bytes]":
    from apportion.cli.client import bus_of

    async with bus_of(place) as bus:
        letter = await _letter(bus, seq)
        return letter, await _body(bus, letter)


async def _body(bus: "Bus", letter: "Letter") -> bytes:
    """All of the message's body: where the copy was cut, from the stream that has it whole."""
    if not letter.is_cut:
        return letter.body
    stored = await bus.jetstream.get_msg(letter.stream, letter.origin_seq)
    return stored.data or b""


async def _retry(place: "Place", seq: int, *, body: bytes | None, reason: str, again: bool) -> dict[str, Any]:
    import msgspec

    from apportion.cli.client import ANSWER_S, actor, bus_of, entries
    from apportion.contracts.envelope import Stream
    from apportion.runtime.letters import Fate, Mark

    async with bus_of(place) as bus:
        letter = await _letter(bus, seq)
        if letter.fate is not Fate.OPEN and not again:
            last = letter.marks[-1]
            raise CommandFailed(
                f"letter {seq} was {last.fate} by {last.actor}",
                hint="--again asks it once more, as a new wish.",
            )
        message = _wish_of(letter, body if body is not None else await _request(bus, letter), actor())
        position = (await bus.position(Stream.FACTS)).last_seq
        stored = await bus.store(message)
        answer: dict[str, Any] = {"seq": seq, "wish_seq": stored.seq, "id": message.headers["ce-id"], "answer": ""}
        # A repeat is the try of a command that died before it could say so: its answer lies further back.
        async for _, entry in entries(
            bus, Stream.FACTS, after=0 if stored.is_repeat else position, until=time.monotonic() + ANSWER_S
        ):
            if getattr(entry.event, "answers", None) == stored.seq:
                answer |= msgspec.to_builtins(entry.event)
                answer["answer"] = type(entry.event).__name__
                break
        mark = Mark(
            fate=Fate.RETRIED,
            actor=actor(),
            reason=reason,
            event_id=message.headers["ce-id"],
            wish_seq=stored.seq,
            answer=answer["answer"],
        )
        await _say(bus, letter, mark)
    return answer


async def _request(bus: "Bus", letter: "Letter") -> bytes:
    """The request within the message: without its envelope, where that could be read."""
    from apportion.contracts.cloudevents import opened

    body = await _body(bus, letter)
    envelope = opened(letter.headers, body)
    return body if envelope.fault is not None else envelope.data


def _wish_of(letter: "Letter", body: bytes, who: str) -> "Message":
    from apportion.contracts import events as ev
    from apportion.contracts import subjects
    from apportion.contracts.cloudevents import escaped
    from apportion.contracts.codec import TYPE_PREFIX, Message

    kinds = {ev.type_name(kind).partition(".")[0]: ev.type_name(kind) for kind in ev.WISHES}
    tenant, kind = subjects.tenant_and_type_of_wish(letter.subject) if letter.is_wish else ("", "")
    if kind not in kinds:
        raise CommandFailed(
            f"letter {letter.seq} is on {letter.subject}: expected a kind of wish that is known, found "
            + (repr(kind) if letter.is_wish else "a fact, which only its author may state"),
            code=Exit.USAGE,
            hint="`apportion dlq show` prints it, `apportion dlq drop` puts it away.",
        )
    # The id says which try it is: a command that died between the wish and its mark asks for the same one again.
    event_id = f"dlq-{letter.seq}-{len(letter.marks) + 1}"
    return Message(
        subject=letter.subject,
        headers={
            "Nats-Msg-Id": f"{tenant} {SOURCE} {event_id}",
            "ce-specversion": "1.0",
            "ce-id": event_id,
            "ce-source": SOURCE,
            "ce-type": TYPE_PREFIX + kinds[kind],
            "ce-actor": escaped(who),
        },
        body=body,
    )


async def _drop(place: "Place", seq: int, reason: str) -> "Mark":
    from apportion.cli.client import actor, bus_of
    from apportion.runtime.letters import Fate, Mark

    async with bus_of(place) as bus:
        letter = await _letter(bus, seq)
        if letter.fate is Fate.DROPPED:
            return letter.marks[-1]
        mark = Mark(fate=Fate.DROPPED, actor=actor(), reason=reason)
        await _say(bus, letter, mark)
        return mark


async def _say(bus: "Bus", letter: "Letter", mark: "Mark") -> None:
    from nats.js.errors import APIError

    from apportion.runtime.letters import mark_of

    message = mark_of(letter, mark)
    try:
        await bus.jetstream.publish(message.subject, message.body, headers=message.headers)
    except APIError as err:
        if err.err_code not in {10071, 10164}:
            raise
        raise CommandFailed(
            f"somebody else did something about letter {letter.seq} at the same time",
            hint=f"`apportion dlq show {letter.seq}` says what.",
        ) from err
