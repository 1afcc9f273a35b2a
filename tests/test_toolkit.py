"""Finding NVRTC and CUDA headers: made-up installations, and the real ones of this environment."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kernelstore import settings
from kernelstore.arch import Arch
from kernelstore.cuda import bundled, nvrtc, toolkit, toolkit_names
from kernelstore.errors import CompileError, ToolchainError

FP16 = '#include <cuda_fp16.h>\nextern "C" __global__ void k(__half2*a){a[0]=__hadd2(a[0],a[1]);}'
CSTDINT = '#include <cuda/std/cstdint>\nextern "C" __global__ void k(cuda::std::int32_t*a){a[0]=1;}'
CUB = '#include <cub/version.cuh>\nextern "C" __global__ void k(int*a){a[0]=CUB_VERSION;}'
COOPERATIVE = '#include <cooperative_groups.h>\nextern "C" __global__ void k(){cooperative_groups::this_grid().sync();}'


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test searches anew, outside the user's cache and environment."""
    toolkit._search.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)


@pytest.fixture
def build() -> str:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        return nvrtc.build()
    except ToolchainError:
        pytest.skip("libnvrtc is not installed")


@pytest.fixture
def bundled_build(build: str) -> str:
    if not nvrtc.has_bundled_headers():
        pytest.skip("this NVRTC bundles no headers")
    return build


@pytest.fixture
def unit(build: str) -> toolkit.HeaderUnit:
    found = toolkit.find_headers(build, nvrtc.library_path())
    if found is None:
        pytest.skip(f"no CUDA headers for NVRTC {build} are installed")
    return found


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def make_include(directory: Path, cudart: int | None = None, cccl: int | None = None) -> Path:
    if cudart is not None:
        write(directory / "cuda_runtime_api.h", f"/* {'x' * 6000} */\n#define CUDART_VERSION  {cudart}\n")
        write(directory / "cuda_fp16.h")
    if cccl is not None:
        write(directory / "cuda/std/__cccl/version.h", f"#ifndef X\n#define CCCL_VERSION {cccl}\n#endif\n")
        write(directory / "cuda/std/version")
    return directory


def make_toolkit(root: Path, cudart: int, cccl: int | None = 3_000_001) -> Path:
    make_include(root / "include", cudart)
    make_include(root / "include" / ("cccl" if cudart >= 13000 else "."), cccl=cccl)
    return root


def search(build: str, library: Path | None = None, **given: Any) -> toolkit.HeaderUnit | None:
    """Search only where the test says."""
    with mock.patch.object(toolkit, "_SYSTEM", "/no/where"):
        return toolkit._search.__wrapped__(
            build,
            None if library is None else str(library),
            str(given.get("cuda_home", "")),
            str(given.get("cuda_path", "")),
            tuple(map(str, given.get("sys_path", ()))),
        )


def compiles(source: str, include_dirs: tuple[str, ...]) -> bool:
    try:
        nvrtc.compile_program(
            source,
            name="k.cu",
            options=["-std=c++17", *(f"-I{directory}" for directory in include_dirs)],
            name_expressions=(),
            headers={},
            arch=Arch.parse("sm_90"),
        )
    except CompileError:
        return False
    return True


# -- libnvrtc -----------------------------------------------------------------------------------------------------


def test_the_library_found_is_the_one_that_is_loaded(build: str) -> None:
    """In a process of its own, where nothing else has loaded one."""
    code = "from kernelstore.cuda import nvrtc, toolkit; print(toolkit.find_nvrtc(), nvrtc.library_path())"
    found, loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    if found == "None":
        pytest.skip("NVRTC comes from no wheel and no conda environment")
    assert found == loaded


