"""Cubins: arch, toolchain, symbols and resource usage, as NVRTC, nvcc, linkers and the driver write them."""

from __future__ import annotations

import struct
import time
from dataclasses import replace

import kinds_samples
import pytest

from kernelstore.arch import Arch
from kernelstore.artifact import Symbol
from kernelstore.cuda import nvrtc, ptxas
from kernelstore.errors import PayloadRejected
from kernelstore.kinds.cubin import PLUGIN

# All archs of this machine's NVRTC with their suffixes; some of them in other ways of compiling too.
ARCHS = [
    str(Arch(number // 10, number % 10, suffix))
    for number in nvrtc.supported_archs()
    for suffix in ("", "a", "f")[: 1 + (number >= 90) + (number >= 100)]
]


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        *((arch, ()) for arch in ARCHS),
        *((arch, (option,)) for arch in ("sm_80", "sm_90a", "sm_120") for option in ("-rdc=true", "-lineinfo")),
    ],
)
def test_a_cubin_of_nvrtc_tells_what_made_it(arch: str, options: tuple[str, ...]) -> None:
    payload = kinds_samples.cubin(arch, *options)

    described = PLUGIN.describe(payload)

    assert described.arch == arch
    # CUDA 12.9 notes it from sm_100 on.
    is_noted = nvrtc.version() >= (13, 0) or Arch.parse(arch).major >= 10
    assert described.toolchain == (f"ptxas {nvrtc.build()}" if is_noted else None)
    assert described.relocatable == (options == ("-rdc=true",))
    assert described.ptx_version is None
    PLUGIN.check(payload, arch)


