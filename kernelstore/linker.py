"""Linking: several LTO-IR, PTX and relocatable cubins to one cubin, and PTX to the cubin of a device."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

from kernelstore import choice, plugins
from kernelstore.arch import Arch
from kernelstore.artifact import Artifact, Program, Symbol
from kernelstore.cuda import driver
from kernelstore.errors import (
    InvalidArch,
    InvalidArgument,
    InvalidType,
    LinkError,
    LoadError,
    NoJitCompiler,
    PayloadRejected,
    ToolchainError,
    UnsupportedPTX,
)
from kernelstore.keeping import Keeping
from kernelstore.key import Key, key_of
from kernelstore.store import Store

__all__ = ["Linker", "cubin_of_ptx"]

_INPUT_KINDS = ("ltoir", "ptx", "cubin")

_logger = logging.getLogger("kernelstore.linker")


class Linker:
    """A front end to nvJitLink that asks a store first.

    Trouble with the store costs a link and a warning, never the program.

    Parameters
    ----------
    store : Store, optional
        ``None`` links each time and stores nothing.

    Raises
    ------
    InvalidType
        `store` is something else.
    """

    def __init__(self, store: Store | None = None) -> None:
        if store is not None and not isinstance(store, Store):
            raise InvalidType(f"store is a Store, not {store!r}; for a path use Linker(Store(path))")
        self._keeping = Keeping(store)

    def link(self, artifacts: Sequence[Artifact], *, arch: str, options: Sequence[str] = ()) -> Artifact:
        """Return the artifacts linked to one cubin, from the store or from nvJitLink. Needs no GPU.

        Parameters
        ----------
        artifacts : sequence of Artifact
            LTO-IR, PTX and relocatable cubins, at least one. Their order counts.
        arch : str
            Of the cubin, such as ``"sm_90"``.
        options : sequence of str
            nvJitLink options, each one element, without arch and ``-lto``. Their order counts.

        Returns
        -------
        Artifact
            With the symbols of all inputs that are in the cubin.

        Raises
        ------
        InvalidType, InvalidArgument
            A parameter is of no use.
        LinkError
            An input does not go with this linker or this arch, or nvJitLink refuses. Nothing was stored.
        ToolchainError
            nvJitLink cannot be used.

        Notes
        -----
        nvJitLink links LTO-IR of another CUDA release without a word, and what it makes of it is not defined. So
        LTO-IR of another major version, of a newer release, or of an unknown one is refused here.

        Cost: loading nvJitLink (100 ms, once per process); a hit is one indexed read more.
        """
        from kernelstore.cuda import nvjitlink

        inputs = _checked_inputs(artifacts)
        target = Arch.parse(arch)
        if target.virtual:
            raise InvalidArch(f"a link makes a cubin for a real arch such as {target.as_real()}, not {arch}", arch=arch)
        given = _checked_options(options)
        release = nvjitlink.version()
        toolchain = f"nvjitlink {nvjitlink.build()}"
        _check_together(inputs, target, release, toolchain, given, nvjitlink.knows(target))
        flags = (f"-arch={target}", *(("-lto",) if any(item.kind == "ltoir" for item in inputs) else ()), *given)
        key = _key(inputs, target, toolchain, flags)
        found = self._keeping.get(key)
        if found is not None:
            return found
        started = time.perf_counter()
        payload, log = nvjitlink.link([(item.kind, _payload(item)) for item in inputs], flags)
        link_ms = (time.perf_counter() - started) * 1000
        linked = _artifact(key, payload, target, toolchain, "nvjitlink", inputs, log, link_ms)
        _keep(self._keeping, linked)
        return linked


def cubin_of_ptx(
    ptx: Artifact, compute_capability: tuple[int, int], *, keeping: Keeping, program: Program | None
) -> Artifact | None:
    """Return the cubin that PTX becomes on the current device, from the store or made once and stored.

    The driver's linker makes it; nvJitLink, where that is installed and the PTX is newer than the driver or the
    driver has no JIT. ``docs/decisions/0008-driver-jit-kept.md`` has the reasons.

    Parameters
    ----------
    ptx : Artifact
        What the device is served with.
    compute_capability : tuple[int, int]
        The current device's.
    keeping : Keeping
        Where it is kept.
    program : Program or None
        What the PTX was compiled from, so that the cubin is found with it.

    Returns
    -------
    Artifact or None
        ``None`` where neither can make one that is worth keeping: let the driver load the PTX itself, or tell why not.
    """
    target = Arch(*compute_capability, suffix="a" if Arch.parse(ptx.arch).suffix == "a" else "")
    try:
        made = _by_driver(ptx, target, keeping)
    except (NoJitCompiler, UnsupportedPTX) as error:
        _logger.info("the driver makes no cubin, trying nvJitLink: %s", error)
        made = _by_nvjitlink(ptx, target)
    except (LoadError, PayloadRejected) as error:
        # Not its last word: the load of the PTX itself tells what is wrong, if anything is.
        _logger.info("the driver's linker failed: %s", error)
        made = None
    if made is None or made.from_cache:
        return made
    made = dataclasses.replace(made, program=program)
    _keep(keeping, made)
    return made


def _by_driver(ptx: Artifact, target: Arch, keeping: Keeping) -> Artifact | None:
    loaded = driver.initialise()
    build = driver.driver_build()
    if build is None:
        return None
    if not choice.accepts_ptx(ptx.ptx_version, loaded.version):
        raise UnsupportedPTX(f"driver version {loaded.version} does not know .version {_dotted(ptx.ptx_version or 0)}")
    toolchain = f"libcuda {build}"
    key = _key((ptx,), target, toolchain, ())
    found = keeping.get(key)
    if found is not None:
        return found
    loaded.make_current()
    started = time.perf_counter()
    payload = loaded.link_ptx(ptx, _payload(ptx))
    link_ms = (time.perf_counter() - started) * 1000
    return _artifact(key, payload, target, toolchain, choice.DRIVER_JIT, (ptx,), "", link_ms)


def _by_nvjitlink(ptx: Artifact, target: Arch) -> Artifact | None:
    from kernelstore.cuda import nvjitlink

    try:
        if nvjitlink.version()[0] > (driver.driver_version() or 0) // 1000:
            # Its cubins would be too new for the driver as well.
            return None
        return Linker(None).link([ptx], arch=str(target))
    except (ToolchainError, LinkError, PayloadRejected) as error:
        _logger.info("nvJitLink makes no cubin: %s", error)
        return None


def _checked_inputs(artifacts: Sequence[Artifact]) -> tuple[Artifact, ...]:
    if isinstance(artifacts, Artifact):
        raise InvalidType("a link takes several artifacts, such as [artifact], not one Artifact")
    inputs = tuple(artifacts)
    for artifact in inputs:
        if not isinstance(artifact, Artifact):
            raise InvalidType(f"a link takes artifacts, not {artifact!r:.100}; for a file use Artifact.from_file")
        if artifact.kind not in _INPUT_KINDS or (artifact.kind == "cubin" and not artifact.relocatable):
            raise InvalidArgument(
                f"the {artifact.kind} of {artifact.arch}, key {artifact.key}, is no input of a link; LTO-IR, PTX and "
                "cubins compiled with -rdc=true are"
            )
        plugins.load("kinds", artifact.kind).check(_payload(artifact), artifact.arch)
    if not inputs:
        raise InvalidArgument("there is nothing to link; give at least one artifact")
    return inputs


def _checked_options(options: Sequence[str]) -> tuple[str, ...]:
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise InvalidType(f"options are several str, each one option, not {options!r:.200}")
    for option in options:
        if "\0" in option or not option.startswith("-"):
            raise InvalidArgument(f"{option!r:.100} is no option of a link")
        if option.partition("=")[0] in ("-arch", "-lto", "-ptx", "-r"):
            raise InvalidArgument(f"{option!r} is not for the options: give arch=; a link makes a whole cubin")
        if "-options-file" in option or "-optf" in option:
            raise InvalidArgument(f"{option!r} reads options from a file, which is in no key; give them themselves")
    return tuple(options)


def _check_together(
    inputs: Sequence[Artifact],
    target: Arch,
    release: tuple[int, int],
    toolchain: str,
    options: tuple[str, ...],
    knows_target: bool,
) -> None:
    """Raise for what nvJitLink would link wrongly without a word, or crash on."""
    reason = None if knows_target else f"{toolchain} does not know {target}"
    for item in inputs:
        why = _refusal(item, target, release)
        if reason is None and why is not None:
            what = f"the {item.kind} of {item.arch}, key {item.key}"
            reason = f"{what}, cannot be linked for {target} by {toolchain}: {why}"
    if reason is not None:
        raise LinkError(reason, log="", options=options, toolchain=toolchain, result=None, arch=str(target))


def _refusal(artifact: Artifact, target: Arch, release: tuple[int, int]) -> str | None:
    """Tell why an input does not go with this linker and target; ``None`` where it does."""
    arch = Arch.parse(artifact.arch)
    if not choice.links(artifact.kind, arch, target):
        return f"{arch} does not reach {target}"
    if artifact.kind == "ptx":
        newest = choice.newest_ptx(release[0] * 1000 + release[1] * 10)
        if artifact.ptx_version is not None and newest is not None and artifact.ptx_version > newest:
            return f"its .version {_dotted(artifact.ptx_version)} is newer than the linker's {_dotted(newest)}"
        return None
    build = choice.build_of(artifact.toolchain)
    if build is None:
        return "the release that made it is not known, and nvJitLink would not say if it were the wrong one"
    if build[:2] > release:
        return f"{artifact.toolchain} made it, which is newer than the linker; update nvidia-nvjitlink"
    if artifact.kind == "ltoir" and build[0] != release[0]:
        return f"{artifact.toolchain} made it, and LTO-IR is for a linker of the same major version"
    return None


def _dotted(ptx_version: int) -> str:
    return f"{ptx_version // 100}.{ptx_version % 100}"


def _key(inputs: Sequence[Artifact], target: Arch, toolchain: str, options: Sequence[str]) -> Key:
    parts = [
        ("linked", b"cubin"),
        ("arch", str(target).encode()),
        ("toolchain", toolchain.encode()),
        *(("option", option.encode()) for option in options),
    ]
    # The payload too: an artifact made by hand may have any key.
    for artifact in inputs:
        parts += [("input", artifact.key), ("payload", key_of([(artifact.kind, artifact.payload)]))]
    return key_of(parts)


def _payload(artifact: Artifact) -> bytes:
    payload: bytes = plugins.load("kinds", artifact.kind).normalise(artifact.payload)
    return payload


def _artifact(
    key: Key,
    payload: bytes,
    target: Arch,
    toolchain: str,
    origin: str,
    inputs: Sequence[Artifact],
    log: str,
    link_ms: float,
) -> Artifact:
    described = plugins.load("kinds", "cubin").describe(payload)
    return Artifact(
        key=key,
        kind="cubin",
        # The driver compiles plain PTX for its device's own arch: sm_90a on 9.0.
        arch=described.arch or str(target),
        payload=payload,
        toolchain=toolchain,
        driver_version=driver.driver_version(),
        origin=origin,
        symbols=_symbols(inputs, described.symbols),
        log=log,
        compile_ms=link_ms,
    )


def _symbols(inputs: Sequence[Artifact], made: Sequence[Symbol]) -> tuple[Symbol, ...]:
    """Keep the names and parameter types that the inputs know, with the resource usage of what was made."""
    present = {symbol.lowered_name: symbol for symbol in made}
    known: dict[tuple[str, str | None], Symbol] = {}
    for artifact in inputs:
        for symbol in artifact.symbols:
            usage = present.get(symbol.lowered_name)
            if usage is not None:
                known[symbol.lowered_name, symbol.name_expression] = dataclasses.replace(
                    usage,
                    name_expression=symbol.name_expression,
                    parameters=usage.parameters if symbol.parameters is None else symbol.parameters,
                )
    named = {lowered for lowered, _ in known}
    return (*known.values(), *(symbol for name, symbol in present.items() if name not in named))


def _keep(keeping: Keeping, artifact: Artifact) -> None:
    _logger.info(
        "%s made a cubin for %s in %.1f ms, key %s",
        artifact.toolchain, artifact.arch, artifact.compile_ms, artifact.key,
    )  # fmt: skip
    keeping.count("link", artifact.origin)
    keeping.put(artifact)
