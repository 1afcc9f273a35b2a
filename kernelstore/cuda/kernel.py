"""Kernels: launches, attributes and handles of one CUkernel."""

from __future__ import annotations

import operator
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernelstore.cuda import results
from kernelstore.cuda.arguments import Packer, Parameter
from kernelstore.cuda.calls import Driver
from kernelstore.cuda.configuration import dimensions, stream_handle
from kernelstore.cuda.library import Hold
from kernelstore.errors import LaunchError, LoadError

if TYPE_CHECKING:
    import cuda.core

__all__ = ["Kernel", "KernelAttributes"]

# Dynamic and static shared memory per block that every kernel may use unasked.
# Source: CUDA C++ Programming Guide, "Shared Memory", compute capability 7.x and later.
_SHARED_BYTES_UNASKED = 48 * 1024
# Blocks of a cluster that every device with clusters can place. Source: the same, "Thread Block Clusters".
_PORTABLE_CLUSTER = 8


class Kernel:
    """A kernel ready to launch; `Module.get_kernel` makes it. The driver calls it a ``CUkernel``.

    It belongs to no context: a launch runs in the stream's context, or with a default stream in the current one,
    on whatever device that is. Threads may share it.
    """

    def __init__(
        self, hold: Hold, handle: Any, *, name: str, lowered_name: str, declared: tuple[str, ...] | None, device: int
    ) -> None:
        driver = hold.driver
        self.name = name
        self._lowered_name = lowered_name
        self._hold = hold
        self._driver = driver
        self._handle = handle
        self._function = driver.as_function(handle)
        self._device = device
        self._packer = _packer(driver, handle, name, declared)
        self._free_shared_bytes = _SHARED_BYTES_UNASKED - driver.kernel_attribute(
            "SHARED_SIZE_BYTES", handle, device=device
        )
        # Dynamic shared memory that was asked for, by device; devices that were asked for clusters above 8 blocks.
        self._allowed_shared_bytes: dict[int, int] = {}
        self._large_clusters: set[int] = set()
        self._lock = threading.Lock()

    @property
    def handle(self) -> int:
        """The ``CUkernel``; launches through the driver API take it where they take a ``CUfunction``.

        Raises
        ------
        ModuleUnloaded
            Its module was unloaded.
        """
        self._hold.check()
        return int(self._handle)

    @property
    def attributes(self) -> KernelAttributes:
        """What the driver tells of the kernel on the current device.

        Raises
        ------
        ModuleUnloaded
            Its module was unloaded.
        """
        self._hold.check()
        device = self._driver.make_current(default=self._device)
        values = [self._driver.kernel_attribute(name, self._handle, device=device) for name in _ATTRIBUTES]
        return KernelAttributes(*values)

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: tuple[object, ...] | list[object] = (),
        *,
        stream: object = None,
        shared_mem_bytes: int = 0,
        cooperative: bool = False,
        cluster: int | tuple[int, ...] | None = None,
    ) -> None:
        """Start the kernel; like every launch it returns before the kernel has run.

        Parameters
        ----------
        grid : int or tuple[int, ...]
            Blocks along x, y, z, each ≥ 1; what is missing is 1.
        block : int or tuple[int, ...]
            Threads of a block along x, y, z, each ≥ 1.
        args : tuple or list
            One value per parameter: numpy scalars, Python numbers (converted to the declared type), pointers as int
            or as objects with ``__cuda_array_interface__``, ``ptr`` or ``handle``, structs as ctypes structures,
            numpy records, 0-d arrays or bytes. They are copied before this returns; memory that pointers point to
            has to live until the kernel has run.
        stream : int or object, optional
            A handle, or a stream of cuda.core, PyTorch, CuPy or anything else with ``__cuda_stream__``. ``None`` is
            the legacy default stream. Nothing is synchronised.
        shared_mem_bytes : int
            Dynamic shared memory per block. Above 48 KB it is asked for, once for a device.
        cooperative : bool
            Whether all blocks have to run at once, for ``grid.sync()``.
        cluster : int or tuple[int, ...], optional
            Blocks of a cluster along x, y, z; the grid is a multiple of it. ``None`` launches without clusters, or
            with those that the kernel was compiled for.

        Raises
        ------
        LaunchError
            Arguments or configuration do not fit the kernel or the device; nothing was launched.
        ModuleUnloaded
            Its module was unloaded.
        DriverError
            The driver failed in another way; also the error of an earlier kernel.
        """
        if self._hold.is_released:
            self._hold.check()
        blocks = dimensions(grid, "grid")
        threads = dimensions(block, "block")
        handle = 0 if stream is None else stream_handle(stream)
        if shared_mem_bytes:
            shared_mem_bytes = self._allow_shared(shared_mem_bytes, handle)
        if cluster is not None or cooperative:
            self._launch_with(blocks, threads, args, handle, shared_mem_bytes, bool(cooperative), cluster)
            return
        packer = self._packer or self._no_packer()
        frame = packer.pack(args)
        status = self._driver.launch(
            self._function, blocks, threads, shared_mem_bytes, handle, frame.address, self._device
        )
        packer.free.append(frame)
        if status:
            raise self._failed(status, blocks, threads, shared_mem_bytes)

    def to_cuda_core(self) -> cuda.core.Kernel:
        """Return the kernel as one of cuda.core, for its launcher and graphs.

        It is loaded once more, by cuda.core, and lives as long as that object: unloading this module does not
        touch it.

        Raises
        ------
        ImportError
            cuda.core is not installed.
        ModuleUnloaded
            Its module was unloaded.
        """
        artifact = self._hold.artifact
        self._hold.check()
        try:
            # Deferred: an optional dependency, and some 100 ms.
            from cuda.core import ObjectCode
        except ImportError as error:
            raise ImportError(
                "cuda.core is not installed, or older than this release knows; "
                "install the extra: pip install 'kernelstore[cuda-core]'"
            ) from error
        make = {"cubin": ObjectCode.from_cubin, "ptx": ObjectCode.from_ptx, "fatbin": ObjectCode.from_fatbin}
        mapping = {symbol.name: symbol.lowered_name for symbol in artifact.symbols}
        code = make[artifact.kind](artifact.payload, name=str(artifact.key), symbol_mapping=mapping)
        return code.get_kernel(self._lowered_name)

    def __repr__(self) -> str:
        artifact = self._hold.artifact
        return f"<Kernel {self.name} of {artifact.kind} {artifact.arch} {str(artifact.key)[:12]}>"

    def _launch_with(
        self,
        blocks: tuple[int, int, int],
        threads: tuple[int, int, int],
        args: tuple[object, ...] | list[object],
        stream: int,
        shared_mem_bytes: int,
        cooperative: bool,
        cluster: int | tuple[int, ...] | None,
    ) -> None:
        size = None if cluster is None else dimensions(cluster, "cluster")
        if size is not None:
            if any(along % step for along, step in zip(blocks, size, strict=True)):
                raise LaunchError(f"a grid of {blocks} blocks is no multiple of a cluster of {size}")
            if size[0] * size[1] * size[2] > _PORTABLE_CLUSTER:
                self._allow_large_clusters(stream)
        packer = self._packer or self._no_packer()
        frame = packer.pack(args)
        status = self._driver.launch_with(
            self._function,
            blocks,
            threads,
            shared_mem_bytes,
            stream,
            frame.address,
            self._device,
            cooperative=cooperative,
            cluster=size,
        )
        packer.free.append(frame)
        if status:
            raise self._failed(status, blocks, threads, shared_mem_bytes, cluster=size)

    def _allow_shared(self, requested: int, stream: int) -> int:
        shared_mem_bytes = _byte_count(requested)
        if shared_mem_bytes <= self._free_shared_bytes:
            return shared_mem_bytes
        device = self._driver.device_of_stream(stream, self._device)
        if shared_mem_bytes <= self._allowed_shared_bytes.get(device, 0):
            return shared_mem_bytes
        static = _SHARED_BYTES_UNASKED - self._free_shared_bytes
        limit = self._driver.device_attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", device) - static
        if shared_mem_bytes > limit:
            raise LaunchError(
                f"{self.name} was given {shared_mem_bytes} bytes of dynamic shared memory per block; device {device} "
                f"allows {limit} beside the kernel's {static} static ones",
                limit_bytes=limit,
            )
        with self._lock:
            # A smaller value set after a larger one would take it back.
            if shared_mem_bytes > self._allowed_shared_bytes.get(device, 0):
                self._driver.set_kernel_attribute(
                    "MAX_DYNAMIC_SHARED_SIZE_BYTES", self._handle, value=shared_mem_bytes, device=device
                )
                self._allowed_shared_bytes[device] = shared_mem_bytes
        return shared_mem_bytes

    def _allow_large_clusters(self, stream: int) -> None:
        device = self._driver.device_of_stream(stream, self._device)
        if device not in self._large_clusters:
            self._driver.set_kernel_attribute("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", self._handle, value=1, device=device)
            self._large_clusters.add(device)

    def _no_packer(self) -> Packer:
        raise LaunchError(
            f"the parameters of {self.name} are not known, and this driver is too old to tell them (before CUDA "
            "12.4); compile the kernel through a Compiler, or update the driver"
        )

    def _failed(
        self,
        status: int,
        blocks: tuple[int, int, int],
        threads: tuple[int, int, int],
        shared_mem_bytes: int,
        cluster: tuple[int, int, int] | None = None,
    ) -> LoadError:
        what = f"{self.name} with grid {blocks}, block {threads}, {shared_mem_bytes} bytes of dynamic shared memory"
        if cluster is not None:
            what += f", cluster {cluster}"
        return results.launch_error_of(status, what, artifact=self._hold.artifact, version=self._driver.version)


