"""Settings: who wins, where a value came from, and errors that name the file, the key and the nearest right name."""

from pathlib import Path

import msgspec
import pytest

from apportion.runtime.settings import (
    Common,
    Loaded,
    LogLevel,
    Secret,
    SettingsInvalid,
    Traces,
    from_command_line,
    load,
)

NOBODY: dict[str, str] = {"HOME": "/nonexistent"}


class PlacerSettings(Common, frozen=True, kw_only=True):
    policy: str = "spread"
    batch_max: int = 900
    weights: dict[str, int] = msgspec.field(default_factory=dict)
    zones: tuple[str, ...] = ()
    spare_dir: Path | None = None
    token: Secret | None = None


class StrictSettings(Common, frozen=True, kw_only=True):
    node: str


@pytest.fixture(autouse=True)
def _an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(toml: str = "", flags: dict[str, str] | None = None, **environ: str) -> Loaded[PlacerSettings]:
    Path("apportion.toml").write_text(toml)
    return load(PlacerSettings, "placer", flags=flags, environ={**NOBODY, **environ})


def refusal(toml: str = "", flags: dict[str, str] | None = None, **environ: str) -> SettingsInvalid:
    with pytest.raises(SettingsInvalid) as refused:
        loaded(toml, flags, **environ)
    return refused.value


def test_flags_win_over_environment_over_own_table_over_common_over_default() -> None:
    """An operator can always see which of two values counts, and overrule it at the command line."""
    toml = '[common]\npool = "a"\n[placer]\npool = "b"\n'
    assert load(PlacerSettings, "placer", environ=NOBODY).settings.pool == "main"
    assert loaded('[common]\npool = "a"').settings.pool == "a"
    assert loaded(toml).settings.pool == "b"
    assert loaded(toml, APPORTION_POOL="c").settings.pool == "c"
    assert loaded(toml, {"pool": "d"}, APPORTION_POOL="c").settings.pool == "d"


def test_each_value_knows_where_it_was_said() -> None:
    """``config show --origin`` answers "who set this?" without a search."""
    toml = '[common]\nlog_level = "debug"\n[placer]\nbatch_max = 5\n'
    result = loaded(toml, {"bus_url": "nats://b:1"}, APPORTION_TRACES="file")
    assert (result.settings.log_level, result.settings.traces) == (LogLevel.DEBUG, Traces.FILE)
    assert {name: result.origins[name] for name in ("bus_url", "traces", "log_level", "batch_max", "pool")} == {
        "bus_url": "flag --bus-url",
        "traces": "environment APPORTION_TRACES",
        "log_level": "apportion.toml [common]",
        "batch_max": "apportion.toml [placer]",
        "pool": "default",
    }
    assert ("batch_max", "5", "apportion.toml [placer]") in result.table()


def test_a_neighbours_table_is_not_ours() -> None:
    """One file configures all services of a machine."""
    assert loaded('[admission]\nanything = 1\n[placer]\npolicy = "packed"').settings.policy == "packed"


def test_text_becomes_numbers_lists_and_tables() -> None:
    """Environment and flags know text alone; lists and tables are written there as in the file."""
    result = loaded("", {"zones": '["a", "b"]'}, APPORTION_BATCH_MAX="7", APPORTION_WEIGHTS="{ wait = 3 }").settings
    assert (result.batch_max, result.zones, result.weights) == (7, ("a", "b"), {"wait": 3})


def test_a_path_in_the_file_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file means the same place, from wherever the service is started."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "apportion.toml").write_text('[placer]\nspare_dir = "spare"\ndata_dir = "/var/lib/a"')
    result = load(PlacerSettings, "placer", environ=NOBODY, file=Path("etc/apportion.toml")).settings
    assert result.spare_dir == tmp_path / "etc" / "spare"
    assert result.data_dir == Path("/var/lib/a")
    monkeypatch.setenv("HOME", "/home/me")
    assert loaded("", {"data_dir": "~/pool"}).settings.data_dir == Path("/home/me/pool")


def test_the_default_data_dir_follows_systemd_and_the_users_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a service and as a user, files go where such files go."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/home/me/data")
    assert loaded().settings.data_dir == Path("/home/me/data/apportion")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/apportion")
    assert loaded().settings.data_dir == Path("/var/lib/apportion")


@pytest.mark.parametrize(
    ("toml", "where", "key", "expected", "found", "hint"),
    [
        ("[placer]\npolcy = 'x'", "apportion.toml [placer]", "polcy", "a known setting", "none such", "policy"),
        ("[placr]\n", "apportion.toml", "placr", "one of the tables", "the table [placr]", "placer"),
        ("pool = 'x'", "apportion.toml", "pool", "one of the tables", "the key pool outside of any table", ""),
        ("placer = 1", "apportion.toml", "placer", "a table", "1", ""),
        ("[common]\npolicy = 'x'", "apportion.toml [common]", "policy", "a known setting", "none such", ""),
        ("[placer]\nbatch_max = '9'", "apportion.toml [placer]", "batch_max", "`int`", "'9'", ""),
        ("[common]\nhealth_port = 70000", "apportion.toml [common]", "health_port", "`int` <= 65535", "70000", ""),
        ("[common]\npool = 'A b'", "apportion.toml [common]", "pool", "`str` matching regex", "'A b'", ""),
        ("[placer]\nspare_dir = 3", "apportion.toml [placer]", "spare_dir", "`path`", "3", ""),
        ("[placer]\nbatch_max = ", "apportion.toml", "", "TOML", "Invalid value", ""),
    ],
)
def test_a_bad_file_is_refused_by_file_key_expected_and_found(  # noqa: PLR0917  (a row of the table)
    toml: str, where: str, key: str, expected: str, found: str, hint: str
) -> None:
    """A typo that is silently ignored is a policy that nobody chose."""
    said = refusal(toml)
    assert (said.where, said.key) == (where, key)
    assert expected in said.expected
    assert found in said.found
    assert said.hint == (f"Did you mean {hint}?" if hint else said.hint)
    assert all(part in str(said) for part in (where, key, said.expected, said.found))


