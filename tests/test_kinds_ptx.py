"""PTX, LTO-IR and fatbins: what they tell, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import kinds_samples
import pytest

from kernelstore.cuda import nvrtc
from kernelstore.errors import PayloadRejected
from kernelstore.kinds import fatbin, ltoir
from kernelstore.kinds.ptx import PLUGIN, entries, variables

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"


def described(text: str) -> tuple[str | None, int | None, bool]:
    found = PLUGIN.describe(PLUGIN.normalise(text.encode()))
    return found.arch, found.ptx_version, found.relocatable


@pytest.mark.parametrize(
    "options", [(), ("-rdc=true",), ("-lineinfo",), ("-G",)], ids=["plain", "rdc", "lineinfo", "G"]
)
@pytest.mark.parametrize("arch", ["compute_80", "compute_90a", "compute_120"])
def test_ptx_of_nvrtc_tells_what_is_in_it(arch: str, options: tuple[str, ...]) -> None:
    payload = kinds_samples.ptx(arch, *options)

    found = PLUGIN.describe(payload)

    assert found.arch == arch
    assert found.toolchain == f"nvvm {nvrtc.build()}"
    assert found.ptx_version == {(12, 9): 808, (13, 5): 905}.get(nvrtc.version(), found.ptx_version)
    # It was made with -rdc=true, but lacks nothing, so the driver loads it.
    assert not found.relocatable
    assert {symbol.lowered_name: symbol.parameters for symbol in found.symbols if symbol.what == "kernel"} == (
        kinds_samples.KERNELS
    )
    assert {symbol.lowered_name for symbol in found.symbols if symbol.what == "variable"} == kinds_samples.VARIABLES
    PLUGIN.check(payload, arch)


def test_ptx_of_nvcc_tells_what_is_in_it() -> None:
    found = PLUGIN.describe(PLUGIN.normalise(kinds_samples.asset("compute_90.ptx")))

    assert (found.arch, found.toolchain, found.ptx_version) == ("compute_90", "nvvm 13.0.88", 900)
    assert [symbol.name for symbol in found.symbols] == ["scale", "factors", "launches"]


def test_ptx_that_calls_what_it_lacks_must_be_linked() -> None:
    found = PLUGIN.describe(PLUGIN.normalise(kinds_samples.asset("unresolved_compute_90.ptx")))

    assert found.relocatable


@pytest.mark.parametrize(
    ("declaration", "relocatable"),
    [
        (".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);", False),
        (".extern .func __assertfail\n(\n.param .b64 a\n)\n;", False),
        (".extern .func (.param .b32 r) ext(.param .b32 a);", True),
        (".extern .func (.param .b32 r) cudaLaunchDeviceV2(.param .b64 a);", True),
        (".extern .global .align 4 .u32 counter;", True),
        (".extern .const .align 4 .b8 table[];", True),
        (".extern .shared .align 16 .b8 dynamic[];", False),
        ("// .extern .func ext();", False),
    ],
)
def test_what_is_extern_decides_whether_it_must_be_linked(declaration: str, relocatable: bool) -> None:
    assert described(HEAD + declaration) == ("compute_90a", 808, relocatable)


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (".param .u64 x", "u64"),
        (".param .f32 x", "f32"),
        (".param .b8 x[16]", "b8[16]"),
        (".param .align 4 .b8 x[16]", "b8[16] align 4"),
        (".param .align 128 .b8 x[128]", "b8[128] align 128"),
        (".param .u64 .ptr .global .align 4 x", "u64"),
        (".param .u64 .ptr .align 16 x", "u64"),
        (".param .u64 .ptr .global x", "u64"),
        (".param .u64 .ptr x", "u64"),
        (".param .f16x2 x", "f16x2"),
        (".param .b128 x", "b128"),
        (".param .texref x", "texref"),
        (".param  .align\t8\n.b8  $x_0[ 24 ]", "b8[24] align 8"),
        (".param .later .u64 x", ".param .later .u64 x"),
    ],
)
def test_parameter_types_are_as_declared(parameter: str, expected: str) -> None:
    assert entries(f"{HEAD}.visible .entry k(\n\t{parameter},\n\t.param .u32 n\n)\n{{ ret; }}") == {
        "k": (expected, "u32")
    }


def test_kernels_are_told_from_what_looks_like_them() -> None:
    text = (
        HEAD
        + """
/* .entry in_a_block_comment(.param .u64 x) { */
// .visible .entry in_a_line(.param .u64 x)
.file 1 "/a/{b/*.cu"
.visible .func (.param .b32 r) device_function(.param .b32 a) { ret; }
.weak
.entry _Z1tIiEvv ( // no parameters )
) .maxntid 256, 1, 1
.minnctapersm 2
{
    .reg .pred %p<2>;
    { // callseq 0, {
    .param .b64 param0;
    call.uni (retval0), vprintf, (param0);
    } // callseq 0
    // .entry in_a_body()
}
.entry plain { ret; }
.visible .entry $odd_1(.param .u64 a, // the first, }
    .param .u32 b) { ret; }