def test_the_library_is_found_in_the_order_of_the_bindings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bindings 12.9 load libnvrtc.so.13 where both wheels are installed."""
    monkeypatch.setattr(toolkit, "_site_packages", lambda: [str(tmp_path / "a"), str(tmp_path / "b")])
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    assert toolkit.find_nvrtc() is None
    conda = write(tmp_path / "conda/lib/libnvrtc.so.12.9.86")
    (tmp_path / "conda/lib/libnvrtc.so.12").symlink_to(conda)
    assert toolkit.find_nvrtc() == conda
    twelve = write(tmp_path / "a/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    assert toolkit.find_nvrtc() == twelve
    thirteen = write(tmp_path / "b/nvidia/cu13/lib/libnvrtc.so.13")
    assert toolkit.find_nvrtc() == thirteen


def test_site_packages_are_those_of_the_bindings() -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder._utils.find_sub_dirs", reason="cuda-pathfinder is not installed")
    existing = [directory for directory in toolkit._site_packages() if Path(directory).is_dir()]
    assert existing == pathfinder.find_sub_dirs_all_sitepackages(())


# -- headers: which ones ------------------------------------------------------------------------------------------


def test_own_version_beats_all_others_and_another_major_never_serves(tmp_path: Path) -> None:
    """C19: headers of another major compile fp16 without a word."""
    twelve = make_toolkit(tmp_path / "twelve", 12090)
    older = make_toolkit(tmp_path / "older", 13000)
    own = make_toolkit(tmp_path / "own", 13010)
    for first, second, chosen in ((twelve, own, own), (older, own, own), (twelve, older, older)):
        found = search("13.1.5", cuda_home=first, cuda_path=second)
        assert found is not None
        assert found.include_dirs[0] == str(chosen / "include")
    assert search("11.8.89", cuda_home=twelve, cuda_path=older) is None


def test_headers_without_cccl_are_a_last_resort(tmp_path: Path) -> None:
    bare = make_toolkit(tmp_path / "bare", 13000, None)
    whole = make_toolkit(tmp_path / "whole", 13000)
    found = search("13.0.88", cuda_home=bare, cuda_path=whole)
    assert found is not None
    assert found.include_dirs == (str(whole / "include"), str(whole / "include/cccl"))
    found = search("13.0.88", cuda_home=bare, cuda_path=make_toolkit(tmp_path / "newer", 13010))
    assert found is not None
    assert found.include_dirs == (str(bare / "include"),)


def test_bundled_headers_beat_incomplete_ones_and_lose_to_whole_ones(tmp_path: Path) -> None:
    bare = make_toolkit(tmp_path / "bare", 13050, None)
    found = search("13.5.37", cuda_home=bare)
    assert found is not None
    assert (found.version, found.bundled, found.directories) == ("bundled 13.5.37", "13.5.37", ())
    whole = make_toolkit(tmp_path / "whole", 13050)
    found = search("13.5.37", cuda_home=bare, cuda_path=whole)
    assert found is not None
    assert found.bundled is None


def test_wheels_of_cuda_13_have_cccl_in_a_directory_of_its_own(tmp_path: Path) -> None:
    """C20."""
    make_toolkit(tmp_path / "nvidia/cu13", 13000)
    for found in (
        search("13.0.88", tmp_path / "nvidia/cu13/lib/libnvrtc.so.13"),
        search("13.0.88", sys_path=["/no/where", tmp_path]),
    ):
        assert found is not None
        assert found.include_dirs == (str(tmp_path / "nvidia/cu13/include"), str(tmp_path / "nvidia/cu13/include/cccl"))


def test_wheels_of_cuda_12_are_put_together(tmp_path: Path) -> None:
    """C20."""
    runtime = make_include(tmp_path / "nvidia/cuda_runtime/include", 12090)
    cccl = make_include(tmp_path / "nvidia/cuda_cccl/include", cccl=2_008_002)
    for found in (
        search("12.9.86", tmp_path / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        search("12.9.86", sys_path=[tmp_path]),
    ):
        assert found is not None
        assert found.include_dirs == (str(runtime), str(cccl))


def test_the_toolkit_around_the_library_is_found(tmp_path: Path) -> None:
    root = make_toolkit(tmp_path / "targets/x86_64-linux", 13000)
    found = search("13.0.88", root / "lib/libnvrtc.so.13.0.88")
    assert found is not None
    assert found.include_dirs[0] == str(root / "include")


def test_a_search_is_kept_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path, 13000)))
    assert toolkit.find_headers("13.0.88", None) is toolkit.find_headers("13.0.88", None)
    monkeypatch.delenv("CUDA_HOME")
    found = toolkit.find_headers("13.0.88", None)
    assert found is None or str(tmp_path / "include") not in found.include_dirs


# -- headers: their version ---------------------------------------------------------------------------------------


def version_of(root: Path) -> str:
    found = search("13.0.88", cuda_home=root)
    assert found is not None
    return found.version


def test_wheels_tell_their_versions(tmp_path: Path) -> None:
    make_toolkit(tmp_path / "nvidia/cu13", 13000)
    for name in ("runtime-13.0.96", "cccl-13.0.85", "crt-13.0.88", "runtime_cu12-12.9.79"):
        (tmp_path / f"nvidia_cuda_{name}.dist-info").mkdir()
    found = search("13.0.88", sys_path=[tmp_path])
    assert found is not None
    assert found.version == "cudart 13.0.96 cccl 3.0.1 (13.0.85) crt 13.0.88"
    (tmp_path / "nvidia_cuda_cccl-13.0.85.dist-info").rename(tmp_path / "nvidia_cuda_cccl-13.0.99.dist-info")
    newer = search("13.0.88", sys_path=[tmp_path])
    assert newer is not None
    assert newer.version != found.version


def test_wheels_of_cuda_12_tell_their_own_versions(tmp_path: Path) -> None:
    make_include(tmp_path / "nvidia/cuda_runtime/include", 12090)
    make_include(tmp_path / "nvidia/cuda_cccl/include", cccl=2_008_002)
    for name in ("runtime_cu12-12.9.79", "cccl_cu12-12.9.27", "runtime-13.0.96"):
        (tmp_path / f"nvidia_cuda_{name}.dist-info").mkdir()
    found = search("12.9.86", sys_path=[tmp_path])
    assert found is not None
    assert found.version == "cudart 12.9.79 cccl 2.8.2 (12.9.27)"


def test_a_toolkit_tells_its_versions(tmp_path: Path) -> None:
    make_toolkit(tmp_path, 13000)
    parts = {"cuda": "13.0.2", "cuda_cudart": "13.0.96", "cuda_cccl": "13.0.85", "cuda_nvcc": "13.0.88"}
    write(tmp_path / "version.json", json.dumps({name: {"version": version} for name, version in parts.items()}))
    assert version_of(tmp_path) == "cudart 13.0.96 cccl 3.0.1 (13.0.85) nvcc 13.0.88"
    for broken in ("", "[]", "{", '{"cuda_cccl": 3}'):
        write(tmp_path / "version.json", broken)
        assert " tree " in version_of(tmp_path)


def test_headers_that_nobody_tells_the_version_of_tell_it_themselves(tmp_path: Path) -> None:
    one, other = make_toolkit(tmp_path / "one", 13000), make_toolkit(tmp_path / "other", 13000)
    assert version_of(one).startswith("cudart 13.0 cccl 3.0.1 tree ")
    # The same headers elsewhere are the same, whenever they were written.
    os.utime(other / "include/cuda_fp16.h", (1, 1))
    assert version_of(one) == version_of(other)
    write(other / "include/cuda_fp16.h", "// fixed\n")
    assert version_of(one) != version_of(other)
    write(one / "include/cooperative_groups/reduce.h", "// new\n")
    write(other / "include/cuda_fp16.h")
    assert version_of(one) != version_of(other)


def test_another_cccl_is_another_version(tmp_path: Path) -> None:
    assert version_of(make_toolkit(tmp_path / "a", 13000, 3_000_001)) != version_of(
        make_toolkit(tmp_path / "b", 13000, 3_000_002)
    )


def test_a_toolkit_directory_that_the_caller_names_tells_its_version(tmp_path: Path) -> None:
    root = make_toolkit(tmp_path / "cuda", 13000)
    assert str(toolkit.toolkit_dir_version(root / "include")).startswith("cudart 13.0 ")
    assert str(toolkit.toolkit_dir_version(root / "include/cccl")).startswith("cccl 3.0.1 ")
    checkout = make_include(tmp_path / "checkout/libcudacxx/include", cccl=3_001_000)
    before = toolkit.toolkit_dir_version(checkout)
    assert before == toolkit.toolkit_dir_version(checkout)
    # Nothing in it is scanned, so a change anywhere in it must show.
    write(checkout / "cuda/std/__new/deep.h", "// new")
    assert toolkit.toolkit_dir_version(checkout) != before
    assert toolkit.toolkit_dir_version(tmp_path) is None


def test_an_edit_of_the_same_size_in_a_checkout_is_another_version(tmp_path: Path) -> None:
    """People edit a checkout of CCCL: a stale kernel was served."""
    write(tmp_path / "cuda/std/version", "")
    write(tmp_path / "cuda/std/__new/deep.h", "#define V 1")
    (tmp_path / "cuda/std/.#deep.h").symlink_to("nowhere")
    before = toolkit.toolkit_dir_version(tmp_path)

    write(tmp_path / "cuda/std/__new/deep.h", "#define V 2")

    assert toolkit.toolkit_dir_version(tmp_path) != before
    write(tmp_path / "cuda/std/__new/deep.h", "#define V 1")
    assert toolkit.toolkit_dir_version(tmp_path) == before


# -- headers: real ones -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [FP16, CSTDINT, CUB, COOPERATIVE])
def test_toolkit_headers_compile_with_what_is_found(unit: toolkit.HeaderUnit, source: str) -> None:
    """C19, C20."""
    assert compiles(source, unit.include_dirs)
    assert not compiles(source, ())


def test_cccl_needs_the_second_directory(unit: toolkit.HeaderUnit) -> None:
    """C20."""
    if not unit.include_dirs[1:]:
        pytest.skip("CCCL lies beside the other headers here")
    assert not compiles(CSTDINT, unit.include_dirs[:1])


def test_the_unit_found_is_of_the_version_of_nvrtc_or_its_own(build: str, unit: toolkit.HeaderUnit) -> None:
    major = build.split(".")[0]
    assert unit.version.startswith((f"bundled {build}", f"cudart {major}."))


# -- bundled headers ----------------------------------------------------------------------------------------------


def fingerprint(tree: Path) -> dict[str, int]:
    return {str(path.relative_to(tree)): path.stat().st_size for path in tree.rglob("*") if path.is_file()}


def root_of() -> Path:
    return settings.cache_directory() / "headers"


def test_bundled_headers_are_extracted_once_and_are_private(bundled_build: str, tmp_path: Path) -> None:
    first = toolkit.HeaderUnit("", bundled=bundled_build).include_dirs
    tree = root_of() / bundled_build
    assert first == (str(tree), str(tree / "cccl"))
    assert tmp_path in tree.parents
    assert root_of().stat().st_mode & 0o777 == root_of().parent.stat().st_mode & 0o777 == 0o700
    assert tree.stat().st_mode & 0o022 == 0
    stamp = (tree / "cuda_fp16.h").stat().st_mtime_ns
    assert toolkit.HeaderUnit("", bundled=bundled_build).include_dirs == first
    assert (tree / "cuda_fp16.h").stat().st_mtime_ns == stamp
    assert sorted(path.name for path in root_of().iterdir()) == [
        bundled_build,
        f"{bundled_build}.lock",
        f"{bundled_build}.seal",
    ]


def extract_and_describe(build: str, barrier: Any, results: Any) -> None:
    barrier.wait()
    tree = bundled.bundled_headers(build)
    assert tree is not None
    results.put((str(tree), fingerprint(tree)))


def test_many_processes_at_once_find_whole_headers(bundled_build: str) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=extract_and_describe, args=(bundled_build, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert found[0][1]["cuda_fp16.h"] > 0
    assert all(one == found[0] for one in found)


def test_damaged_headers_are_mended(bundled_build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-extracted (no seal), files and directories deleted, something else in their place, emptied by a crash."""
    tree = bundled.bundled_headers(bundled_build)
    assert tree is not None
    whole = fingerprint(tree)

    def mended() -> bool:
        assert bundled.bundled_headers(bundled_build) == tree
        return fingerprint(tree) == whole

    (tree / "cooperative_groups/reduce.h").unlink()
    shutil.rmtree(tree / "cccl/cub")
    shutil.rmtree(tree / "crt")
    write(tree / "crt", "in the way")
    (tree / "cuda_fp16.h").unlink()
    write(tree / "cuda_fp16.h/inside")
    assert mended()
    (root_of() / f"{bundled_build}.seal").unlink()
    write(tree / "cuda_bf16.h")
    assert mended()
    write(root_of() / f"{bundled_build}.seal", "nonsense\n1 2")
    assert mended()
    write(tree / "cuda_bf16.h")
    monkeypatch.setattr(bundled, "_boot", lambda: "the next boot")
    assert mended()