@pytest.mark.parametrize("options", [(), ("-rdc=true",), ("-G",)], ids=["plain", "rdc", "debug"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_symbols_and_resource_usage_are_those_that_ptxas_reports(arch: str, options: tuple[str, ...]) -> None:
    output = kinds_samples.compiled(arch, *options)
    usage, _ = ptxas.split_log(output.log)

    symbols = PLUGIN.describe(kinds_samples.cubin(arch, *options)).symbols

    kernels = {symbol.lowered_name: symbol for symbol in symbols if symbol.what == "kernel"}
    assert set(kernels) == set(kinds_samples.KERNELS)
    assert {symbol.lowered_name for symbol in symbols if symbol.what == "variable"} == kinds_samples.VARIABLES
    for name, kernel in kernels.items():
        told = usage[name]
        assert (kernel.registers, kernel.shared_bytes, kernel.stack_bytes) == (
            told.registers,
            told.shared_bytes,
            told.stack_bytes,
        )
        assert told.constant_bytes in (None, kernel.constant_bytes)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_sizes_of_parameters_are_told(arch: str) -> None:
    """The types are not in the file; "8 bytes" is no type, so that a launch asks the driver and takes pointers."""
    symbols = PLUGIN.describe(kinds_samples.cubin(arch)).symbols

    assert {symbol.lowered_name: symbol.parameters for symbol in symbols if symbol.what == "kernel"} == {
        "mixed": ("4 bytes", "8 bytes", "8 bytes", "16 bytes", "1 bytes"),
        "_Z5stackIiEvPKT_PS0_i": ("8 bytes", "8 bytes", "4 bytes"),
        "large": ("6000 bytes", "4 bytes", "8 bytes"),
        "empty": (),
    }


@pytest.mark.parametrize(
    ("name", "arch", "toolchain", "relocatable"),
    [
        ("sm_90a.cubin", "sm_90a", "ptxas 13.0.88", False),
        ("relocatable_sm_90.cubin", "sm_90", "ptxas 13.0.88", True),
        ("linked_sm_90a.cubin", "sm_90a", "ptxas 13.0.88", False),
        # CUDA 12.9 leaves no note in these; the suffix is in the header.
        ("old_abi_sm_75.cubin", "sm_75", None, False),
        ("old_abi_sm_90a.cubin", "sm_90a", None, False),
        # The driver compiles for its device alone, whatever the PTX is for.
        ("driver_jit_of_compute_80.cubin", "sm_90a", "ptxas 13.0.98", False),
    ],
)
def test_a_cubin_from_elsewhere_tells_what_made_it(
    name: str, arch: str, toolchain: str | None, relocatable: bool
) -> None:
    payload = kinds_samples.asset(name)

    described = PLUGIN.describe(payload)

    assert (described.arch, described.toolchain, described.relocatable) == (arch, toolchain, relocatable)
    PLUGIN.check(payload, arch)


def test_a_linked_cubin_has_the_kernels_of_all_its_parts() -> None:
    symbols = PLUGIN.describe(kinds_samples.asset("linked_sm_90a.cubin")).symbols

    assert [replace(symbol, constant_bytes=None) for symbol in symbols] == [
        Symbol(
            "scale",
            parameters=("4 bytes", "8 bytes", "8 bytes", "16 bytes", "1 bytes"),
            registers=24,
            shared_bytes=128,
            stack_bytes=0,
        ),
        Symbol("factors", what="variable"),
        Symbol("launches", what="variable"),
        Symbol("count", parameters=("8 bytes",), registers=8, shared_bytes=0, stack_bytes=0),
    ]


@pytest.mark.parametrize("other", ["sm_90", "sm_90f", "sm_80", "sm_100a", "compute_90a"])
@pytest.mark.parametrize("name", ["sm_90a.cubin", "old_abi_sm_90a.cubin", "linked_sm_90a.cubin"])
def test_a_suffix_is_a_part_of_the_arch(name: str, other: str) -> None:
    with pytest.raises(PayloadRejected, match=r"this cubin is for sm_90a, not for"):
        PLUGIN.check(kinds_samples.asset(name), other)


def test_without_its_note_only_the_number_is_known() -> None:
    payload = kinds_samples.asset("sm_90a.cubin").replace(b".note.nv.tkinfo", b".note.nv.gone..")

    described = PLUGIN.describe(payload)

    assert described.arch is None
    assert described.toolchain is None
    PLUGIN.check(payload, "sm_90")
    PLUGIN.check(payload, "sm_90a")
    with pytest.raises(PayloadRejected, match="for sm_90, not for sm_80"):
        PLUGIN.check(payload, "sm_80")


def test_a_note_for_another_number_tells_no_suffix() -> None:
    """Parts for sm_90a cannot be in a file for sm_80; the header's number is what the driver goes by."""
    payload = bytearray(kinds_samples.asset("sm_90a.cubin"))
    payload[49] = 80

    assert PLUGIN.describe(bytes(payload)).arch is None


def test_a_suffix_bit_of_the_new_abi_is_read() -> None:
    """CUDA 12.9 sets it for sm_100a, CUDA 13 does not."""
    payload = bytearray(kinds_samples.asset("relocatable_sm_90.cubin"))
    payload[48] |= 0x8

    assert PLUGIN.describe(bytes(payload)).arch == "sm_90a"


@pytest.mark.parametrize(
    ("at", "size", "number", "reason"),
    [
        (16, 2, 3, "type"),
        (40, 8, 2**64 - 1, "section table"),
        (40, 8, 0, "section table"),
        (58, 2, 40, "section table"),
        (60, 2, 0xFFFF, "section table"),
        (62, 2, 0xFFFE, "section names"),
        (32, 8, 2**63, "program headers"),
    ],
)
def test_a_header_that_points_outside_is_refused(at: int, size: int, number: int, reason: str) -> None:
    payload = bytearray(kinds_samples.asset("sm_90a.cubin"))
    payload[at : at + size] = number.to_bytes(size, "little")

    for refuse in (lambda: PLUGIN.check(bytes(payload), "sm_90a"), lambda: PLUGIN.describe(bytes(payload))):
        with pytest.raises(PayloadRejected, match=reason):
            refuse()


@pytest.mark.parametrize("name", ["sm_90a.cubin", "relocatable_sm_90.cubin", "old_abi_sm_75.cubin"])
def test_a_cubin_that_lacks_its_last_byte_is_refused(name: str) -> None:
    payload = kinds_samples.asset(name)

    with pytest.raises(PayloadRejected):
        PLUGIN.check(payload[:-1], PLUGIN.describe(payload).arch or "")


def test_names_that_all_run_through_one_megabyte_are_refused_at_once() -> None:
    """40,000 kernels whose names are each the same megabyte less a byte would be 40 GB of text."""
    names = b"x" * 2**20 + b"\0"
    symbols = b"".join(struct.pack("<IBBHQQ", index, 2, 0x10, 1, 0, 0) for index in range(40_000))
    payload = _elf([(3, names, 0), (2, symbols, 1)])
    started = time.perf_counter()

    with pytest.raises(PayloadRejected, match="overlap"):
        PLUGIN.describe(payload)

    assert time.perf_counter() - started < 2


def test_a_name_with_escape_codes_is_refused() -> None:
    """A terminal would obey it where the kernels are listed."""
    payload = _elf([(3, b"\0k\x1b[2J\0", 0), (2, struct.pack("<IBBHQQ", 1, 2, 0x10, 1, 0, 0), 1)])

    with pytest.raises(PayloadRejected, match="is no name"):
        PLUGIN.describe(payload)


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"V13.0.88\0", b"V" + b"9" * 5000 + b".0.88\0"), (b"\0ptxas\0", b"\0p\x1b[2J\0")],
    ids=["a build of 5,000 digits", "a tool named by escape codes"],
)
def test_a_note_that_names_no_tool_is_passed_over(before: bytes, after: bytes) -> None:
    """The arch, which stands in it too, is told."""
    texts = b"\0ptxas\0V13.0.88\0-arch sm_90a\0".replace(before, after)
    ends = [at for at, byte in enumerate(texts) if byte == 0]
    value = struct.pack("<6I", 0, 0, 1, ends[1] + 1, ends[2], ends[2] + 1) + texts
    value += bytes(-len(value) % 4)
    note = struct.pack("<III", 4, len(value), 2000) + b"nv\0\0" + value
    payload = _elf([(3, b".note.nv.tkinfo\0", 0), (7, note, 0)], names_at=0)

    described = PLUGIN.describe(payload)

    assert (described.arch, described.toolchain) == ("sm_90a", None)


