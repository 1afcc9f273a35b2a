"""Kinds of artifacts: how the bytes of each are recognised, checked and described. One plug-in per file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernelstore.arch import Arch
from kernelstore.artifact import Symbol

__all__ = ["Description", "Kind"]


@dataclass(frozen=True, slots=True)
class Description:
    """What a payload tells of itself; ``None`` where it does not tell."""

    arch: str | None = None
    toolchain: str | None = None
    ptx_version: int | None = None
    relocatable: bool = False
    symbols: tuple[Symbol, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """One format of compiled output.

    Parameters
    ----------
    name : str
        As users write it, such as ``"cubin"``.
    suffix : str
        Of files that hold it, such as ``".cubin"``.
    is_text : bool
        Whether people can read it.
    loadable : bool
        Whether the CUDA driver takes it without a link.
    arch_of : callable
        The arch that an artifact of this kind has when `Arch` was asked for: ``compute_90`` for PTX of ``sm_90``.
    recognises : callable
        Whether bytes look like this kind, from their first bytes; cheap.
    normalise : callable
        The bytes in the one form that is stored (PTX: exactly one trailing NUL).
    check : callable
        Raise `PayloadRejected` for bytes that are not of this kind, or not for the arch given. Cheap: it is
        part of every put.
    describe : callable
        Read what the payload tells of itself; raises `PayloadRejected`.
    """

    name: str
    suffix: str
    is_text: bool
    loadable: bool
    arch_of: Callable[[Arch], Arch]
    recognises: Callable[[bytes], bool]
    normalise: Callable[[bytes], bytes]
    check: Callable[[bytes, str], None]
    describe: Callable[[bytes], Description]
