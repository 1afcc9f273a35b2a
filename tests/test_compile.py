"""Compiling: real NVRTC, both outputs of one run stored together, and what a failed compile leaves: nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kernelstore import Artifact, Compiler, Store
from kernelstore.cuda import nvrtc, toolkit
from kernelstore.directives import Directives
from kernelstore.errors import (
    ArchRequired,
    CompileError,
    CompilerClosed,
    InvalidArch,
    InvalidArgument,
    InvalidOption,
    InvalidType,
    StoreWarning,
    ToolchainError,
    UncacheableWarning,
    UnknownPlugin,
    UnsupportedArch,
)
from kernelstore.options import Options

K = 'extern "C" __global__ void k(float*a){a[threadIdx.x]+=1.f;}'
T = (
    "template<class A,class B=float> __global__ void mul(A*p,B v){p[threadIdx.x]*=(A)v;}\n"
    "template<int N> __global__ void addn(int*p){p[0]+=N;}"
)
W = 'extern "C" __global__ void k(){asm volatile("wgmma.fence.sync.aligned;");}'

Count = Callable[[], int]
Rows = Callable[..., list[tuple[Any, ...]]]


def test_the_second_compile_is_a_hit_with_the_same_bytes(compiler: Compiler, count_compiles: Count) -> None:
    first = compiler.compile(K, arch="sm_90")
    second = compiler.compile(K, arch="sm_90")

    assert count_compiles() == 1
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.payload == first.payload
    assert second.symbols == first.symbols


def test_the_next_process_hits_without_loading_nvrtc_or_the_driver(
    path: Path, compiler: Compiler, run_python: Callable[..., str]
) -> None:
    compiler.compile(T, arch="sm_90", name_expressions=("addn<3>",))
    compiler.store.flush()  # type: ignore[union-attr]

    printed = run_python(
        "import sys; from kernelstore import Compiler, Store\n"
        "compiler = Compiler(Store(sys.argv[1]))\n"
        "artifact = compiler.compile(sys.argv[2], arch='sm_90', name_expressions=('addn<3>',))\n"
        "wanted = {'sqlalchemy', 'alembic', 'cuda.bindings', 'cuda.core', 'cuda.pathfinder', 'numpy'}\n"
        "print(artifact.from_cache, sorted(set(sys.modules) & wanted))\n"
        "print('libnvrtc' in open('/proc/self/maps').read())",
        path,
        T,
    )

    assert printed.split("\n")[:2] == ["True []", "False"]


def test_a_cubin_and_its_ptx_come_from_one_run(compiler: Compiler, count_compiles: Count, rows: Rows) -> None:
    cubin = compiler.compile(K, "cubin", arch="sm_90")
    ptx = compiler.compile(K, "ptx", arch="sm_90")

    assert count_compiles() == 1
    assert (cubin.kind, cubin.arch) == ("cubin", "sm_90")
    assert (ptx.kind, ptx.arch, ptx.from_cache) == ("ptx", "compute_90", True)
    assert ptx.payload.endswith(b"\0")
    assert ptx.payload.count(b"\0") == 1
    assert rows("SELECT kind, arch FROM artifact ORDER BY kind") == [("cubin", "sm_90"), ("ptx", "compute_90")]


def test_ptx_kept_beside_a_cubin_is_what_a_run_for_ptx_makes(compiler: Compiler) -> None:
    compiler.compile(T, "cubin", arch="sm_90a", name_expressions=("addn<3>",))

    kept = compiler.compile(T, "ptx", arch="compute_90a", name_expressions=("addn<3>",))
    fresh = compiler.compile(T, "ptx", arch="compute_90a", name_expressions=("addn<3>",), cache=False)

    assert kept.from_cache
    assert (kept.payload, kept.log, kept.ptx_version) == (fresh.payload, fresh.log, fresh.ptx_version)
    assert kept.symbols == fresh.symbols


def test_every_spelling_of_a_name_is_kept(
    compiler: Compiler, path: Path, count_compiles: Count, run_python: Callable[..., str]
) -> None:
    """C01: names are never demangled; NVRTC's own map is stored."""
    spelled = ("mul<size_t,float>", "mul<unsigned long,float>", "mul< float , float >", "addn<1+2>")

    artifact = compiler.compile(T, arch="sm_90", name_expressions=spelled)

    lowered = {symbol.name_expression: symbol.lowered_name for symbol in artifact.symbols}
    assert set(lowered) == set(spelled)
    assert lowered["mul<size_t,float>"] == lowered["mul<unsigned long,float>"] == "_Z3mulImfEvPT_T0_"
    assert lowered["addn<1+2>"] == "_Z4addnILi3EEvPi"
    printed = run_python(
        "import sys; from kernelstore import Compiler, Store; from kernelstore.cuda import nvrtc\n"
        "nvrtc.compile_program = None\n"
        "artifact = Compiler(Store(sys.argv[1])).compile(sys.argv[2], arch='sm_90', name_expressions=sys.argv[3:])\n"
        "print({symbol.name_expression: symbol.lowered_name for symbol in artifact.symbols})",
        path,
        T,
        *spelled,
    )
    assert eval(printed) == lowered


