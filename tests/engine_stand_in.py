"""Stands for docker or podman in tests: writes down what it is told, and starts "containers" as plain processes.

Its state, and each command line as JSON in ``said``, are in ``$HOME``. It isolates nothing, and so is never installed
but by ``install``.
"""

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import NoReturn


def install(directory: Path, name: str) -> None:
    """Put it into a directory for PATH, under an engine's name."""
    tool = directory / name
    tool.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", __file__])} "$@"\n')
    tool.chmod(0o755)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _place(name: str) -> Path:
    return Path(os.environ["HOME"]) / f"{name}.box"


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"Error response from daemon: {text}\n")
    sys.exit(1)


def _create(words: list[str]) -> None:
    options: dict[str, list[str]] = {}
    while words[0].startswith("--"):
        options.setdefault(words.pop(0), []).append(words.pop(0))
    if words[0] == "no/such:image":
        _refuse("pull access denied for no/such")
    env = dict(line.split("=", 1) for line in sys.stdin.read().splitlines())
    env |= dict(pair.split("=", 1) for pair in options.get("--env", []))
    work = next(one for one in options["--mount"] if one.endswith("target=/work")).split(",")[1].removeprefix("source=")
    argv = [*options.get("--entrypoint", []), *words[1:]]
    limit = options.get("--memory", ["0m"])[0].removesuffix("m")
    config = {
        "Memory": int(limit) * 1024 * 1024 // (2 if words[0] == "half:memory" else 1),
        "NanoCpus": round(float(options.get("--cpus", ["0"])[0]) * 1e9),
        "PidsLimit": int(options.get("--pids-limit", ["0"])[0]),
        "CpusetCpus": options.get("--cpuset-cpus", [""])[0],
    }
    box = {"argv": argv, "env": env, "work": work, "config": config, "labels": options["--label"]}
    _place(options["--name"][0]).write_text(json.dumps(box))


def _start(name: str) -> None:
    box = json.loads(_place(name).read_text())
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(box["work"])
        os.execvpe(box["argv"][0], box["argv"], {"PATH": os.defpath, **box["env"]})
    written = _place(name).with_suffix(".new")
    written.write_text(str(pid))
    written.rename(written.with_suffix(".pid"))  # whoever sees it reads it whole
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
    while True:
        try:
            _, status = os.waitpid(pid, 0)
            break
        except InterruptedError:
            continue
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _main(words: list[str]) -> None:
    with Path(os.environ["HOME"], "said").open("a") as said:
        said.write(json.dumps(words) + "\n")
    match words:
        case ["version", *_]:
            _say("1.2.3")
        case ["create", *rest]:
            _create(rest)
        case ["start", "--attach", "--sig-proxy=true", name]:
            _start(name)
        case ["ps", *_]:
            for box in sorted(Path(os.environ["HOME"]).glob("*.box")):
                labels = dict(one.split("=", 1) for one in json.loads(box.read_text())["labels"])
                _say(f"{box.stem} {labels['io.apportion.run']}")
        case [_, *_, name] if not _place(name).exists():
            _refuse(f"No such container: {name}")
        case ["inspect", "--format", "{{json .HostConfig}}", name]:
            _say(json.dumps(json.loads(_place(name).read_text())["config"]))
        case ["inspect", "--format", "{{json .State.OOMKilled}}", name]:
            _say("false")
        case ["kill", "--signal", "KILL", name]:
            os.kill(int(_place(name).with_suffix(".pid").read_text()), signal.SIGKILL)
        case ["rm", "--force", "--volumes", name]:
            _place(name).unlink()
        case _:
            _refuse(f"unknown: {words}")


if __name__ == "__main__":
    _main(sys.argv[1:])
