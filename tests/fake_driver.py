"""A stand-in for ``cuda.bindings.driver``: named CUresults, and every launch recorded with its bytes.

It stands where `kernelstore.cuda.driver` imports the real one, so all of the package above that runs as it is. Types
and enums are the real ones.
"""

# ruff: noqa: N802 - the methods have the names of the API

from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import dataclass, field
from typing import Any

import cuda.bindings.driver as real
import pytest

from kernelstore.cuda import driver, library

CUresult = real.CUresult
SUCCESS = CUresult.CUDA_SUCCESS
NOT_FOUND = CUresult.CUDA_ERROR_NOT_FOUND

_LIBRARY, _KERNEL, _CONTEXT = 0x1000, 0x2000, 0x7000


@dataclass
class Launch:
    """One launch as the driver saw it."""

    kernel: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_mem_bytes: int
    stream: int
    arguments: list[bytes]
    device: int
    attributes: dict[str, Any] = field(default_factory=dict)


# The least that the cubin plug-in takes for sm_90: a header of the old ABI (e_machine 190, e_flags 0x5a), one empty section.
IMAGE = (
    b"\x7fELF\x02\x01\x01\x33\x07".ljust(16, b"\0")
    + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64, 0x5A055A, 64, 0, 0, 64, 1, 0)
    + bytes(64)
)


