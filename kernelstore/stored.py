"""Stored programs: what is rebuilt or loaded where only the store knows the sources."""

from __future__ import annotations

from kernelstore import choice, explanation
from kernelstore.arch import Arch
from kernelstore.artifact import Artifact, ArtifactInfo, Program
from kernelstore.errors import InvalidOption, NoBinary, RebuildRefused
from kernelstore.key import Key
from kernelstore.options import Options
from kernelstore.request import Request
from kernelstore.store import Store

__all__ = ["best_artifact", "request_of"]


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


def best_artifact(
    store: Store, program: Key, *, compute_capability: tuple[int, int], arch: str | None, driver_version: int | None
) -> Artifact:
    """Return the stored cubin of a program that serves a device best.

    Exactly of the device's compute capability, ``sm_90a`` before ``sm_90``, or of `arch`; of the newest toolchain
    that the driver can load: a cubin of CUDA 13 needs a driver of CUDA 13.

    Raises
    ------
    NoBinary
        None is stored.
    """
    if arch is None:
        wanted = [str(Arch(*compute_capability, suffix)) for suffix in ("a", "f", "")]
    else:
        wanted = [str(Arch.parse(arch))]
    stored = store.artifacts_of(program)
    newest_major = 999 if driver_version is None else driver_version // 1000
    fit = [
        artifact
        for artifact in stored
        if artifact.kind == "cubin"
        and artifact.arch in wanted
        and not artifact.relocatable
        and _build(artifact)[0] <= newest_major
    ]
    # Stable: among equals the newest row stays first.
    fit.sort(key=_build, reverse=True)
    fit.sort(key=lambda artifact: wanted.index(artifact.arch))
    for candidate in fit:
        artifact = store.get(candidate.key)
        if artifact is not None:
            return artifact
    present = ", ".join(sorted({f"{artifact.kind} {artifact.arch}" for artifact in stored})) or "nothing"
    raise NoBinary(
        f"program {program} has no cubin for {' or '.join(wanted)} that this driver can load, it has {present}; "
        f"Compiler.rebuild(program, {wanted[-1]!r}) makes one",
        kind="cubin",
        arch=wanted[-1],
        key=program,
        driver_version=driver_version,
        result=None,
        name=None,
    )


def _build(artifact: ArtifactInfo) -> tuple[int, int, int]:
    return choice.build_of(artifact.toolchain) or (0, 0, 0)
