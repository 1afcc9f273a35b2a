"""LZ4 block format: half the size of a cubin, decoded in microseconds."""

from __future__ import annotations

import lz4.block

from kernelstore.codecs import Codec
from kernelstore.errors import PayloadCorrupt

__all__ = ["PLUGIN"]

# lz4 takes sizes below 2 GiB (LZ4_MAX_INPUT_SIZE); a row that says more was not written by kernelstore.
_MAX_SIZE_BYTES = 2**30


def _encode(payload: bytes) -> bytes:
    # The size stands in a column of its own, under the checksum, so it is not stored again before the data.
    blob: bytes = lz4.block.compress(payload, store_size=False)
    return blob


def _decode(blob: bytes, size_bytes: int) -> bytes:
    if not 0 <= size_bytes <= _MAX_SIZE_BYTES:
        raise PayloadCorrupt(f"a payload of {size_bytes} bytes cannot be", codec="lz4", reason="size")
    try:
        payload: bytes = lz4.block.decompress(blob, uncompressed_size=size_bytes)
    except lz4.block.LZ4BlockError as error:
        raise PayloadCorrupt(f"the blob does not decode: {error}", codec="lz4", reason="lz4") from error
    if len(payload) != size_bytes:
        raise PayloadCorrupt(
            f"the blob decodes to {len(payload)} bytes, not {size_bytes}", codec="lz4", reason="size"
        )
    return payload


PLUGIN = Codec(name="lz4", encode=_encode, decode=_decode)
