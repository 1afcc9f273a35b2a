"""The NVRTC boundary, with the real NVRTC of this environment."""

from __future__ import annotations

import logging
import pickle
import re
import shutil
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kernelstore.arch import Arch
from kernelstore.cuda import nvrtc
from kernelstore.errors import CompileError, InvalidArgument, InvalidOption, ToolchainError, UnsupportedArch

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
try:
    nvrtc.version()
except ToolchainError:
    pytest.skip("libnvrtc is not installed", allow_module_level=True)

K = 'extern "C" __global__ void k(float*a){a[threadIdx.x]+=1.f;}'
WGMMA = 'extern "C" __global__ void k(){asm volatile("wgmma.fence.sync.aligned;");}'
PLAIN = "__global__ void plain(int*p){p[0]=1;}"
EXTERN = "extern __device__ float ext(float); __global__ void k(float*p){p[0]=ext(p[0]);}"


def compile_(source: str, arch: str = "sm_90", *options: str, **given: Any) -> nvrtc.Output:
    arguments: dict[str, Any] = {"name": "k.cu", "name_expressions": (), "headers": {}} | given
    return nvrtc.compile_program(source, options=options, arch=Arch.parse(arch), **arguments)


def elf_type(cubin: bytes) -> int:
    return int.from_bytes(cubin[16:18], "little")


def test_importing_the_modules_imports_no_bindings() -> None:
    """They cost 60-140 ms."""
    code = (
        "import sys\n"
        "from kernelstore.cuda import nvrtc, ptxas, toolkit\n"
        "assert not [name for name in sys.modules if name.startswith(('cuda.bindings', 'cuda.pathfinder'))]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- what a run gives ---------------------------------------------------------------------------------------------


def test_one_run_gives_ptx_with_one_nul_and_a_cubin() -> None:
    output = compile_(K)
    assert output.ptx is not None
    assert output.cubin is not None
    assert output.ptx.endswith(b"\0")
    assert output.ptx.count(b"\0") == 1
    assert b".visible .entry k(" in output.ptx
    assert output.cubin.startswith(b"\x7fELF")
    assert output.ltoir is None
    assert output.log == ""
    assert type(output.ptx) is type(output.cubin) is bytes


def test_a_virtual_arch_gives_the_same_ptx_and_no_cubin() -> None:
    output = compile_(K, "compute_90")
    assert output.cubin is None
    assert output.ptx == compile_(K).ptx


@pytest.mark.parametrize("arch", ["sm_80", "compute_80"])
def test_dlto_gives_ltoir_alone(arch: str) -> None:
    """C30: NVRTC's PTX is then a lone NUL, its cubin empty."""
    output = compile_(K, arch, "-dlto")
    assert output.ptx is None
    assert output.cubin is None
    assert output.ltoir
    assert output.ltoir != bytes(len(output.ltoir))


@pytest.mark.parametrize("option", ["-rdc=true", "-dc", "--relocatable-device-code=true", "--device-c"])
def test_relocatable_code_is_an_elf_of_another_type(option: str) -> None:
    """C32: ET_REL, where a cubin that can be loaded is ET_EXEC."""
    relocatable, final = compile_(EXTERN, "sm_90", option).cubin, compile_(K).cubin
    assert relocatable is not None
    assert final is not None
    assert (elf_type(relocatable), elf_type(final)) == (1, 2)


def test_an_unresolved_function_is_a_compile_error() -> None:
    """C32."""
    with pytest.raises(CompileError, match="Unresolved extern function '_Z3extf'"):
        compile_(EXTERN)


def test_an_empty_program_compiles() -> None:
    output = compile_("", name="")
    assert output.cubin
    assert output.lowered_names == {}


def test_warnings_are_in_the_log_of_a_success() -> None:
    """C37."""
    output = compile_("__global__ void k(int*p){int unused=3;\np[0]=1;}")
    assert "warning #177-D" in output.log
    assert output.log == output.log.rstrip().rstrip("\0")


def test_what_ptxas_says_is_in_the_log() -> None:
    """C37."""
    assert "Used " in compile_(K, "sm_90", "--ptxas-options=-v").log


def test_bytes_of_a_log_that_are_no_utf8_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "bad.h").write_bytes(b'#warning "\xff\xfe"\n')
    output = compile_(f"#include <bad.h>\n{K}", "sm_90", f"-I{tmp_path}")
    assert "\N{REPLACEMENT CHARACTER}" in output.log
    (tmp_path / "bad.h").write_bytes(b'#error "\xff\xfe"\n')
    with pytest.raises(CompileError, match="\N{REPLACEMENT CHARACTER}"):
        compile_("#include <bad.h>\n", "sm_90", f"-I{tmp_path}")


