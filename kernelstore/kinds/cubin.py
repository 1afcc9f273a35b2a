"""Cubins: machine code for one arch, as an ELF file."""

from __future__ import annotations

import struct
from collections import defaultdict

from kernelstore.arch import Arch
from kernelstore.artifact import Symbol
from kernelstore.errors import InvalidArch, PayloadRejected
from kernelstore.kinds import Description, Kind
from kernelstore.kinds._elf import Elf, ElfSymbol, Section, ToolNote, is_cuda_elf

__all__ = ["PLUGIN"]

# STT_OBJECT and, in relocatable files, STT_CUDA_OBJECT.
_VARIABLES = (1, 13)
_FUNCTION = 2
# STO_CUDA_ENTRY in st_other: a kernel, where device functions and their copies (`$kernel$function`) lack it.
_ENTRY = 0x10
# Shared variables and parameters lie in others. Constants of the user lie in bank 3.
_VARIABLE_SECTIONS = (".nv.global", ".nv.global.init", ".nv.constant3")
# Of the compiler's own: literals of strings are `$str`, `$str$1`.
_INTERNAL = (".", "$", "__nv_")

# Of .nv.info: symbol number and value. MIN_STACK_SIZE counts called functions in; FRAME_SIZE is the kernel's own, and
# all that a relocatable file has.
_REGISTER_COUNT, _FRAME_SIZE, _MIN_STACK_SIZE = 0x2F, 0x11, 0x12
_OF_SYMBOL = struct.Struct("<II")
# Of .nv.info.<kernel>: ordinal, offset and size of a parameter, the size in 14 bits at most, or in the newer one, which
# kernels with more than 4 KB of parameters have, in 24.
_PARAMETER, _LARGE_PARAMETER = 0x17, 0x45
_OF_PARAMETER = struct.Struct("<4xH2xI")

# Of each block from sm_90 on the system keeps 1 KB of shared memory, which an executable cubin counts in and ptxas does
# not. Source: CUDA Programming Guide, "Compute Capability 9.x, Shared Memory".
_SYSTEM_SHARED_BYTES = 1024
_SYSTEM_SHARED_SINCE = 90

# No kernel uses that much of anything; columns of the store take 63 bits.
_MAX_USAGE = 2**31


def _check(payload: bytes, arch: str) -> None:
    elf = Elf(payload)
    wanted = Arch.parse(arch)
    told = _told_arch(elf, elf.tool_notes() if not elf.tells_suffix else [])
    if wanted.virtual or (arch != told if told else wanted.major * 10 + wanted.minor != elf.arch_number):
        held = told or f"sm_{elf.arch_number}"
        raise PayloadRejected(f"this cubin is for {held}, not for {arch}", kind="cubin", reason=f"it is for {held}")


def _describe(payload: bytes) -> Description:
    elf = Elf(payload)
    notes = elf.tool_notes()
    arch = _told_arch(elf, notes)
    named = arch or f"sm_{elf.arch_number}"
    try:
        Arch.parse(named)
    except InvalidArch:
        raise PayloadRejected(f"no device has the arch {named} of this cubin", kind="cubin", reason="arch") from None
    return Description(
        arch=arch,
        toolchain=_toolchain(notes),
        relocatable=elf.is_relocatable,
        symbols=_symbols(elf, elf.sections()),
    )


def _told_arch(elf: Elf, notes: list[ToolNote]) -> str | None:
    """Return the arch with its suffix, or ``None`` where only the number is known."""
    number = elf.arch_number
    if elf.tells_suffix:
        return f"sm_{number}a" if elf.has_suffix_bit else f"sm_{number}"
    # A linked file has notes of its linker and of the parts' compilers, which may be for lesser archs. Of those for its
    # own number the suffix that serves the fewest devices is the safe one.
    noted = {note.arch_number for note in notes}
    return next((f"sm_{arch}" for arch in (f"{number}a", f"{number}f", f"{number}") if arch in noted), None)


def _toolchain(notes: list[ToolNote]) -> str | None:
    """Name the newest of the tools, since a driver has to know its output, or of equal ones the code's author."""
    made = [
        (tuple(map(int, build.split("."))), tool == "ptxas", f"{tool} {build}")
        for tool, build in ((note.tool, note.build) for note in notes)
        if tool and build
    ]
    # Of equal ones the first, as the notes have the last tool first.
    return max(made, key=lambda entry: entry[:2])[2] if made else None