def test_what_killed_processes_left_is_swept(bundled_build: str) -> None:
    bundled._make_private(root_of())
    old = write(root_of() / ".extracting-old/headers/cuda_fp16.h").parents[1]
    os.utime(old, (1, 1))
    young = write(root_of() / ".extracting-young/headers/cuda_fp16.h").parents[1]
    assert bundled.bundled_headers(bundled_build)
    assert not old.exists()
    assert young.exists()


def test_headers_go_to_a_temporary_directory_where_the_cache_cannot_be_written(
    bundled_build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "file")))
    tree = bundled.bundled_headers(bundled_build)
    assert tree == temporary / f"kernelstore-headers-{os.geteuid()}" / bundled_build
    assert tree.parent.stat().st_mode & 0o777 == 0o700
    # Anybody could have made this one.
    tree.parent.chmod(0o777)
    assert bundled.bundled_headers(bundled_build) is None
    with caplog.at_level(logging.WARNING):
        assert toolkit.HeaderUnit("", bundled=bundled_build).include_dirs == ()
    assert "CUDA_HOME" in caplog.text


def test_a_link_planted_in_the_temporary_directory_is_not_followed(
    bundled_build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / f"kernelstore-headers-{os.geteuid()}").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "file")))
    assert bundled.bundled_headers(bundled_build) is None
    assert list((tmp_path / "theirs").iterdir()) == []


