"""What simgpu/client.py is to a simulated device, for a real one: memory and kernels by libcuda's driver interface.

Only the parties of isolation tests use it (subject.py). A kernel is a fixed amount of work, made so that it takes the
microseconds asked for when it has its SMs to itself: one that waited for a clock would end in time whoever else ran.

It has never run on a board: there was none where it was written. Its calls were tried against a C library of the same
interface (tests/gpu), its kernels against nothing.
"""

import ctypes
import os
from typing import Any

_LIBRARY = "libcuda.so.1"
_SMS_ATTRIBUTE = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_THREADS = 1024
_MIB = 1024 * 1024
_CONTEXT_MIB = 500
"""About what a context takes: 250 to 500 MiB were seen, and nothing tells a process its own."""
_TRIAL_ITERATIONS = 4096
_MASKS = {"l2": 16 * _MIB - 1, "dram": 256 * _MIB - 1}
"""What a kernel walks over: well within the second-level cache, or well beyond it."""
_PTX = b"""
.version 7.0
.target sm_80
.address_size 64

.visible .entry compute(.param .u64 out, .param .u32 iterations)
{
  .reg .pred %p1;
  .reg .f32 %f<3>;
  .reg .b32 %r<3>;
  .reg .b64 %rd1;
  ld.param.u64 %rd1, [out];
  ld.param.u32 %r1, [iterations];
  mov.u32 %r2, %tid.x;
  cvt.rn.f32.u32 %f2, %r2;
  mov.f32 %f1, 0f3F800001;
again:
  fma.rn.f32 %f2, %f2, %f1, %f1;
  fma.rn.f32 %f2, %f2, %f1, %f1;
  fma.rn.f32 %f2, %f2, %f1, %f1;
  fma.rn.f32 %f2, %f2, %f1, %f1;
  add.s32 %r1, %r1, -1;
  setp.ne.s32 %p1, %r1, 0;
  @%p1 bra again;
  setp.eq.f32 %p1, %f2, 0f00000000;
  @%p1 st.global.f32 [%rd1], %f2;
  ret;
}

.visible .entry walk(.param .u64 buffer, .param .u32 iterations, .param .u32 mask, .param .u32 stride)
{
  .reg .pred %p1;
  .reg .b32 %r<10>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [buffer];
  ld.param.u32 %r1, [iterations];
  ld.param.u32 %r2, [mask];
  ld.param.u32 %r3, [stride];
  mov.u32 %r4, %ctaid.x;
  mov.u32 %r5, %ntid.x;
  mov.u32 %r6, %tid.x;
  mad.lo.u32 %r7, %r4, %r5, %r6;
  shl.b32 %r7, %r7, 5;
  mov.u32 %r9, 0;
again:
  and.b32 %r7, %r7, %r2;
  cvt.u64.u32 %rd2, %r7;
  add.u64 %rd3, %rd1, %rd2;
  ld.global.cg.u32 %r8, [%rd3];
  add.u32 %r9, %r9, %r8;
  add.u32 %r7, %r7, %r3;
  add.s32 %r1, %r1, -1;
  setp.ne.s32 %p1, %r1, 0;
  @%p1 bra again;
  setp.eq.u32 %p1, %r9, 1;
  @%p1 st.global.u32 [%rd1], %r9;
  ret;
}

.visible .entry stray()
{
  .reg .b32 %r1;
  .reg .b64 %rd1;
  mov.u64 %rd1, 16;
  mov.u32 %r1, 1;
  st.global.u32 [%rd1], %r1;
  ret;
}
\0"""