def test_another_set_of_names_is_another_entry(compiler: Compiler, count_compiles: Count) -> None:
    """C02: never a hit that lacks the kernel."""
    for number, names in enumerate([["addn<3>"], ["addn<4>"], ["addn<4>", "addn<3>"], ["addn<3>", "addn<4>"]]):
        artifact = compiler.compile(T, arch="sm_90", name_expressions=names)

        assert {symbol.name for symbol in artifact.symbols} == set(names)
        assert artifact.from_cache == (number == 3)
    assert count_compiles() == 3


def test_the_order_of_macros_decides(compiler: Compiler) -> None:
    """C09: NVRTC's last -D wins."""
    source = 'extern "C" __global__ void k(int* a) { a[0] = X; }'

    def constant(*options: str) -> bytes:
        return compiler.compile(source, "ptx", arch="compute_90", options=options).payload

    assert b", 2;" in constant("-DX=1", "-DX=2")
    assert b", 1;" in constant("-DX=2", "-DX=1")


def test_rows_do_not_multiply_over_processes(path: Path, run_python: Callable[..., str], rows: Rows) -> None:
    """C03: nothing of the output is in the key."""
    for _ in range(2):
        run_python(
            "import sys; from kernelstore import Compiler, Store\n"
            "with Store(sys.argv[1]) as store: Compiler(store).compile(sys.argv[2], arch='sm_90')",
            path,
            K,
        )

    assert rows("SELECT count(*) FROM artifact") == [(2,)]


def test_symbols_tell_parameters_and_resource_usage(compiler: Compiler) -> None:
    source = (
        "struct P { float a; int b[3]; };\n"
        "__device__ int table[4] = {1, 2, 3, 4};\n"
        "__global__ void st(P p, float* o, double d, short s) {\n"
        "  __shared__ float t[64]; t[threadIdx.x] = o[threadIdx.x]; __syncthreads();\n"
        "  o[0] = p.a + p.b[2] + t[63 - threadIdx.x] + table[p.b[0] & 3] + d + s; }"
    )

    artifact = compiler.compile(source, arch="sm_90", name_expressions=("st", "&table"))

    kernel = next(symbol for symbol in artifact.symbols if symbol.name == "st")
    variable = next(symbol for symbol in artifact.symbols if symbol.name == "&table")
    assert kernel.what == "kernel"
    assert kernel.parameters == ("b8[16] align 4", "u64", "f64", "u16")
    assert kernel.registers is not None
    assert kernel.registers > 0
    assert kernel.shared_bytes == 256
    assert kernel.constant_bytes is not None
    assert kernel.constant_bytes > 0
    assert kernel.spill_store_bytes == 0
    assert (variable.what, variable.lowered_name, variable.parameters) == ("variable", "table", None)


def test_the_log_is_replayed_on_a_hit(compiler: Compiler) -> None:
    """C37: a warning."""
    source = 'extern "C" __global__ void k() { int unused = 3; }'

    first = compiler.compile(source, arch="sm_90")
    second = compiler.compile(source, arch="sm_90")

    assert second.from_cache
    assert "#177-D" in first.log
    assert "ptxas info" not in first.log
    assert second.log == first.log


def test_verbose_output_of_ptxas_stays_for_those_who_asked(compiler: Compiler) -> None:
    """C37: --ptxas-options=-v."""
    first = compiler.compile(K, arch="sm_90", options=("--ptxas-options=-v",))
    second = compiler.compile(K, arch="sm_90", options=("--ptxas-options=-v",))

    assert "Used" in first.log
    assert second.log == first.log


