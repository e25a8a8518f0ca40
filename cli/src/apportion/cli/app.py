"""The command's root: its options, its group, and how a command finds its pool. Heavy modules are imported inside."""

import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from apportion.cli.exits import CommandFailed, Exit, code_of

if TYPE_CHECKING:
    from apportion.cli.places import Place

T = TypeVar("T")

_CONTEXT: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_SECTIONS: Final = (
    ("Run a pool", ("up", "demo", "doctor")),
    ("Ask for work", ("submit", "plan", "cancel", "hold", "release", "reprioritize", "preempt", "resize", "size")),
    ("Look", ("top", "jobs", "show", "why", "nodes", "events", "logs")),
    ("Share it out", ("queue", "policy")),
    ("Care for nodes", ("alerts", "defrag", "cordon", "drain", "uncordon", "thaw")),
    ("Who is let in", ("keys",)),
    ("Prove it", ("isolation", "audit", "sql", "log", "replay", "usage", "rates", "whatif", "simulate")),
    ("Break", ("fault", "scenario")),
    ("Measure", ("bench",)),
    ("Mend", ("dlq", "restore")),
    ("About", ("config", "paths", "version")),
)


class _Sectioned(click.Group):
    """Lists commands by what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's own
        for title, names in _SECTIONS:
            rows = [(name, self.commands[name].get_short_help_str(200)) for name in names if name in self.commands]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


@click.group(cls=_Sectioned, context_settings=_CONTEXT)
@click.version_option(package_name="apportion-cli", prog_name="apportion")
def cli() -> None:
    """Apportion shares the GPUs of a pool, memory and compute apart, and gives a reason for each answer.

    \b
    New here?     apportion demo          a pool of simulated GPUs, a real day of work, a lost node, and the proof
    Your machine  apportion up            all services here; stop with Ctrl-C
    A job         apportion submit job.toml --wait finished
    """  # noqa: D301  \b is click's mark for a block that is not refilled


def pool_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--data-dir``, ``--pool`` and ``--bus-url``: which pool the command talks about."""
    for option in (
        click.option("--bus-url", metavar="URL", help="The bus. Default: that of the pool running on this machine."),
        click.option("--pool", metavar="NAME", help="The pool's name. Default: main."),
        click.option("--data-dir", metavar="DIR", help="Where the pool keeps its files."),
    ):
        command = option(command)
    return command


def place_of(data_dir: str | None, pool: str | None, bus_url: str | None) -> "Place":
    """The pool that the options name, else the one that runs here."""
    from apportion.cli.places import find

    given = {"data_dir": data_dir, "pool": pool, "bus_url": bus_url}
    return find({name: value for name, value in given.items() if value})


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a command's own coroutine."""
    import asyncio  # a third of the time of `apportion --help` otherwise

    return asyncio.run(work)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``apportion``: every error ends in one message on stderr and a code of ``Exit``."""
    sys.exit(int(outcome(arguments)))


def outcome(arguments: list[str] | None = None) -> int:
    """Run the command; the code it ends with."""
    # Here, since they import us: each adds its commands to the group.
    from apportion.cli import (  # noqa: F401
        alert_commands,
        audit_commands,
        bench_commands,
        dlq_commands,
        fault_commands,
        isolation_commands,
        job_commands,
        keeping_commands,
        key_commands,
        log_commands,
        plan_commands,
        policy_commands,
        pool_commands,
        queue_commands,
        reservation_commands,
        scenario_commands,
        top_commands,
        usage_commands,
        whatif_commands,
        wish_commands,
    )

    try:
        code = cli.main(args=arguments, prog_name="apportion", standalone_mode=False)
        return code if isinstance(code, int) else Exit.OK
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has seen enough (``| head``); Python would complain once more at its end.
        sys.stderr.close()
        return Exit.OK
    except CommandFailed as err:
        click.echo(f"apportion: {err.format_message()}", err=True)
        return err.exit_code
    except click.ClickException as err:
        err.show()
        return Exit.USAGE
    except Exception as err:
        code = code_of(err)
        if code is Exit.FAILURE and not hasattr(err, "exit_code"):
            # None of the errors that we know: its place in the code is what helps.
            raise
        click.echo(f"apportion: {err}", err=True)
        return code
