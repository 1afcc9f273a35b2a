"""Codecs: how payloads become the blobs that are stored, and back. One plug-in per file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Codec"]


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to store bytes.

    Parameters
    ----------
    name : str
        As users write it and as each row keeps it.
    encode : callable
        Payload to blob.
    decode : callable
        Blob and the payload's exact size in bytes to payload. Never allocates more than that size, whatever
        the blob says, and raises `PayloadCorrupt` where the result is not of that size.
    """

    name: str
    encode: Callable[[bytes], bytes]
    decode: Callable[[bytes, int], bytes]