def test_an_arch_specific_instruction_needs_the_arch_with_its_suffix(compiler: Compiler, rows: Rows) -> None:
    """C15."""
    with pytest.raises(CompileError, match="wgmma"):
        compiler.compile(W, arch="sm_90")
    with pytest.raises(CompileError):
        compiler.compile(W, arch="sm_100a")
    assert rows("SELECT count(*) FROM artifact") == [(0,)]

    compiler.compile(W, arch="sm_90a")

    assert rows("SELECT arch, arch_major, arch_minor, arch_suffix FROM artifact WHERE kind = 'cubin'") == [
        ("sm_90a", 9, 0, "a")
    ]


def test_close_archs_do_not_share_an_entry(compiler: Compiler) -> None:
    """C13: what was made for sm_120a is nothing for sm_121, nor for sm_120."""
    compiler.compile(K, arch="sm_120a")

    assert not compiler.compile(K, arch="sm_121").from_cache
    assert not compiler.compile(K, arch="sm_120").from_cache


def test_a_failed_compile_leaves_no_row_and_is_not_remembered(compiler: Compiler, rows: Rows) -> None:
    """C19, C21."""
    source = '#include <missing.h>\nextern "C" __global__ void k(int* a) { a[0] = Q; }'
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            compiler.compile(source, arch="sm_90")
    assert caught.value.result == "NVRTC_ERROR_COMPILATION"
    assert "missing.h" in caught.value.log
    assert rows("SELECT count(*) FROM artifact UNION ALL SELECT count(*) FROM program") == [(0,), (0,)]

    artifact = compiler.compile(source, arch="sm_90", headers={"missing.h": "#define Q 7"})

    assert not artifact.from_cache


def test_a_compile_error_shows_the_lines_around_it(compiler: Compiler) -> None:
    source = "\n".join([f"// line {number}" for number in range(1, 10)] + ["__global__ void k() { nonsense; }"])

    with pytest.raises(CompileError) as caught:
        compiler.compile(source, arch="sm_90", name="k.cu", options=("-DN=8",))

    text = str(caught.value)
    assert "nonsense" in text
    assert "// line 9" in text
    assert "-DN=8" in text
    assert nvrtc.build().rpartition(".")[0] in text


def test_lto_ir_is_a_kind_of_its_own(compiler: Compiler, rows: Rows) -> None:
    """C30: with -dlto NVRTC gives no cubin, and PTX of one NUL."""
    artifact = compiler.compile(K, "ltoir", arch="sm_80")

    assert (artifact.kind, artifact.arch) == ("ltoir", "compute_80")
    assert artifact.size_bytes > 1000
    assert compiler.compile(K, "ltoir", arch="sm_80", options=("-dlto",)).from_cache
    with pytest.raises(InvalidOption, match="ltoir"):
        compiler.compile(K, "cubin", arch="sm_80", options=("-dlto",))
    assert rows("SELECT kind FROM artifact") == [("ltoir",)]


def test_a_relocatable_cubin_says_so(compiler: Compiler) -> None:
    """C32."""
    source = 'extern __device__ float ext(float); extern "C" __global__ void k(float* a) { a[0] = ext(a[1]); }'

    with pytest.raises(CompileError, match="Unresolved extern"):
        compiler.compile(source, arch="sm_90")
    artifact = compiler.compile(source, arch="sm_90", options=("-rdc=true",))

    assert artifact.relocatable
    assert compiler.compile(source, arch="sm_90", options=("-dc",)).from_cache
    assert compiler.compile(source, "ptx", arch="sm_90", options=("-dc",)).relocatable


def test_no_arch_and_no_device_is_said(compiler: Compiler) -> None:
    """C28: NVRTC's own default is never used."""
    from kernelstore.cuda import driver

    if driver.device_count():
        pytest.skip("there is a device to take the arch from")
    with pytest.raises(ArchRequired):
        compiler.compile(K)


@pytest.mark.parametrize("arch", ["sm_50", "sm_101", "sm_99"])
def test_an_arch_that_this_nvrtc_does_not_know_is_said_with_those_it_does(compiler: Compiler, arch: str) -> None:
    """C17, C26."""
    if int(arch[3:]) in nvrtc.supported_archs():
        pytest.skip(f"this NVRTC knows {arch}")

    with pytest.raises(UnsupportedArch) as caught:
        compiler.compile(K, arch=arch)

    assert caught.value.arch == arch
    assert "sm_90" in str(caught.value) or "90" in str(caught.value)
    assert caught.value.supported == nvrtc.supported_archs()


