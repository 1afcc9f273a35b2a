"""Fat binaries: cubins and PTX for several archs in one; the driver takes what fits its device."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kernelstore.arch import Arch
from kernelstore.errors import PayloadRejected
from kernelstore.kinds import Description, Kind

__all__ = ["PLUGIN"]

# Magic, version, size of the header, size of what follows; then per image a header with kind, its own size, the
# size of the image, and at byte 28 the arch number. As nvcc 13.0 writes them.
_MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")
_IMAGE = struct.Struct("<HHIQ")
_ARCH_AT = 28
_KIND_PTX, _KIND_CUBIN = 1, 2


def _recognises(payload: bytes) -> bool:
    return len(payload) > _HEADER.size and _HEADER.unpack_from(payload)[0] == _MAGIC


def _images(payload: bytes) -> Iterator[Arch]:
    """Yield the arch of each image."""
    if not _recognises(payload):
        raise PayloadRejected(f"{payload[:8]!r} does not begin a fatbin", kind="fatbin", reason="magic")
    _, _, header_bytes, size_bytes = _HEADER.unpack_from(payload)
    at, end = header_bytes, header_bytes + size_bytes
    if header_bytes < _HEADER.size or end > len(payload):
        raise PayloadRejected(
            f"this fatbin is cut off: {len(payload)} of {end} bytes", kind="fatbin", reason="cut off"
        )
    while at < end:
        if at + _ARCH_AT + 4 > end:
            raise PayloadRejected("an image's header lies outside the fatbin", kind="fatbin", reason="cut off")
        kind, _, image_header_bytes, image_bytes = _IMAGE.unpack_from(payload, at)
        number = int.from_bytes(payload[at + _ARCH_AT : at + _ARCH_AT + 4], "little")
        if image_header_bytes < _ARCH_AT + 4 or at + image_header_bytes + image_bytes > end or not 20 <= number < 1000:
            raise PayloadRejected("an image lies outside the fatbin", kind="fatbin", reason="cut off")
        if kind in {_KIND_PTX, _KIND_CUBIN}:
            yield Arch(number // 10, number % 10, virtual=kind == _KIND_PTX)
        at += image_header_bytes + image_bytes


def _check(payload: bytes, arch: str) -> None:
    wanted = Arch.parse(arch)
    found = sorted(set(_images(payload)))
    # An image's header does not tell `a` and `f`.
    if not any(image.compute_capability == wanted.compute_capability for image in found):
        held = ", ".join(map(str, found)) or "nothing"
        raise PayloadRejected(f"this fatbin holds {held}, nothing for {arch}", kind="fatbin", reason="arch")


def _describe(payload: bytes) -> Description:
    found = set(_images(payload))
    numbers = {image.compute_capability for image in found}
    # One arch is told only where there is one, and then without a suffix, which the headers do not keep.
    return Description(arch=str(min(found).as_real()) if len(numbers) == 1 else None)


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
