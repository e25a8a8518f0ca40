"""Commands that ask something of a job or a node that there is. Each publishes one wish and prints its one answer.

They ask in the operator's name, as who runs this command has the bus; the log keeps who that was, and why.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.durations import Duration
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_object, printable

if TYPE_CHECKING:
    from apportion.cli.places import Place
    from apportion.runtime.stream import Bus


def wish_options(*, is_reason_required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds what every wish has: its reason, whether it is only tried, and the options of output and pool."""

    def added(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            pool_options,
            output_option,
            click.option("--dry-run", is_flag=True, help="Ask what would follow, and change nothing."),
            # A default, even None, counts as given: click would not ask for what is required.
            click.option("--reason", required=True, help="Why; kept in the log.")
            if is_reason_required
            else click.option("--reason", default="", help="Why; kept in the log."),
        ):
            command = option(command)
        return command

    return added


def _ask_job(kind: str, job: str, options: dict[str, Any], **fields: Any) -> int:
    """Ask something of a job; ``options`` are those of every wish."""
    from apportion.contracts import events as ev

    place = _place(options)
    name = job if "/" in job else f"{place.settings.tenant}/{job}"
    return _ask(place, getattr(ev, kind), options, job_id=name, **fields)


def _event(kind: str) -> Any:
    from apportion.contracts import events as ev

    return getattr(ev, kind)


def _ask_node(kind: str, node: str, options: dict[str, Any], **fields: Any) -> int:
    from apportion.contracts import events as ev

    return _ask(_place(options), getattr(ev, kind), options, node_id=node, **fields)


def ask_wish(wish: Any, options: dict[str, Any], /, **fields: Any) -> int:
    """Ask something of the pool; ``options`` are those of every wish. The command's code."""
    return _ask(_place(options), wish, options, **fields)


def _place(options: dict[str, Any]) -> "Place":
    return place_of(options["data_dir"], options["pool"], options["bus_url"])


def _ask(place: "Place", wish_type: Any, options: dict[str, Any], /, **fields: Any) -> int:
    import msgspec

    from apportion.contracts import diagnosis

    given = {**fields, "reason": options["reason"], "dry_run": options["dry_run"]}
    try:
        wish = msgspec.convert(given, wish_type)
    except msgspec.ValidationError as err:
        # Told as admission and the monitor tell it: by field, what was expected, what was found.
        fault = diagnosis.fault_of(msgspec.json.encode(given), wish_type, err)
        raise CommandFailed(f"{fault.field}: expected {fault.expected}, found {fault.found}", code=Exit.USAGE) from err
    return run(_wish(place, wish, output=options["output"]))


@cli.command()
@click.argument("job")
@wish_options(is_reason_required=False)
def cancel(*, job: str, **options: Any) -> int:
    """Ask that JOB (<tenant>/<name>) ends."""
    return _ask_job("JobCancelRequested", job, options)


@cli.command()
@click.argument("job")
@wish_options(is_reason_required=False)
def hold(*, job: str, **options: Any) -> int:
    """Ask that JOB isn't placed until it is released; what of it runs, runs on."""
    return _ask_job("JobHoldRequested", job, options)


@cli.command()
@click.argument("job")
@wish_options(is_reason_required=False)
def release(*, job: str, **options: Any) -> int:
    """Ask that JOB, which is held, may be placed again."""
    return _ask_job("JobReleaseRequested", job, options)


@cli.command()
@click.argument("job")
@wish_options(is_reason_required=False)
def suspend(*, job: str, **options: Any) -> int:
    """Ask that JOB, which runs, stands still; it keeps its slices, and its time limit goes on."""
    return _ask_job("JobSuspendRequested", job, options)


@cli.command()
@click.argument("job")
@wish_options(is_reason_required=False)
def resume(*, job: str, **options: Any) -> int:
    """Ask that JOB, which is suspended, goes on."""
    return _ask_job("JobResumeRequested", job, options)


@cli.command()
@click.argument("job")
@wish_options(is_reason_required=False)
def checkpoint(*, job: str, **options: Any) -> int:
    """Ask that JOB, which runs and says how (checkpoint.signal), keeps what it has done."""
    return _ask_job("JobCheckpointRequested", job, options)


@cli.command()
@click.argument("job")
@click.argument("priority", type=click.IntRange(0, 1000))
@wish_options(is_reason_required=False)
def reprioritize(*, job: str, priority: int, **options: Any) -> int:
    """Ask that JOB waits with PRIORITY, 0 to 1000, higher first."""
    return _ask_job("JobReprioritizeRequested", job, options, priority=priority)