.section .debug_str { .b8 46,101,110,116,114,121,32,120,40,41; }
"""
    )

    assert entries(text) == {"_Z1tIiEvv": (), "plain": (), "$odd_1": ("u64", "u32")}


def test_variables_are_told_from_what_looks_like_them() -> None:
    text = (
        HEAD
        + """
.extern .global .align 4 .u32 elsewhere;
.extern .shared .align 16 .b8 dynamic[];
.global .align 1 .b8 $str[6] = {104, 101, 108, 108, 111};
.visible .global .align 8 .u64 message = generic($str);
.global .attribute(.managed) .align 4 .u32 managed = 3;
.weak .const .align 8 .v4 .f32 _ZN1n2tvILi3EEE[2];
.common .global .f32 common;
.visible .const .align 4 .b8 table[28] = {1, 2};
.global .texref texture;
// .global .u32 commented;
.visible .entry k(.param .u64 p) {
    .shared .align 4 .b8 tile[64];
    .global .u32 in_a_body;
    ld.global.u32 %r1, [%rd1];
}
.global .u32 last;
"""
    )

    assert variables(text) == [
        "message",
        "managed",
        "_ZN1n2tvILi3EEE",
        "common",
        "table",
        "texture",
        "last",
    ]


def test_text_that_is_no_ptx_has_no_kernels() -> None:
    assert entries("") == entries("\0") == entries('extern "C" __global__ void k() {}') == {}
    assert variables("") == []


@pytest.mark.parametrize("nuls", [0, 1, 5])
def test_ptx_ends_with_exactly_one_nul(nuls: int) -> None:
    assert PLUGIN.normalise(HEAD.encode() + bytes(nuls)) == HEAD.encode() + b"\0"


@pytest.mark.parametrize("text", [HEAD.encode() + b"a\0b", HEAD.encode() + b"// \xff", b"\xff\xfe", b"\0a"])
def test_text_that_the_driver_would_misread_is_not_normalised(text: bytes) -> None:
    with pytest.raises(PayloadRejected, match=r"NUL|UTF-8"):
        PLUGIN.normalise(text)
    with pytest.raises(PayloadRejected):
        PLUGIN.check(text + b"\0", "compute_90a")


@pytest.mark.parametrize("ending", [b"", b"\0\0"])
def test_ptx_without_its_one_nul_does_not_pass(ending: bytes) -> None:
    with pytest.raises(PayloadRejected, match="NUL"):
        PLUGIN.check(HEAD.encode() + ending, "compute_90a")


def test_other_letters_than_ascii_pass_in_comments() -> None:
    payload = PLUGIN.normalise(f"// größer\n{HEAD}".encode())

    PLUGIN.check(payload, "compute_90a")
    assert described(payload.decode()) == ("compute_90a", 808, False)


@pytest.mark.parametrize(
    ("text", "version", "arch"),
    [
        (".version 9.5\n.target sm_100f, texmode_independent", 905, "compute_100f"),
        ("//\n// Generated by LLVM NVPTX Back-End\n//\n\n.version 8.7\n.target sm_90a", 807, "compute_90a"),
        ("/* a\n * licence */ .version 7.0 // seven\n\t.target sm_80, debug", 700, "compute_80"),
    ],
)
def test_a_head_is_read_however_it_is_laid_out(text: str, version: int, arch: str) -> None:
    assert described(text) == (arch, version, False)


@pytest.mark.parametrize(
    "text", [".version 9.5", ".target sm_90", ".version 9\n.target sm_90", "x .version 9.5\n.target sm_90"]
)
def test_text_without_a_head_is_refused(text: str) -> None:
    with pytest.raises(PayloadRejected, match=r"begins no \.version and \.target"):
        described(text)


def test_a_target_that_is_no_arch_is_refused() -> None:
    with pytest.raises(PayloadRejected, match="its target is b'sm_90x'"):
        described(".version 9.5\n.target sm_90x")


def test_a_target_of_a_megabyte_is_not_told_in_full() -> None:
    with pytest.raises(PayloadRejected, match="its target is") as error:
        described(".version 9.5\n.target sm_" + "9" * 2**20)

    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "text",
    [
        "/*",
        "{",
        "}",
        '"',
        ".entry k(",
        ".global ",
        ".extern .func (",
        ".extern .global .b8 ",
        ".param ",
        ".global .a 1 ",
    ],
)
def test_reading_is_linear_in_the_text(text: str) -> None:
    """400 KB of any of these; what is quadratic takes minutes."""
    repeated = HEAD + text * (400_000 // len(text))
    started = time.perf_counter()

    described(repeated)
    entries(repeated)
    variables(repeated)

    assert time.perf_counter() - started < 10


def test_ptx_of_a_sort_is_read_in_milliseconds(tmp_path: Path) -> None:
    """150 KB of CUB and 800 variables; measured 1 to 2 ms for the kernels, 5 for the variables."""
    if not nvrtc.has_bundled_headers():
        pytest.skip("NVRTC before 13.5 bundles no CCCL headers")
    nvrtc.install_bundled_headers(tmp_path)
    source = """
