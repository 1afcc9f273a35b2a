"""Choosing, the driver's JIT kept, and links, on a real driver and device; results checked against numpy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_memory import DeviceArray, with_ptx_version

from kernelstore import Artifact, Compiler, Linker, Store, choice, load
from kernelstore.cuda import driver, nvjitlink, nvrtc
from kernelstore.errors import ToolchainError

pytestmark = pytest.mark.gpu

OnDevice = Callable[[Any], DeviceArray]

SOURCE = """
template<class T> __global__ void scale(T a, T* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= a;
}
"""
NAME = "scale<float>"

# A process without NVRTC: what it loads comes from the store, and PTX costs a JIT.
SCRIPT = """
import json, sys, time
from kernelstore import Compiler, Store
from kernelstore.cuda import driver, nvrtc, toolkit
from kernelstore.errors import ToolchainError

def broken():
    raise ToolchainError("there is no NVRTC in this test", library=None, log="")

toolkit.find_nvrtc, nvrtc.build = (lambda: None), broken
driver.initialise().make_current()
with Store(sys.argv[1]) as store, Compiler(store) as compiler:
    started = time.perf_counter()
    kernel = compiler.kernel(open(sys.argv[2]).read(), sys.argv[3])
    took_ms = (time.perf_counter() - started) * 1000
    artifact = kernel._hold.artifact
    links = dict(store.sql("SELECT reason, value FROM counter WHERE name = 'link'").rows)
    print(json.dumps([artifact.kind, artifact.arch, artifact.origin, artifact.toolchain, artifact.from_cache, took_ms,
                      artifact.compile_ms, links]))
"""


def older_ptx(ptx: Artifact) -> Artifact:
    """The PTX with a `.version` that this driver knows."""
    newest = choice.newest_ptx(driver.driver_version() or 0)
    if newest is None or ptx.ptx_version is None or ptx.ptx_version <= newest:
        return ptx
    return dataclasses.replace(ptx, payload=with_ptx_version(ptx, newest), ptx_version=newest)


@pytest.fixture
def only_ptx(path: Path, store: Store, compiler: Compiler, tmp_path: Path) -> Path:
    """Leave nothing but PTX of compute_80 in the store; return the source's file."""
    source = tmp_path / "scale.cu"
    # Enough work for ptxas that a JIT can be told from a load.
    source.write_text(SOURCE + "\n".join(_heavy(index) for index in range(40)))
    names = (NAME,)
    kept: list[Artifact] = []
    put = store.put_compiled
    store.put_compiled = lambda claim, *made, codec=None: kept.extend(made)  # type: ignore[method-assign]
    compiler.compile(source.read_text(), "ptx", arch="compute_80", name_expressions=names)
    store.put_compiled = put  # type: ignore[method-assign]
    store.put(older_ptx(kept[0]))
    store.flush()
    return source


def _heavy(index: int) -> str:
    terms = " + ".join(f"sinf(x * {index}.{term}f)" for term in range(1, 9))
    return (
        f'extern "C" __global__ void heavy{index}(float* p) {{ float x = p[threadIdx.x]; p[threadIdx.x] = {terms}; }}'
    )