class GpuError(Exception):
    """A CUDA error by its name, as in CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class VisibleDevice:
    """The device as this process sees it; ``sms`` is its share under MPS."""

    def __init__(self, uuid: str, memory_mib: int, sms: int) -> None:
        self.ordinal = 0
        self.uuid = uuid
        self.memory_mib = memory_mib
        self.sms = sms


class Driver:
    """The first visible device."""

    def __init__(self) -> None:
        try:
            self._cuda: Any = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise GpuError("CUDA_ERROR_NO_DEVICE") from error
        self._call("cuInit", 0)
        device, count = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if not count.value:
            raise GpuError("CUDA_ERROR_NO_DEVICE")
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        context, uuid = ctypes.c_void_p(), (ctypes.c_ubyte * 16)()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        total, sms = ctypes.c_size_t(), ctypes.c_int()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        self._call("cuDeviceGetAttribute", ctypes.byref(sms), _SMS_ATTRIBUTE, device)
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), _PTX)
        self._functions = {name: self._function(module, name) for name in ("compute", "walk", "stray")}
        self._begun, self._done = self._event(), self._event()
        self._is_timed = False
        self._buffer = ctypes.c_uint64()
        self._buffer_mib = 0
        self._speed: dict[tuple[str, int], float] = {}
        """Iterations a microsecond, by what binds a kernel and by its SMs."""
        self.is_mps_client = bool(os.environ.get("CUDA_MPS_PIPE_DIRECTORY"))
        self.context_mib = _CONTEXT_MIB
        self.devices = [VisibleDevice(_uuid_text(bytes(uuid)), total.value // _MIB, sms.value)]
        self._reserve(1)

    def alloc(self, ordinal: int, mib: int) -> int:
        """Reserve memory; the allocation's handle."""
        del ordinal
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(mib * _MIB))
        return pointer.value

    def free(self, handle: int) -> None:
        """Give an allocation back."""
        self._call("cuMemFree_v2", ctypes.c_uint64(handle))

    def memory(self, ordinal: int) -> tuple[int, int]:
        """Free and total MiB."""
        del ordinal
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value // _MIB, total.value // _MIB

    def launch(self, ordinal: int, sms: int, us: int, bound: str = "sm") -> None:
        """Queue a kernel that takes ``us`` on ``sms`` SMs when it has them to itself."""
        del ordinal
        if (bound, sms) not in self._speed:
            self._speed[bound, sms] = self._measure(bound, sms)
        if not self._is_timed:
            self._is_timed = True
            self._call("cuEventRecord", self._begun, None)
        self._queue(bound, sms, max(1, round(us * self._speed[bound, sms])))

    def sync(self, ordinal: int) -> int:
        """Wait for the kernels; microseconds from the first launch to the last end, by the device's clock."""
        del ordinal
        if not self._is_timed:
            self._call("cuCtxSynchronize")
            return 0
        self._is_timed = False
        self._call("cuEventRecord", self._done, None)
        self._call("cuEventSynchronize", self._done)
        took_ms = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(took_ms), self._begun, self._done)
        return round(took_ms.value * 1000)

    def illegal_access(self, ordinal: int) -> None:
        """Touch memory that isn't ours: raises."""
        del ordinal
        self._run("stray", 1, ())
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Nothing: the driver takes back what the process had."""

    def _measure(self, bound: str, sms: int) -> float:
        self._queue(bound, sms, _TRIAL_ITERATIONS)  # The first one wakes the board.
        self._call("cuCtxSynchronize")
        self._call("cuEventRecord", self._begun, None)
        self._queue(bound, sms, _TRIAL_ITERATIONS)
        self._is_timed = True
        return _TRIAL_ITERATIONS / max(1, self.sync(0))

    def _queue(self, bound: str, sms: int, iterations: int) -> None:
        if bound == "sm":
            self._run("compute", sms, (self._buffer, ctypes.c_uint32(iterations)))
            return
        mask = _MASKS[bound]
        self._reserve((mask + 1) // _MIB)
        stride = ctypes.c_uint32(sms * _THREADS * 32)
        self._run("walk", sms, (self._buffer, ctypes.c_uint32(iterations), ctypes.c_uint32(mask), stride))

    def _reserve(self, mib: int) -> None:
        if self._buffer_mib < mib:
            if self._buffer_mib:
                self.free(self._buffer.value)
            self._buffer, self._buffer_mib = ctypes.c_uint64(self.alloc(0, mib)), mib

    def _run(self, name: str, blocks: int, values: tuple[Any, ...]) -> None:
        pointers = (ctypes.c_void_p * max(1, len(values)))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
        )
        shape = (ctypes.c_uint(blocks), *map(ctypes.c_uint, (1, 1, _THREADS, 1, 1, 0)))
        self._call("cuLaunchKernel", self._functions[name], *shape, None, pointers, None)

    def _function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def _event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 0)
        return event

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise GpuError((text.value or b"CUDA_ERROR_UNKNOWN").decode())


def _uuid_text(raw: bytes) -> str:
    """As NVML writes it.

    >>> _uuid_text(bytes(range(16)))
    'GPU-00010203-0405-0607-0809-0a0b0c0d0e0f'
    """
    text = raw.hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