def test_headers_of_another_build_than_the_loaded_one_are_not_extracted(
    bundled_build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert bundled.bundled_headers("13.99.1") is None
    assert not (root_of() / "13.99.1").exists()


# -- toolkit directories and names --------------------------------------------------------------------------------


def test_toolkit_directories_are_recognised(tmp_path: Path) -> None:
    root = make_toolkit(tmp_path / "cuda", 13000)
    assert toolkit.is_toolkit_dir(root / "include")
    assert toolkit.is_toolkit_dir(root / "include/cccl")
    assert toolkit.is_toolkit_dir(str(make_include(tmp_path / "cccl", cccl=2_008_002)))
    assert not toolkit.is_toolkit_dir(tmp_path / "absent")
    mine = tmp_path / "mine"
    write(mine / "cuda/my_kernels.h")
    write(mine / "cuda_fp16.h")
    assert not toolkit.is_toolkit_dir(mine)


def test_real_toolkit_directories_are_recognised(unit: toolkit.HeaderUnit) -> None:
    assert [toolkit.is_toolkit_dir(directory) for directory in unit.include_dirs] == [True] * len(unit.include_dirs)


def test_names_that_hide_those_of_the_toolkit_are_told(tmp_path: Path) -> None:
    for name in ("cub/mine.cuh", "cuda_fp16.h", "mine.h", "cuda_fp16.h.bak", "Cub/x.h"):
        write(tmp_path / name)
    assert toolkit.shadowed_names(str(tmp_path)) == ["cub", "cuda_fp16.h"]
    assert toolkit.shadowed_names(tmp_path / "mine.h") == []
    assert toolkit.shadowed_names("/no/where") == []


def names_in(*directories: str | Path) -> set[str]:
    entries = {path.name for directory in directories for path in Path(directory).iterdir()}
    return {name for name in entries if not name.startswith((".", "_")) and name != "cccl"}


def test_the_names_are_those_of_the_bundled_headers(bundled_build: str) -> None:
    if not bundled_build.startswith("13.5."):
        pytest.skip(f"the names of NVRTC 13.5 are written down, this is {bundled_build}")
    assert names_in(*toolkit.HeaderUnit("", bundled=bundled_build).include_dirs) == toolkit_names.BUNDLED_13_5


def test_the_names_are_those_of_the_wheels() -> None:
    found = next((dirs for path in sys.path for dirs in toolkit._split_wheels(os.path.join(path, "nvidia"))), None)
    if found is None or len(found) != 2 or toolkit._cudart_version(found[0]) != (12, 9):
        pytest.skip("the wheels nvidia-cuda-runtime-cu12 and nvidia-cuda-cccl-cu12 of 12.9 are not installed")
    assert names_in(*found) == toolkit_names.WHEELS_12_9


def test_all_names_are_known_together() -> None:
    assert toolkit_names.TOOLKIT_NAMES >= toolkit_names.BUNDLED_13_5 | toolkit_names.WHEELS_12_9
    assert {"cub", "cuda", "thrust", "nv", "cuda_fp16.h", "cuda_runtime.h"} <= toolkit_names.TOOLKIT_NAMES
    assert "cccl" not in toolkit_names.TOOLKIT_NAMES