class FakeDriver:
    """Answers the calls that the package makes, for two devices of compute capability 9.0.

    Attributes
    ----------
    version : int or None
        The driver version; ``None`` without libcuda.
    fail : dict of str to int
        CUresult that a function gives from now on.
    kernels : dict of str to list of int
        Lowered name to the size of each parameter in bytes; the kernels of every library.
    globals : dict of str to tuple of int
        Lowered name to address and size.
    linked : bytes or None
        What the driver's linker makes of PTX; ``None`` rejects it.
    build : str or None
        In the name of libcuda's file.
    calls : list of str
        Names of the functions called, in order.
    launches : list of Launch
        What was launched.
    """

    def __init__(self) -> None:
        self.version: int | None = 13000
        self.fail: dict[str, int] = {}
        self.missing: set[str] = set()
        self.kernels: dict[str, list[int]] = {"_Z5saxpyIfEvT_PKS0_PS0_i": [4, 8, 8, 4]}
        self.globals: dict[str, tuple[int, int]] = {}
        self.device_attributes = {
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232_448,
        }
        self.kernel_attributes = {"CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 0}
        self.jit_log = b""
        self.build: str | None = "580.159.04"
        self.linked: bytes | None = None
        self.calls: list[str] = []
        self.launches: list[Launch] = []
        self.payloads: list[bytes] = []
        self.unloaded: list[int] = []
        self.kernel_settings: list[tuple[str, int, int]] = []
        self.active: dict[int, bool] = {}
        self.destroyed: set[int] = set()
        self.stream_contexts: dict[int, int] = {}
        self._thread = threading.local()
        self._names: dict[int, str] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
        """Put it in the place of the real driver, in a process that knows nothing of CUDA yet."""
        monkeypatch.setattr(driver, "_import_api", lambda: self)
        monkeypatch.setattr(driver, "_libcuda_version", lambda: self.version)
        monkeypatch.setattr(driver, "_libcuda_path", lambda: f"/usr/lib/libcuda.so.{self.build or 1}")
        monkeypatch.setattr(driver, "_process", driver._Process())
        monkeypatch.setattr(library, "_libraries", {})
        return self

    def count(self, name: str) -> int:
        return self.calls.count(name)

    @property
    def context(self) -> int:
        return getattr(self._thread, "context", 0)

    @context.setter
    def context(self, value: int) -> None:
        self._thread.context = value

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return object.__getattribute__(self, name)
        if name in self.missing:
            raise RuntimeError(f'Function "{name}" not found')
        function = object.__getattribute__(self, name)
        self.calls.append(name)
        if name in self.fail:
            return lambda *_args: (CUresult(self.fail[name]), *_nothing(name))
        return function

    def __getattr__(self, name: str) -> Any:
        # Types and enums.
        return getattr(real, name)

    def reset_primary_context(self, device: int) -> None:
        """Do what ``cuDevicePrimaryCtxReset`` does, behind the package's back."""
        self.active[device] = False
        self.destroyed.add(_CONTEXT + device)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return SUCCESS, self.version

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return SUCCESS, 2

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return SUCCESS, real.CUdevice(ordinal)

    def cuDeviceGetName(self, length: int, device: Any) -> tuple[Any, ...]:
        return SUCCESS, b"Fake H200".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, ...]:
        return SUCCESS, self.device_attributes[attribute.name]

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return SUCCESS, real.CUcontext(self.context)

    def cuCtxGetDevice(self) -> tuple[Any, ...]:
        if not self.context:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        return SUCCESS, real.CUdevice(self.context - _CONTEXT)

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any, ...]:
        self.context = int(context)
        return (SUCCESS,)

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self._thread.pushed = self.context
        self.context = int(context)
        return (SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        popped, self.context = self.context, self._thread.pushed
        return SUCCESS, real.CUcontext(popped)

    def cuStreamGetCtx(self, stream: Any) -> tuple[Any, ...]:
        return SUCCESS, real.CUcontext(self.stream_contexts[int(stream)])

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:
        self.active[int(device)] = True
        self.destroyed.discard(_CONTEXT + int(device))
        return SUCCESS, real.CUcontext(_CONTEXT + int(device))

    def cuDevicePrimaryCtxGetState(self, device: Any) -> tuple[Any, ...]:
        return SUCCESS, 0, int(self.active.get(int(device), False))

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> tuple[Any, ...]:
        assert options == ([], [], 0, [], [], 0)
        self.payloads.append(bytes(code))
        return SUCCESS, real.CUlibrary(_LIBRARY + len(self.payloads))

    def cuLibraryUnload(self, handle: Any) -> tuple[Any, ...]:
        self.unloaded.append(int(handle))
        return (SUCCESS,)

    def cuLibraryGetKernel(self, handle: Any, name: bytes) -> tuple[Any, ...]:
        if name.decode() not in self.kernels:
            return NOT_FOUND, None
        kernel = _KERNEL + list(self.kernels).index(name.decode())
        self._names[kernel] = name.decode()
        return SUCCESS, real.CUkernel(kernel)

    def cuKernelGetFunction(self, kernel: Any) -> tuple[Any, ...]:
        return SUCCESS, real.CUfunction(int(kernel) + 0x100000)

    def cuLibraryGetGlobal(self, handle: Any, name: bytes) -> tuple[Any, ...]:
        if name.decode() not in self.globals:
            return NOT_FOUND, None, None
        address, size_bytes = self.globals[name.decode()]
        return SUCCESS, real.CUdeviceptr(address), size_bytes

    def cuLibraryGetKernelCount(self, handle: Any) -> tuple[Any, ...]:
        return SUCCESS, len(self.kernels)

    def cuLibraryEnumerateKernels(self, count: int, handle: Any) -> tuple[Any, ...]:
        for index, name in enumerate(self.kernels):
            self._names[_KERNEL + index] = name
        return SUCCESS, [real.CUkernel(_KERNEL + index) for index in range(count)]

    def cuKernelGetName(self, kernel: Any) -> tuple[Any, ...]:
        return SUCCESS, self._names[int(kernel)].encode()

    def cuKernelGetParamInfo(self, kernel: Any, index: int) -> tuple[Any, ...]:
        sizes = self.kernels[self._names[int(kernel)]]
        if index >= len(sizes):
            return CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        return SUCCESS, sum(sizes[:index]), sizes[index]

    def cuKernelGetAttribute(self, attribute: Any, kernel: Any, device: Any) -> tuple[Any, ...]:
        return SUCCESS, self.kernel_attributes.get(attribute.name, int(attribute))

    def cuKernelSetAttribute(self, attribute: Any, value: int, kernel: Any, device: Any) -> tuple[Any, ...]:
        self.kernel_settings.append((attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_"), value, int(device)))
        return (SUCCESS,)

    def cuLaunchKernel(self, function: Any, *rest: Any) -> tuple[Any, ...]:
        *sizes, shared_mem_bytes, stream, parameters, extra = rest
        assert extra == 0
        status = self._launch(function, tuple(sizes), shared_mem_bytes, int(stream), parameters, {})
        return (status,)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[Any, ...]:
        assert extra == 0
        assert config.numAttrs == len(config.attrs)
        attributes: dict[str, Any] = {}
        for attribute in config.attrs:
            cluster = attribute.value.clusterDim
            if attribute.id == real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
                attributes["cooperative"] = attribute.value.cooperative
            else:
                assert attribute.id == real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                attributes["cluster"] = (cluster.x, cluster.y, cluster.z)
        sizes = (config.gridDimX, config.gridDimY, config.gridDimZ)
        sizes += (config.blockDimX, config.blockDimY, config.blockDimZ)
        shared, stream = config.sharedMemBytes, int(config.hStream)
        return (self._launch(function, sizes, shared, stream, parameters, attributes),)

    def cuLinkCreate(self, count: int, options: list[Any], values: list[Any]) -> tuple[Any, ...]:
        buffers = dict(zip(options, values, strict=True))
        log = buffers[real.CUjit_option.CU_JIT_ERROR_LOG_BUFFER]
        assert buffers[real.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES] == len(log)
        log[: len(self.jit_log)] = self.jit_log
        return SUCCESS, real.CUlinkState(1)

    def cuLinkAddData(self, *_args: Any) -> tuple[Any, ...]:
        return (CUresult.CUDA_ERROR_INVALID_PTX if self.linked is None else SUCCESS,)

    def cuLinkComplete(self, state: Any) -> tuple[Any, ...]:
        assert self.linked is not None
        self._output = ctypes.create_string_buffer(self.linked, len(self.linked))
        return SUCCESS, ctypes.addressof(self._output), len(self.linked)

    def cuLinkDestroy(self, state: Any) -> tuple[Any, ...]:
        return (SUCCESS,)

    def _launch(
        self,
        function: Any,
        sizes: tuple[int, ...],
        shared_mem_bytes: int,
        stream: int,
        parameters: int,
        attributes: dict[str, Any],
    ) -> Any:
        if not self.context:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        if self.context in self.destroyed:
            return CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED
        widths = self.kernels[self._names[int(function)]]
        pointers = (ctypes.c_void_p * len(widths)).from_address(parameters)
        arguments = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, widths, strict=True)]
        context = self.stream_contexts.get(stream, self.context)
        self.launches.append(
            Launch(
                int(function),
                sizes[:3],  # type: ignore[arg-type]
                sizes[3:],  # type: ignore[arg-type]
                shared_mem_bytes,
                stream,
                arguments,
                context - _CONTEXT,
                attributes,
            )
        )
        return SUCCESS


def _nothing(name: str) -> tuple[None, ...]:
    # What cuda.bindings returns beside the CUresult of a failed call.
    one = {
        "cuLibraryLoadData",
        "cuLibraryGetKernel",
        "cuKernelGetFunction",
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuLinkCreate",
    }
    two = {"cuLibraryGetGlobal", "cuLinkComplete", "cuKernelGetParamInfo", "cuDevicePrimaryCtxGetState"}
    return (None,) * (1 if name in one else 2 if name in two else 0)
