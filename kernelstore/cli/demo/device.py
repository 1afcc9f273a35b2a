"""Running the demo's launches on a GPU, with plain device memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelstore.cli.demo import Argument, Launch
from kernelstore.cuda import driver
from kernelstore.loader import Module

__all__ = ["run"]

_SEED = 20


def run(module: Module, launch: Launch) -> list[str]:
    """Launch once and return a line for each array that differs from what numpy says."""
    kernel = module.get_kernel(launch.kernel)
    for name, content in launch.variables.items():
        variable = module.get_global(name)
        _copy_in(variable.handle, content)
    before = launch.arguments(np.random.default_rng(_SEED))
    buffers = [_allocate(value) if isinstance(value, np.ndarray) else None for value in before]
    try:
        values = tuple(value if buffer is None else buffer for value, buffer in zip(before, buffers, strict=True))
        kernel.launch(launch.grid, launch.block, values)
        # A copy into the legacy default stream waits for the launch in it.
        after = tuple(_copy_out(value, buffer) for value, buffer in zip(before, buffers, strict=True))
    finally:
        for buffer in buffers:
            if buffer is not None:
                driver.initialise().call("cuMemFree", buffer)
    return launch.mismatches(before, after)


def _allocate(content: np.ndarray[Any, Any]) -> int:
    address = int(driver.initialise().call("cuMemAlloc", content.nbytes))
    _copy_in(address, content)
    return address


def _copy_in(address: int, content: np.ndarray[Any, Any]) -> None:
    content = np.ascontiguousarray(content)
    driver.initialise().call("cuMemcpyHtoD", address, content.ctypes.data, content.nbytes)


def _copy_out(before: Argument, address: int | None) -> Argument:
    if address is None:
        return before
    after = np.empty_like(before)
    driver.initialise().call("cuMemcpyDtoH", after.ctypes.data, address, after.nbytes)
    return after
