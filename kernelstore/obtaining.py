"""Obtaining: what was asked for, from the store, or from one run of NVRTC whose artifacts are stored."""

from __future__ import annotations

import logging

from kernelstore import plugins, serving
from kernelstore.artifact import Artifact
from kernelstore.db.claims import Claim
from kernelstore.errors import StoreError, ToolchainError, UncacheableWarning
from kernelstore.explanation import Asked, Difference, Explanation
from kernelstore.flight import Made, single_flight
from kernelstore.keeping import Keeping
from kernelstore.key import Key
from kernelstore.request import Request
from kernelstore.store import Store
from kernelstore.toolchain import Toolchain

__all__ = ["explain", "obtain"]

_logger = logging.getLogger("kernelstore.compiler")


def obtain(request: Request, keeping: Keeping, *, cache: bool = True, codec: str | None = None) -> Artifact:
    """Return the artifact that was asked for: looked up, or compiled and kept.

    Parameters
    ----------
    keeping : Keeping
        Where the compiler's build is remembered and compiles are counted; with `cache` also where artifacts are.
    codec : str, optional
        How they are stored; ``None`` takes the store's.

    Raises
    ------
    UnknownPlugin
        There is no such codec; nothing was compiled.
    CompileError, UnsupportedArch, ToolchainError
        As they come; nothing was stored.
    """
    if codec is not None:
        plugins.load("codecs", codec)
    kept = keeping if cache and _is_keyed(request, keeping) else Keeping()
    found, toolchain = _look_up(request, kept, keeping.store)
    if found is not None:
        return found
    if _logger.isEnabledFor(logging.DEBUG):
        _log_miss(request, toolchain, kept.store)

    def make(claim: Claim | None) -> Made:
        artifacts = _compile(request, toolchain, keeping)
        request.uncacheable = request.uncacheable or toolchain.uncacheable(request)
        return artifacts[0], _keep(request, artifacts, kept, codec, claim)

    return single_flight(_key(request, toolchain), kept, make)


def explain(request: Request, keeping: Keeping) -> Explanation:
    """Tell whether `obtain` would find it stored, and if not, what differs from what is.

    Raises
    ------
    StoreError
        The file cannot be read.
    ToolchainError
        NVRTC cannot be used, and no other toolchain's artifact would be served.
    """
    store = keeping.store
    if request.uncacheable is not None:
        return Explanation(None, None, (Difference("uncacheable", request.uncacheable),))
    if store is None:
        return Explanation(None, None, (Difference("store", "disabled, or it cannot be opened"),))
    try:
        return store.explain_request(_asked(request, Toolchain.expected(request, store)))
    except ToolchainError:
        served = next(iter(serving.infos_of_any_toolchain(request, keeping)), None)
        if served is None:
            raise
        return Explanation(served.key, served.key)


def _is_keyed(request: Request, keeping: Keeping) -> bool:
    reason = request.uncacheable
    if reason is not None and keeping.store is not None:
        keeping.count("uncacheable", reason.partition(":")[0])
        message = f"{_shown(request)} is compiled each time, it cannot be keyed: {reason}"
        keeping.warn_once(message, UncacheableWarning, reason)
    return reason is None


def _look_up(request: Request, kept: Keeping, memo: Store | None) -> tuple[Artifact | None, Toolchain]:
    expected = Toolchain.expected(request, memo)
    found = kept.get(_key(request, expected))
    if found is not None:
        return found, expected
    loaded = Toolchain.loaded(request, expected)
    return None if loaded is expected else kept.get(_key(request, loaded)), loaded


def _compile(request: Request, toolchain: Toolchain, keeping: Keeping) -> list[Artifact]:
    from kernelstore import build  # NVRTC's bindings and what reads its output: 100 ms that a hit does without

    artifacts = build.run(request, toolchain)
    compile_ms = artifacts[0].compile_ms
    _logger.info("compiled %s for %s in %.1f ms", _shown(request), request.arch, compile_ms)
    keeping.count("compile")
    keeping.count("compile_us", value=round(compile_ms * 1000))
    return artifacts


def _keep(request: Request, artifacts: list[Artifact], kept: Keeping, codec: str | None, claim: Claim | None) -> bool:
    """Store what was compiled, and tell whether it is what the key says."""
    if not _is_keyed(request, kept):
        kept.end_claim(claim, "not_stored")
        return False
    if reason := _doubt(request):
        _logger.info("%s: nothing of %s is stored", reason, _shown(request))
        kept.count("not_stored", reason)
        kept.end_claim(claim, "not_stored")
        return False
    kept.put(*artifacts, codec=codec, claim=claim)
    return True


def _doubt(request: Request) -> str | None:
    """Tell why what was compiled may not be what the key says; ``None`` where it is."""
    from kernelstore.cuda import nvrtc  # loaded by the compile

    if not request.unchanged():
        # NVRTC may have read another text than the key tells.
        return "header changed"
    return "compiled after -G" if nvrtc.leaks_debug() and not request.options.debug else None


def _log_miss(request: Request, toolchain: Toolchain, store: Store | None) -> None:
    if store is None:
        return
    try:
        _logger.debug("%s: %s", _shown(request), store.explain_request(_asked(request, toolchain)))
    except StoreError as error:
        _logger.debug("a miss that cannot be explained: %s", error)


def _asked(request: Request, toolchain: Toolchain) -> Asked:
    return Asked(request.program, _key(request, toolchain), request.kind, str(request.arch), toolchain.text)


def _key(request: Request, toolchain: Toolchain) -> Key:
    return request.artifact_key(request.kind, request.arch, toolchain.identity)


def _shown(request: Request) -> str:
    return request.name or "a program"
