"""Stored programs: rebuilt for another GPU, and loaded, where the sources are not at hand."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver

from kernelstore import Artifact, Compiler, Key, Program, Store, errors, stored
from kernelstore.arch import Arch
from kernelstore.db import rows

ADDN = '#include "a.h"\ntemplate<int N> __global__ void addn(int* p) { p[0] += N * A; }\n'
HEADERS = {"a.h": "#define A 3"}
NAMES = ("addn<2>", "addn<1>")

# Requests of which each rebuild has to give the very key.
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"source": "__global__ void k() {}"},
    "options": {"source": ADDN, "headers": HEADERS, "name_expressions": NAMES, "options": ("-DV=8", "-D", "W=1", "-std=c++17", "-use_fast_math", "-rdc=true", "-Xptxas", "-v")},
    "extra": {"source": ADDN, "headers": HEADERS, "name_expressions": NAMES, "extra": b"\x00\xff"},
    "name": {"source": ADDN, "headers": HEADERS, "name": "some/where.cu"},
    "external": {"source": "#if 0\n#include <cuda_fp16.h>\n#endif\n__global__ void k() {}"},
    "paths": {"source": "__global__ void k() {}", "options": ("-lineinfo",), "include_dirs": ("relative",)},
    "pre-include": {"source": "__global__ void k(int* p) { *p = A; }", "headers": HEADERS, "options": ("-include", "a.h")},
    "arch among options": {"source": "__global__ void k() {}", "options": ("-arch=sm_90",), "arch": None},
}  # fmt: skip


def program_key(store: Store, artifact: Artifact) -> Key:
    key = store.info(artifact.key).program_key
    assert key is not None
    return key


@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_rebuild_has_the_key_of_the_original_request(
    store: Store, request_name: str, count_compiles: Callable[[], int]
) -> None:
    asked = {"arch": "sm_90"} | REQUESTS[request_name]
    with Compiler(store) as compiler:
        first = compiler.compile(**asked)
        rebuilt = compiler.rebuild(program_key(store, first), "sm_80")
        if asked["arch"] is None:
            asked |= {"options": ()}
        original = compiler.compile(**asked | {"arch": "sm_80"})

    assert (rebuilt.arch, rebuilt.kind, rebuilt.from_cache) == ("sm_80", "cubin", False)
    assert (original.key, original.from_cache) == (rebuilt.key, True)
    assert original.symbols == rebuilt.symbols
    assert [symbol.name for symbol in rebuilt.symbols] == [symbol.name for symbol in first.symbols]
    assert count_compiles() == 2


@pytest.mark.parametrize("kind", ["ptx", "ltoir"])
def test_a_rebuild_may_be_of_another_kind(compiler: Compiler, store: Store, kind: str) -> None:
    first = compiler.compile(ADDN, arch="sm_90", headers=HEADERS, name_expressions=NAMES)

    rebuilt = compiler.rebuild(first.key, "sm_100", kind=kind)

    assert (rebuilt.kind, rebuilt.arch) == (kind, "compute_100")
    again = compiler.compile(ADDN, kind, arch="sm_100", headers=HEADERS, name_expressions=NAMES)
    assert (again.key, again.from_cache) == (rebuilt.key, True)


def test_a_rebuild_takes_no_options_of_the_compiler(compiler: Compiler, store: Store) -> None:
    first = compiler.compile(ADDN, arch="sm_90", headers=HEADERS, extra=b"1")

    with Compiler(store, options=("-DOTHER",), include_dirs=("other",)) as other:
        rebuilt = other.rebuild(first.key, "sm_80")

    assert compiler.compile(ADDN, arch="sm_80", headers=HEADERS, extra=b"1").key == rebuilt.key


def test_a_rebuild_that_is_there_is_a_hit(compiler: Compiler, count_compiles: Callable[[], int]) -> None:
    first = compiler.compile(ADDN, arch="sm_90", headers=HEADERS)

    assert compiler.rebuild(first.key, "sm_90").from_cache
    assert count_compiles() == 1


@pytest.mark.parametrize("spelt", ["name", "key", "digits", "artifact", "artifact's digits", "bytes"])
def test_a_program_is_named_in_many_ways(compiler: Compiler, store: Store, spelt: str) -> None:
    first = compiler.compile(ADDN, arch="sm_90", headers=HEADERS, name="addn.cu")
    key = program_key(store, first)
    program = {
        "name": "addn.cu",
        "key": key,
        "digits": str(key)[:9].upper(),
        "artifact": str(first.key),
        "artifact's digits": str(first.key)[:9],
        "bytes": bytes(key),
    }[spelt]

    assert store.find_program(program) == key  # type: ignore[arg-type]
    assert compiler.rebuild(program, "sm_90").key == first.key  # type: ignore[arg-type]


def test_several_programs_of_one_name_are_told(compiler: Compiler, store: Store) -> None:
    keys = [
        program_key(store, compiler.compile(ADDN, arch="sm_90", headers=HEADERS, name="addn.cu", extra=extra))
        for extra in (b"1", b"2")
    ]

    with pytest.raises(errors.InvalidArgument, match="several programs") as caught:
        compiler.rebuild("addn.cu", "sm_80")
    assert all(str(key)[:12] in str(caught.value) for key in keys)


@pytest.mark.parametrize("program", ["", "nothing.cu", "abcd", "%", bytes(32), "0" * 64])
def test_a_program_that_is_not_there_is_told(compiler: Compiler, program: str | bytes) -> None:
    with pytest.raises(errors.KeyNotFound, match="no program"):
        compiler.rebuild(program, "sm_80")


def test_wrong_parameters_are_told(compiler: Compiler, store: Store) -> None:
    first = compiler.compile(ADDN, arch="sm_90", headers=HEADERS)
    lto = Program(Key(bytes(32)), "", "", options=("--dlink-time-opt",), include_dirs=(), extra=b"")

    with pytest.raises(errors.InvalidType):
        compiler.rebuild(3, "sm_80")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArch):
        compiler.rebuild(first.key, "80")
    with pytest.raises(errors.InvalidArgument, match="NVRTC makes"):
        compiler.rebuild(first.key, "sm_80", kind="fatbin")
    with pytest.raises(errors.UnsupportedArch):
        compiler.rebuild(first.key, "sm_35")
    with pytest.raises(errors.InvalidOption, match="LTO-IR"):
        stored.request_of(lto, "cubin", Arch(9, 0))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_header_that_has_come_meanwhile_refuses_the_rebuild(
    compiler: Compiler, store: Store, tmp_path: Path, count_compiles: Callable[[], int]
) -> None:
    """The include was a toolkit's to provide; now a file of the user's stands there."""
    source = "#if 0\n#include <mine.h>\n#endif\n__global__ void k() {}"
    first = compiler.compile(source, arch="sm_90", include_dirs=(tmp_path,))
    (tmp_path / "mine.h").write_text("#define A 1")

    with pytest.raises(errors.RebuildRefused, match=r"mine\.h") as caught:
        compiler.rebuild(first.key, "sm_80")

    assert caught.value.program == program_key(store, first)
    assert caught.value.parts
    assert (count_compiles(), len(store)) == (1, 2)


def test_another_working_directory_refuses_the_rebuild_where_paths_count(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiler.compile("__global__ void k() {}", arch="sm_90", options=("-lineinfo",))
    monkeypatch.chdir(tmp_path)

    with pytest.raises(errors.RebuildRefused, match="working directory") as caught:
        compiler.rebuild(first.key, "sm_80")

    assert caught.value.parts == ("paths",)


def test_a_source_that_was_tampered_with_is_not_compiled(compiler: Compiler, path: Path) -> None:
    first = compiler.compile("__global__ void k() {}", arch="sm_90")
    with sqlite3.connect(path) as connection:
        connection.execute("""UPDATE program SET options = '["-DEVIL"]'""")
    connection.close()

    with pytest.raises(errors.RebuildRefused, match="options"):
        compiler.rebuild(first.key, "sm_80")


def test_a_row_of_an_older_release_refuses_the_rebuild(
    store: Store, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    program_row = rows.program_row

    def older(program: Any) -> Any:
        return program_row(dataclasses.replace(program, include_dirs=None, extra=None))

    monkeypatch.setattr(rows, "program_row", older)
    first = compiler.compile("__global__ void k() {}", arch="sm_90")

    with pytest.raises(errors.RebuildRefused, match="include directories"):
        compiler.rebuild(first.key, "sm_80")
    assert store.program(program_key(store, first)).extra is None  # type: ignore[union-attr]


def test_a_damaged_program_is_not_there(compiler: Compiler, path: Path) -> None:
    first = compiler.compile("__global__ void k() {}", arch="sm_90")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE program SET source = x'00'")
    connection.close()

    with pytest.raises(errors.KeyNotFound):
        compiler.rebuild(first.key, "sm_80")


def test_without_a_store_there_is_nothing_to_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELSTORE_DISABLE", "1")
    with Compiler() as compiler, pytest.raises(errors.StoreError, match="no store"):
        compiler.rebuild("addn.cu", "sm_80")


# -- modules of stored programs ---------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Two devices of compute capability 9.0 under a driver of CUDA 13."""
    fake = FakeDriver().install(monkeypatch)
    fake.kernels = {"_Z4addnILi1EEvPi": [8], "_Z4addnILi2EEvPi": [8]}
    return fake


