"""A small real workload for simulated devices: it holds memory, runs kernels, checkpoints when asked to end.

``train`` does device work worth ``--seconds`` at the SMs that it sees; a neighbour that takes turns makes it last
longer. ``serve`` answers a request every ``--interval-ms`` for ``--seconds``. Run it as a plain file, so that it starts
as fast as what it stands for: ``python -S -E workload.py train --seconds 1.5 --memory-mib 8000``.

Options: ``--seconds S``, ``--memory-mib N`` (on each visible device, the context included), ``--sms N`` (most SMs that
a kernel uses), ``--step-ms N``, ``--interval-ms N``, ``--exit-code N``, ``--illegal-access-after S``,
``--grow-mib-each-step N``, ``--checkpoint FILE``, ``--ignore-sigterm``.

Where its job says how it is told to checkpoint (APPORTION_CHECKPOINT_SIGNAL), it does so at the end of a step, goes on,
and says so; what lies where its checkpoints are kept (a ``file://`` URI), it goes on from.

Ends with 0 or the code asked for; 143 once SIGTERM was obeyed; 76 without a device; 77 out of memory; 78 on another
device error; 64 on wrong usage. The last line on stdout is a summary of what was done.
"""

import os
import sys
import time

try:
    from apportion.node_agent.simgpu import client
except ModuleNotFoundError:  # Run as a plain file, without site: the client lies beside it.
    import client  # type: ignore[import-not-found,no-redef]

import _signal  # type: ignore[import-not-found]  # ``signal`` would bring enum, and take longer than a whole short run

_CODE_USAGE = 64
_CODE_NO_DEVICE = 76
_CODE_OUT_OF_MEMORY = 77
_CODE_DEVICE_ERROR = 78
_CODE_TERMINATED = 143
_REQUEST_US = 5000

_DEFAULTS: dict[str, str] = {
    "--seconds": "1",
    "--memory-mib": "1024",
    "--sms": "0",
    "--step-ms": "250",
    "--interval-ms": "100",
    "--exit-code": "0",
    "--illegal-access-after": "",
    "--grow-mib-each-step": "0",
    "--checkpoint": "",
    "--ignore-sigterm": "",
}
_FLAGS = ("--ignore-sigterm",)


class _Run:
    """One run of the program."""

    def __init__(self, kind: str, options: dict[str, str]) -> None:
        self._kind = kind
        self._options = options
        self._terminated = False
        self._steps_done = 0
        self._device_us = 0
        self._is_asked = False
        uri = _env("APPORTION_CHECKPOINT_URI")
        self._path = options["--checkpoint"] or (uri[7:] if uri.startswith("file://") else "")

    def on_sigterm(self, _number: int, _frame: object) -> None:
        self._terminated = not self._options["--ignore-sigterm"]

    def on_checkpoint(self, _number: int, _frame: object) -> None:
        self._is_asked = True

    def run(self) -> int:
        driver = client.Driver()
        if not driver.devices:
            raise client.GpuError("CUDA_ERROR_NO_DEVICE", "no visible device")
        memory_mib = int(self._options["--memory-mib"])
        for device in driver.devices:
            driver.alloc(device.ordinal, max(0, memory_mib - driver.context_mib))
        self._steps_done = self._read_checkpoint()
        if self._kind == "train":
            self._train(driver)
        else:
            self._serve(driver)
        if self._terminated:
            self._write_checkpoint()
        print(
            f"{self._kind} steps={self._steps_done} device_ms={self._device_us // 1000} devices={len(driver.devices)} "
            f"mps={int(driver.is_mps_client)} terminated={int(self._terminated)}"
        )
        driver.close()
        return _CODE_TERMINATED if self._terminated else int(self._options["--exit-code"])

    def _train(self, driver: "client.Driver") -> None:
        step_us = int(self._options["--step-ms"]) * 1000
        total_us = round(float(self._options["--seconds"]) * 1e6)
        while not self._terminated and self._steps_done * step_us < total_us:
            self._step(driver, min(step_us, total_us - self._steps_done * step_us))

    def _serve(self, driver: "client.Driver") -> None:
        interval_s = int(self._options["--interval-ms"]) / 1000
        until_s = time.monotonic() + float(self._options["--seconds"])
        while not self._terminated and time.monotonic() < until_s:
            self._step(driver, _REQUEST_US)
            time.sleep(max(0.0, min(interval_s, until_s - time.monotonic())))

    def _step(self, driver: "client.Driver", us: int) -> None:
        """The same kernel on every device at once, as data-parallel training does."""
        self._maybe_misbehave(driver)
        for device in driver.devices:
            driver.launch(device.ordinal, int(self._options["--sms"]) or device.sms, us)
        self._device_us += max(driver.sync(device.ordinal) for device in driver.devices)
        self._steps_done += 1
        if self._is_asked:
            self._is_asked = False
            self._write_checkpoint()
            self._report()

    def _maybe_misbehave(self, driver: "client.Driver") -> None:
        grow_mib = int(self._options["--grow-mib-each-step"])
        if grow_mib:
            driver.alloc(0, grow_mib)
        after = self._options["--illegal-access-after"]
        if after and self._device_us >= float(after) * 1e6:
            driver.illegal_access(0)

    def _read_checkpoint(self) -> int:
        try:
            with open(self._path) as file:  # noqa: PTH123  pathlib costs more than the run
                return int(file.read())
        except (OSError, ValueError):
            return 0

    def _write_checkpoint(self) -> None:
        if self._path:
            with open(self._path, "w") as file:  # noqa: PTH123
                file.write(str(self._steps_done))

    def _report(self) -> None:
        path = _env("APPORTION_CHECKPOINT_FILE")
        with open(path + ".new", "w") as file:  # noqa: PTH123
            file.write(f'{{"step": {self._steps_done}}}')
        os.rename(path + ".new", path)  # noqa: PTH104


def _env(name: str) -> str:
    return os.environ.get(name, "")


def _options(arguments: list[str]) -> dict[str, str] | None:
    """The options by name; None where one is unknown or has no value."""
    options = dict(_DEFAULTS)
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if name in _FLAGS:
            options[name] = "1"
        elif name in options and rest:
            options[name] = rest.pop(0)
        else:
            return None
    return options


def main(arguments: list[str]) -> int:
    """Run the program and return its exit code."""
    options = _options(arguments[1:])
    if options is None or not arguments or arguments[0] not in ("train", "serve"):
        client.complain("workload", "usage: workload.py train|serve [--OPTION VALUE]...; see the head of the file")
        return _CODE_USAGE
    run = _Run(arguments[0], options)
    _signal.signal(_signal.SIGTERM, run.on_sigterm)
    if name := _env("APPORTION_CHECKPOINT_SIGNAL"):
        _signal.signal(getattr(_signal, name), run.on_checkpoint)
    try:
        return run.run()
    except client.GpuError as error:
        client.complain("workload", str(error))
        if error.code == "CUDA_ERROR_OUT_OF_MEMORY":
            return _CODE_OUT_OF_MEMORY
        return _CODE_NO_DEVICE if error.code == "CUDA_ERROR_NO_DEVICE" else _CODE_DEVICE_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
