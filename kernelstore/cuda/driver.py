"""The CUDA driver of this process: initialised on first use, its version, its devices.

Importing this module imports no CUDA and calls no `cuInit`; `initialise` does, and gives the one `Driver`.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any, NoReturn

from kernelstore.cuda import results
from kernelstore.cuda.calls import Driver
from kernelstore.errors import NoDriver
from kernelstore.locks import new_lock

__all__ = [
    "compute_capability",
    "current_device",
    "device_count",
    "device_name",
    "driver_build",
    "driver_version",
    "initialise",
]


_MAPPED_LIBCUDA = re.compile(r"(/\S.*/libcuda\.so[.0-9]*)$", re.MULTILINE)
# libcuda.so.580.159.04; three digits, as WSL has a libcuda.so.1.1.
_BUILD = re.compile(r"/libcuda\.so\.(\d{3,}\.\d+(?:\.\d+)*)$")


class _ForkedApi:
    """What `Driver.api` becomes in a forked child: every use of it raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise results.forked()


class _Process:
    """What this process knows of CUDA."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.driver: Driver | None = None
        self.version: int | None = None
        self.version_known = False


_process = _Process()


def initialise() -> Driver:
    """Return the driver of this process, after one `cuInit`.

    Raises
    ------
    NoDriver
        There is no libcuda, or no device. The next call tries again.
    ForkedContext
        This process was forked from one in which CUDA was initialised.
    DriverError
        `cuInit` failed in another way.
    """
    driver = _process.driver
    if driver is None:
        with _process.lock:
            driver = _process.driver
            if driver is None:
                driver = _process.driver = _initialised()
    driver.check()
    return driver


def driver_version() -> int | None:
    """Return ``cuDriverGetVersion()`` of the libcuda that this process loads, such as 13000.

    ``None`` where there is no libcuda. Neither a device, `cuInit` nor cuda.bindings is needed, and a forked child may
    ask. The number is the user-mode driver's: that of the forward-compatibility package where one is in use.
    """
    if not _process.version_known:
        _process.version = _libcuda_version()
        _process.version_known = True
    return _process.version


def driver_build() -> str | None:
    """Return the build of the libcuda that this process has loaded, such as ``"580.159.04"``.

    ``None`` where none is loaded, or where its file has no build in its name. `driver_version` is the same for all
    builds of one CUDA version.
    """
    path = _libcuda_path()
    match = None if path is None else _BUILD.search(os.path.realpath(path))
    return None if match is None else match[1]


def device_count() -> int:
    """Return the number of devices that this process sees; 0 where there is no driver."""
    try:
        return int(initialise().call("cuDeviceGetCount"))
    except NoDriver:
        return 0


def current_device() -> int:
    """Return the ordinal of the current context's device, or 0 where no context is current; errors as `initialise`."""
    return initialise().current_device()


def compute_capability(device: int | None = None) -> tuple[int, int]:
    """Return a device's compute capability, such as ``(9, 0)``; ``None`` asks for the current device.

    No context is made. Errors as `initialise`.
    """
    driver = initialise()
    return driver.compute_capability(driver.current_device() if device is None else device)


def device_name(device: int | None = None) -> str:
    """Return a device's name, such as ``"NVIDIA H200"``; ``None`` asks for the current device."""
    driver = initialise()
    ordinal = driver.current_device() if device is None else device
    name: bytes = driver.call("cuDeviceGetName", 256, driver.call("cuDeviceGet", ordinal))
    return name.split(b"\0", 1)[0].decode(errors="replace")


def _libcuda_version() -> int | None:
    # Not through cuda.bindings: a process that only compiles owes neither its import nor cuInit, and NVRTC has loaded
    # libcuda by then where there is one.
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return None if library.cuDriverGetVersion(ctypes.byref(version)) else version.value


def _libcuda_path() -> str | None:
    # Of the mapped file, as the forward-compatibility package and containers bring others than the system's.
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:  # noqa: PTH123
            found = _MAPPED_LIBCUDA.search(maps.read())
    except OSError:
        return None
    return None if found is None else found[1]


def _import_api() -> Any:
    # Deferred: it costs 60 to 140 ms, which nobody owes who only opens, compiles or searches.
    import cuda.bindings.driver as api

    return api


def _initialised() -> Driver:
    try:
        api = _import_api()
        (status,) = api.cuInit(0)
    except (ImportError, RuntimeError) as error:
        raise NoDriver(
            f"there is no CUDA driver here: libcuda cannot be loaded ({error}); compile, put and search need none",
            result=None,
            driver_version=None,
        ) from error
    version = driver_version()
    if status == results.NOT_INITIALIZED:
        # What cuInit answers in the child of a process where another library had initialised CUDA.
        raise results.forked()
    if status in (results.NO_DEVICE, results.STUB_LIBRARY):
        raise NoDriver(
            f"there is no CUDA device here: {status.name} ({int(status)}) from cuInit; "
            "compile, put and search need none",
            result=int(status),
            name=status.name,
            driver_version=version,
        )
    if status:
        raise results.error_of(status, "cuInit", artifact=None, version=version)
    # cuda.bindings may find a libcuda where the loader does not look.
    return Driver(api, int(api.cuDriverGetVersion()[1]) if version is None else version)


def _after_fork_in_child() -> None:
    if _process.driver is not None:
        _process.driver.api = _ForkedApi()


os.register_at_fork(after_in_child=_after_fork_in_child)