def test_buffers_shared_by_the_interpreter_are_not_written() -> None:
    """An empty log has one byte, and bytes of length 1 are singletons."""
    compile_(K)
    assert [bytes([value])[0] for value in range(256)] == list(range(256))


def test_every_program_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, counts = nvrtc._loaded(), {"nvrtcCreateProgram": 0, "nvrtcDestroyProgram": 0}

    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name in counts:
                counts[name] += 1
            return getattr(real, name)

    nvrtc.build()
    monkeypatch.setattr(nvrtc, "_loaded", Counting)
    compile_(K)
    for source, names in (("oops", ()), (K, ("nope",)), (K, ("\0",))):
        with pytest.raises((CompileError, InvalidArgument)):
            compile_(source, name_expressions=names)
    assert counts == {"nvrtcCreateProgram": 3, "nvrtcDestroyProgram": 3}


def test_threads_compile_at_once() -> None:
    expected, found = compile_(K), []
    threads = [threading.Thread(target=lambda: found.append(compile_(K))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_headers_by_content_are_found_under_their_spelling() -> None:
    output = compile_(
        '#include "sub/q.h"\n#include <r.h>\nextern "C" __global__ void k(int*p){p[0]=Q+R;}',
        headers={"sub/q.h": "#define Q 1000\n", "r.h": "#define R 234\n"},
    )
    assert output.ptx is not None
    assert re.search(rb"mov\.\w+\s+%r\d+, 1234;", output.ptx)


@pytest.mark.parametrize("spelling", [("-I{}",), ("-I", "{}"), ("--include-path={}",), ("--include-path", "{}")])
def test_an_include_directory_may_have_spaces(tmp_path: Path, spelling: tuple[str, ...]) -> None:
    """C22."""
    directory = tmp_path / "a dir"
    directory.mkdir()
    (directory / "q.h").write_text("#define Q 1\n")
    output = compile_(f"#include <q.h>\n{K}", "sm_90", *(part.format(directory) for part in spelling))
    assert output.cubin


# -- name expressions ---------------------------------------------------------------------------------------------


def test_each_spelling_of_a_name_expression_has_its_lowered_name() -> None:
    source = (
        "template<class A,class B=float> __global__ void mul(A*p,B v){p[threadIdx.x]*=(A)v;}"
        "template<int N> __global__ void addn(int*p){p[0]+=N;} __constant__ int table[4];"
    )
    names = ("mul<size_t,float>", "mul<unsigned long,float>", "mul< float , float >", "addn<1+2>", "&table")
    assert compile_(source, name_expressions=names).lowered_names == {
        "mul<size_t,float>": "_Z3mulImfEvPT_T0_",
        "mul<unsigned long,float>": "_Z3mulImfEvPT_T0_",
        "mul< float , float >": "_Z3mulIffEvPT_T0_",
        "addn<1+2>": "_Z4addnILi3EEvPi",
        "&table": "table",
    }


def test_a_kernel_without_extern_c_resolves_by_name_expression() -> None:
    """C33."""
    output = compile_(PLAIN, name_expressions=("plain", "plain"))
    assert output.lowered_names == {"plain": "_Z5plainPi"}


@pytest.mark.parametrize("names", [("nope", "plain", "nix<int>"), ("plain<", "nope", "nix<int>")])
def test_unknown_name_expressions_are_named(names: tuple[str, ...]) -> None:
    """C33."""
    with pytest.raises(CompileError) as caught:
        compile_(PLAIN, name_expressions=names)
    assert "__nv_name_map" in caught.value.log
    hint = next(line for line in caught.value.message.split("\n") if line.startswith("Name expressions"))
    assert "nope" in hint
    assert "nix<int>" in hint
    assert "plain," not in hint
    assert caught.value.result == "NVRTC_ERROR_COMPILATION"


# -- archs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_70", "sm_101", "sm_110", "sm_139", "compute_139"])
def test_an_arch_compiles_or_is_unsupported_as_nvrtc_tells(arch: str) -> None:
    """C17, C26: sm_101 was renamed to sm_110, sm_70 was removed, and there will be newer ones."""
    number = int(arch.split("_")[1])
    if number in nvrtc.supported_archs():
        assert compile_(K, arch).ptx
        return
    with pytest.raises(UnsupportedArch) as caught:
        compile_(K, arch)
    major, minor = nvrtc.version()
    assert f"NVRTC {major}.{minor}" in caught.value.message
    assert "sm_90" in caught.value.message
    assert caught.value.arch == arch
    assert caught.value.toolchain == f"nvrtc {nvrtc.build()}"
    assert caught.value.supported == nvrtc.supported_archs()


@pytest.mark.parametrize("arch", ["sm_80a", "sm_75f", "sm_90f", "compute_80a"])
def test_a_suffix_that_the_arch_has_not_is_an_unsupported_arch(arch: str) -> None:
    """C15: the number alone is supported; NVRTC's front end then reports another error than for a number."""
    with pytest.raises(UnsupportedArch, match=arch):
        compile_(K, arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_100f", "sm_120a", "compute_90a"])
def test_suffixes_reach_the_ptx(arch: str) -> None:
    """C15."""
    output = compile_(K, arch)
    assert output.ptx is not None
    assert f".target sm_{arch.split('_')[1]}\n".encode() in output.ptx


def test_an_instruction_of_one_arch_fails_for_its_plain_name_only_in_ptxas() -> None:
    """C15: PTX of compute_90 "compiles"; it could never be loaded."""
    assert compile_(WGMMA, "sm_90a").cubin
    with pytest.raises(CompileError, match=r"wgmma\.fence.* not supported on \.target 'sm_90'"):
        compile_(WGMMA, "sm_90")
    with pytest.raises(CompileError, match="wgmma"):
        compile_(WGMMA, "sm_100a")
    only_ptx = compile_(WGMMA, "compute_90")
    assert only_ptx.ptx
    assert only_ptx.cubin is None


# -- errors -------------------------------------------------------------------------------------------------------


def test_a_compile_error_shows_log_source_lines_and_options() -> None:
    source = "\n".join(["// one", "// two", "__global__ void k(int*p) {", "  int x = 1;", "  oops;", "}", "// seven"])
    with pytest.raises(CompileError) as caught:
        compile_(source, "sm_90", "-DX=1", name="dir/a b.cu")
    error = caught.value
    assert 'identifier "oops" is undefined' in error.log
    assert "dir/a b.cu:\n" in error.message
    assert ">    5 |   oops;" in error.message
    assert "     2 | // two" in error.message
    assert "one" not in error.message
    assert "['-DX=1']" in error.message
    assert "sm_90" in error.message
    assert (error.options, error.result, error.name, error.arch, error.toolchain) == (
        ("-DX=1",),
        "NVRTC_ERROR_COMPILATION",
        "dir/a b.cu",
        "sm_90",
        f"nvrtc {nvrtc.build()}",
    )


def test_a_compile_error_shows_the_lines_of_a_header_by_content() -> None:
    header = "#pragma once\n\f#define OK\n#error boom\n"
    with pytest.raises(CompileError) as caught:
        compile_('#include "h.h"\n', headers={"h.h": header})
    assert "h.h:\n" in caught.value.message
    assert ">    3 | #error boom" in caught.value.message


def test_a_compile_error_of_a_program_without_a_name_shows_its_lines() -> None:
    with pytest.raises(CompileError, match=r">    1 \| oops"):
        compile_("oops", name="")


def test_errors_survive_pickling() -> None:
    for arch, option in (("sm_90", "--frobnicate"), ("sm_139", "-DX")):
        with pytest.raises((InvalidOption, UnsupportedArch)) as caught:
            compile_(K, arch, option)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert type(copy) is type(caught.value)
        assert (copy.message, copy.fields) == (caught.value.message, caught.value.fields)


def test_a_long_log_is_cut_in_the_message_and_whole_in_the_field() -> None:
    with pytest.raises(CompileError) as caught:
        compile_("\n".join(f'extern "C" __global__ void k{i}(int*p){{ p[0] = undefined{i}; }}' for i in range(99)))
    assert len(caught.value.message) < 20_000 or "characters in all" in caught.value.message
    assert "undefined98" in caught.value.log


@pytest.mark.parametrize(
    "option", ["--frobnicate", "-std=c++99", "", "--maxrregcount=x", "--ptxas-options=--nope", "-DX(=3"]
)
def test_an_invalid_option_is_told_with_all_options_version_and_library(option: str) -> None:
    """C25: of NVRTC itself, of its front end and of ptxas."""
    with pytest.raises(InvalidOption) as caught:
        compile_(K, "sm_90", "-DY", option)
    error = caught.value
    assert error.log
    assert error.log in error.message
    assert str(["-DY", option]) in error.message
    assert str(nvrtc.library_path()) in error.message
    assert "NVRTC {}.{}".format(*nvrtc.version()) in error.message
    assert error.options == ("-DY", option)


@pytest.mark.parametrize("header", ["cuda_fp16.h", "cub/cub.cuh", "stdint.h", "mine.h"])
def test_a_header_that_is_not_found_is_told_with_the_directories_searched(tmp_path: Path, header: str) -> None:
    """C19."""
    with pytest.raises(CompileError) as caught:
        compile_(f"#include <{header}>\n{K}")
    assert caught.value.result == "NVRTC_ERROR_COMPILATION"
    assert "no directories in search list" in caught.value.log
    assert f"Searched for {header!r}: no directory" in caught.value.message
    with pytest.raises(CompileError) as caught:
        compile_(f"#include <{header}>\n{K}", "sm_90", f"-I{tmp_path}", "--include-path", "/no/where")
    assert f"Searched for {header!r}: {tmp_path}, /no/where." in caught.value.message
    remedy = {"stdint.h": "<cuda/std/cstdint>", "mine.h": "include_dirs"}.get(header, "pip install nvidia-cuda-runtime")
    assert remedy in caught.value.message


def test_a_failure_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C21: it fails each time, and succeeds as soon as the header is there."""
    caplog.set_level(logging.DEBUG)
    source = f"#include <late.h>\n{K}"
    for _ in range(2):
        with pytest.raises(CompileError, match=r"late\.h"):
            compile_(source, "sm_90", f"-I{tmp_path}")
    (tmp_path / "late.h").write_text("")
    assert compile_(source, "sm_90", f"-I{tmp_path}").cubin
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "given",
    [
        {"source": "a\0b"},
        {"source": "\udc80"},
        {"name": "a\0"},
        {"options": ("-DX\0",)},
        {"name_expressions": ("k\0",)},
        {"headers": {"h\0": ""}},
        {"headers": {"h": "\0"}},
    ],
)
def test_text_that_nvrtc_would_not_read_to_its_end_is_refused(given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"source": K, "name": "k", "options": (), "name_expressions": (), "headers": {}} | given
    with pytest.raises(InvalidArgument):
        nvrtc.compile_program(arguments.pop("source"), arch=Arch.parse("sm_90"), **arguments)


# -- the library --------------------------------------------------------------------------------------------------


def test_the_build_is_the_wheels() -> None:
    build = nvrtc.build()
    assert re.fullmatch(r"\d+\.\d+\.\d+", build)
    assert build.startswith("{}.{}.".format(*nvrtc.version()))
    name = "nvidia-cuda-nvrtc" if nvrtc.version()[0] >= 13 else f"nvidia-cuda-nvrtc-cu{nvrtc.version()[0]}"
    try:
        wheel = metadata.version(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"NVRTC is not from the wheel {name}")
    assert build == wheel


def test_supported_archs_are_numbers_in_order() -> None:
    archs = nvrtc.supported_archs()
    assert list(archs) == sorted(archs)
    assert {80, 90, 100, 120} <= set(archs)


def test_the_library_is_one_that_this_process_has_mapped() -> None:
    path = nvrtc.library_path()
    assert path is not None
    assert str(path) in Path("/proc/self/maps").read_text()
    assert str(path) in nvrtc._mapped_libraries()


def test_headers_of_a_library_without_any_are_refused(tmp_path: Path) -> None:
    if nvrtc.has_bundled_headers():
        pytest.skip("this NVRTC bundles headers")
    with pytest.raises(ToolchainError, match="no headers of its own"):
        nvrtc.install_bundled_headers(tmp_path)


def test_bundled_headers_are_extracted(tmp_path: Path) -> None:
    if not nvrtc.has_bundled_headers():
        pytest.skip("this NVRTC bundles no headers")
    nvrtc.install_bundled_headers(tmp_path / "a b" / "c")
    assert (tmp_path / "a b" / "c" / "cuda_fp16.h").is_file()
    (tmp_path / "file").touch()
    with pytest.raises(ToolchainError, match=r"cannot be extracted into .*/file/below: nvrtcResult \d+ .+"):
        nvrtc.install_bundled_headers(tmp_path / "file" / "below")


PRINT_TOOLCHAIN_ERROR = """
import ctypes, sys
if len(sys.argv) > 1:
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # cuda.bindings takes a libnvrtc that is loaded already
else:
    sys.modules["cuda.bindings.nvrtc"] = None
from kernelstore.arch import Arch
from kernelstore.cuda import nvrtc
from kernelstore.errors import ToolchainError
try:
    nvrtc.compile_program("", name="k.cu", options=(), name_expressions=(), headers={}, arch=Arch.parse("sm_90"))
except ToolchainError as error:
    print(error, error.library, error.log, sep="\\n--\\n")
"""


def run_in_process(*arguments: str) -> str:
    command = [sys.executable, "-c", PRINT_TOOLCHAIN_ERROR, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_builtins_that_are_missing_are_not_blamed_on_the_program(tmp_path: Path) -> None:
    """C35: a real libnvrtc, alone in its directory."""
    library = nvrtc.library_path()
    assert library is not None
    copy = str(shutil.copy(library, tmp_path))
    message, told, log = run_in_process(copy).split("\n--\n")
    assert "libnvrtc-builtins" in message
    assert copy in message
    assert "pip install 'kernelstore[cu" in message
    assert told == copy
    assert "failed to open libnvrtc-builtins" in log


def test_bindings_that_are_missing_are_told_with_the_remedy() -> None:
    """C35."""
    message, told, _ = run_in_process().split("\n--\n")
    assert "NVRTC cannot be loaded" in message
    assert "pip install 'kernelstore[cu13]'" in message
    assert told == "None"
