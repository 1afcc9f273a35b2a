"""The driver's JIT, kept: a cubin made from PTX once for one driver build, and found by the next process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_driver import IMAGE, FakeDriver

from kernelstore import Artifact, Compiler, Linker, Store
from kernelstore.cuda import driver, nvjitlink, nvrtc
from kernelstore.errors import InvalidPTX, ToolchainError

K = """
template<class T> __global__ void k(T* a) { a[threadIdx.x] += 1; }
"""
LOWERED = "_Z1kIfEvPT_"

Rows = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    fake.version = nvrtc.version()[0] * 1000 + nvrtc.version()[1] * 10
    fake.kernels = {LOWERED: [8]}
    return fake.install(monkeypatch)


@pytest.fixture
def jitted(compiler: Compiler) -> bytes:
    """What a driver could make of the PTX."""
    return compiler.compile(K, arch="sm_90", name_expressions=("k<float>",), cache=False).payload


@pytest.fixture
def only_ptx(
    compiler: Compiler, fake: FakeDriver, jitted: bytes, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Artifact]:
    """Store the PTX of the program, take NVRTC away, and load the program in what counts as a new process."""

    def broken(*_: object, **__: object) -> None:
        raise ToolchainError("NVRTC cannot be loaded", library=None, log="")

    fake.linked = jitted
    compiler.compile(K, "ptx", arch="compute_80", name_expressions=("k<float>",))
    monkeypatch.setattr("kernelstore.cuda.toolkit.find_nvrtc", lambda: None)
    monkeypatch.setattr(nvrtc, "build", broken)

    def load_in_a_new_process() -> Artifact:
        fake.install(monkeypatch)
        with Compiler(compiler.store) as other:
            return other.module(K, name_expressions=("k<float>",)).artifact

    return load_in_a_new_process


def test_the_second_process_pays_no_jit(
    only_ptx: Callable[[], Artifact], fake: FakeDriver, store: Store, jitted: bytes, rows: Rows
) -> None:
    """C47."""
    first, second = only_ptx(), only_ptx()

    assert fake.count("cuLinkComplete") == 1
    assert fake.payloads == [jitted, jitted]
    assert (first.from_cache, second.from_cache) == (False, True)
    store.flush()
    assert rows(
        "SELECT kind, arch, origin, toolchain, driver_version, usage_count, program_id IS NOT NULL FROM artifact "
        "WHERE origin = 'driver-jit'"
    ) == [("cubin", "sm_90", "driver-jit", "libcuda 580.159.04", fake.version, 1, 1)]
    assert rows("SELECT value FROM counter WHERE name = 'link' AND reason = 'driver-jit'") == [(1,)]


def test_names_and_types_of_the_ptx_are_kept(only_ptx: Callable[[], Artifact]) -> None:
    (symbol,) = only_ptx().symbols

    assert (symbol.name_expression, symbol.lowered_name, symbol.parameters) == ("k<float>", LOWERED, ("u64",))
    assert symbol.registers


def test_the_arch_is_what_the_cubin_tells(
    only_ptx: Callable[[], Artifact], fake: FakeDriver, compiler: Compiler
) -> None:
    """A driver of CUDA 13 makes sm_90a of plain PTX on 9.0."""
    fake.linked = _linked_for("sm_90a", compiler)

    assert only_ptx().arch == "sm_90a"
    assert only_ptx().from_cache


def _linked_for(arch: str, compiler: Compiler) -> bytes:
    try:
        nvjitlink.version()
    except ToolchainError:
        pytest.skip("nvJitLink is not installed")
    store = compiler.store
    assert store is not None
    (key,) = [key for key in store if store.peek(key).kind == "ptx"]  # type: ignore[union-attr]
    ptx = store.peek(key)
    assert ptx is not None
    return Linker().link([ptx], arch=arch).payload


def test_another_driver_build_is_a_miss_for_that_row_alone(
    only_ptx: Callable[[], Artifact], fake: FakeDriver, rows: Rows
) -> None:
    only_ptx()
    fake.build = "580.200.01"
    assert only_ptx().toolchain == "libcuda 580.200.01"
    fake.build = "580.159.04"
    assert only_ptx().from_cache

    assert fake.count("cuLinkComplete") == 2
    assert rows("SELECT kind, count(*) FROM artifact GROUP BY kind ORDER BY kind") == [("cubin", 2), ("ptx", 1)]


def test_a_driver_without_a_build_in_its_name_translates_by_itself(
    only_ptx: Callable[[], Artifact], fake: FakeDriver, store: Store
) -> None:
    fake.build = None

    assert only_ptx().kind == "ptx"
    assert fake.count("cuLinkCreate") == 0
    assert len(store) == 1


def test_what_the_drivers_linker_rejects_is_left_to_its_loader(
    only_ptx: Callable[[], Artifact], fake: FakeDriver, store: Store
) -> None:
    fake.linked = None
    assert only_ptx().kind == "ptx"
    assert len(store) == 1

    fake.fail = {"cuLibraryLoadData": 218}
    with pytest.raises(InvalidPTX):
        only_ptx()


def test_a_cubin_that_the_driver_made_and_refuses_gives_way_to_its_ptx(
    only_ptx: Callable[[], Artifact], fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = fake.cuLibraryLoadData

    def refuse_cubins(code: bytes, *options: Any) -> tuple[Any, ...]:
        from fake_driver import CUresult

        return (CUresult(209), None) if code.startswith(b"\x7fELF") else load(code, *options)

    monkeypatch.setattr(fake, "cuLibraryLoadData", refuse_cubins)

    assert only_ptx().kind == "ptx"


@pytest.mark.parametrize("refusal", ["222", "221", "table"])
def test_nvjitlink_makes_what_the_driver_cannot(
    only_ptx: Callable[[], Artifact], fake: FakeDriver, rows: Rows, refusal: str
) -> None:
    """C38, C45."""
    try:
        nvjitlink.version()
    except ToolchainError:
        pytest.skip("nvJitLink is not installed")
    if refusal == "table":
        fake.version = nvrtc.version()[0] * 1000
    else:
        fake.fail = {"cuLinkAddData": int(refusal)}

    first, second = only_ptx(), only_ptx()

    assert (first.origin, first.arch) == ("nvjitlink", "sm_90")
    assert (first.from_cache, second.from_cache) == (False, True)
    assert rows("SELECT count(*) FROM artifact WHERE origin = 'nvjitlink' AND program_id IS NOT NULL") == [(1,)]


def test_the_build_is_that_of_the_mapped_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, build in (
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "580.159.04"),
        ("/usr/local/cuda/compat/libcuda.so.575.57.08", "575.57.08"),
        ("/usr/lib/wsl/drivers/libcuda.so.1.1", None),
        ("/usr/lib/libcuda.so.1", None),
        (None, None),
    ):
        monkeypatch.setattr(driver, "_libcuda_path", lambda path=path: path)
        assert driver.driver_build() == build


def test_a_cubin_that_cannot_be_read_is_not_kept(
    only_ptx: Callable[[], Artifact], fake: FakeDriver, store: Store
) -> None:
    fake.linked = IMAGE

    assert only_ptx().kind == "ptx"
    assert len(store) == 1
