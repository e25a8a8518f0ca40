"""Settings: one loader for every service, and for each value the place where it was said.

Flags win over the environment (``APPORTION_<NAME>``), the environment over the TOML file (``[common]``, then the
service's own table over it), the file over the defaults. What the settings mean is left to those who read them.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from enum import StrEnum, unique
from pathlib import Path
from typing import Annotated, Any, Final, Generic, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

ENV_PREFIX: Final = "APPORTION_"
CONFIG_FILE: Final = "apportion.toml"
COMMON_TABLE: Final = "common"
TABLES: Final = (COMMON_TABLE, "admission", "placer", "node-agent", "monitor", "cli")
"""Every table that the file may have: one file configures all services of a machine."""
_LISTS: Final = ("queue", "policy")
"""Lists of tables which are wishes rather than settings (``[[queue]]``): `apportion up` reads and publishes them."""
_OTHER_ENV: Final = frozenset({"CONFIG", "NATS_SERVER"})
"""Variables with our prefix which are no settings: where the file is, and which nats-server to start."""
_HINT_CUTOFF: Final = 0.6
_TYPO_CUTOFF: Final = 0.85


class SettingsInvalid(Exception):
    """A setting cannot be used. Says where it was set, which one, what was expected and what was found."""

    exit_code = 2

    def __init__(self, *, where: str, key: str, expected: str, found: str, hint: str = "") -> None:
        where_key = where if where.endswith(key) else f"{where}: {key}"
        super().__init__(f"{where_key}: expected {expected}, found {found}.{f' {hint}' if hint else ''}")
        self.where = where
        self.key = key
        self.expected = expected
        self.found = found
        self.hint = hint


class Secret:
    """A secret's text. It is read from the file that ``<name>_file`` names, and never prints itself."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "Secret(…)"


@unique
class LogLevel(StrEnum):
    """What is worth a log line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@unique
class Traces(StrEnum):
    """Where spans go."""

    OFF = "off"
    FILE = "file"
    OTLP = "otlp"


Port = Annotated[int, Meta(ge=0, le=65535)]
Percent = Annotated[int, Meta(ge=0, le=100)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$(?!\n)")]


def default_data_dir() -> Path:
    """Where state lives when nobody said: systemd's StateDirectory, else the user's data directory."""
    if state := os.environ.get("STATE_DIRECTORY"):
        return Path(state.partition(":")[0])
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "apportion"


class Common(Struct, frozen=True, kw_only=True):
    """What every service can be told. A service's own settings are a subclass."""

    pool: Name = "main"
    """Which pool it serves."""
    bus_url: str = "nats://127.0.0.1:4222"
    """Where the bus is; several addresses are separated by commas."""
    bus_key_file: Path | None = None
    """The seed to speak with on a bus that lets in whom it knows: a file that its owner alone may read."""
    bus_ca_file: Path | None = None
    """Whom to trust that the bus is the bus (PEM): the way there is TLS then, from the first byte."""
    bus_plain: bool = False
    """Take plain TCP to a bus that isn't on this machine: for a network that you trust."""
    bus_replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """On how many servers of the bus each message is kept, where this service is the one that makes the streams."""
    data_dir: Path = msgspec.field(default_factory=default_data_dir)
    """Where it keeps its files."""
    log_level: LogLevel = LogLevel.INFO
    health_port: Port = 0
    """Where /healthz, /readyz and /metrics answer on loopback; 0 takes a free one, told in run/<service>.json."""
    traces: Traces = Traces.OFF
    trace_sample_pct: Percent = 5
    """How many of a hundred jobs are traced, where the publisher of the wish didn't decide it."""
    faults: bool = False
    """Whether operators may have things broken on purpose. Never on in a pool that does real work."""

    def link(self) -> dict[str, Any]:
        """How to connect to the bus, as ``Bus.connect`` takes it."""
        return {"key": self.bus_key_file, "ca_file": self.bus_ca_file, "allow_plain": self.bus_plain}


S = TypeVar("S", bound=Common)


class Loaded(Struct, Generic[S], frozen=True, kw_only=True):
    """Settings, and where each of them was said."""

    settings: S
    origins: dict[str, str]
    """By name: ``flag --bus-url``, ``environment APPORTION_BUS_URL``, ``/etc/apportion.toml [common]``, ``default``."""

    def table(self) -> list[tuple[str, str, str]]:
        """Rows of (name, value, origin) by name, for people; secrets stay hidden."""
        return [
            (name, _shown(getattr(self.settings, name)), self.origins[name])
            for name in sorted(self.settings.__struct_fields__)
        ]


class _Found(Struct, frozen=True, kw_only=True):
    """One value as it was written."""

    value: object
    origin: str
    key: str
    """The name as the place has it: ``--bus-url``, ``APPORTION_BUS_URL``, ``bus_url``."""
    base: Path | None = None
    """What a relative path is relative to; None: the working directory."""
    is_text: bool = True
    """True where the place knows text alone (flags, environment), so that numbers have to be read from it."""