def test_a_device_newer_than_nvrtc_gets_ptx_of_the_newest_known_arch(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, rows: Rows
) -> None:
    """C26: the row says compute_NN and ptx, never the device's own arch."""
    from kernelstore import loader
    from kernelstore.cuda import driver

    loaded: list[Artifact] = []
    monkeypatch.setattr(driver, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "compute_capability", lambda device=None: (19, 9))
    monkeypatch.setattr(loader, "load", lambda artifact: loaded.append(artifact) or Mock())

    compiler.module(K)

    newest = max(nvrtc.supported_archs())
    assert [(artifact.kind, artifact.arch) for artifact in loaded] == [("ptx", f"compute_{newest}")]
    assert rows("SELECT kind, arch FROM artifact") == [("ptx", f"compute_{newest}")]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"kind": "cubin", "arch": "compute_90"}, InvalidArch),
        ({"arch": "sm_90", "options": ("-arch=sm_90",)}, InvalidArgument),
        ({"options": ("-arch=sm_90", "-arch=sm_80")}, InvalidOption),
        ({"arch": "sm_90", "options": ("--frobnicate",)}, InvalidOption),
        ({"arch": "sm_90", "options": ("-std=c++17 -DN=8",)}, CompileError),
        ({"arch": "sm_90", "codec": "zip"}, UnknownPlugin),
        ({"arch": "sm_90", "kind": "object"}, UnknownPlugin),
    ],
)
def test_what_cannot_be_compiled_is_said_and_nothing_is_stored(
    compiler: Compiler, arguments: dict[str, Any], error: type[Exception], rows: Rows
) -> None:
    """C23, C25."""
    with pytest.raises(error):
        compiler.compile(K, **arguments)

    assert rows("SELECT count(*) FROM artifact") == [(0,)]


def test_an_empty_source_has_no_kernels(compiler: Compiler) -> None:
    assert compiler.compile("", arch="sm_90").symbols == ()


# -- headers ------------------------------------------------------------------------------------------------------


def test_headers_by_content_are_compiled_and_cached(compiler: Compiler) -> None:
    source = '#include "a.h"\n#include <b.h>\nextern "C" __global__ void k(int* a) { a[0] = A + B; }'
    headers = {"a.h": "#define A 40", "b.h": '#include "c.h"\n', "c.h": "#define B 2"}

    first = compiler.compile(source, "ptx", arch="compute_90", headers=headers)
    second = compiler.compile(source, "ptx", arch="compute_90", headers=headers)
    third = compiler.compile(source, "ptx", arch="compute_90", headers=headers | {"c.h": "#define B 3"})

    assert b", 42;" in first.payload
    assert second.from_cache
    assert b", 43;" in third.payload


@pytest.mark.parametrize(
    "include", ["cuda_fp16.h", "cuda/std/cstdint", "cub/block/block_reduce.cuh", "cooperative_groups.h"]
)
def test_toolkit_headers_are_found_with_the_nvrtc_wheel_alone(compiler: Compiler, include: str) -> None:
    """C19, C20: the headers of NVRTC's own version, include and include/cccl."""
    if toolkit.find_headers(nvrtc.build(), toolkit.find_nvrtc()) is None:
        pytest.skip("no CUDA headers of this NVRTC's version here")
    source = f"#include <{include}>\n{K}"

    first = compiler.compile(source, arch="sm_90", options=("-std=c++17",))
    second = compiler.compile(source, arch="sm_90", options=("-std=c++17",))

    assert second.from_cache
    assert first.toolchain is not None
    assert first.toolchain.startswith(f"nvrtc {nvrtc.build()} with ")


def test_a_program_without_includes_does_not_depend_on_the_toolkit(compiler: Compiler) -> None:
    assert compiler.compile(K, arch="sm_90").toolchain == f"nvrtc {nvrtc.build()}"


def test_a_program_with_a_user_header_is_stored(compiler: Compiler, tmp_path: Path, count_compiles: Count) -> None:
    directory = tmp_path / "a dir"
    directory.mkdir()
    (directory / "q.h").write_text("#define Q 5")
    source = '#include <q.h>\nextern "C" __global__ void k(int* a) { a[0] = Q; }'

    first = compiler.compile(source, "ptx", arch="compute_90", include_dirs=[directory])
    second = compiler.compile(source, "ptx", arch="compute_90", options=[f"-I{directory}"])  # C22: a path with spaces

    assert b", 5;" in first.payload
    assert second.from_cache
    assert count_compiles() == 1
    assert first.program is not None
    assert list(first.program.user_headers) == ["q.h"]


