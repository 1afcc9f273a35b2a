"""LTO-IR: NVVM's intermediate code, which a linker turns into a cubin."""

from __future__ import annotations

from kernelstore.arch import Arch
from kernelstore.errors import PayloadRejected
from kernelstore.kinds import Description, Kind

__all__ = ["PLUGIN"]

# Of nvrtcGetLTOIR in 12.9 and 13.5, and of nvcc -ltoir in 13.0. The header's own arch number is not read: for sm_110
# it tells 101, and `f` not at all. The rest of the file is scrambled.
_MAGIC = bytes.fromhex("ed434e7f")
# Magic, versions, and the sizes of the tables that follow.
_HEADER_BYTES = 24


def _recognises(payload: bytes) -> bool:
    return payload.startswith(_MAGIC)


def _check(payload: bytes, arch: str) -> None:
    if not _recognises(payload):
        raise PayloadRejected(f"{payload[:8]!r} does not begin LTO-IR", kind="ltoir", reason="no LTO-IR")
    if len(payload) <= _HEADER_BYTES:
        raise PayloadRejected(f"this LTO-IR is cut off after {len(payload)} bytes", kind="ltoir", reason="cut off")
    if not Arch.parse(arch).virtual:
        raise PayloadRejected(f"LTO-IR is for a virtual arch, not for {arch}", kind="ltoir", reason="arch")


def _describe(payload: bytes) -> Description:
    if not _recognises(payload):
        raise PayloadRejected(f"{payload[:8]!r} does not begin LTO-IR", kind="ltoir", reason="no LTO-IR")
    return Description(relocatable=True)


PLUGIN = Kind(
    name="ltoir",
    suffix=".ltoir",
    is_text=False,
    loadable=False,
    arch_of=Arch.as_virtual,
    recognises=_recognises,
    normalise=bytes,
    check=_check,
    describe=_describe,
)
