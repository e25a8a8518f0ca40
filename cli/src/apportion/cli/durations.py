"""Durations as people write them."""

import re
from typing import Any, Final

import click

_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class Duration(click.ParamType[int]):
    """``30s``, ``15m``, ``2h``, ``3d`` as seconds; a bare number is seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Seconds. Fails on anything else, and says what it takes."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d{1,9})([smhd]?)", str(value))
        if found is None:
            self.fail(f"{value!r}: expected a duration such as 30s, 15m, 2h or 3d", param, ctx)
        return int(found[1]) * _UNITS[found[2] or "s"]