UNCACHEABLE = {
    "__TIME__ (C11)": ('extern "C" __global__ void k(const char** a) { a[0] = __TIME__; }', ()),
    "__DATE__ (C11)": ('extern "C" __global__ void k(const char** a) { a[0] = __DATE__; }', ()),
    "computed include": ("#if 0\n#include H\n#endif\n" + K, ()),
    "side-effect option": (K, ("--time=-",)),
}


@pytest.mark.parametrize(("source", "options"), UNCACHEABLE.values(), ids=UNCACHEABLE)
def test_what_cannot_be_keyed_is_compiled_and_not_stored(
    compiler: Compiler, store: Store, source: str, options: tuple[str, ...]
) -> None:
    with pytest.warns(UncacheableWarning):
        compiler.compile(source, arch="sm_90", options=options)

    assert len(store) == 0
    assert sum(store.stats().uncacheable.values()) == 1


CACHEABLE = {
    "an identifier that contains __TIME__ (C11)": "__device__ int Ident__TIME__DEF;",
    "__TIME__ in a comment": "// __TIME__\n/* __DATE__ */",
    "__TIME__ in a string": '__device__ const char* s = "__TIME__";',
    "an include in a comment": '// #include "q.h"\n/*\n#include <q.h>\n*/',
    "an include in a raw string": '__device__ const char* s = R"(\n#include <q.h>\n)";',
    "a question whether __has_include exists": "#if defined(__has_include)\n#endif\n#ifdef __has_include\n#endif",
}


