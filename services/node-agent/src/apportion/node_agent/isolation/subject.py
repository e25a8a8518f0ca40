"""One party of an isolation test: a process on a device that does what its stdin says, and tells what came of it.

Run as a plain file, ``python -I -S subject.py``; it ends with its stdin, so that nothing of a test outlives the tester.
A line is a command: ``alloc MIB``, ``free HANDLE``, ``churn TIMES MIB``, ``kernels BOUND SMS US COUNT``, ``hog BOUND
SMS US`` until the next line, and ``crash exception|memory|access|flight``. An answer is a line: ``ok …`` or the error.
"""

import os
import select
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "simgpu"))  # noqa: PTH100,PTH118,PTH120
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100,PTH120

if os.environ.get("APPORTION_SIMGPU_SOCKET"):
    import client as gpu  # type: ignore[import-not-found]
else:
    import cuda as gpu  # type: ignore[import-not-found]

_CODE_DEVICE_ERROR = 78
_CODE_OUT_OF_MEMORY = 77
_LONG_US = 30_000_000
_STEP_MIB = 256


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _kernels(driver: "gpu.Driver", bound: str, sms: int, us: int, count: int) -> list[int]:
    """Microseconds of each, one after the other, by the device's own clock."""
    found = []
    for _ in range(count):
        driver.launch(0, sms, us, bound)
        found.append(driver.sync(0))
    return found


def _churn(driver: "gpu.Driver", times: int, mib: int) -> int:
    """How many of so many allocations were refused; each is given back at once."""
    refused = 0
    for _ in range(times):
        try:
            driver.free(driver.alloc(0, mib))
        except gpu.GpuError:
            refused += 1
    return refused


def _hog(driver: "gpu.Driver", bound: str, sms: int, us: int) -> None:
    """Keep the device busy without a gap until there is another line to read."""
    driver.launch(0, sms, us, bound)
    _say("ok hogging")
    while not select.select([sys.stdin], [], [], 0)[0]:
        driver.launch(0, sms, us, bound)
        driver.launch(0, sms, us, bound)
        driver.sync(0)
    driver.sync(0)


def _crash(driver: "gpu.Driver", how: str) -> None:
    if how == "exception":
        raise RuntimeError("as asked for")
    if how == "memory":
        while True:
            driver.alloc(0, _STEP_MIB)
    if how == "access":
        driver.illegal_access(0)
    driver.launch(0, driver.devices[0].sms, _LONG_US)
    driver.memory(0)  # Answered after the launch has arrived: from here on it is in flight.
    _say("ok in flight")


def _obey(driver: "gpu.Driver", words: list[str]) -> None:
    match words:
        case ["alloc", mib]:
            _say("ok", driver.alloc(0, int(mib)))
        case ["free", handle]:
            driver.free(int(handle))
            _say("ok")
        case ["churn", times, mib]:
            _say("ok", _churn(driver, int(times), int(mib)))
        case ["kernels", bound, sms, us, count]:
            _say("ok", *_kernels(driver, bound, int(sms), int(us), int(count)))
        case ["hog", bound, sms, us]:
            _hog(driver, bound, int(sms), int(us))
        case ["stop"]:
            _say("ok")
        case ["crash", how]:
            _crash(driver, how)
        case _:
            _say("CUDA_ERROR_INVALID_VALUE")


def main() -> int:
    """The exit code: 0 once stdin has ended, 77 out of memory, 78 on another device error of a crash."""
    if group := os.environ.get("APPORTION_TEST_CGROUP"):
        with open(os.path.join(group, "cgroup.procs"), "w") as file:  # noqa: PTH118,PTH123
            file.write(str(os.getpid()))
    try:
        driver = gpu.Driver()
        driver.memory(0)
        device = driver.devices[0]
    except (gpu.GpuError, IndexError) as error:
        _say(getattr(error, "code", "CUDA_ERROR_NO_DEVICE"))
        return _CODE_DEVICE_ERROR
    _say("ok", "mps" if driver.is_mps_client else "direct", device.uuid, device.sms, driver.context_mib)
    while line := sys.stdin.readline():
        words = line.split()
        try:
            _obey(driver, words)
        except gpu.GpuError as error:
            if words[:1] == ["crash"]:
                _say(error.code)
                return _CODE_OUT_OF_MEMORY if error.code == "CUDA_ERROR_OUT_OF_MEMORY" else _CODE_DEVICE_ERROR
            _say(error.code)
    driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