@dataclass(frozen=True, slots=True)
class KernelAttributes:
    """What the driver tells of a kernel on one device.

    Parameters
    ----------
    registers : int
        Per thread.
    shared_bytes, constant_bytes, local_bytes : int
        Static shared memory per block; constant memory; local memory per thread.
    max_threads_per_block : int
        Threads of the largest block that can be launched.
    max_dynamic_shared_bytes : int
        Dynamic shared memory that a block may have now; a launch that needs more asks for it.
    binary_version, ptx_version : int
        Compute capability of the code, and of the PTX that it was made from, as ``10 * major + minor``.
    """

    registers: int
    shared_bytes: int
    constant_bytes: int
    local_bytes: int
    max_threads_per_block: int
    max_dynamic_shared_bytes: int
    binary_version: int
    ptx_version: int


# In the order of KernelAttributes' fields.
_ATTRIBUTES = (
    "NUM_REGS",
    "SHARED_SIZE_BYTES",
    "CONST_SIZE_BYTES",
    "LOCAL_SIZE_BYTES",
    "MAX_THREADS_PER_BLOCK",
    "MAX_DYNAMIC_SHARED_SIZE_BYTES",
    "BINARY_VERSION",
    "PTX_VERSION",
)


def _packer(driver: Driver, kernel: Any, name: str, declared: tuple[str, ...] | None) -> Packer | None:
    if declared is not None:
        parameters = [Parameter.parse(text) for text in declared]
        known = [parameter for parameter in parameters if parameter is not None]
        if len(known) == len(parameters):
            return Packer(name, known)
    sizes = driver.parameter_sizes(kernel)
    return None if sizes is None else Packer(name, [Parameter.of_size(size) for size in sizes])


def _byte_count(value: object) -> int:
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if count < 0:
        raise LaunchError(f"shared_mem_bytes is an int ≥ 0, not {value!r:.100}")
    return count