def load(
    kind: type[S],
    table: str,
    *,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    elsewhere: frozenset[str] = frozenset(),
) -> Loaded[S]:
    """The settings of one service.

    ``table`` is its table in the file. ``flags`` are texts by setting name. ``file`` must exist where it is given;
    otherwise APPORTION_CONFIG, ./apportion.toml and the user's configuration directory are looked at. ``elsewhere``
    holds names in other services' settings that merely look like a typo of ours. Raises SettingsInvalid.
    """
    assert table in TABLES, f"unknown table {table!r}: add it to TABLES"
    environ = os.environ if environ is None else environ
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    found: dict[str, _Found] = {}
    path = _config_path(file, environ)
    if path is not None:
        found |= _from_file(path, table, fields)
    found |= _from_environ(environ, fields, elsewhere)
    found |= _from_flags(flags or {}, fields)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(fields, "default")
    for name, one in found.items():
        values[name] = _converted(one, fields[name])
        origins[name] = one.origin
    for name, field in fields.items():
        if field.required and name not in values:
            raise SettingsInvalid(
                where=f"settings of {table}",
                key=name,
                expected=f"a value, by --{_dashed(name)}, {ENV_PREFIX}{name.upper()} or {name} in {CONFIG_FILE}",
                found="none",
            )
    return Loaded(settings=kind(**values), origins=origins)


def from_command_line(
    kind: type[S], table: str, argv: Sequence[str], *, environ: Mapping[str, str] | None = None
) -> Loaded[S]:
    """The settings of a service that was started with ``argv`` (without the program's name).

    Each setting is a flag: ``--bus-url``. ``--config FILE`` names the TOML file. Raises SettingsInvalid; ``--help``
    prints the flags and exits.
    """
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    parser = _Parser(prog=f"apportion-{table}", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.names = ["--config", *(_flag(field) for field in fields.values())]
    parser.add_argument("--config", metavar="FILE", help=f"TOML file to read (default: ./{CONFIG_FILE} if it is there)")
    for name, field in fields.items():
        said = "" if field.default is msgspec.NODEFAULT else f"default: {_shown(field.default)}"
        # A flag that is there says yes: --standby is --standby true.
        yes: dict[str, Any] = {"nargs": "?", "const": "true"} if field.type is bool else {}
        parser.add_argument(_flag(field), dest=name, metavar="VALUE", help=said, **yes)
    flags = vars(parser.parse_args(argv))
    config = flags.pop("config", None)
    return load(kind, table, flags=flags, environ=environ, file=None if config is None else Path(config))


class _Parser(argparse.ArgumentParser):
    """argparse, with our errors and hints."""

    names: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
        if unknown != message.split(" ", maxsplit=1)[0].partition("=")[0]:
            raise SettingsInvalid(
                where="flags", key=unknown, expected="a known flag", found="none such", hint=_hint(unknown, self.names)
            )
        raise SettingsInvalid(where="flags", key="", expected="flags as --help lists them", found=message)


# Places ------------------------------------------------------------------------------------------------------------


def _config_path(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: what was named must be there, what wasn't may be missing."""
    for where, named in (
        ("flag --config", file),
        (f"environment {ENV_PREFIX}CONFIG", environ.get(f"{ENV_PREFIX}CONFIG")),
    ):
        if named:
            path = Path(named).expanduser()
            if not path.is_file():
                raise SettingsInvalid(where=where, key=str(path), expected="a TOML file", found="no such file")
            return path
    home = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "/")) / ".config")
    folders = [Path(), Path(environ.get("CONFIGURATION_DIRECTORY") or Path(home) / "apportion")]
    return next((folder / CONFIG_FILE for folder in folders if (folder / CONFIG_FILE).is_file()), None)


def _from_file(path: Path, table: str, fields: Mapping[str, msgspec.structs.FieldInfo]) -> dict[str, _Found]:
    try:
        with path.open("rb") as opened:
            tables = tomllib.load(opened)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise SettingsInvalid(where=str(path), key="", expected="TOML", found=str(err)) from err
    except OSError as err:
        raise SettingsInvalid(where=str(path), key="", expected="a readable file", found=str(err)) from err
    for name, content in tables.items():
        if name in _LISTS and isinstance(content, list):
            continue
        if name not in TABLES:
            expected = f"one of the tables {', '.join(f'[{known}]' for known in TABLES)}"
            found = f"the table [{name}]" if isinstance(content, dict) else f"the key {name} outside of any table"
            raise SettingsInvalid(where=str(path), key=name, expected=expected, found=found, hint=_hint(name, TABLES))
        if not isinstance(content, dict):
            raise SettingsInvalid(where=str(path), key=name, expected="a table", found=repr(content))
    common = {field.name: field for field in msgspec.structs.fields(Common)}
    return {
        **_from_table(path, COMMON_TABLE, tables.get(COMMON_TABLE, {}), common),
        **(_from_table(path, table, tables.get(table, {}), fields) if table != COMMON_TABLE else {}),
    }