def test_the_second_process_pays_no_jit(
    path: Path, only_ptx: Path, run_python: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """C47."""
    if driver.driver_build() is None:
        pytest.skip("the file name of this libcuda does not tell its build")

    first, second = (
        json.loads(run_python(SCRIPT, path, only_ptx, NAME, CUDA_CACHE_DISABLE="1")) for _ in range(2)
    )  # fmt: skip

    with capsys.disabled():
        print(f"\nPTX only, {driver.driver_build()}: first {first}, second {second}")
    major, minor = driver.compute_capability()
    for made in (first, second):
        assert made[0] == "cubin"
        assert made[1].rstrip("af") == f"sm_{major}{minor}"
        assert made[2:4] == ["driver-jit", f"libcuda {driver.driver_build()}"]
    assert [first[4], second[4]] == [False, True]
    assert [first[7], second[7]] == [{"driver-jit": 1}] * 2
    assert second[5] < first[6]


def test_what_the_driver_made_computes_what_numpy_does(
    path: Path, only_ptx: Path, run_python: Callable[..., str], on_device: OnDevice
) -> None:
    run_python(SCRIPT, path, only_ptx, NAME)
    with Store(path) as store:
        (key,) = [key for key in store if store.peek(key).origin == "driver-jit"]  # type: ignore[union-attr]
        launch(load(store[key]).get_kernel(NAME), on_device)


def launch(kernel: Any, on_device: OnDevice) -> None:
    x = np.arange(1000, dtype=np.float32)
    on_x = on_device(x)
    # numpy scalars: of what was linked from LTO-IR only the sizes are known.
    kernel.launch(4, 256, (np.float32(3), on_x, np.int32(1000)))
    np.testing.assert_array_equal(on_x.get(), 3 * x)


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def broken() -> None:
        raise ToolchainError("there is no NVRTC in this test", library=None, log="")

    def take_away() -> None:
        monkeypatch.setattr("kernelstore.cuda.toolkit.find_nvrtc", lambda: None)
        monkeypatch.setattr(nvrtc, "build", broken)

    return take_away


def test_a_cubin_of_8_0_does_not_serve_9_0_but_its_ptx_does(
    compiler: Compiler, store: Store, no_nvrtc: Callable[[], None], on_device: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = driver.compute_capability()
    if device[0] == 8:
        pytest.skip("needs a device of another major than 8")
    put = store.put_compiled

    def older(claim: Any, *made: Artifact, codec: str | None = None) -> None:
        put(claim, *(older_ptx(item) if item.kind == "ptx" else item for item in made), codec=codec)

    monkeypatch.setattr(store, "put_compiled", older)
    compiler.compile(SOURCE, arch="sm_80", name="scale.cu", name_expressions=(NAME,))
    no_nvrtc()

    best = store.best_for("scale.cu", device, driver.driver_version())
    kernel = compiler.kernel(SOURCE, NAME, name="scale.cu")

    assert best is not None
    assert (best.kind, best.arch) == ("ptx", "compute_80")
    assert kernel._hold.artifact.origin in {"driver-jit", "nvrtc"}
    launch(kernel, on_device)


def test_a_cubin_of_this_device_goes_before_ptx(
    compiler: Compiler, store: Store, no_nvrtc: Callable[[], None], arch: str, on_device: OnDevice
) -> None:
    for made_for in ("sm_80", arch):
        compiler.compile(SOURCE, arch=made_for, name="scale.cu", name_expressions=(NAME,))
    no_nvrtc()

    kernel = compiler.kernel(SOURCE, NAME, name="scale.cu")

    assert (kernel._hold.artifact.kind, kernel._hold.artifact.arch) == ("cubin", arch)
    best = store.best_for("scale.cu", driver.compute_capability(), driver.driver_version())
    assert best is not None
    assert best.key == kernel._hold.artifact.key
    launch(kernel, on_device)


CALLER = """
extern __device__ float times(float a, float b);
template<class T> __global__ void scale(T a, T* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = times(x[i], a);
}
"""
CALLEE = "__device__ float times(float a, float b) { return a * b; }"


@pytest.mark.parametrize("kind", ["ltoir", "ptx", "cubin"])
def test_a_pair_is_linked_loaded_and_launched(
    compiler: Compiler, store: Store, arch: str, on_device: OnDevice, kind: str
) -> None:
    try:
        if nvjitlink.version() < nvrtc.version():
            pytest.skip("nvJitLink is older than NVRTC")
    except ToolchainError:
        pytest.skip("nvJitLink is not installed")
    arguments: dict[str, Any] = {
        "kind": kind,
        "arch": arch if kind == "cubin" else "compute_80",
        "options": () if kind == "ltoir" else ("-rdc=true",),
    }
    pair = [
        compiler.compile(CALLER, name_expressions=(NAME,), **arguments),
        compiler.compile(CALLEE, **arguments),
    ]

    linked = Linker(store).link(pair, arch=arch)

    launch(load(linked).get_kernel(NAME), on_device)
    assert Linker(store).link(pair, arch=arch).from_cache


def test_ptx_newer_than_the_driver_becomes_a_cubin_with_nvjitlink(
    compiler: Compiler, store: Store, no_nvrtc: Callable[[], None], on_device: OnDevice
) -> None:
    """C38."""
    ptx = compiler.compile(SOURCE, "ptx", arch="compute_80", name_expressions=(NAME,))
    if choice.accepts_ptx(ptx.ptx_version, driver.driver_version()):
        pytest.skip("this driver knows the PTX of this NVRTC")
    try:
        nvjitlink.version()
    except ToolchainError:
        pytest.skip("nvJitLink is not installed")
    no_nvrtc()

    kernel = compiler.kernel(SOURCE, NAME)

    assert kernel._hold.artifact.origin == "nvjitlink"
    launch(kernel, on_device)
