"""Stored programs: the request that made one, where only the store knows the sources."""

from __future__ import annotations

from kernelstore import explanation
from kernelstore.arch import Arch
from kernelstore.artifact import Program
from kernelstore.errors import InvalidOption, RebuildRefused
from kernelstore.options import Options
from kernelstore.request import Request

__all__ = ["request_of"]


def request_of(program: Program, kind: str, arch: Arch) -> Request:
    """Return the request that made a stored program, for another kind and arch.

    Raises
    ------
    RebuildRefused
        What the compile would read has changed since, or is not known: the request would have another key.
    InvalidOption
        The program's options make another kind.
    """
    shown = program.name or str(program.key)
    if program.include_dirs is None or program.extra is None:
        raise RebuildRefused(
            f"{shown} was stored by a release that did not keep its include directories; compile it from its sources",
            program=program.key,
            parts=("include directories",),
        )
    options = Options.read(program.options)
    if options.lto and kind != "ltoir":
        raise InvalidOption(f"{shown} has options that make LTO-IR only; use kind='ltoir'", options=program.options)
    request = Request(
        source=program.source,
        name=program.name,
        kind=kind,
        arch=arch,
        options=options,
        name_expressions=program.name_expressions,
        include_dirs=program.include_dirs,
        headers=program.headers,
        extra=program.extra,
    )
    if request.uncacheable is not None:
        raise RebuildRefused(
            f"{shown} cannot be keyed any more: {request.uncacheable}; compile it from its sources",
            program=program.key,
            parts=(request.uncacheable,),
        )
    if request.program.key != program.key:
        differences = explanation.between(request.program, program)
        told = "; ".join(map(str, differences)) or "this release makes other keys"
        raise RebuildRefused(
            f"{shown} is no longer what was stored: {told}; compile it from its sources",
            program=program.key,
            parts=tuple(difference.part for difference in differences),
        )
    return request
