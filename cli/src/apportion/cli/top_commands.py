"""``apportion top``: the pool on one screen, again and again."""

import asyncio
import shutil
import sys
import time

import click

from apportion.cli.app import cli, place_of, pool_options, run


@cli.command()
@click.option("--once", is_flag=True, help="Print one frame, and end; so also where the output is no terminal.")
@click.option("--every", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="Seconds between frames.")
@pool_options
def top(*, once: bool, every: float, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """How full the pool is, who waits and why, and what is wrong, on one screen; q ends it."""
    from apportion.cli import top as view
    from apportion.cli.client import bus_of

    place = place_of(data_dir, pool, bus_url)

    async def frames() -> None:
        async with bus_of(place) as bus:
            while True:
                size = shutil.get_terminal_size((100, 40))
                seen = await view.look(place, bus)
                lines = view.frame(seen, width=size.columns, height=size.lines - 1, now=time.time_ns())
                if is_single:
                    click.echo("\n".join(lines))
                    return
                view.draw(lines)
                if await asyncio.to_thread(view.is_over, every):
                    return

    is_single = once or not sys.stdout.isatty()
    if is_single:
        run(frames())
        return
    with view.screen():
        run(frames())