def _from_table(
    path: Path, table: str, content: Mapping[str, object], fields: Mapping[str, msgspec.structs.FieldInfo]
) -> dict[str, _Found]:
    where = f"{path} [{table}]"
    keys = {_key(field): name for name, field in fields.items()}
    found = {}
    for key, value in content.items():
        if key not in keys:
            raise _unknown(where, key, keys)
        found[keys[key]] = _Found(value=value, origin=where, key=key, base=path.absolute().parent, is_text=False)
    return found


def _from_environ(
    environ: Mapping[str, str], fields: Mapping[str, msgspec.structs.FieldInfo], elsewhere: frozenset[str]
) -> dict[str, _Found]:
    keys = {f"{ENV_PREFIX}{_key(field).upper()}": name for name, field in fields.items()}
    others = {f"{ENV_PREFIX}{name.upper()}" for name in _OTHER_ENV | elsewhere}
    found = {}
    for key, value in sorted(environ.items()):
        if not key.startswith(ENV_PREFIX) or key in others:
            continue
        if key in keys:
            found[keys[key]] = _Found(value=value, origin=f"environment {key}", key=key)
        # All services share one environment, so a name that we don't know may be a neighbour's. One letter off is not.
        elif difflib.get_close_matches(key, keys, n=1, cutoff=_TYPO_CUTOFF) or _inline_secret(key, keys):
            raise _unknown("environment", key, keys)
    return found


def _from_flags(flags: Mapping[str, str], fields: Mapping[str, msgspec.structs.FieldInfo]) -> dict[str, _Found]:
    known = {name: _flag(field) for name, field in fields.items()}
    found = {}
    for name, value in flags.items():
        if name not in known:
            raise _unknown("flags", f"--{_dashed(name)}", dict.fromkeys(known.values(), ""))
        found[name] = _Found(value=value, origin=f"flag {known[name]}", key=known[name])
    return found


def _unknown(where: str, key: str, keys: Mapping[str, str]) -> SettingsInvalid:
    if secret := _inline_secret(key, keys):
        return SettingsInvalid(
            where=where, key=key, expected=f"a secret in a file, named by {secret}", found="the secret itself"
        )
    return SettingsInvalid(where=where, key=key, expected="a known setting", found="none such", hint=_hint(key, keys))


def _inline_secret(key: str, keys: Mapping[str, str]) -> str:
    """The key that names the file of the secret which somebody tries to give openly; empty where it is none."""
    return next((known for known in keys if known in {f"{key}_file", f"{key}_FILE", f"{key}-file"}), "")


# Values ------------------------------------------------------------------------------------------------------------


def _converted(found: _Found, field: msgspec.structs.FieldInfo) -> object:
    def from_text(wanted: type, value: object) -> object:
        if wanted is Path and isinstance(value, str) and value:
            path = Path(value).expanduser()
            return path if found.base is None else found.base / path
        raise ValueError(f"Expected `{wanted.__name__.lower()}`, got `{type(value).__name__}`")

    if _is_secret(field):
        return _secret(found, from_text(Path, found.value) if isinstance(found.value, str) else None)
    value = found.value
    if found.is_text and isinstance(value, str) and _is_structured(field.type):
        value = _toml_value(found, value)
    try:
        return msgspec.convert(value, field.type, strict=not found.is_text, dec_hook=from_text)
    except msgspec.ValidationError as err:
        expected = str(err).removeprefix("Expected ").partition(", got ")[0]
        raise SettingsInvalid(where=found.origin, key=found.key, expected=expected, found=repr(found.value)) from err


def _secret(found: _Found, path: object) -> Secret:
    if not isinstance(path, Path):
        raise SettingsInvalid(where=found.origin, key=found.key, expected="a path", found="something else")
    try:
        return Secret(path.read_text(encoding="utf-8").rstrip("\r\n"))
    except (OSError, UnicodeDecodeError) as err:
        raise SettingsInvalid(where=found.origin, key=found.key, expected="a readable file", found=str(err)) from err


def _toml_value(found: _Found, text: str) -> object:
    """Lists and tables in flags and environment are written as in the file: ``["a", "b"]``."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as err:
        raise SettingsInvalid(where=found.origin, key=found.key, expected="a TOML value", found=repr(text)) from err


def _is_secret(field: msgspec.structs.FieldInfo) -> bool:
    kind = msgspec.inspect.type_info(field.type)
    options = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return any(isinstance(option, msgspec.inspect.CustomType) and option.cls is Secret for option in options)


def _is_structured(kind: Any) -> bool:
    info = msgspec.inspect.type_info(kind)
    options = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    structured = (
        msgspec.inspect.CollectionType,
        msgspec.inspect.DictType,
        msgspec.inspect.StructType,
        msgspec.inspect.TupleType,
    )
    return any(isinstance(option, structured) for option in options)


def _key(field: msgspec.structs.FieldInfo) -> str:
    return f"{field.name}_file" if _is_secret(field) else field.name


def _flag(field: msgspec.structs.FieldInfo) -> str:
    return f"--{_dashed(_key(field))}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _hint(name: str, known: Mapping[str, str] | Sequence[str]) -> str:
    """The nearest known name, as a question; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_HINT_CUTOFF)
    return f"Did you mean {near[0]}?" if near else ""


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, Secret) else str(value)
