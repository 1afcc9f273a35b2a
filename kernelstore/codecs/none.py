"""No compression: the blob is the payload."""

from __future__ import annotations

from kernelstore.codecs import Codec
from kernelstore.errors import PayloadCorrupt

__all__ = ["PLUGIN"]


def _encode(payload: bytes) -> bytes:
    return payload


def _decode(blob: bytes, size_bytes: int) -> bytes:
    if len(blob) != size_bytes:
        raise PayloadCorrupt(
            f"{len(blob)} bytes are stored for a payload of {size_bytes} bytes", codec="none", reason="size"
        )
    return blob


PLUGIN = Codec(name="none", encode=_encode, decode=_decode)