@cli.command()
@click.argument("job")
@click.option(
    "--requeue/--no-requeue", default=True, show_default=True, help="Whether it waits for slices again, or ends."
)
@wish_options(is_reason_required=True)
def preempt(*, job: str, requeue: bool, **options: Any) -> int:
    """Ask that JOB, which runs, gives its slices back."""
    return _ask_job("JobPreemptRequested", job, options, requeue=requeue)


@cli.command()
@click.argument("job")
@click.option("--gpu-milli", type=click.IntRange(1, 1000), help="Thousandths of each device.")
@click.option("--gpu-memory-mib", type=click.IntRange(1), help="MiB of each device.")
@wish_options(is_reason_required=False)
def resize(*, job: str, gpu_milli: int | None, gpu_memory_mib: int | None, **options: Any) -> int:
    """Ask that JOB has another share of its devices; if it runs, it is stopped and starts again."""
    return _ask_job("JobResizeRequested", job, options, gpu_milli=gpu_milli, gpu_memory_mib=gpu_memory_mib)


@cli.command()
@click.argument("node")
@click.option(
    "--deadline",
    "deadline_s",
    type=Duration(),
    default="5m",
    show_default=True,
    help="So long its runs may take to checkpoint and end, where their own grace isn't shorter; 0: none.",
)
@wish_options(is_reason_required=True)
def drain(*, node: str, deadline_s: int, **options: Any) -> int:
    """Ask that NODE takes no more and its runs move elsewhere; those that can, checkpoint first."""
    return _ask_node("NodeDrainRequested", node, options, deadline_s=deadline_s)


@cli.command()
@click.argument("node")
@wish_options(is_reason_required=True)
def cordon(*, node: str, **options: Any) -> int:
    """Ask that NODE takes no more; what runs, runs on."""
    return _ask_node("NodeCordonRequested", node, options)


@cli.command()
@click.argument("node")
@wish_options(is_reason_required=True)
def uncordon(*, node: str, **options: Any) -> int:
    """Ask that NODE is used again."""
    return _ask_node("NodeUncordonRequested", node, options)


@cli.command()
@wish_options(is_reason_required=True)
def thaw(**options: Any) -> int:
    """Say that the silent nodes are gone, so that a frozen control plane fences them and goes on.

    It thaws by itself when half of the nodes or more speak again, or after freeze_ms if any node was heard.
    """
    return _ask(_place(options), _event("ControlPlaneThawRequested"), options)


async def _wish(place: "Place", wish: Any, *, output: str) -> int:
    """Publish a wish, wait for its answer, print it; the command's code."""
    from apportion.cli.client import bus_of

    async with bus_of(place) as bus:
        answer = await answered(bus, wish)
    print_object(answer, kind="answer", output=output, text=partial(answer_text, answer))
    return code_of_answer(answer)


async def answered(bus: "Bus", wish: Any) -> dict[str, Any]:
    """Publish a wish in the operator's name; the fact that answers it. Raises CommandFailed where none comes."""
    import msgspec

    from apportion.cli.client import answers_of

    [answer] = await answers_of(bus, [wish])
    found: dict[str, Any] = msgspec.to_builtins(answer)
    return found


def answer_text(answer: dict[str, Any]) -> str:
    """The fact that answers a wish, for people."""
    name = answer["type"].partition(".")[0]
    about = (
        answer.get("job_id")
        or answer.get("node_id")
        or answer.get("queue")
        or answer.get("reservation")
        or answer.get("fault_id")
        or answer.get("hold_id")
        or _alert(answer)
    )
    if answer.get("code"):
        field = f"{answer['field']}: " if answer.get("field") else ""
        wanted = f"{field}expected {answer.get('expected', '')}, found {answer.get('found', '')}"
        message = answer.get("message", "")
        # Some authors' messages say all of it, with what to do; others' say what kind of refusal it is.
        said = [message, wanted if answer.get("expected") and wanted not in message else ""]
        head = "dry run: would be refused" if "verdict" in answer else "refused"
        return "\n  ".join(printable(line) for line in (f"{head}: {answer['code']}", *said) if line)
    if "verdict" in answer:
        lines = [f"dry run: would be answered {answer['fact']} {about}".rstrip(), *answer.get("would", ())]
        return "\n  ".join(printable(line) for line in lines)
    note = answer.get("note", "")
    return "\n  ".join(printable(line) for line in (f"{name} {about}".rstrip(), note) if line)


def code_of_answer(answer: dict[str, Any]) -> int:
    """The command's code for the fact that answers its wish, a dry run's included."""
    code = answer.get("code")
    if not code:
        return Exit.OK
    return Exit.NOT_FOUND if str(code).endswith("NotFound") else Exit.REFUSED


def _alert(answer: dict[str, Any]) -> str:
    """The alert that the answer is about; empty where it is about something else."""
    return ":".join(part for part in (answer.get("rule", ""), answer.get("about", "")) if part)
