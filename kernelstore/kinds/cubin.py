"""Cubins: machine code for one arch, as an ELF file."""

from __future__ import annotations

from kernelstore.arch import Arch
from kernelstore.errors import PayloadRejected
from kernelstore.kinds import Description, Kind
from kernelstore.kinds._elf import Elf, arch_matches, is_cuda_elf, read_arch_number

__all__ = ["PLUGIN"]


def _check(payload: bytes, arch: str) -> None:
    if not is_cuda_elf(payload):
        raise PayloadRejected(f"{payload[:8]!r} does not begin a cubin", kind="cubin", reason="no CUDA ELF")
    end = int.from_bytes(payload[40:48], "little") + 64 * int.from_bytes(payload[60:62], "little")
    if end > len(payload):
        raise PayloadRejected(
            f"this cubin is cut off: {len(payload)} of at least {end} bytes", kind="cubin", reason="cut off"
        )
    wanted = Arch.parse(arch)
    if wanted.virtual or not arch_matches(payload, wanted):
        number, _ = read_arch_number(payload)
        raise PayloadRejected(f"this cubin is for sm_{number}, not for {arch}", kind="cubin", reason="arch")


def _describe(payload: bytes) -> Description:
    elf = Elf(payload)
    return Description(
        arch=elf.arch, toolchain=elf.toolchain, relocatable=elf.relocatable, symbols=elf.symbols()
    )


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