@pytest.mark.parametrize("text", CACHEABLE.values(), ids=CACHEABLE)
def test_what_only_looks_uncacheable_is_stored(
    compiler: Compiler, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.h").write_text("")
    source = f"{text}\n{K}"

    compiler.compile(source, arch="sm_90")

    assert compiler.compile(source, arch="sm_90").from_cache


HIDDEN = {
    "form feed (R2)": '\f#include "q.h"\n',
    "carriage return in the directive": '#\rinclude "q.h"\n',
    "carriage return before it": '\r#include "q.h"\n',
    "a wide quote": '__device__ int c = L\'"\'; __device__ const char* s = "/*";\n#include "q.h"\n// */\n',
    "a splice in a raw string": '__device__ const char* s = R"a()\\\na" /* )a";\n#include "q.h"\n',
    "a macro for __has_include": "#define H __has_include\n#if H(<q.h>)\n#endif\n",
    "a pasted __has_include": "#define C(a,b) a##b\n#if C(__has_,include)(<q.h>)\n#endif\n",
    "a pasted __TIME__": "#define C(a,b) a##b\n#define STAMP C(__TI,ME__)\n",
    "a word pasted to __TIME__": "#define C(a) __##a##__\n__device__ const char* s = C(TIME);\n",
    "the end of __DATE__": "#define C(a,b,c) a##b##c\n__device__ const char* s = C(_,_D,ATE__);\n",
    "a comment mark between < and > of no include": '#define I(x)\nI(include < "> /*")\n#include "q.h"\n',
    "a comment mark between < and > of an include": "#include <a/*b*/../../q.h>\n",
}


@pytest.mark.parametrize("text", HIDDEN.values(), ids=HIDDEN)
def test_no_form_hides_what_is_read(compiler: Compiler, tmp_path: Path, text: str) -> None:
    given = {"arch": "sm_90", "name": "", "options": (), "name_expressions": (), "headers": None, "extra": b""}
    (tmp_path / "a" / "*b*").mkdir(parents=True)
    request = compiler._request(text + K, "ptx", include_dirs=[tmp_path], **given)
    (tmp_path / "q.h").write_text("#define Q 1\n")

    after = compiler._request(text + K, "ptx", include_dirs=[tmp_path], **given)

    assert after.uncacheable is not None or after.program.key != request.program.key


def test_options_that_ptxas_reads_from_a_file_are_not_stored(compiler: Compiler, store: Store, tmp_path: Path) -> None:
    """The file is in no key: -O0 was served where it had come to say -O3."""
    (tmp_path / "options").write_text("-O0\n")

    with pytest.warns(UncacheableWarning, match="--options-file"):
        compiler.compile(K, arch="sm_90", options=(f"--ptxas-options=--options-file={tmp_path / 'options'}",))

    assert len(store) == 0


def test_many_comments_behind_an_include_are_read_at_once() -> None:
    """Each could be read as several, so that thirty took an hour."""
    assert Directives.read("#include " + "/**/" * 100 + "x.h\n").uncacheable is not None


@pytest.mark.parametrize("options", [("-DH=__has_include",), ("-DH(x)=__has_include(x)",), ("-DSTAMP=__TIME__",)])
def test_macros_of_the_command_line_hide_nothing(compiler: Compiler, store: Store, options: tuple[str, ...]) -> None:
    with pytest.warns(UncacheableWarning):
        compiler.compile(K, arch="sm_90", options=options)

    assert len(store) == 0


@pytest.mark.parametrize(
    "options",
    [(" -Id",), ("-I d",), ("--include-path= d",), (" -arch=sm_80",), ("-lineinfo ",), ("-I",), ("-I=",), ("-D",),
     ("--optix-ir",), ("-optix-ir",), ("-arch=",), ("\t-G",)],
)  # fmt: skip
def test_options_that_nvrtc_would_read_in_another_way_are_refused(
    compiler: Compiler, store: Store, options: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidArgument if options[0] not in {"--optix-ir", "-optix-ir"} else InvalidOption):
        compiler.compile(K, arch="sm_90", options=options)

    assert len(store) == 0


@pytest.mark.parametrize(
    "option",
    ["-create-pch=b.pch", "-fdevice-time-trace=t", "--pch", "-pch", "-Xptxas=--options-file=o", "-Xptxas=-optf=o"],
)
def test_side_effects_are_seen_in_either_spelling(option: str) -> None:
    assert Options.read((option,)).side_effect is not None


@pytest.mark.parametrize("directory", ["", " d", "d ", "=d"])
def test_directories_that_nvrtc_would_read_in_another_way_are_refused(compiler: Compiler, directory: str) -> None:
    with pytest.raises(InvalidArgument):
        compiler.compile(K, arch="sm_90", include_dirs=[directory])


def test_a_file_that_toolkit_headers_ask_for_is_not_read_unseen(
    compiler: Compiler, store: Store, tmp_path: Path
) -> None:
    """CCCL includes <version>, a name that projects use for a file of their own."""
    if toolkit.find_headers(nvrtc.build(), toolkit.find_nvrtc()) is None:
        pytest.skip("no CUDA headers of this NVRTC's version here")
    (tmp_path / "version").write_text("")

    with pytest.warns(UncacheableWarning, match="version"):
        compiler.compile(f"#include <cuda_fp16.h>\n{K}", arch="sm_90", include_dirs=[tmp_path])

    assert len(store) == 0


def test_a_warning_points_at_the_caller(compiler: Compiler) -> None:
    with pytest.warns(UncacheableWarning) as seen:
        compiler.compile("// x\n" + K, arch="sm_90", options=("-DSTAMP=__TIME__",))

    assert seen[0].filename == __file__


def test_a_computed_include_whose_macro_a_toolkit_defines_too_is_not_stored(compiler: Compiler, tmp_path: Path) -> None:
    """Toolkit headers are not scanned, so that such a definition would be missed."""
    include = tmp_path / "include"
    include.mkdir()
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13050\n#undef STD\n# define  STD(x) <x.h>\n")
    (tmp_path / "q.h").write_text("")
    source = "#define STD(x) <no/x.h>\n#include <cuda_runtime_api.h>\n#include STD(q)\n" + K

    with pytest.warns(UncacheableWarning, match="a toolkit header defines STD"):
        compiler.compile(source, arch="sm_90", include_dirs=[tmp_path, include])
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13050\n#define STDIO <q.h>\n")
    toolkit.defined_macros.cache_clear()
    compiler.compile(source.replace("no/", ""), arch="sm_90", include_dirs=[tmp_path, include])

    assert compiler.compile(source.replace("no/", ""), arch="sm_90", include_dirs=[tmp_path, include]).from_cache


def test_a_user_directory_that_shadows_toolkit_headers_is_not_trusted(
    compiler: Compiler, store: Store, tmp_path: Path
) -> None:
    if toolkit.find_headers(nvrtc.build(), toolkit.find_nvrtc()) is None:
        pytest.skip("no CUDA headers of this NVRTC's version here")
    (tmp_path / "crt").mkdir()

    with pytest.warns(UncacheableWarning, match="shadowed toolkit header"):
        compiler.compile(f"#include <cuda_fp16.h>\n{K}", arch="sm_90", include_dirs=[tmp_path])

    assert len(store) == 0


# -- without a store, or with one that fails ----------------------------------------------------------------------


def test_cache_false_neither_looks_nor_stores(compiler: Compiler, store: Store, count_compiles: Count) -> None:
    for _ in range(2):
        assert not compiler.compile(K, arch="sm_90", cache=False).from_cache

    assert count_compiles() == 2
    assert len(store) == 0


def test_disabled_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C58."""
    monkeypatch.setenv("KERNELSTORE_DISABLE", "1")

    with Compiler() as compiler:
        assert compiler.store is None
        assert not compiler.compile(K, arch="sm_90").from_cache

    assert not (tmp_path / "default").exists()


@pytest.mark.parametrize("value", ["0", "off", "none", ""])
def test_disable_set_to_off_does_not_disable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELSTORE_DISABLE", value)

    with Compiler() as compiler:
        assert compiler.store is not None


def test_the_default_store_is_opened_by_the_first_compile(tmp_path: Path) -> None:
    with Compiler() as compiler:
        assert not (tmp_path / "default").exists()
        compiler.compile(K, arch="sm_90")
        assert (tmp_path / "default" / "cache.db").exists()


def test_a_store_that_cannot_be_opened_costs_a_compile_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a database, and longer than a page would be" * 100)
    monkeypatch.setenv("KERNELSTORE_PATH", str(tmp_path / "file"))

    with Compiler() as compiler, pytest.warns(StoreWarning, match="not a database") as seen:
        for _ in range(2):
            assert compiler.compile(K, arch="sm_90").size_bytes > 1000

    assert len(seen) == 1


def test_a_store_that_fails_later_costs_a_compile_and_a_warning(compiler: Compiler, store: Store) -> None:
    compiler.compile(K, arch="sm_90")
    store.close()

    with pytest.warns(StoreWarning) as seen:
        for _ in range(2):
            assert not compiler.compile(K, arch="sm_90").from_cache

    assert len(seen) == 1


def test_a_damaged_row_is_compiled_again(compiler: Compiler, store: Store, rows: Rows) -> None:
    """C40, promise 1."""
    first = compiler.compile(K, arch="sm_90")
    halve = "UPDATE blob SET data = substr(data, 1, length(data) / 2)"
    store._pool.write(lambda connection: connection.execute(halve))

    second = compiler.compile(K, arch="sm_90")
    third = compiler.compile(K, arch="sm_90")

    assert not second.from_cache
    assert third.from_cache
    assert first.payload == second.payload == third.payload


def test_a_compiler_is_given_a_store_not_a_path(path: Path) -> None:
    with pytest.raises(InvalidType, match="Store"):
        Compiler(str(path))  # type: ignore[arg-type]


def test_defaults_of_the_compiler_come_before_those_of_the_call(store: Store) -> None:
    source = 'extern "C" __global__ void k(int* a) { a[0] = X; }'

    with Compiler(store, options=("-DX=1",)) as compiler:
        assert b", 1;" in compiler.compile(source, "ptx", arch="compute_90").payload
        assert b", 2;" in compiler.compile(source, "ptx", arch="compute_90", options=("-UX", "-DX=2")).payload


def test_a_compiler_library_that_cannot_be_loaded_is_said(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ToolchainError("libnvrtc cannot be loaded", library=None, log="")

    monkeypatch.setattr(nvrtc, "compile_program", broken)

    with pytest.raises(ToolchainError):
        compiler.compile(K, arch="sm_90")


def test_an_upgraded_library_is_another_toolchain(compiler: Compiler, store: Store) -> None:
    """C07: the memo holds for one path and one stat signature."""
    library = toolkit.find_nvrtc()
    if library is None:
        pytest.skip("NVRTC is not from a wheel here")
    compiler.compile(K, arch="sm_90")

    assert store.toolchain_build(str(library), "another signature") is None


def test_the_log_tells_where_time_went(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kernelstore"):
        compiler.compile(K, arch="sm_90", name="k.cu")

    assert any(record.getMessage().startswith("compiled k.cu for sm_90 in ") for record in caplog.records)


def test_no_warning_comes_with_an_ordinary_compile(compiler: Compiler) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiler.compile(K, arch="sm_90")


# -- modules ------------------------------------------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Artifact]:
    """Stand in for the driver: what would be loaded."""
    from kernelstore import loader
    from kernelstore.cuda import driver

    loaded: list[Artifact] = []
    monkeypatch.setattr(driver, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "compute_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(loader, "load", lambda artifact: loaded.append(artifact) or Mock())
    return loaded


def test_a_module_is_loaded_once(compiler: Compiler, loads: list[Artifact], count_compiles: Count) -> None:
    first = compiler.module(T, name_expressions=("addn<3>", "addn<4>"))
    second = compiler.module(T, name_expressions=("addn<4>", "addn<3>"))

    assert first is second
    assert [(artifact.kind, artifact.arch) for artifact in loads] == [("cubin", "sm_90")]
    assert compiler.kernel(T, "addn<3>") is compiler.kernel(T, "addn<3>")
    assert count_compiles() == 2


def test_a_module_that_cannot_be_keyed_is_never_an_old_one(
    compiler: Compiler, loads: list[Artifact], tmp_path: Path
) -> None:
    header = tmp_path / "q.h"
    source = '#define H(x) #x\n#include H(q.h)\nextern "C" __global__ void k(int* a) { a[0] = Q; }'
    modules = []
    for value in ("1", "2"):
        header.write_text(f"#define Q {value}")
        with pytest.warns(UncacheableWarning) if value == "1" else contextlib.nullcontext():
            modules.append(compiler.module(source, include_dirs=[tmp_path]))

    assert modules[0] is not modules[1]
    assert loads[0].payload != loads[1].payload
    compiler.close()
    for module in modules:
        module.unload.assert_called_once()


def test_a_module_whose_header_changed_is_never_an_old_one(
    compiler: Compiler, loads: list[Artifact], tmp_path: Path
) -> None:
    """C04, C05: also where size and mtime stay, and where the header is a new one earlier on the path."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    header = tmp_path / "b" / "q.h"
    source = '#include <q.h>\nextern "C" __global__ void k(int* a) { a[0] = Q; }'

    def module() -> object:
        return compiler.module(source, include_dirs=[tmp_path / "a", tmp_path / "b"])

    header.write_text("#define Q 1")
    first = module()
    assert module() is first
    stamp = header.stat()
    header.write_text("#define Q 2")
    os.utime(header, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = module()
    (tmp_path / "a" / "q.h").write_text("#define Q 3")
    third = module()
    (tmp_path / "a" / "q.h").unlink()

    assert len({id(first), id(second), id(third)}) == 3
    assert len({artifact.payload for artifact in loads}) == 3
    assert module() is not third


def test_closing_unloads_every_module_once(store: Store, loads: list[Artifact]) -> None:
    compiler = Compiler(store)
    modules = [compiler.module(K), compiler.module(K, cache=False), compiler.module(K)]

    compiler.close()
    compiler.close()

    assert modules[0] is modules[2]
    for module in modules:
        module.unload.assert_called_once()


def test_a_closed_compiler_says_so(store: Store, loads: list[Artifact], count_compiles: Count) -> None:
    """Its modules are gone, and what it would load now nobody would unload."""
    compiler = Compiler(store)
    artifact = compiler.compile(K, arch="sm_90")
    compiler.module(K)
    compiler.close()

    for ask in (
        lambda: compiler.compile(K, arch="sm_90"),
        lambda: compiler.module(K),
        lambda: compiler.module(K, cache=False),
        lambda: compiler.kernel(K, "k"),
        lambda: compiler.explain(K, arch="sm_90"),
        lambda: compiler.rebuild(artifact.key, "sm_80"),
        lambda: compiler.stored_module(artifact.key),
        compiler.__enter__,
    ):
        with pytest.raises(CompilerClosed, match="make another one"):
            ask()
    assert compiler.store is store
    assert store.get(artifact.key) is not None
    assert count_compiles() == 1


def test_a_module_that_is_loaded_while_the_compiler_closes_is_unloaded(
    store: Store, loads: list[Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelstore import loader

    compiler, module = Compiler(store), Mock()

    def load(_: Artifact) -> Mock:
        compiler.close()
        return module

    monkeypatch.setattr(loader, "load", load)

    with pytest.raises(CompilerClosed):
        compiler.module(K)
    module.unload.assert_called_once()


def test_what_nvrtc_12_compiles_after_a_debug_compile_is_not_stored(compiler: Compiler, store: Store) -> None:
    """NVRTC 12.9 keeps something of -G: later output is right, but not what its options mean."""
    compiler.compile(K, arch="sm_90")
    compiler.compile(K, arch="sm_90", options=("-G",))
    leaks = nvrtc.version()[0] < 13
    try:
        assert nvrtc.leaks_debug() == leaks
        compiler.compile(T, arch="sm_90", name_expressions=("addn<1>",))

        assert compiler.compile(T, arch="sm_90", name_expressions=("addn<1>",)).from_cache != leaks
        assert compiler.compile(K, arch="sm_90", options=("-G",)).from_cache
    finally:
        nvrtc._debug_compiled.clear()
