"""Annotated types of published fields: their ranges and grammars, once.

msgspec checks them on decode and writes them into the JSON Schemas.
"""

from typing import Annotated

from msgspec import Meta

# A dollar alone also matches before a last newline in Python; the look-ahead makes both regex dialects agree.
NAME = r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$(?!\n)"
# NUL, control characters, and the bidirectional controls with which text can be made to look like other text.
PLAIN = r"^[^\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]*$(?!\n)"

Name = Annotated[str, Meta(pattern=NAME, min_length=1, max_length=63)]
"""A part of an id: lower-case letters, digits, ``-`` and ``_``."""
Text = Annotated[str, Meta(max_length=1024, pattern=PLAIN)]
"""Free text of at most 1,024 characters, without control characters."""
Argument = Annotated[str, Meta(max_length=8192, pattern=r"^[^\x00]*$(?!\n)")]
"""One argument of a command: anything but NUL."""
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$(?!\n)", min_length=1, max_length=128)]
Label = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,125}[A-Za-z0-9])?$(?!\n)", min_length=1, max_length=127)
]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]

Count = Annotated[int, Meta(ge=0, le=2_147_483_647)]
Positive = Annotated[int, Meta(ge=1, le=2_147_483_647)]
Milli = Annotated[int, Meta(ge=1, le=1000)]
"""Milli-GPU of one device: 1000 is the whole."""
Priority = Annotated[int, Meta(ge=0, le=1000)]
"""0 to 1000, higher first."""
Seconds = Annotated[int, Meta(ge=0, le=2_147_483_647)]
Instant = Annotated[int, Meta(ge=0, le=9_223_372_036_854_775_807)]
"""Nanoseconds since the Unix epoch."""
Timestamp = Annotated[
    str,
    Meta(
        max_length=40,
        pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$(?!\n)",
    ),
]
"""An instant in RFC 3339, as people and other systems write it."""
