"""Keys: SHA-256 over labelled, length-prefixed parts of everything that decides a compile's output."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Self

from kernelstore.errors import InvalidArgument, InvalidType

__all__ = ["KEY_VERSION", "Key", "key_of"]

# Raise it whenever equal parts come to mean another output; all old keys then miss.
KEY_VERSION = 1

_SIZE = 32


class Key(bytes):
    """A 32-byte key, shown as 64 hex digits.

    Parameters
    ----------
    value : bytes or str
        The 32 bytes, or their hex form.

    Raises
    ------
    InvalidType
        `value` is neither.
    InvalidArgument
        `value` is not 32 bytes, or not hex.
    """

    __slots__ = ()

    def __new__(cls, value: bytes | str) -> Self:  # noqa: D102 - the class says it
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                value = bytes.fromhex(value)
            except ValueError:
                raise InvalidArgument(f"{value[:80]!r} is no key; a key is 64 hex digits") from None
        elif not isinstance(value, (bytes, bytearray, memoryview)):
            raise InvalidType(f"a key is 32 bytes or their hex text, not {type(value).__name__}")
        if len(value) != _SIZE:
            raise InvalidArgument(f"a key is {_SIZE} bytes, not {len(value)}")
        return super().__new__(cls, value)

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"Key('{self.hex()}')"

    def __reduce__(self) -> tuple[type[Key], tuple[bytes]]:
        return Key, (bytes(self),)


def key_of(parts: Iterable[tuple[str, bytes]]) -> Key:
    """Hash labelled parts so that no two lists of parts give one key.

    Parameters
    ----------
    parts : iterable of (label, content)
        In a fixed order. Labels and contents are hashed with their lengths, so neither a separator inside a
        content nor an empty content can make two lists look alike.
    """
    digest = hashlib.sha256(b"kernelstore key %d\0" % KEY_VERSION, usedforsecurity=False)
    for label, content in parts:
        name = label.encode()
        digest.update(len(name).to_bytes(8, "little"))
        digest.update(name)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return Key(digest.digest())
