"""Serving a device: the exact cubin, or the next best of what is stored, until the driver takes one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kernelstore import choice
from kernelstore.arch import Arch
from kernelstore.artifact import Artifact, ArtifactInfo, Program
from kernelstore.errors import (
    KernelNotFound,
    KernelStoreError,
    LoadError,
    NoBinary,
    NoJitCompiler,
    ToolchainError,
    UnsupportedArch,
    UnsupportedPTX,
)
from kernelstore.keeping import Keeping
from kernelstore.key import Key
from kernelstore.request import Request
from kernelstore.store import Store

if TYPE_CHECKING:
    from kernelstore.loader import Module

__all__ = ["infos_of_any_toolchain", "module_for_device", "module_of_stored", "of_any_toolchain"]

# The driver's side is imported where it is used: a hit of `Compiler.compile` owes it nothing.
_logger = logging.getLogger("kernelstore.serving")

# What another artifact may do better at. Other refusals, such as a damaged payload, are told at once.
_REFUSALS = (NoBinary, UnsupportedPTX, NoJitCompiler)


def of_any_toolchain(request: Request, keeping: Keeping) -> Artifact | None:
    """Return what was asked for as another toolchain made it, the newest that the driver here can load."""
    keeping = _trusted(request, keeping)
    found = map(keeping.get, (info.key for info in infos_of_any_toolchain(request, keeping)))
    return next((artifact for artifact in found if artifact is not None), None)


def infos_of_any_toolchain(request: Request, keeping: Keeping) -> list[ArtifactInfo]:
    """Return what is stored of that kind and arch, the newest toolchain first that the driver here can load."""
    from kernelstore.cuda import driver

    stored = [
        info
        for info in keeping.artifacts_of(request.program.key)
        if (info.kind, info.arch) == (request.kind, str(request.arch))
    ]
    return choice.newest_first(stored, driver.driver_version())


def module_for_device(
    request: Request, keeping: Keeping, obtain: Callable[[Request], Artifact], *, chosen: bool
) -> Module:
    """Load what was asked for, or else the next best of the program, for the current device.

    In this order: the exact cubin, from the store or from NVRTC; compatible cubins of any toolchain; PTX, by way of a
    cubin that is made of it once and kept.

    Parameters
    ----------
    request : Request
        For a cubin.
    keeping : Keeping
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
    keeping = _trusted(request, keeping)
    stored = keeping.artifacts_of(request.program.key)
    others = _Offers.of(stored, request.arch if chosen else None, keeping, lambda: request.program)
    newer = () if chosen else _of_newest_known(request, obtain, first)
    module, refused = _first_that_loads(
        itertools.chain(
            others.cubins(tried=getattr(first, "key", None)),
            itertools.chain.from_iterable(map(others.of_ptx, newer)),
            others.ptx(),
        )
    )
    if module is not None:
        return module
    if refused is None and isinstance(first, LoadError):
        refused = first
    if isinstance(refused, (UnsupportedPTX, NoJitCompiler)):
        raise refused
    if not stored or (chosen and not isinstance(first, NoBinary)):
        raise first
    remedy = f"compile it for {request.arch}"
    raise _nothing_runs(request.name or "the program", stored, request.arch, refused, remedy) from first


def module_of_stored(store: Store, keeping: Keeping, program: Key, arch: Arch | None) -> Module:
    """Load what is stored of a program for the current device: compatible cubins, then PTX as `module_for_device`.

    Parameters
    ----------
    keeping : Keeping
        Over the same store.
    arch : Arch or None
        Other archs than this one are not looked at; ``None`` takes the best for the device.

    Raises
    ------
    NoBinary
        What is stored does not run here; it is named.
    UnsupportedPTX, NoJitCompiler
        There is only PTX, which the driver does not take.
    LoadError
        As it comes: another artifact would not help.
    StoreError
        The file cannot be read.
    """
    from kernelstore.cuda import driver

    stored = store.artifacts_of(program)
    offers = _Offers.of(stored, arch, keeping, lambda: store.program(program))
    module, refused = _first_that_loads(itertools.chain(offers.cubins(), offers.ptx()))
    if module is not None:
        return module
    if isinstance(refused, (UnsupportedPTX, NoJitCompiler)):
        raise refused
    wanted = Arch(*driver.compute_capability())
    remedy = f"Compiler.rebuild(program, {str(wanted)!r}) makes what does"
    raise _nothing_runs(f"program {program}", stored, arch or wanted, refused, remedy)


