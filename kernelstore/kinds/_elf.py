"""CUDA ELF files: header, sections, symbols, notes and attributes, with every offset checked before it is followed.

What these mean for a cubin is told in `kernelstore.kinds.cubin`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kernelstore.errors import PayloadRejected

__all__ = ["Elf", "ElfSymbol", "Section", "ToolNote", "is_cuda_elf"]

# ELFCLASS64, ELFDATA2LSB.
_MAGIC = b"\x7fELF\x02\x01"
# EM_CUDA. Source: binutils, include/elf/common.h.
_MACHINE = (190).to_bytes(2, "little")

_HEADER = struct.Struct("<8sB7xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_NOTE = struct.Struct("<III")
# Of .note.nv.tkinfo, after two numbers: where in its strings the tool, its version, its build and its arguments start.
_TOOL = struct.Struct("<8xIIII")
_ATTRIBUTE = struct.Struct("<BBH")

_RELOCATABLE, _EXECUTABLE = 1, 2
_SYMBOLS, _NOTES, _NO_BITS = 2, 7, 8
# SHN_LORESERVE and SHN_XINDEX: with more sections than fit 16 bits, section 0 holds the numbers.
_FIRST_RESERVED, _EXTENDED = 0xFF00, 0xFFFF
_TOOL_NOTE = b".note.nv.tkinfo"

# From ABI version 8 on (CUDA 13; on CUDA 12.9 from sm_100 on) e_flags has the arch number in bits 8 to 15 and the
# suffix `a` as bit 3; before it, in bits 0 to 7 and as bit 11. CUDA 13 leaves bit 3 clear. Source: LLVM,
# BinaryFormat/ELF.h, EF_CUDA_*; seen in what NVRTC 12.9 and 13.5 make for sm_50 to sm_121.
_NEW_ABI = 8
_NEW_SUFFIX_BIT, _OLD_SUFFIX_BIT = 0x8, 0x800

# Bounded, since both come from the file: int() of thousands of digits raises, and a terminal obeys escape codes.
_BUILD = re.compile(r"\bV(\d{1,6}\.\d{1,6}\.\d{1,6})\b", re.ASCII)
_TOOL_NAME = re.compile(r"[\w.+-][\w.+ -]{0,39}", re.ASCII)
_ARCH = re.compile(r"-arch[= ]sm_(\d+[af]?)(?!\w)", re.ASCII)


def is_cuda_elf(payload: bytes) -> bool:
    """Whether the first bytes are those of a 64-bit CUDA ELF file."""
    return payload.startswith(_MAGIC) and payload[18:20] == _MACHINE


@dataclass(frozen=True, slots=True)
class Section:
    """One section. `size_bytes` is its size in memory, which takes no bytes in the file where it has no content."""

    name: str
    type: int
    start: int
    size_bytes: int
    link: int


@dataclass(frozen=True, slots=True)
class ElfSymbol:
    """One symbol; `type` and `other` as in st_info and st_other, `section` a number."""

    index: int
    name: str
    type: int
    other: int
    section: int


@dataclass(frozen=True, slots=True)
class ToolNote:
    """What one tool noted of itself. Read when asked for: a check needs the arch alone."""

    value: bytes

    @property
    def tool(self) -> str | None:
        """Such as ``"ptxas"``; ``None`` for text that is no name."""
        found = _TOOL_NAME.fullmatch(self._text(0))
        return None if found is None else found[0]

    @property
    def build(self) -> str | None:
        """Such as ``"13.5.37"``."""
        found = _BUILD.search(self._text(1))
        return None if found is None else found[1]

    @property
    def arch_number(self) -> str | None:
        """Such as ``"90a"``, of the tool's argument ``-arch sm_90a``."""
        found = _ARCH.search(self._text(3))
        return None if found is None else found[1]

    def _text(self, field: int) -> str:
        if len(self.value) < _TOOL.size:
            raise _rejected("a note of its tools is cut off")
        start = _TOOL.size + _TOOL.unpack_from(self.value)[field]
        # Without an end it runs on to the note's.
        end = self.value.find(b"\0", start)
        return self.value[start : end if end >= 0 else None].decode(errors="replace")


