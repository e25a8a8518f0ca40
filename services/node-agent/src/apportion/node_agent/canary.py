"""A process that initialises the driver and nothing more: it shows whether others could. Run as a plain file.

An MPS server can look healthy to every command and serve nobody, so it is asked what a workload would ask. On hardware
this goes through libcuda itself. Says ``ok`` and the device's SMs once it has a context, and ends with its stdin.
"""

import ctypes
import os
import sys

_SMS_ATTRIBUTE = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


def _sms() -> int:
    if os.environ.get("APPORTION_SIMGPU_SOCKET"):
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "simgpu"))  # noqa: PTH100,PTH118,PTH120
        import client  # type: ignore[import-not-found]  # noqa: PLC0415  only a simulated node has it

        driver = client.Driver()
        driver.memory(0)
        globals()["_driver"] = driver  # Held to the end: its context is what is looked for.
        return int(driver.devices[0].sms)
    cuda = ctypes.CDLL("libcuda.so.1")
    context, sms = ctypes.c_void_p(), ctypes.c_int()
    for code in (
        cuda.cuInit(0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        cuda.cuDeviceGetAttribute(ctypes.byref(sms), _SMS_ATTRIBUTE, 0),
    ):
        if code:
            raise OSError(f"CUDA error {code}")
    return sms.value


if __name__ == "__main__":
    try:
        sys.stdout.write(f"ok {_sms()}\n")
    except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
        sys.stdout.write(f"{error}\n")
        sys.exit(1)
    sys.stdout.flush()
    sys.stdin.read()