@dataclasses.dataclass(frozen=True, slots=True)
class _Offers:
    """What is stored of a program and may serve the current device, the best first, read as it is asked for."""

    candidates: list[ArtifactInfo]
    keeping: Keeping
    program: Callable[[], Program | None]

    @classmethod
    def of(
        cls, stored: list[ArtifactInfo], arch: Arch | None, keeping: Keeping, program: Callable[[], Program | None]
    ) -> _Offers:
        from kernelstore.cuda import driver

        found = choice.candidates(
            stored,
            driver.compute_capability(),
            driver_version=driver.driver_version(),
            only=None if arch is None else arch.number,
            newer_ptx=True,
        )
        if arch is not None and arch.virtual:
            found = [info for info in found if info.kind == "ptx"]
        return cls(found, keeping, program)

    def cubins(self, tried: Key | None = None) -> Iterator[Artifact]:
        return self._read("cubin", tried)

    def ptx(self) -> Iterator[Artifact]:
        for ptx in self._read("ptx"):
            yield from self.of_ptx(ptx)

    def of_ptx(self, ptx: Artifact) -> Iterator[Artifact]:
        from kernelstore.cuda import driver
        from kernelstore.linker import cubin_of_ptx

        cubin = cubin_of_ptx(ptx, driver.compute_capability(), keeping=self.keeping, program=self.program())
        if cubin is not None:
            yield cubin
        # The driver's own JIT, and its own words where it refuses.
        yield ptx

    def _read(self, kind: str, tried: Key | None = None) -> Iterator[Artifact]:
        for info in self.candidates:
            artifact = self.keeping.get(info.key) if info.kind == kind and info.key != tried else None
            if artifact is not None:
                yield artifact


def _first_that_loads(artifacts: Iterable[Artifact]) -> tuple[Module | None, LoadError | None]:
    """Load the first artifact that the driver takes; otherwise tell what it said of the last."""
    refused: LoadError | None = None
    for artifact in artifacts:
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
        return module, None
    return None, refused


def _of_newest_known(
    request: Request, obtain: Callable[[Request], Artifact], error: KernelStoreError
) -> Iterator[Artifact]:
    """Yield PTX of the newest arch that NVRTC knows, where the device is newer than NVRTC."""
    if not isinstance(error, UnsupportedArch):
        return
    # PTX of an older arch runs on a newer device.
    known = [number for number in error.supported if (number // 10, number % 10) <= request.arch.compute_capability]
    if known:
        newest = Arch(max(known) // 10, max(known) % 10, virtual=True)
        _logger.info("%s is newer than %s; compiling PTX for %s", request.arch, error.toolchain, newest)
        yield obtain(dataclasses.replace(request, kind="ptx", arch=newest))


def _trusted(request: Request, keeping: Keeping) -> Keeping:
    # What cannot be keyed may be another program tomorrow under the same key.
    return keeping if request.uncacheable is None else Keeping()


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


def _nothing_runs(
    shown: str, stored: list[ArtifactInfo], arch: Arch, refused: LoadError | None, remedy: str
) -> NoBinary:
    from kernelstore.cuda import driver

    major, minor = driver.compute_capability()
    archs = tuple(dict.fromkeys(f"{info.kind} {info.arch}" for info in reversed(stored)))
    return NoBinary(
        f"nothing that is stored of {shown} runs on compute capability {major}.{minor} with driver version "
        f"{driver.driver_version()}: there are {', '.join(archs)}; {remedy}",
        result=None if refused is None else refused.result,
        name=None if refused is None else refused.name,
        kind="cubin",
        arch=str(arch),
        key=None,
        driver_version=driver.driver_version(),
        archs=archs,
    )