def test_a_bad_number_in_the_environment_names_the_variable() -> None:
    """The message points to the place that has to be mended."""
    said = refusal(APPORTION_TRACE_SAMPLE_PCT="many")
    assert str(said) == ("environment APPORTION_TRACE_SAMPLE_PCT: expected `int`, found 'many'.")


def test_a_typo_in_the_environment_is_an_error_and_a_neighbours_variable_is_not() -> None:
    """All services of a machine share one environment."""
    assert refusal(APPORTION_BUS_URI="nats://x").hint == "Did you mean APPORTION_BUS_URL?"
    assert loaded(APPORTION_QUOTA_FILE_OF_ADMISSION="x", APPORTION_NATS_SERVER="/bin/nats").settings.pool == "main"
    allowed = load(
        PlacerSettings, "placer", environ={**NOBODY, "APPORTION_POLICIES": "x"}, elsewhere=frozenset({"policies"})
    )
    assert allowed.settings.policy == "spread"


def test_a_secret_is_read_from_a_file_and_never_shown(tmp_path: Path) -> None:
    """Flags, environment and configuration files end up in process lists, crash reports and tickets."""
    (tmp_path / "token").write_text("s3cret\n")
    result = loaded(APPORTION_TOKEN_FILE=str(tmp_path / "token"))
    assert result.settings.token is not None
    assert result.settings.token.reveal() == "s3cret"
    assert "s3cret" not in repr(result)
    assert "s3cret" not in repr(result.table())
    assert loaded("[placer]\ntoken_file = 'token'").settings.token == Secret("s3cret")


@pytest.mark.parametrize(
    ("toml", "environ", "names"),
    [("[placer]\ntoken = 's3cret'", {}, "token_file"), ("", {"APPORTION_TOKEN": "s3cret"}, "APPORTION_TOKEN_FILE")],
)
def test_an_open_secret_is_refused_without_repeating_it(toml: str, environ: dict[str, str], names: str) -> None:
    """The error itself goes to a log."""
    said = refusal(toml, None, **environ)
    assert names in said.expected
    assert "s3cret" not in str(said)


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    """Falling back to defaults would run another configuration than the one that was asked for."""
    with pytest.raises(SettingsInvalid, match=r"flag --config: .*missing.toml: expected a TOML file"):
        load(PlacerSettings, "placer", environ=NOBODY, file=tmp_path / "missing.toml")
    with pytest.raises(SettingsInvalid, match="environment APPORTION_CONFIG"):
        load(PlacerSettings, "placer", environ={"APPORTION_CONFIG": "nowhere.toml"})


def test_a_setting_without_default_must_be_given_and_the_error_says_how() -> None:
    """An agent without a name must not make one up."""
    with pytest.raises(SettingsInvalid) as refused:
        load(StrictSettings, "node-agent", environ=NOBODY)
    assert all(how in str(refused.value) for how in ("--node", "APPORTION_NODE", "node in apportion.toml"))


def test_every_setting_is_a_flag_of_the_command_line(tmp_path: Path) -> None:
    """What a file can say, a flag can say."""
    (tmp_path / "my.toml").write_text("[placer]\npolicy = 'packed'\nbatch_max = 1\n")
    argv = ["--config", "my.toml", "--batch-max", "3", "--log-level=error"]
    result = from_command_line(PlacerSettings, "placer", argv, environ=NOBODY)
    assert (result.settings.policy, result.settings.batch_max) == ("packed", 3)
    assert result.settings.log_level is LogLevel.ERROR
    assert result.origins["batch_max"] == "flag --batch-max"


@pytest.mark.parametrize(
    ("argv", "key", "hint"),
    [
        (["--bus-uri", "x"], "--bus-uri", "Did you mean --bus-url?"),
        (["--pol=x"], "--pol", "Did you mean --pool?"),
        (["--batch-max"], "", ""),
    ],
)
def test_a_bad_flag_is_refused_with_the_nearest_one(argv: list[str], key: str, hint: str) -> None:
    """No prefix is guessed: ``--pol`` may mean another flag tomorrow."""
    with pytest.raises(SettingsInvalid) as refused:
        from_command_line(PlacerSettings, "placer", argv, environ=NOBODY)
    assert (refused.value.key, refused.value.hint) == (key, hint)
    assert refused.value.exit_code == 2