#include <cub/block/block_radix_sort.cuh>
extern "C" __global__ void sort(int* keys) {
    using Sort = cub::BlockRadixSort<int, 256, 19>;
    __shared__ typename Sort::TempStorage storage;
    int mine[19];
    for (int i = 0; i < 19; i++) mine[i] = keys[threadIdx.x * 19 + i];
    Sort(storage).Sort(mine);
    for (int i = 0; i < 19; i++) keys[threadIdx.x * 19 + i] = mine[i];
}
"""
    output = kinds_samples.compiled("compute_90", "-std=c++17", f"-I{tmp_path}", f"-I{tmp_path}/cccl", source=source)
    assert output.ptx is not None
    text = output.ptx[:-1].decode()
    started = time.perf_counter()

    assert entries(text) == {"sort": ("u64",)}

    assert time.perf_counter() - started < 0.25


def test_lto_ir_of_nvcc_and_nvrtc_is_recognised() -> None:
    for payload in (kinds_samples.ltoir(), kinds_samples.asset("compute_90.ltoir")):
        assert ltoir.PLUGIN.recognises(payload)
        assert ltoir.PLUGIN.describe(payload).relocatable
        ltoir.PLUGIN.check(payload, "compute_90")


def test_lto_ir_that_is_its_head_alone_is_refused() -> None:
    with pytest.raises(PayloadRejected, match="cut off"):
        ltoir.PLUGIN.check(kinds_samples.asset("compute_90.ltoir")[:24], "compute_90")


def test_what_dlto_leaves_of_ptx_is_refused() -> None:
    """NVRTC then gives one NUL as PTX, with success (C30)."""
    with pytest.raises(PayloadRejected):
        PLUGIN.check(b"\0", "compute_90")


@pytest.mark.parametrize(
    ("name", "arch", "relocatable", "held"),
    [
        ("sm_90a.fatbin", "sm_90a", False, ["sm_90a"]),
        ("two_archs.fatbin", None, False, ["sm_80", "sm_100f"]),
        ("relocatable_sm_90a.fatbin", "sm_90a", True, ["sm_90a"]),
    ],
)
def test_a_fatbin_tells_its_archs(name: str, arch: str | None, relocatable: bool, held: list[str]) -> None:
    payload = kinds_samples.asset(name)

    found = fatbin.PLUGIN.describe(payload)

    assert (found.arch, found.relocatable) == (arch, relocatable)
    for each in held:
        fatbin.PLUGIN.check(payload, each)
    with pytest.raises(PayloadRejected, match=f"this fatbin holds {', '.join(held)}, nothing for sm_90$"):
        fatbin.PLUGIN.check(payload, "sm_90")


def test_fatbins_in_a_row_hold_what_each_holds() -> None:
    payload = kinds_samples.asset("sm_90a.fatbin") + kinds_samples.asset("two_archs.fatbin") + bytes(8)

    for arch in ("sm_80", "sm_90a", "sm_100f"):
        fatbin.PLUGIN.check(payload, arch)


@pytest.mark.parametrize(
    ("at", "size", "number"),
    [(8, 8, 2**64 - 1), (6, 2, 0), (20, 4, 0), (20, 4, 2**32 - 1), (24, 8, 2**63), (44, 4, 5)],
)
def test_a_fatbin_that_points_outside_is_refused(at: int, size: int, number: int) -> None:
    payload = bytearray(kinds_samples.asset("two_archs.fatbin"))
    payload[at : at + size] = number.to_bytes(size, "little")

    with pytest.raises(PayloadRejected):
        fatbin.PLUGIN.check(bytes(payload), "sm_80")


@pytest.mark.parametrize(
    "images", [b"", bytes.fromhex("1000010148000000") + bytes(64)], ids=["none", "one of another kind"]
)
def test_a_fatbin_that_holds_nothing_is_refused(images: bytes) -> None:
    payload = bytes.fromhex("50ed55ba01001000") + len(images).to_bytes(8, "little") + images

    for refuse in (lambda: fatbin.PLUGIN.check(payload, "sm_90"), lambda: fatbin.PLUGIN.describe(payload)):
        with pytest.raises(PayloadRejected, match="holds no cubin"):
            refuse()


def test_bytes_after_a_fatbin_are_refused() -> None:
    with pytest.raises(PayloadRejected, match="follows the fatbin"):
        fatbin.PLUGIN.describe(kinds_samples.asset("two_archs.fatbin") + b"more")
