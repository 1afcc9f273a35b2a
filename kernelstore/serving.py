"""Serving a device: the exact cubin, or the next best of what is stored, until the driver takes one."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kernelstore import choice
from kernelstore.arch import Arch
from kernelstore.artifact import Artifact, ArtifactInfo
from kernelstore.errors import (
    KernelNotFound,
    KernelStoreError,
    LoadError,
    NoBinary,
    NoJitCompiler,
    StoreError,
    ToolchainError,
    UnknownPlugin,
    UnsupportedArch,
    UnsupportedPTX,
)
from kernelstore.request import Request
from kernelstore.store import Store

if TYPE_CHECKING:
    from kernelstore.loader import Module

__all__ = ["module_for_device", "of_any_toolchain"]

# The driver's side is imported where it is used: a hit of `Compiler.compile` owes it nothing.
_logger = logging.getLogger("kernelstore.serving")

# What another artifact may do better at. Other refusals, such as a damaged payload, are told at once.
_REFUSALS = (NoBinary, UnsupportedPTX, NoJitCompiler)


def of_any_toolchain(request: Request, store: Store | None) -> Artifact | None:
    """Return what was asked for as another toolchain made it, the newest that the driver here can load."""
    from kernelstore.cuda import driver

    version = driver.driver_version()
    stored = [info for info in _stored(request, store) if (info.kind, info.arch) == (request.kind, str(request.arch))]
    for info in choice.newest_first(stored, version):
        artifact = _read(store, info)
        if artifact is not None:
            return artifact
    return None


def module_for_device(
    request: Request, store: Store | None, obtain: Callable[[Request], Artifact], *, chosen: bool
) -> Module:
    """Load what was asked for, or else the next best of the program, for the current device.

    In this order: the exact cubin, from the store or from NVRTC; compatible cubins of any toolchain; PTX, by way of a
    cubin that is made of it once and kept.

    Parameters
    ----------
    request : Request
        For a cubin.
    store : Store or None
        Where the others are looked for.
    obtain : callable
        Gives an artifact from the store or from NVRTC.
    chosen : bool
        Whether the caller chose the arch; then artifacts of other archs are not looked at.

    Raises
    ------
    UnsupportedArch, ToolchainError
        There is nothing stored and it cannot be compiled.
    NoBinary
        What is stored does not run here; it is named.
    UnsupportedPTX, NoJitCompiler
        There is only PTX, which the driver does not take.
    LoadError, CompileError
        As they come: another artifact would not help.
    """
    try:
        return _load(obtain(request))
    except (ToolchainError, UnsupportedArch, *_REFUSALS) as error:
        first: KernelStoreError = error
    _logger.info("looking for another artifact of the program: %s", first)
    stored = _stored(request, store)
    refused: LoadError | None = first if isinstance(first, LoadError) else None
    for artifact in _others(request, store, stored, obtain, first, chosen=chosen):
        try:
            module = _load(artifact)
        except _REFUSALS as error:
            _logger.info("the driver refused, trying the next: %s", error)
            refused = error
            continue
        _logger.info(
            "serving the %s of %s by %s, key %s",
            artifact.kind, artifact.arch, artifact.toolchain or artifact.origin, artifact.key,
        )  # fmt: skip
        return module
    if isinstance(refused, (UnsupportedPTX, NoJitCompiler)):
        raise refused
    if not stored or (chosen and not isinstance(first, NoBinary)):
        raise first
    raise _nothing_runs(request, stored, refused) from first


def _others(
    request: Request,
    store: Store | None,
    stored: list[ArtifactInfo],
    obtain: Callable[[Request], Artifact],
    first: KernelStoreError,
    *,
    chosen: bool,
) -> Iterator[Artifact]:
    from kernelstore.cuda import driver

    device = driver.compute_capability()
    found = choice.candidates(
        stored,
        device,
        driver_version=driver.driver_version(),
        only=request.arch.number if chosen else None,
        newer_ptx=True,
    )
    tried = getattr(first, "key", None)
    for info in found:
        if info.kind == "cubin" and info.key != tried:
            artifact = _read(store, info)
            if artifact is not None:
                yield artifact
    newest = None if chosen or not isinstance(first, UnsupportedArch) else _newest_known(first, request.arch)
    if newest is not None:
        _logger.info("%s is newer than %s; compiling PTX for %s", request.arch, first.toolchain, newest)
        yield from _of_ptx(obtain(dataclasses.replace(request, kind="ptx", arch=newest)), device, request, store)
    for info in found:
        if info.kind == "ptx":
            artifact = _read(store, info)
            if artifact is not None:
                yield from _of_ptx(artifact, device, request, store)


def _of_ptx(ptx: Artifact, device: tuple[int, int], request: Request, store: Store | None) -> Iterator[Artifact]:
    from kernelstore.linker import cubin_of_ptx

    kept = None if request.uncacheable is not None else store
    cubin = cubin_of_ptx(ptx, device, store=kept, program=request.program)
    if cubin is not None:
        yield cubin
    # The driver's own JIT, and its own words where it refuses.
    yield ptx


def _newest_known(error: KernelStoreError, wanted: Arch) -> Arch | None:
    # PTX of an older arch runs on a newer device.
    known = [number for number in error.supported if (number // 10, number % 10) <= wanted.compute_capability]
    return Arch(max(known) // 10, max(known) % 10, virtual=True) if known else None


def _load(artifact: Artifact) -> Module:
    from kernelstore import loader

    module = loader.load(artifact)
    # A lazily loaded library tells only now that it does not run here, while there still is a choice.
    kernel = next((symbol for symbol in artifact.symbols if symbol.what == "kernel"), None)
    if kernel is not None:
        try:
            with contextlib.suppress(KernelNotFound):
                module.get_kernel(kernel.name)
        except BaseException:
            module.unload()
            raise
    return module


def _stored(request: Request, store: Store | None) -> list[ArtifactInfo]:
    # What cannot be keyed may be another program tomorrow under the same key.
    if store is None or request.uncacheable is not None:
        return []
    try:
        return store.artifacts_of(request.program.key)
    except StoreError as error:
        _logger.info("what is stored of the program cannot be read: %s", error)
        return []


def _read(store: Store | None, info: ArtifactInfo) -> Artifact | None:
    try:
        return None if store is None else store.get(info.key)
    except (StoreError, UnknownPlugin) as error:
        _logger.info("artifact %s cannot be read: %s", info.key, error)
        return None


def _nothing_runs(request: Request, stored: list[ArtifactInfo], refused: LoadError | None) -> NoBinary:
    from kernelstore.cuda import driver

    major, minor = driver.compute_capability()
    archs = tuple(dict.fromkeys(f"{info.kind} {info.arch}" for info in reversed(stored)))
    return NoBinary(
        f"nothing that is stored of {request.name or 'the program'} runs on compute capability {major}.{minor} with "
        f"driver version {driver.driver_version()}: there are {', '.join(archs)}; compile it for {request.arch}",
        result=None if refused is None else refused.result,
        name=None if refused is None else refused.name,
        kind=request.kind,
        arch=str(request.arch),
        key=None,
        driver_version=driver.driver_version(),
        archs=archs,
    )
