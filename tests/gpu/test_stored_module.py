"""A stored program loaded by its name and launched, with no source at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_memory import DeviceArray

from kernelstore import Compiler, Store

pytestmark = pytest.mark.gpu


def test_a_stored_program_is_rebuilt_loaded_and_launched_by_its_name(
    store: Store, arch: str, on_device: Callable[[Any], DeviceArray]
) -> None:
    source = "template<int N> __global__ void addn(int* p) { p[threadIdx.x] += N; }"
    array = on_device(np.arange(32, dtype=np.int32))
    with Compiler(store) as compiler:
        compiler.compile(source, arch="sm_75", name="addn.cu", name_expressions=("addn<7>",))
        compiler.rebuild("addn.cu", arch)

    with Compiler(store) as compiler:
        compiler.stored_module("addn.cu").get_kernel("addn<7>").launch(1, 32, (array,))

    assert array.get().tolist() == list(range(7, 39))


def test_a_stored_program_of_which_there_is_only_ptx_is_launched(
    store: Store, on_device: Callable[[Any], DeviceArray]
) -> None:
    """Its cubin is made once and kept."""
    source = "template<int N> __global__ void addn(int* p) { p[threadIdx.x] += N; }"
    array = on_device(np.arange(32, dtype=np.int32))
    with Compiler(store) as compiler:
        compiler.compile(source, "ptx", arch="compute_75", name="addn.cu", name_expressions=("addn<7>",))

    for _ in range(2):
        with Compiler(store) as compiler:
            compiler.stored_module("addn.cu").get_kernel("addn<7>").launch(1, 32, (array,))

    assert array.get().tolist() == list(range(14, 46))
    assert [info.origin for info in store.search(kind="cubin")] == ["driver-jit"]
