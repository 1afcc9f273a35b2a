"""Fat binaries: cubins and PTX for several archs in one; the driver takes what fits its device.

One that holds a single arch tells it. For others the caller says under which of those it holds it is to be found:
the lowest serves the most devices.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from kernelstore.arch import Arch
from kernelstore.errors import PayloadRejected
from kernelstore.kinds import Description, Kind

__all__ = ["PLUGIN"]

# The layouts as nvcc 13.0 and nvFatbin 13.5 write them. Magic, version, size of this header, size of the images.
_MAGIC = (0xBA55ED50).to_bytes(4, "little")
_HEADER = struct.Struct("<4xHHQ")
# Kind, version, size of this header, size of the image, arch number, flags. A longer header has from byte 64 on where
# in it the options lie, and their size.
_IMAGE = struct.Struct("<HHIQ12xI8xQ")
_OPTIONS = struct.Struct("<64xII")

_PTX, _CUBIN, _LTOIR = 1, 2, 8
_SUFFIX_A, _SUFFIX_F = 0x100000, 0x200000
# Of the options of an image's compiler, with -rdc=true.
_RELOCATABLE = b"--compile-only"
_ELF_RELOCATABLE = 1


@dataclass(frozen=True, slots=True)
class _Image:
    """One image: its arch, and whether it must be linked before it can be loaded."""

    arch: Arch
    relocatable: bool


def _recognises(payload: bytes) -> bool:
    return payload.startswith(_MAGIC)


def _check(payload: bytes, arch: str) -> None:
    wanted = Arch.parse(arch)
    found = _archs(_images(payload))
    if wanted not in found:
        held = ", ".join(map(str, found))
        raise PayloadRejected(f"this fatbin holds {held}, nothing for {arch}", kind="fatbin", reason=f"holds {held}")


def _describe(payload: bytes) -> Description:
    images = _images(payload)
    found = _archs(images)
    return Description(
        arch=str(found[0]) if len(found) == 1 else None,
        # A compressed cubin does not tell; PTX and LTO-IR, which nvcc puts beside it, do.
        relocatable=any(image.relocatable for image in images),
    )


def _archs(images: list[_Image]) -> list[Arch]:
    return sorted({image.arch.as_real() for image in images})


def _images(payload: bytes) -> list[_Image]:
    if not _recognises(payload):
        raise PayloadRejected(f"{payload[:8]!r} does not begin a fatbin", kind="fatbin", reason="no fatbin")
    found: list[_Image] = []
    at = 0
    # A file may hold several, one after the other, and end with padding.
    while payload.startswith(_MAGIC, at):
        if at + _HEADER.size > len(payload):
            raise _cut_off("its header", at)
        _, header_bytes, size_bytes = _HEADER.unpack_from(payload, at)
        start, end = at + header_bytes, at + header_bytes + size_bytes
        if start < at + _HEADER.size or end > len(payload):
            raise _cut_off(f"of {len(payload)} bytes", end)
        found.extend(_images_between(payload, start, end))
        at = end
    if payload[at:].strip(b"\0"):
        raise PayloadRejected(f"{payload[at : at + 8]!r} follows the fatbin", kind="fatbin", reason="trailing bytes")
    if not found:
        raise PayloadRejected("this fatbin holds no cubin, PTX or LTO-IR", kind="fatbin", reason="holds nothing")
    return found


def _images_between(payload: bytes, start: int, end: int) -> Iterator[_Image]:
    while start < end:
        if start + _IMAGE.size > end:
            raise _cut_off("an image's header", start)
        kind, _, header_bytes, size_bytes, number, flags = _IMAGE.unpack_from(payload, start)
        content = start + header_bytes
        if header_bytes < _IMAGE.size or content + size_bytes > end:
            raise _cut_off("an image", start)
        # Kinds that other tools add hold nothing that loads.
        if kind in (_PTX, _CUBIN, _LTOIR):
            yield _Image(_arch(number, flags), kind == _LTOIR or _is_relocatable(payload, start, content))
        start = content + size_bytes


def _arch(number: int, flags: int) -> Arch:
    if not 10 <= number < 1000:
        raise PayloadRejected(f"an image of this fatbin is for {number}, no arch", kind="fatbin", reason="arch")
    suffix = "a" if flags & _SUFFIX_A else "f" if flags & _SUFFIX_F else ""
    return Arch(number // 10, number % 10, suffix)


def _is_relocatable(payload: bytes, start: int, content: int) -> bool:
    if payload.startswith(b"\x7fELF", content):
        return int.from_bytes(payload[content + 16 : content + 18], "little") == _ELF_RELOCATABLE
    if content - start < _OPTIONS.size:
        return False
    options_at, options_bytes = _OPTIONS.unpack_from(payload, start)
    return _RELOCATABLE in payload[start + options_at : min(start + options_at + options_bytes, content)]


def _cut_off(what: str, at: int) -> PayloadRejected:
    return PayloadRejected(f"this fatbin is cut off or damaged: {what} at {at}", kind="fatbin", reason="cut off")


PLUGIN = Kind(
    name="fatbin",
    suffix=".fatbin",
    is_text=False,
    loadable=True,
    arch_of=Arch.as_real,
    recognises=_recognises,
    normalise=bytes,
    check=_check,
    describe=_describe,
)
