"""What tests on a device need: a device, memory on it, and artifacts made for it by a real NVRTC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_memory import DeviceArray, with_ptx_version

from kernelstore import Artifact, Compiler
from kernelstore.cuda import driver


@pytest.fixture(autouse=True)
def device() -> int:
    """The ordinal of the current device; no test of this directory runs without one."""
    if driver.device_count() == 0:
        pytest.skip("no CUDA device")
    return driver.initialise().make_current()


@pytest.fixture
def on_device(device: int) -> Iterator[Callable[[Any], DeviceArray]]:
    """Copy an array to the device until the test ends."""
    arrays: list[DeviceArray] = []

    def copy(content: Any) -> DeviceArray:
        arrays.append(DeviceArray(np.asarray(content)))
        return arrays[-1]

    yield copy
    for array in arrays:
        array.free()


@pytest.fixture
def arch(device: int) -> str:
    major, minor = driver.compute_capability(device)
    return f"sm_{major}{minor}"


@pytest.fixture
def build(compiler: Compiler, arch: str) -> Callable[..., Artifact]:
    """Compile for the current device."""

    def compile_for_device(source: str, *name_expressions: str, kind: str = "cubin", **arguments: Any) -> Artifact:
        arguments = {"arch": arch} | arguments
        return compiler.compile(source, kind, name_expressions=name_expressions, **arguments)

    return compile_for_device


@pytest.fixture
def ptx_for_driver(build: Callable[..., Artifact]) -> Callable[..., Artifact]:
    """Compile to PTX that drivers from CUDA 12.8 on take; NVRTC writes its own, newest ``.version``."""

    def compile_to_ptx(source: str, *name_expressions: str) -> Artifact:
        made = build(source, *name_expressions, kind="ptx")
        return Artifact.from_bytes(with_ptx_version(made, 807))

    return compile_to_ptx