def test_a_module_of_a_stored_program_needs_no_sources(fake: FakeDriver, compiler: Compiler, store: Store) -> None:
    first = compiler.compile(ADDN, arch="sm_90", headers=HEADERS, name_expressions=NAMES, name="addn.cu")

    module = compiler.stored_module("addn.cu")

    assert module.get_kernel("addn<2>") is not None
    assert compiler.stored_module("addn.cu") is module
    store.flush()
    assert store.info(first.key).usage_count == 1


def test_an_arch_of_no_use_is_told(fake: FakeDriver, compiler: Compiler) -> None:
    first = compiler.compile(ADDN, arch="sm_90", headers=HEADERS)

    with pytest.raises(errors.InvalidType):
        compiler.stored_module(first.key, arch=["sm_90"])  # type: ignore[arg-type]


def test_a_suffixed_arch_comes_before_the_plain_one(fake: FakeDriver, compiler: Compiler, store: Store) -> None:
    plain = compiler.compile(ADDN, arch="sm_90", headers=HEADERS)
    best = compiler.rebuild(plain.key, "sm_90a")

    compiler.stored_module(plain.key)
    compiler.stored_module(plain.key, arch="sm_90")

    store.flush()
    assert [store.info(artifact.key).usage_count for artifact in (best, plain)] == [1, 1]


