"""The CUDA driver of this process: initialised on first use, its version, its devices.

Importing this module imports no CUDA and calls no `cuInit`; `initialise` does, and gives the one `Driver`.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn

from kernelstore.cuda import results
from kernelstore.cuda.calls import Driver
from kernelstore.errors import NoDriver

__all__ = [
    "compute_capability",
    "current_device",
    "device_count",
    "device_name",
    "driver_version",
    "initialise",
    "version_if_loaded",
]


class _ForkedApi:
    """What `Driver.api` becomes in a forked child: every use of it raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise results.forked()


class _Process:
    """What this process knows of CUDA."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
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

    ``None`` where there is no libcuda. Neither a device nor `cuInit` is needed, and a forked child may ask. The
    number is that of the user-mode driver: of the forward-compatibility package where one is in use.
    """
    if not _process.version_known:
        try:
            status, version = _import_api().cuDriverGetVersion()
        except (ImportError, RuntimeError):
            # cuda.bindings raises RuntimeError where it finds no libcuda.
            status, version = results.NO_DEVICE, 0
        _process.version = None if status else int(version)
        _process.version_known = True
    return _process.version


def version_if_loaded() -> int | None:
    """Return `driver_version` where this process uses the driver already; ``None`` costs nothing and loads nothing."""
    return _process.version if _process.driver is not None else None


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
    assert version is not None
    return Driver(api, version)


def _after_fork_in_child() -> None:
    # Another thread of the parent may have held it.
    _process.lock = threading.Lock()
    if _process.driver is not None:
        _process.driver.api = _ForkedApi()


os.register_at_fork(after_in_child=_after_fork_in_child)