class Elf:
    """One CUDA ELF file, of which nothing but the header is read until it is asked for.

    Parameters
    ----------
    payload : bytes
        The whole file.

    Raises
    ------
    PayloadRejected
        From here and from every method: it is no CUDA ELF file, or it is cut off or damaged.
    """

    def __init__(self, payload: bytes) -> None:
        if not is_cuda_elf(payload):
            raise _rejected(f"{payload[:8]!r} does not begin a CUDA ELF file")
        if len(payload) < _HEADER.size:
            raise _rejected("its header is cut off")
        self._payload = payload
        # Names and attributes of a sound file do not overlap, so reading them all takes fewer bytes than this. A
        # hostile one whose names all run through the same megabyte would otherwise keep us busy for hours.
        self._left = 2 * len(payload)
        fields: tuple[int, ...] = _HEADER.unpack_from(payload)[1:]
        self.abi_version, elf_type, _, _, _, programs_at, self._table_at, self.flags = fields[:8]
        _, program_bytes, programs, entry_bytes, self._count, self._names_number = fields[8:]
        if elf_type not in (_RELOCATABLE, _EXECUTABLE):
            raise _rejected(f"its type {elf_type} is neither executable nor relocatable")
        self.is_relocatable = elf_type == _RELOCATABLE
        if entry_bytes != _SECTION.size or not self._table_at:
            raise _rejected("it has no section table")
        self._extend_counts()
        if self._table_at + self._count * _SECTION.size > len(payload):
            raise _rejected("its section table lies outside the file")
        if programs_at + programs * program_bytes > len(payload):
            raise _rejected("its program headers lie outside the file")
        if self._names_number >= self._count:
            raise _rejected("its section names lie outside the file")

    @property
    def arch_number(self) -> int:
        """Such as 90."""
        return self.flags >> 8 & 0xFF if self.abi_version >= _NEW_ABI else self.flags & 0xFF

    @property
    def has_suffix_bit(self) -> bool:
        """Whether the header tells the suffix ``a``."""
        return bool(self.flags & (_NEW_SUFFIX_BIT if self.abi_version >= _NEW_ABI else _OLD_SUFFIX_BIT))

    @property
    def tells_suffix(self) -> bool:
        """Whether the header alone tells the suffix, as it does in the old ABI, which knew none but ``a``."""
        return self.abi_version < _NEW_ABI or self.has_suffix_bit

    def sections(self) -> list[Section]:
        """Read the section table."""
        names_at, names_end = self._names_range()
        return [
            Section(self._string(row[0], names_at, names_end), row[1], row[4], row[5], row[6]) for row in self._rows()
        ]

    def content(self, section: Section) -> bytes:
        """Return a section's bytes."""
        if section.type == _NO_BITS:
            return b""
        self._check_range(section.start, section.size_bytes)
        return self._payload[section.start : section.start + section.size_bytes]

    def symbols(self, sections: list[Section], types: Collection[int]) -> Iterator[ElfSymbol]:
        """Yield the symbols of those types, in their order."""
        table = next((section for section in sections if section.type == _SYMBOLS), None)
        if table is None:
            return
        if table.link >= len(sections):
            raise _rejected("its symbols have no names")
        names = sections[table.link]
        self._check_range(names.start, names.size_bytes)
        content = self.content(table)
        content = content[: len(content) - len(content) % _SYMBOL.size]
        for index, (name_at, info, other, section, _, _) in enumerate(_SYMBOL.iter_unpack(content)):
            if info & 15 in types:
                name = self._string(name_at, names.start, names.start + names.size_bytes)
                if not name.isprintable():
                    raise _rejected(f"{name[:40]!r} is no name")
                yield ElfSymbol(index, name, info & 15, other, section)

    def attributes(self, section: Section) -> Iterator[tuple[int, bytes]]:
        """Yield number and value of the attributes that hold more than 16 bits, from a section ``.nv.info*``."""
        content = self.content(section)
        self._spend(len(content))
        at = 0
        while at + _ATTRIBUTE.size <= len(content):
            form, attribute, size_bytes = _ATTRIBUTE.unpack_from(content, at)
            at += _ATTRIBUTE.size
            # EIFMT_SVAL; the other forms hold their value where this one has the size.
            if form == 4:
                yield attribute, content[at : at + size_bytes]
                at += size_bytes

    def tool_notes(self) -> list[ToolNote]:
        """Read what the tools that made the file noted of themselves, the last tool first."""
        names_at, _ = self._names_range()
        for row in self._rows():
            # Without making names of all sections: this is part of every check.
            if row[1] == _NOTES and self._payload.startswith(_TOOL_NOTE + b"\0", names_at + row[0]):
                self._check_range(row[4], row[5])
                return [ToolNote(value) for value in _notes(self._payload[row[4] : row[4] + row[5]])]
        return []

    def _rows(self) -> Iterator[tuple[int, ...]]:
        return _SECTION.iter_unpack(self._payload[self._table_at : self._table_at + self._count * _SECTION.size])

    def _extend_counts(self) -> None:
        if self._count and self._names_number != _EXTENDED:
            return
        if self._table_at + _SECTION.size > len(self._payload):
            raise _rejected("its section table lies outside the file")
        row = _SECTION.unpack_from(self._payload, self._table_at)
        self._count = self._count or row[5]
        self._names_number = row[6] if self._names_number == _EXTENDED else self._names_number

    def _names_range(self) -> tuple[int, int]:
        row = _SECTION.unpack_from(self._payload, self._table_at + self._names_number * _SECTION.size)
        self._check_range(row[4], row[5])
        return row[4], row[4] + row[5]

    def _check_range(self, start: int, size_bytes: int) -> None:
        if start + size_bytes > len(self._payload):
            raise _rejected(f"a section of {size_bytes} bytes at {start} lies outside its {len(self._payload)} bytes")

    def _string(self, at: int, table_start: int, table_end: int) -> str:
        start = table_start + at
        end = self._payload.find(b"\0", start, table_end) if start < table_end else -1
        if end < 0:
            raise _rejected("a name lies outside the file")
        self._spend(end - start)
        return self._payload[start:end].decode(errors="replace")

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _rejected("its parts overlap")


def _notes(content: bytes) -> Iterator[bytes]:
    """Yield the values of the notes in a note section."""
    at = 0
    while at + _NOTE.size <= len(content):
        name_bytes, value_bytes, _ = _NOTE.unpack_from(content, at)
        # Both parts are padded to four bytes.
        start = at + _NOTE.size + (name_bytes + 3 & ~3)
        yield content[start : start + value_bytes]
        at = start + (value_bytes + 3 & ~3)


def _rejected(reason: str) -> PayloadRejected:
    return PayloadRejected(f"this is no whole cubin: {reason}", kind="cubin", reason=reason)