def _symbols(elf: Elf, sections: list[Section]) -> tuple[Symbol, ...]:
    usage = _Usage(elf, sections)
    found = []
    for symbol in elf.symbols(sections, (_FUNCTION, *_VARIABLES)):
        if symbol.type == _FUNCTION:
            if symbol.other & _ENTRY and symbol.section:
                found.append(usage.of_kernel(symbol))
        elif _holds_variables(symbol, sections) and not symbol.name.startswith(_INTERNAL):
            found.append(Symbol(symbol.name, what="variable"))
    return tuple(found)


def _holds_variables(symbol: ElfSymbol, sections: list[Section]) -> bool:
    return symbol.section < len(sections) and sections[symbol.section].name in _VARIABLE_SECTIONS


class _Usage:
    """Resource usage of the kernels of one file, gathered in one pass over its sections."""

    def __init__(self, elf: Elf, sections: list[Section]) -> None:
        self._elf = elf
        self._by_number: dict[int, dict[int, int]] = defaultdict(dict)
        self._constant_bytes: dict[str, int] = defaultdict(int)
        self._shared_bytes: dict[str, int] = {}
        self._attributes: dict[str, Section] = {}
        system = _SYSTEM_SHARED_BYTES if elf.arch_number >= _SYSTEM_SHARED_SINCE and not elf.is_relocatable else 0
        for section in sections:
            # .nv.constant0.<kernel>, .nv.shared.<kernel>, .nv.info.<kernel>
            _, _, name = section.name.partition(".nv.")
            what, _, kernel = name.partition(".")
            if what.startswith("constant"):
                self._constant_bytes[kernel] += section.size_bytes
            elif what == "shared":
                self._shared_bytes[kernel] = max(section.size_bytes - system, 0)
            elif what == "info":
                self._attributes[kernel] = section
        if "" in self._attributes:
            self._read_counts(self._attributes.pop(""))

    def of_kernel(self, symbol: ElfSymbol) -> Symbol:
        name = symbol.name
        counts = self._by_number.get(symbol.index, {})
        stacks = [counts[number] for number in (_FRAME_SIZE, _MIN_STACK_SIZE) if number in counts]
        return Symbol(
            name,
            parameters=self._parameters(name),
            registers=counts.get(_REGISTER_COUNT),
            shared_bytes=_plausible(self._shared_bytes.get(name, 0)),
            stack_bytes=max(stacks, default=None),
            constant_bytes=_plausible(self._constant_bytes.get(name, 0)),
        )

    def _read_counts(self, section: Section) -> None:
        for attribute, value in self._elf.attributes(section):
            if attribute in (_REGISTER_COUNT, _FRAME_SIZE, _MIN_STACK_SIZE) and len(value) == _OF_SYMBOL.size:
                index, count = _OF_SYMBOL.unpack(value)
                # A stack that the compiler cannot bound, as with recursion in old releases, is all ones.
                if count < _MAX_USAGE:
                    self._by_number[index][attribute] = count

    def _parameters(self, kernel: str) -> tuple[str, ...] | None:
        """Return ``"8 bytes"`` for each parameter, as the file keeps no types; ``None`` where it does not tell."""
        if kernel not in self._attributes:
            return None
        sizes: dict[int, int] = {}
        for attribute, value in self._elf.attributes(self._attributes[kernel]):
            if attribute in (_PARAMETER, _LARGE_PARAMETER) and len(value) == _OF_PARAMETER.size:
                ordinal, packed = _OF_PARAMETER.unpack(value)
                sizes[ordinal] = packed >> 18 if attribute == _PARAMETER else packed & 0xFFFFFF
        if sorted(sizes) != list(range(len(sizes))):
            return None
        return tuple(f"{sizes[ordinal]} bytes" for ordinal in range(len(sizes)))


def _plausible(size_bytes: int) -> int:
    if size_bytes >= _MAX_USAGE:
        raise PayloadRejected(f"a kernel of this cubin uses {size_bytes} bytes", kind="cubin", reason="resource usage")
    return size_bytes


PLUGIN = Kind(
    name="cubin",
    suffix=".cubin",
    is_text=False,
    loadable=True,
    arch_of=Arch.as_real,
    recognises=is_cuda_elf,
    normalise=bytes,
    check=_check,
    describe=_describe,
)