def test_an_arch_that_no_device_has_is_refused() -> None:
    payload = bytearray(kinds_samples.asset("sm_90a.cubin"))
    payload[49] = 0

    with pytest.raises(PayloadRejected, match="no device has the arch sm_0"):
        PLUGIN.describe(bytes(payload))


def test_more_sections_than_16_bits_hold_are_read() -> None:
    """Section 0 then has their number and that of the names; libraries of thousands of kernels have that many."""
    payload = _elf([(3, b"\0kernel\0", 0), (2, struct.pack("<IBBHQQ", 1, 2, 0x10, 1, 0, 0), 1)], extended=True)

    assert [symbol.lowered_name for symbol in PLUGIN.describe(payload).symbols] == ["kernel"]


def _elf(sections: list[tuple[int, bytes, int]], *, extended: bool = False, names_at: int | None = None) -> bytes:
    """Make an ELF file for sm_90 of sections (type, content, link), all of one name: none, or the first one's there."""
    name = len(sections[0][1]) - 1 if names_at is None else names_at
    content = b""
    rows = []
    for kind, data, link in sections:
        rows.append(struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, 64 + len(content), len(data), link, 0, 0, 0))
        content += data
    count = len(rows) + 1
    rows.insert(0, struct.pack("<IIQQQQIIQQ", name, 0, 0, 0, 0, count * extended, extended, 0, 0, 0))
    head = struct.pack(
        "<8sB7xHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01\x41",
        8,
        *(2, 190, 1, 0, 0, 64 + len(content), 0x06005A04),
        *(64, 56, 0, 64, 0 if extended else count, 0xFFFF if extended else 1),
    )
    return head + content + b"".join(rows)
