"""compose.yaml without an engine: its shape, and that each command, port and file that it names exists."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent

# The part of the compose specification that we use, and nothing else: a key outside of it is a typo or needs a look.
STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["services"],
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "volumes": {"type": "object", "additionalProperties": {"type": "null"}},
        "services": {
            "type": "object",
            "patternProperties": {"^[a-zA-Z0-9._-]+$": {"$ref": "#/$defs/service"}},
            "additionalProperties": False,
        },
    },
    "$defs": {
        "service": {
            "type": "object",
            "additionalProperties": False,
            "oneOf": [{"required": ["image"]}, {"required": ["build"]}],
            "required": ["command", "healthcheck", "restart", "stop_grace_period"],
            "properties": {
                "image": {"type": "string"},
                "build": {
                    "type": "object",
                    "required": ["context", "dockerfile"],
                    "additionalProperties": False,
                    "properties": {
                        "context": {"type": "string"},
                        "dockerfile": {"type": "string"},
                        "args": {"type": "object", "additionalProperties": {"type": "string"}},
                    },
                },
                "command": STRINGS,
                "environment": {"type": "object", "additionalProperties": {"type": "string"}},
                "healthcheck": {
                    "type": "object",
                    "required": ["test"],
                    "additionalProperties": False,
                    "properties": {
                        "test": {"allOf": [STRINGS], "prefixItems": [{"enum": ["CMD", "CMD-SHELL"]}]},
                        "interval": DURATION,
                        "timeout": DURATION,
                        "start_period": DURATION,
                        "retries": {"type": "integer", "minimum": 1},
                    },
                },
                "depends_on": {
                    "type": "object",
                    "additionalProperties": {
                        "type": "object",
                        "required": ["condition"],
                        "additionalProperties": False,
                        "properties": {"condition": {"enum": ["service_started", "service_healthy"]}},
                    },
                },
                "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
                "stop_grace_period": DURATION,
                "init": {"type": "boolean"},
                "cap_drop": STRINGS,
                "security_opt": STRINGS,
                "ports": {"type": "array", "items": {"type": "string", "pattern": r"^[0-9.]+:[0-9]+:[0-9]+$"}},
                "volumes": {"type": "array", "items": {"type": "string", "pattern": r"^[^:]+:/[^:]+(:ro)?$"}},
            },
        }
    },
}


@pytest.fixture(name="compose")
def _compose() -> dict[str, Any]:
    content = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert isinstance(content, dict)
    return content


def members() -> dict[str, dict[str, Any]]:
    """Each member's pyproject by its folder."""
    paths = [*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml"), ROOT / "cli/pyproject.toml"]
    return {str(path.parent.relative_to(ROOT)): tomllib.loads(path.read_text()) for path in paths}


def ours(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The services that are built here."""
    return {name: service for name, service in compose["services"].items() if "build" in service}


def test_it_is_a_compose_file(compose: dict[str, Any]) -> None:
    """An engine would refuse a misspelt key, but there may be none where this is written."""
    jsonschema.Draft202012Validator(SCHEMA).validate(compose)


def test_a_misspelt_key_is_found(compose: dict[str, Any]) -> None:
    """Else the test above proves nothing."""
    compose["services"]["placer"]["enviroment"] = {}
    with pytest.raises(jsonschema.ValidationError, match="enviroment"):
        jsonschema.Draft202012Validator(SCHEMA).validate(compose)


def test_every_service_of_the_repository_has_its_container(compose: dict[str, Any]) -> None:
    """A service that is missing here is a service that nobody runs."""
    folders = {path.parent.name for path in ROOT.glob("services/*/pyproject.toml")}
    assert set(ours(compose)) == folders
    assert {service["build"]["args"]["SERVICE"] for service in ours(compose).values()} == folders


def test_every_command_is_a_console_script_of_the_member_that_its_image_installs(compose: dict[str, Any]) -> None:
    """The exact command, in an image that has it."""
    for name, service in ours(compose).items():
        scripts = members()[f"services/{name}"]["project"]["scripts"]
        assert service["command"][0] in scripts, name


def test_images_install_every_sibling_that_the_service_needs() -> None:
    """No index has our distributions: what is left out cannot be fetched."""
    installed = set(re.findall(r"\./(libs/[a-z-]+)", (ROOT / "deploy/Dockerfile").read_text()))
    by_name = {content["project"]["name"]: folder for folder, content in members().items()}
    needed: set[str] = set()
    for folder, content in members().items():
        if folder.startswith("services/"):
            names = (re.split(r"[<>=\[ ]", dependency)[0] for dependency in content["project"]["dependencies"])
            needed |= {by_name[name] for name in names if name in by_name}
    assert needed <= installed
    assert all((ROOT / folder / "pyproject.toml").is_file() for folder in installed)


def test_what_is_named_exists_and_what_is_declared_is_used(compose: dict[str, Any]) -> None:
    """Files, volumes and dependencies."""
    used = set()
    for service in compose["services"].values():
        assert set(service.get("depends_on", {})) <= set(compose["services"])
        if "build" in service:
            assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).is_file()
            else:
                used.add(source)
    assert used == set(compose["volumes"])


def test_only_loopback_of_the_host_is_reachable(compose: dict[str, Any]) -> None:
    """The bus has no password here."""
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_health_checks_ask_the_port_that_the_service_listens_on(compose: dict[str, Any]) -> None:
    """A check on another port restarts a healthy service for ever."""
    for name, service in ours(compose).items():
        assert service["healthcheck"]["test"][-1] == service["environment"]["APPORTION_HEALTH_PORT"], name


def test_services_are_given_more_time_to_drain_than_they_take(compose: dict[str, Any]) -> None:
    """Ten seconds are promised; the engine must not kill at the tenth."""
    for name, service in ours(compose).items():
        assert int(service["stop_grace_period"].removesuffix("s")) > 10, name


def test_every_variable_is_a_setting_that_all_services_know(compose: dict[str, Any]) -> None:
    """A misspelt variable would be a setting that nobody made."""
    from apportion.runtime.settings import Common

    known = {f"APPORTION_{name.upper()}" for name in Common.__struct_fields__}
    for name, service in ours(compose).items():
        assert set(service["environment"]) <= known, name


def test_the_compose_file_says_the_same_to_every_yaml_reader(compose: dict[str, Any]) -> None:
    """Numbers in quotes stay texts, and nothing turns into a date or a truth value."""
    assert json.loads(json.dumps(compose)) == compose


@pytest.mark.integration
def test_the_bus_configuration_is_accepted_and_as_durable_as_the_embedded_one(compose: dict[str, Any]) -> None:
    """A container that promises less than a laptop would be a trap."""
    import os
    import subprocess

    from apportion.runtime.embedded import MAX_PAYLOAD_BYTES, find_binary

    path = ROOT / "deploy/nats.conf"
    argv = [str(find_binary(dict(os.environ))), "-t", "-c", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    assert "sync_interval: always" in text
    assert f"max_payload: {MAX_PAYLOAD_BYTES}" in text
    assert f"{compose['services']['nats']['command'][-1]}:ro" in str(compose["services"]["nats"]["volumes"])
