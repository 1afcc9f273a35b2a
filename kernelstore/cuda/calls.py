"""The calls of the CUDA driver that the package makes, checked; nothing else calls ``cuda.bindings.driver``."""

from __future__ import annotations

import ctypes
import os
from typing import Any, NoReturn

from kernelstore.artifact import Artifact
from kernelstore.cuda import results
from kernelstore.errors import KernelNotFound, LoadError

__all__ = ["Driver"]

# Bytes of the JIT's error log that are kept; ptxas stops at some dozens of errors.
_JIT_LOG_BYTES = 64 * 1024


class Driver:
    """The initialised driver of this process; `initialise` makes it.

    Parameters
    ----------
    api : module
        ``cuda.bindings.driver``, or in tests something that answers as it does: each call a tuple of CUresult and
        values.
    version : int
        ``cuDriverGetVersion()``, such as 13000.
    """

    def __init__(self, api: Any, version: int) -> None:
        self.api = api
        self.version = version
        self.pid = os.getpid()
        # Made once: cuda.bindings would make it of an int 0 for each launch.
        self._default_stream = api.CUstream(0)
        self._primary_contexts: dict[int, Any] = {}

    def call(self, name: str, *args: Any, artifact: Artifact | None = None) -> Any:
        """Call one function of the API; return its value, a tuple of several, or ``None``.

        Raises
        ------
        LoadError
            The class that the CUresult has.
        """
        status, *values = self._answer(name, *args, artifact=artifact)
        if status:
            self.fail(status, name, artifact)
        if len(values) > 1:
            return tuple(values)
        return values[0] if values else None

    def _answer(self, name: str, *args: Any, artifact: Artifact | None = None) -> Any:
        try:
            return getattr(self.api, name)(*args)
        except ValueError as error:
            # A CUresult of a newer driver, which this cuda.bindings cannot name.
            raise results.unknown(str(error), name, artifact=artifact, version=self.version) from error

    def check(self) -> None:
        """See to it that this is not a forked child.

        Raises
        ------
        ForkedContext
            It is.
        """
        if self.pid != os.getpid():
            raise results.forked()

    def fail(self, status: Any, call: str, artifact: Artifact | None = None) -> NoReturn:
        """Raise the error that a CUresult stands for."""
        raise results.error_of(status, call, artifact=artifact, version=self.version)

    def current_device(self) -> int:
        """Return the ordinal of the current context's device, or 0 where no context is current."""
        status, device = self.api.cuCtxGetDevice()
        return 0 if status else int(device)

    def make_current(self, device: int | None = None, *, default: int = 0) -> int:
        """See to it that the calling thread has a usable current context, and return its device.

        Parameters
        ----------
        device : int, optional
            Ordinal. ``None`` takes the current context's.
        default : int
            Ordinal for a thread that has no current context.

        Notes
        -----
        A current context of that device is left alone. Otherwise the device's primary context, which the CUDA
        runtime and most frameworks use too, is retained for the life of the process and made current.
        """
        status, context = self.api.cuCtxGetCurrent()
        if not status and int(context):
            status, found = self.api.cuCtxGetDevice()
            if not status:
                found = int(found)
                if device in (None, found) and not self._was_reset(found, context):
                    return found
                device = found if device is None else device
        device = default if device is None else device
        self.call("cuCtxSetCurrent", self._primary_context(device))
        return device

    def _was_reset(self, device: int, context: Any) -> bool:
        primary = self._primary_contexts.get(device)
        return primary is not None and int(primary) == int(context) and not self._is_active(device)

    def _is_active(self, device: int) -> bool:
        _flags, is_active = self.call("cuDevicePrimaryCtxGetState", self._device(device))
        return bool(is_active)

    def _primary_context(self, device: int) -> Any:
        # A reset takes our reference with it, so it is retained again.
        if device not in self._primary_contexts or not self._is_active(device):
            self._primary_contexts[device] = self.call("cuDevicePrimaryCtxRetain", self._device(device))
        return self._primary_contexts[device]

    def _device(self, ordinal: int) -> Any:
        return self.call("cuDeviceGet", ordinal)

    def device_attribute(self, name: str, device: int) -> int:
        """Return a device's attribute, named without ``CU_DEVICE_ATTRIBUTE_``."""
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, self._device(device)))

    def compute_capability(self, device: int) -> tuple[int, int]:
        """Return a device's compute capability, such as ``(9, 0)``."""
        return (
            self.device_attribute("COMPUTE_CAPABILITY_MAJOR", device),
            self.device_attribute("COMPUTE_CAPABILITY_MINOR", device),
        )

    def device_of_stream(self, stream: int, default: int) -> int:
        """Return the ordinal of the device on which a launch into `stream` runs; `default` as in `make_current`."""
        # 0, 1 and 2 are the legacy and per-thread default streams, which are the current context's.
        if stream <= 2:
            return self.make_current(default=default)
        context = self.call("cuStreamGetCtx", self.api.CUstream(stream))
        self.call("cuCtxPushCurrent", context)
        try:
            return int(self.call("cuCtxGetDevice"))
        finally:
            self.call("cuCtxPopCurrent")

    def load_library(self, artifact: Artifact, payload: bytes) -> Any:
        """Place a payload into the driver, for all its contexts; return the CUlibrary.

        Raises
        ------
        LoadError
            Nothing was loaded.
        """
        status, library = self._answer("cuLibraryLoadData", payload, [], [], 0, [], [], 0, artifact=artifact)
        if status:
            raise self._load_error(status, "cuLibraryLoadData", artifact, payload)
        return library

    def link_ptx(self, artifact: Artifact, payload: bytes) -> bytes:
        """Make a cubin of PTX for the current context's device, with the driver's linker.

        Raises
        ------
        LoadError
            `NoJitCompiler`, `UnsupportedPTX`, `InvalidPTX` with the linker's log, and others.
        """
        option = self.api.CUjit_option
        log = bytearray(_JIT_LOG_BYTES)
        options = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        state = self.call("cuLinkCreate", len(options), options, [log, len(log)], artifact=artifact)
        try:
            kind = self.api.CUjitInputType.CU_JIT_INPUT_PTX
            call = "cuLinkAddData"
            status, *made = self._answer(
                call, state, kind, payload, len(payload), b"artifact.ptx", 0, [], [], artifact=artifact
            )
            if not status:
                call = "cuLinkComplete"
                status, *made = self._answer(call, state, artifact=artifact)
            if status:
                detail = log.split(b"\0", 1)[0].decode(errors="replace").rstrip()
                raise results.error_of(status, call, artifact=artifact, version=self.version, detail=detail)
            # The linker owns the bytes, and its end frees them.
            address, size_bytes = made
            return ctypes.string_at(address, size_bytes)
        finally:
            self.api.cuLinkDestroy(state)

    def get_kernel(self, library: Any, name: str, *, artifact: Artifact, payload: bytes) -> Any:
        """Return the CUkernel of a lowered name, loaded into the current context.

        Raises
        ------
        KernelNotFound
            The library has no kernel of that name.
        LoadError
            The real fault of a lazily loaded library, which its load did not show.
        """
        call = "cuLibraryGetKernel"
        status, kernel = self._answer(call, library, name.encode(), artifact=artifact)
        if not status:
            call = "cuKernelGetFunction"
            status, _function = self._answer(call, kernel, artifact=artifact)
        if status == results.NOT_FOUND:
            raise KernelNotFound(f"the {artifact.kind} has no kernel {name!r}", name=name, available=())
        if status:
            raise self._load_error(status, call, artifact, payload)
        return kernel

    def get_global(self, library: Any, name: str, *, artifact: Artifact) -> tuple[int, int]:
        """Return address and size in bytes of a variable, in the current context.

        Raises
        ------
        KernelNotFound
            The library has no variable of that name.
        """
        status, address, size_bytes = self._answer("cuLibraryGetGlobal", library, name.encode(), artifact=artifact)
        if status == results.NOT_FOUND:
            raise KernelNotFound(f"the {artifact.kind} has no variable {name!r}", name=name, available=())
        if status:
            self.fail(status, "cuLibraryGetGlobal", artifact)
        return int(address), int(size_bytes)

    def kernel_names(self, library: Any) -> list[str]:
        """List the lowered names of a library's kernels; empty where the driver is too old to tell (before 12.4)."""
        try:
            count = self.call("cuLibraryGetKernelCount", library)
            kernels = self.call("cuLibraryEnumerateKernels", count, library) if count else []
            return sorted(self.call("cuKernelGetName", kernel).decode() for kernel in kernels)
        except (RuntimeError, LoadError):
            # cuda.bindings raises RuntimeError for a function that this libcuda does not have.
            return []

    def parameter_sizes(self, kernel: Any) -> list[int] | None:
        """Return the size of each parameter in bytes; ``None`` where the driver is too old to tell (before 12.4)."""
        sizes: list[int] = []
        while True:
            try:
                # The index after the last one is how the driver tells that there are no more: INVALID_VALUE.
                status, _offset, size_bytes = self.api.cuKernelGetParamInfo(kernel, len(sizes))
            except RuntimeError:
                return None
            if status:
                return None if status == results.NOT_SUPPORTED else sizes
            sizes.append(int(size_bytes))

    def kernel_attribute(self, name: str, kernel: Any, *, device: int) -> int:
        """Return a kernel's attribute on a device, named without ``CU_FUNC_ATTRIBUTE_``."""
        attribute = getattr(self.api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(self.call("cuKernelGetAttribute", attribute, kernel, self._device(device)))

    def set_kernel_attribute(self, name: str, kernel: Any, *, value: int, device: int) -> None:
        """Set a kernel's attribute on a device, named without ``CU_FUNC_ATTRIBUTE_``."""
        attribute = getattr(self.api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        self.call("cuKernelSetAttribute", attribute, value, kernel, self._device(device))

    def as_function(self, kernel: Any) -> Any:
        """Cast a CUkernel to the CUfunction that launches take; it stays independent of contexts.

        Source: CUDA Driver API, cuLaunchKernel: "can also be used to launch context-less kernel CUkernel".
        """
        return self.api.CUfunction(int(kernel))

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem_bytes: int,
        stream: int,
        parameters: int,
        device: int,
    ) -> int:
        """Launch, and return the CUresult.

        Parameters
        ----------
        function : CUfunction
            As `as_function` gives it. It runs in the stream's context, or for a default stream in the current one.
        grid, block : tuple[int, int, int]
            Blocks and threads along x, y, z.
        shared_mem_bytes : int
            Dynamic shared memory per block.
        stream : int
            Handle; 0 is the legacy default stream.
        parameters : int
            Address of an array of one pointer per parameter; 0 for a kernel that takes none.
        device : int
            Ordinal whose primary context is used where the thread has no current context.
        """
        # This is the hot path: no checks beside the driver's own.
        gx, gy, gz = grid
        bx, by, bz = block
        place = stream or self._default_stream
        status: int = self.api.cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_mem_bytes, place, parameters, 0)[
            0
        ]
        if status and status in (results.INVALID_CONTEXT, results.CONTEXT_IS_DESTROYED):
            # A thread without a context, or one whose primary context was reset.
            self.make_current(default=device)
            status = self.api.cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_mem_bytes, place, parameters, 0)[
                0
            ]
        return status

    def launch_with(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_mem_bytes: int,
        stream: int,
        parameters: int,
        device: int,
        *,
        cooperative: bool,
        cluster: tuple[int, int, int] | None,
    ) -> int:
        """Launch cooperatively, in clusters, or both; otherwise as `launch`."""
        config = self.api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_mem_bytes
        config.hStream = self.api.CUstream(stream)
        # `attributes` stays referenced until the call returns: the config holds pointers into it.
        attributes = []
        if cooperative:
            attribute = self.api.CUlaunchAttribute()
            attribute.id = self.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if cluster is not None:
            attribute = self.api.CUlaunchAttribute()
            attribute.id = self.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = attribute.value.clusterDim
            dimension.x, dimension.y, dimension.z = cluster
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        status: int = self.api.cuLaunchKernelEx(config, function, parameters, 0)[0]
        if status and status in (results.INVALID_CONTEXT, results.CONTEXT_IS_DESTROYED):
            self.make_current(default=device)
            status = self.api.cuLaunchKernelEx(config, function, parameters, 0)[0]
        return status

    def _load_error(self, status: Any, call: str, artifact: Artifact, payload: bytes) -> LoadError:
        detail = ""
        if status == results.INVALID_PTX and artifact.kind == "ptx":
            detail = self._jit_log(payload)
        elif status == results.NO_BINARY_FOR_GPU:
            device = self.current_device()
            major, minor = self.compute_capability(device)
            detail = f"Device {device} has compute capability {major}.{minor}."
        return results.error_of(status, call, artifact=artifact, version=self.version, detail=detail)

    def _jit_log(self, payload: bytes) -> str:
        # The JIT of a lazily loaded library may run long after cuLibraryLoadData returned, so no buffers are given
        # to it. Only for the log, rejected PTX goes once more through the driver's linker, which runs at once.
        option = self.api.CUjit_option
        log = bytearray(_JIT_LOG_BYTES)
        options = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        status, state = self.api.cuLinkCreate(len(options), options, [log, len(log)])
        if status:
            return ""
        kind = self.api.CUjitInputType.CU_JIT_INPUT_PTX
        self.api.cuLinkAddData(state, kind, payload, len(payload), b"artifact.ptx", 0, [], [])
        self.api.cuLinkDestroy(state)
        return log.split(b"\0", 1)[0].decode(errors="replace").rstrip()
