"""Keeping: a store that may fail, under a program that must not."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import TypeVar

from kernelstore import settings
from kernelstore.artifact import Artifact, ArtifactInfo
from kernelstore.db.claims import Claim
from kernelstore.errors import (
    InvalidArgument,
    KernelStoreError,
    PayloadRejected,
    StoreError,
    StoreWarning,
    UnknownPlugin,
)
from kernelstore.key import Key
from kernelstore.locks import new_lock
from kernelstore.store import Store

__all__ = ["Keeping"]

_T = TypeVar("_T")

_logger = logging.getLogger("kernelstore.keeping")


class Keeping:
    """Where artifacts are looked for and kept: a store whose trouble costs a miss, one warning and a counter.

    No method raises `StoreError`.

    Parameters
    ----------
    store : Store, optional
        ``None`` finds nothing and keeps nothing.
    opens_default : bool
        Whether the default store is opened at the first use, where `store` is ``None``.
    """

    def __init__(self, store: Store | None = None, *, opens_default: bool = False) -> None:
        self._store = store
        self._opens = self._owns = store is None and opens_default
        self._lock = new_lock()
        self._warned: set[str] = set()

    @property
    def store(self) -> Store | None:
        """The store in use; ``None`` where there is none, it is disabled, or it cannot be opened."""
        if settings.flag("DISABLE"):
            return None
        if self._opens:
            with self._lock:
                if self._opens:
                    self._open()
        return self._store

    def get(self, key: Key) -> Artifact | None:
        """Return the artifact with that key, or ``None``."""
        store = self.store
        try:
            return None if store is None else store.get(key)
        except (StoreError, UnknownPlugin) as error:
            self._warn("looking up a kernel", error)
            return None

    def put(self, *artifacts: Artifact, codec: str | None = None, claim: Claim | None = None) -> None:
        """Store artifacts, all or none, and give the claim back."""
        store = self.store
        if store is None:
            return
        try:
            store.put_compiled(claim, *artifacts, codec=codec)
        except (StoreError, PayloadRejected, InvalidArgument) as error:
            store.count("not_stored", type(error).__name__)
            self._warn("storing a kernel", error)
            self.end_claim(claim, "not_stored")

    def claim(self, key: Key, dead: bytes | None = None) -> Claim | None:
        """Claim a compile, as `Store.claim`; ``None`` where the store cannot tell."""
        return self._quietly(lambda store: store.claim(key, dead))

    def look_at_claim(self, key: Key) -> Claim | None:
        """Return how a compile stands; ``None`` where nobody claims it, or the store cannot tell."""
        return self._quietly(lambda store: store.look_at_claim(key))

    def beat(self, claim: Claim) -> bool:
        """Tell those who wait that the compile goes on; ``False`` where another process has taken over."""
        return self._quietly(lambda store: store.beat(claim)) is not False

    def end_claim(self, claim: Claim | None, state: str | None = None, log: str | None = None) -> None:
        """Give a claim back, if there is one. Where that fails, its beat stops."""
        if claim is not None:
            self._quietly(lambda store: store.end_claim(claim, state, log))

    def count(self, name: str, reason: str = "", value: int = 1) -> None:
        """Add to a counter of the store."""
        store = self.store
        if store is not None:
            store.count(name, reason, value)

    def artifacts_of(self, program: Key) -> list[ArtifactInfo]:
        """Return what is stored of a program, newest first."""
        store = self.store
        try:
            return [] if store is None else store.artifacts_of(program)
        except StoreError as error:
            self._warn("looking for other kernels of a program", error)
            return []

    def warn_once(self, message: str, category: type[Warning], cause: str) -> None:
        """Warn the first caller outside this package, the first time for each cause."""
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(message, category, stacklevel=_outside())

    def close(self) -> None:
        """Close the store if it was opened here; a second call does nothing."""
        with self._lock:
            store, self._store = (self._store, None) if self._owns else (None, self._store)
            self._opens = self._owns = False
        if store is not None:
            store.close()

    def _quietly(self, ask: Callable[[Store], _T]) -> _T | None:
        # Single flight spares compiles; without it each compiles for itself, and the put that follows will warn.
        store = self.store
        try:
            return None if store is None else ask(store)
        except StoreError as error:
            _logger.info("without single flight: %s", error)
            return None

    def _open(self) -> None:
        try:
            self._store = Store()
        except (StoreError, InvalidArgument) as error:
            # First, as a warning may be an error.
            self._opens = False
            self._warn("opening the default store", error)
        self._opens = False

    def _warn(self, doing: str, error: KernelStoreError) -> None:
        _logger.info("%s failed: %s", doing, error)
        message = f"{doing} failed, kernels are made without the store: {error}"
        self.warn_once(message, StoreWarning, type(error).__name__)


def _outside() -> int:
    """Return the stack level of the first caller outside this package, as `warnings.warn` counts it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kernelstore":
        level, frame = level + 1, frame.f_back
    return level