@pytest.mark.parametrize("device", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_a_stored_module_is_chosen_as_the_best_for_the_device_is(
    fake: FakeDriver, compiler: Compiler, store: Store, device: tuple[int, int]
) -> None:
    for arch in ("sm_80", "sm_86", "sm_90", "sm_90a"):
        compiler.compile(ADDN, arch=arch, headers=HEADERS, name="addn.cu")
    (
        fake.device_attributes["CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"],
        fake.device_attributes["CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"],
    ) = device
    best = store.best_for("addn.cu", device, fake.version)

    assert best is not None
    assert compiler.stored_module("addn.cu").artifact.key == best.key


def test_ptx_serves_a_stored_program_and_its_cubin_is_kept(fake: FakeDriver, compiler: Compiler, store: Store) -> None:
    fake.version = 13990
    fake.linked = compiler.compile(ADDN, arch="sm_90", headers=HEADERS, name_expressions=NAMES, cache=False).payload
    stored = compiler.compile(ADDN, arch="sm_80", headers=HEADERS, name_expressions=NAMES)

    with Compiler(store) as first:
        made = first.stored_module(stored.key).artifact
    with Compiler(store) as second:
        found = second.stored_module(stored.key).artifact

    assert (made.kind, made.arch, made.origin, made.from_cache) == ("cubin", "sm_90", "driver-jit", False)
    assert (found.key, found.from_cache) == (made.key, True)
    assert store.info(made.key).program_key == program_key(store, stored)


def test_where_nothing_serves_the_device_what_there_is_is_told(fake: FakeDriver, compiler: Compiler) -> None:
    other = compiler.compile(ADDN, arch="sm_100", headers=HEADERS)

    with pytest.raises(
        errors.NoBinary,
        match=r"runs on compute capability 9\.0 .*: there are cubin sm_100, ptx compute_100; "
        r"Compiler.rebuild\(program, 'sm_90'\)",
    ) as caught:
        compiler.stored_module(other.key)
    assert caught.value.archs == ("cubin sm_100", "ptx compute_100")


def test_a_stored_program_is_loaded_for_the_arch_that_was_chosen_or_not_at_all(
    fake: FakeDriver, compiler: Compiler
) -> None:
    fake.version = 13990
    stored = compiler.compile(ADDN, arch="sm_90", headers=HEADERS)

    assert compiler.stored_module(stored.key, arch="sm_90").artifact.key == stored.key
    assert compiler.stored_module(stored.key, arch="compute_90").artifact.key != stored.key
    for arch in ("sm_90a", "sm_80"):
        with pytest.raises(errors.NoBinary):
            compiler.stored_module(stored.key, arch=arch)


def test_a_cubin_of_a_newer_major_than_the_drivers_is_not_loaded(fake: FakeDriver, compiler: Compiler) -> None:
    """What the driver says of the PTX is the last word."""
    artifact = compiler.compile(ADDN, arch="sm_90", headers=HEADERS)
    fake.version = 11080
    fake.fail = {"cuLibraryLoadData": 222}

    with pytest.raises(errors.UnsupportedPTX) as caught:
        compiler.stored_module(artifact.key)
    assert caught.value.kind == "ptx"


def test_a_relocatable_cubin_is_passed_over(fake: FakeDriver, compiler: Compiler) -> None:
    fake.version = 13990
    artifact = compiler.compile(ADDN, arch="sm_90", headers=HEADERS, options=("-rdc=true",))

    assert compiler.stored_module(artifact.key).artifact.kind == "ptx"


def test_a_damaged_cubin_is_passed_over(fake: FakeDriver, compiler: Compiler, path: Path) -> None:
    artifact = compiler.compile(ADDN, arch="sm_90", headers=HEADERS)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE blob SET data = x'00'")
    connection.close()

    with pytest.raises(errors.NoBinary):
        compiler.stored_module(artifact.key)


def test_a_stored_module_is_read_without_sqlalchemy_and_without_nvrtc(
    compiler: Compiler, path: Path, run_python: Callable[..., str]
) -> None:
    artifact = compiler.compile(ADDN, arch="sm_90", headers=HEADERS, name_expressions=NAMES)
    script = """
import sys
sys.path.insert(0, sys.argv[3])
import pytest
from fake_driver import FakeDriver
from kernelstore import Compiler, Store
with pytest.MonkeyPatch.context() as patch:
    fake = FakeDriver().install(patch)
    fake.kernels = {"_Z4addnILi1EEvPi": [8], "_Z4addnILi2EEvPi": [8]}
    with Store(sys.argv[1]) as store, Compiler(store) as compiler:
        print(compiler.stored_module(sys.argv[2]).get_kernel("addn<1>") is not None)
assert "sqlalchemy" not in sys.modules
assert "kernelstore.cuda.nvrtc" not in sys.modules
"""
    assert run_python(script, path, artifact.key, Path(__file__).parent) == "True\n"
