"""Annotated types of published fields: their ranges and grammars, once.

msgspec checks them on decode and writes them into the JSON Schemas.
"""

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta

# A dollar alone also matches before a last newline in Python; the look-ahead makes both regex dialects agree.
NAME = r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$(?!\n)"
JOB_NAME = r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?(/[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?)?$(?!\n)"
# NUL, control characters, line separators, and the bidirectional controls with which text can be made to look like
# other text.
PLAIN = r"^[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]*$(?!\n)"
NO_NUL = r"^[^\x00]*$(?!\n)"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$(?!\n)"
LABEL = r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,125}[A-Za-z0-9])?$(?!\n)"
TIMESTAMP = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$(?!\n)"
IMAGE = r"^[a-z0-9][A-Za-z0-9._/:@-]*$(?!\n)"
MIG_PROFILE = r"^[1-7]g\.[0-9]{1,3}gb(\+me)?$(?!\n)"
# Letters are named one by one: what counts as a space differs between dialects. Only links that a browser may follow.
WEB_URI = r"^https?://[A-Za-z0-9._~:/?#@!$&'()*+,;=%\[\]-]+$(?!\n)"
URI = r"^[a-z][a-z0-9+.-]{0,31}://[A-Za-z0-9._~:/?#@!$&'()*+,;=%\[\]-]+$(?!\n)"
VERSION = r"^[0-9]{1,4}(\.[0-9]{1,4}){0,3}$(?!\n)"
CURRENCY = r"^[A-Z]{3}$(?!\n)"
WORD = r"^[A-Za-z0-9][A-Za-z0-9._ /:+-]{0,127}$(?!\n)"

GRAMMARS: Final[Mapping[str, str]] = {
    NAME: "a name of 1 to 63 lower-case letters, digits, - and _, with neither sign at an end",
    JOB_NAME: "a job's name, or <tenant>/<name>",
    PLAIN: "text without control characters",
    NO_NUL: "text without NUL",
    ENV_NAME: "a variable's name of letters, digits and _, not beginning with a digit",
    LABEL: "a key of 1 to 127 letters, digits, _, ., / and -, with no sign at an end",
    TIMESTAMP: "an instant in RFC 3339, such as 2026-09-01T12:00:00Z",
    IMAGE: "the name of an image",
    MIG_PROFILE: "a MIG profile, such as 1g.10gb",
    WEB_URI: "a link that begins with https:// or http://",
    URI: "a URI, such as s3://bucket/key",
    VERSION: "a version, such as 12.4",
    CURRENCY: "a currency's ISO 4217 code, such as EUR",
    WORD: "a word of letters, digits, ., _, /, :, + and -",
}
"""Patterns in words, for people who are told that something doesn't match."""

Name = Annotated[str, Meta(pattern=NAME, min_length=1, max_length=63)]
"""A part of an id: lower-case letters, digits, ``-`` and ``_``."""
# Free text is most of a request, and a pattern costs more than all the rest of decoding it. The schema has it all the
# same; the codec knows from the bytes that nearly all requests match, and looks at the others text by text.
Text = Annotated[str, Meta(max_length=1024, extra_json_schema={"pattern": PLAIN})]
"""Free text of at most 1,024 characters, without control characters."""
Argument = Annotated[str, Meta(max_length=8192, extra_json_schema={"pattern": NO_NUL})]
"""One argument of a command: anything but NUL."""
# So do the names which nearly every request holds: the decoder checks their length, and `grammar` the rest.
RequestName = Annotated[str, Meta(min_length=1, max_length=63, extra_json_schema={"pattern": NAME})]
"""A Name, in a request for a job."""
EnvName = Annotated[str, Meta(min_length=1, max_length=128, extra_json_schema={"pattern": ENV_NAME})]
"""The name of a variable."""
Key = Annotated[str, Meta(min_length=1, max_length=127, extra_json_schema={"pattern": LABEL})]
"""The name under which an object holds a text: a Label."""
Label = Annotated[str, Meta(pattern=LABEL, min_length=1, max_length=127)]
JobName = Annotated[str, Meta(pattern=JOB_NAME, min_length=1, max_length=127)]
"""A tenant's name for a job, or with the tenant before it."""
WebUri = Annotated[str, Meta(pattern=WEB_URI, max_length=2048)]
Uri = Annotated[str, Meta(pattern=URI, max_length=2048)]
Version = Annotated[str, Meta(pattern=VERSION, max_length=20)]
Word = Annotated[str, Meta(pattern=WORD, min_length=1, max_length=128)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]

Count = Annotated[int, Meta(ge=0, le=2_147_483_647)]
Positive = Annotated[int, Meta(ge=1, le=2_147_483_647)]
Milli = Annotated[int, Meta(ge=1, le=1000)]
Weight = Annotated[int, Meta(ge=1, le=1000)]
"""Milli-GPU of one device: 1000 is the whole."""
Currency = Annotated[str, Meta(pattern=CURRENCY)]
"""An ISO 4217 code."""
Micro = Annotated[int, Meta(ge=0, le=1_000_000_000_000)]
"""Millionths of a currency's unit."""
Priority = Annotated[int, Meta(ge=0, le=1000)]
"""0 to 1000, higher first."""
Seconds = Annotated[int, Meta(ge=0, le=2_147_483_647)]
Instant = Annotated[int, Meta(ge=0, le=9_223_372_036_854_775_807)]
"""Nanoseconds since the Unix epoch."""
Timestamp = Annotated[str, Meta(max_length=40, pattern=TIMESTAMP)]
"""An instant in RFC 3339, as people and other systems write it."""
