"""CUDA ELF files: headers, symbols, notes and resource usage, with every offset checked before it is followed."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from kernelstore.arch import Arch
from kernelstore.artifact import Symbol
from kernelstore.errors import PayloadRejected

__all__ = ["Elf", "Section", "is_cuda_elf", "read_arch_number"]

_MAGIC = b"\x7fELF\x02\x01"
# EM_CUDA. Source: Linux, include/uapi/linux/elf-em.h and binutils, elf/common.h.
_MACHINE = 190
_HEADER_BYTES = 64
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")

# Offsets into the file header.
_ABI_VERSION_AT, _TYPE_AT, _SECTIONS_AT, _FLAGS_AT, _COUNTS_AT = 8, 16, 40, 48, 58
_TYPE_RELOCATABLE = 1

# ABI version 8 (CUDA 13, and from sm_100 on CUDA 12.9) keeps the arch number in bits 8 to 15 of e_flags, version 7 in
# bits 0 to 7. Seen for sm_75 to sm_121 in the output of NVRTC 12.9 and 13.5.
_NEW_ABI = 8
_OLD_SUFFIX_BIT = 0x800

_OBJECT, _FUNCTION = 1, 2
# st_other of functions that can be launched (STO_CUDA_ENTRY).
_ENTRY = 0x10
_VARIABLE_SECTIONS = (".nv.global", ".nv.global.init", ".nv.constant3")

# Attributes in `.nv.info` that hold (symbol index, value), and in `.nv.info.<kernel>` the parameters.
_HAS_VALUE = 0x04
_REGISTER_COUNT, _FRAME_SIZE, _PARAMETER = 0x2F, 0x11, 0x17

_ARCH_ARGUMENT = re.compile(r"-arch(?:=|\s+)(sm_\w+)")
_BUILD = re.compile(r"\bV(\d+\.\d+\.\d+)")


def is_cuda_elf(payload: bytes) -> bool:
    """Whether the first bytes are those of a CUDA ELF file."""
    return (
        len(payload) >= _HEADER_BYTES
        and payload.startswith(_MAGIC)
        and int.from_bytes(payload[18:20], "little") == _MACHINE
    )


def read_arch_number(payload: bytes) -> tuple[int, bool]:
    """Return the arch number of the header, such as 90, and whether it has the ``a`` bit of the old ABI."""
    flags = int.from_bytes(payload[_FLAGS_AT : _FLAGS_AT + 4], "little")
    if payload[_ABI_VERSION_AT] >= _NEW_ABI:
        return flags >> 8 & 0xFF, False
    return flags & 0xFF, bool(flags & _OLD_SUFFIX_BIT)


@dataclass(frozen=True, slots=True)
class Section:
    """One section: its name, and where its bytes lie."""

    name: str
    kind: int
    start: int
    size_bytes: int
    link: int


class Elf:
    """One CUDA ELF file.

    Raises
    ------
    PayloadRejected
        It is none, or it is cut off or damaged: something points outside the file.
    """

    def __init__(self, payload: bytes) -> None:
        if not is_cuda_elf(payload):
            raise _rejected(f"{payload[:8]!r} does not begin a CUDA ELF file")
        self._payload = payload
        self.relocatable = int.from_bytes(payload[_TYPE_AT : _TYPE_AT + 2], "little") == _TYPE_RELOCATABLE
        self.sections = self._read_sections()
        self._by_name = {section.name: section for section in self.sections}

    @property
    def arch(self) -> str | None:
        """Such as ``"sm_90a"``; ``None`` where the suffix is not told."""
        number, has_suffix = read_arch_number(self._payload)
        if has_suffix:
            return f"sm_{number}a"
        told = _ARCH_ARGUMENT.search(self._toolkit_note())
        if told is not None:
            return told[1]
        # The old ABI had no suffix but `a`, and a bit for it.
        return f"sm_{number}" if self._payload[_ABI_VERSION_AT] < _NEW_ABI else None

    @property
    def toolchain(self) -> str | None:
        """Such as ``"ptxas 13.5.37"``; ``None`` where the file does not tell."""
        build = _BUILD.search(self._toolkit_note())
        return f"ptxas {build[1]}" if build is not None else None

    def symbols(self) -> tuple[Symbol, ...]:
        """Kernels and variables, in the order of the symbol table."""
        table = self._by_name.get(".symtab")
        if table is None:
            return ()
        names = self.sections[table.link] if table.link < len(self.sections) else None
        if names is None:
            raise _rejected("its symbol table names no strings")
        registers, frames = self._usage()
        found = []
        content = self._content(table)
        for index in range(len(content) // _SYMBOL.size):
            name_at, info, other, section, _, _ = _SYMBOL.unpack_from(content, index * _SYMBOL.size)
            if not name_at:
                continue
            name = self._string(names, name_at)
            if info & 15 == _FUNCTION and other & _ENTRY:
                found.append(self._kernel(name, registers.get(index), frames.get(index)))
            elif info & 15 == _OBJECT and self._is_variable(section, name):
                found.append(Symbol(name, what="variable"))
        return tuple(found)

    def constant_bytes(self, kernel: str) -> int:
        """Sum of the kernel's own constant banks."""
        return sum(
            section.size_bytes
            for section in self.sections
            if section.name.startswith(".nv.constant") and section.name.partition(".nv.constant")[2][1:] == f".{kernel}"
        )

    def _kernel(self, name: str, registers: int | None, frame: int | None) -> Symbol:
        return Symbol(
            name,
            parameters=self._parameters(name),
            registers=registers,
            stack_bytes=frame,
            constant_bytes=self.constant_bytes(name),
        )

    def _is_variable(self, section: int, name: str) -> bool:
        if section >= len(self.sections) or name.startswith((".", "$", "__nv_")):
            return False
        return self.sections[section].name in _VARIABLE_SECTIONS

    def _read_sections(self) -> list[Section]:
        payload = self._payload
        start = int.from_bytes(payload[_SECTIONS_AT : _SECTIONS_AT + 8], "little")
        entry_bytes, count, names_at = struct.unpack_from("<HHH", payload, _COUNTS_AT)
        if count and (entry_bytes != _SECTION.size or start + count * entry_bytes > len(payload) or names_at >= count):
            raise _rejected("its section table lies outside the file")
        raw = [_SECTION.unpack_from(payload, start + number * entry_bytes) for number in range(count)]
        if not raw:
            return []
        names = Section("", 3, raw[names_at][4], raw[names_at][5], 0)
        sections = [Section(self._string(names, row[0]), row[1], row[4], row[5], row[6]) for row in raw]
        for section in sections:
            # SHT_NOBITS (8): shared memory and zeroed variables, which take no bytes in the file.
            if section.kind != 8 and section.start + section.size_bytes > len(payload):
                raise _rejected(f"its section {section.name!r} lies outside the file")
        return sections

    def _content(self, section: Section) -> bytes:
        return self._payload[section.start : section.start + section.size_bytes]

    def _string(self, table: Section, at: int) -> str:
        start = table.start + at
        end = self._payload.find(b"\0", start, table.start + table.size_bytes)
        if at >= table.size_bytes or end < 0:
            raise _rejected("one of its names lies outside the file")
        return self._payload[start:end].decode(errors="replace")

    def _toolkit_note(self) -> str:
        section = self._by_name.get(".note.nv.tkinfo")
        return "" if section is None else self._content(section).replace(b"\0", b"\n").decode(errors="replace")

    def _usage(self) -> tuple[dict[int, int], dict[int, int]]:
        """Registers and frame sizes by symbol index."""
        registers: dict[int, int] = {}
        frames: dict[int, int] = {}
        for attribute, value in self._attributes(".nv.info"):
            if len(value) == 8 and attribute in {_REGISTER_COUNT, _FRAME_SIZE}:
                index, number = struct.unpack("<II", value)
                (registers if attribute == _REGISTER_COUNT else frames)[index] = number
        return registers, frames

    def _parameters(self, kernel: str) -> tuple[str, ...] | None:
        """Sizes of the parameters in order; the file does not keep their types."""
        sizes: dict[int, int] = {}
        for attribute, value in self._attributes(f".nv.info.{kernel}"):
            if attribute == _PARAMETER and len(value) == 12:
                _, ordinal, _, packed = struct.unpack("<IHHI", value)
                sizes[ordinal] = packed >> 18
        if sorted(sizes) != list(range(len(sizes))):
            return None
        return tuple(f"b8[{sizes[ordinal]}]" for ordinal in sorted(sizes))

    def _attributes(self, name: str) -> Iterator[tuple[int, bytes]]:
        section = self._by_name.get(name)
        content = b"" if section is None else self._content(section)
        at = 0
        while at + 4 <= len(content):
            form, attribute, size = struct.unpack_from("<BBH", content, at)
            at += 4
            if form == _HAS_VALUE:
                yield attribute, content[at : at + size]
                at += size


def arch_matches(payload: bytes, arch: Arch) -> bool:
    """Whether the number in the header is the arch's; the suffix is not looked at."""
    number, _ = read_arch_number(payload)
    return number == arch.major * 10 + arch.minor


def _rejected(reason: str) -> PayloadRejected:
    return PayloadRejected(f"this is no whole cubin: {reason}", kind="cubin", reason=reason)
