"""Alerts: what is firing, who looks at it, and what nobody wants to hear of for a while."""

from typing import Any

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.durations import Duration
from apportion.cli.exits import Exit
from apportion.cli.output import ago, output_option, print_rows, say
from apportion.cli.wish_commands import ask_wish, wish_options


@cli.group()
def alerts() -> None:
    """What the monitor finds wrong: see it, say that you look at it, or silence it for a while."""


@alerts.command(name="ls")
@click.option("--check", is_flag=True, help="End with 1 where something fires that nobody has seen or silenced.")
@output_option
@pool_options
def ls(*, check: bool, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> int:
    """What is firing, the newest first."""
    from apportion.cli.client import ask, bus_of

    place = place_of(data_dir, pool, bus_url)

    async def asked() -> dict[str, Any]:
        async with bus_of(place) as bus:
            return await ask(bus, "alerts", {})

    found = run(asked())
    rows = [{**alert, "alert": _called(alert), "age": ago(alert["raised_at"])} for alert in found["alerts"]]
    print_rows(
        rows,
        kind="alerts",
        output=output,
        columns=("alert", "severity", "state", "age", "value", "threshold", "unit", "summary"),
        wide=("by", "action"),
        name="alert",
        extra={"silences": found["silences"]},
    )
    if output in {"table", "wide"}:
        if not rows:
            say("Nothing is firing.")
        for silence in found["silences"]:
            about = f":{silence['about']}" if silence["about"] else ""
            say(f"{silence['rule']}{about} is silenced by {silence['actor']}: {silence['reason']}")
    unseen = any(row["state"] == "firing" for row in rows)
    return Exit.FAILURE if check and unseen else Exit.OK


@alerts.command()
@click.argument("alert", metavar="ALERT")
@click.option("--for", "for_s", type=Duration(), default="1h", show_default=True, help="How long it counts as seen.")
@wish_options(is_reason_required=True)
def ack(*, alert: str, for_s: int, **options: Any) -> int:
    """Say that somebody looks at ALERT (as `alerts ls` names it)."""
    from apportion.contracts import events as ev

    rule, _, about = alert.partition(":")
    return ask_wish(ev.AlertAcknowledgeRequested, options, rule=rule, about=about, for_s=for_s)


@alerts.command()
@click.argument("alert", metavar="RULE[:ABOUT]")
@click.option("--for", "for_s", type=Duration(), required=True, help="How long; 0 ends a silence.")
@wish_options(is_reason_required=True)
def silence(*, alert: str, for_s: int, **options: Any) -> int:
    """Tell nobody of a rule's alerts for a while, of all of them or of one."""
    from apportion.contracts import events as ev

    rule, _, about = alert.partition(":")
    return ask_wish(ev.AlertSilenceRequested, options, rule=rule, about=about, for_s=for_s)


def _called(alert: dict[str, Any]) -> str:
    return f"{alert['rule']}:{alert['about']}" if alert["about"] else str(alert["rule"])
