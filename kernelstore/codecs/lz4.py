"""LZ4 block format: half the size of a cubin, decoded in microseconds."""

from __future__ import annotations

import lz4.block

from kernelstore.codecs import Codec
from kernelstore.errors import PayloadCorrupt

__all__ = ["MAX_SIZE_BYTES", "PLUGIN"]

# SQLite keeps no blob above 10**9 bytes unless it is built to (SQLITE_MAX_LENGTH), so a row that tells more was not
# written by kernelstore. liblz4 takes the size as a C int: beyond 2**31 it would be cut off before it is compared.
MAX_SIZE_BYTES = 2**30

# A byte of a block yields at most 255 bytes: it lengthens a match by up to that much. Source: LZ4, "Block Format
# Description". Without this bound, 10 damaged bytes could ask for a gigabyte.
_MAX_RATIO = 255


def _encode(payload: bytes) -> bytes:
    # The size stands in a column of its own, under the checksum, so it is not stored again before the data.
    blob: bytes = lz4.block.compress(payload, store_size=False)
    return blob


def _decode(blob: bytes, size_bytes: int) -> bytes:
    # Before the call: liblz4's binding allocates `size_bytes` at once.
    if not 0 <= size_bytes <= min(MAX_SIZE_BYTES, _MAX_RATIO * len(blob)):
        raise PayloadCorrupt(
            f"{len(blob)} bytes of LZ4 cannot hold a payload of {size_bytes} bytes", codec="lz4", reason="size"
        )
    try:
        payload: bytes = lz4.block.decompress(blob, uncompressed_size=size_bytes)
    except lz4.block.LZ4BlockError as error:
        raise PayloadCorrupt(f"the blob does not decode: {error}", codec="lz4", reason="lz4") from error
    if len(payload) != size_bytes:
        raise PayloadCorrupt(f"the blob decodes to {len(payload)} bytes, not {size_bytes}", codec="lz4", reason="size")
    return payload


PLUGIN = Codec(name="lz4", encode=_encode, decode=_decode)
