"""Libraries: what the driver holds of an artifact, once for a key and process, shared by all that loaded it."""

from __future__ import annotations

import threading
from typing import Any

from kernelstore.artifact import Artifact
from kernelstore.cuda.calls import Driver
from kernelstore.errors import ForkedContext, ModuleUnloaded
from kernelstore.key import Key

__all__ = ["Hold", "hold"]


class Hold:
    """One user's hold on the driver's library of an artifact; `hold` makes it.

    Parameters
    ----------
    driver : Driver
        Where it is loaded.
    artifact : Artifact
        What is loaded.
    payload : bytes
        The bytes as the driver got them.
    library : _Library
        Shared with the other holds of the artifact's key.
    """

    def __init__(self, driver: Driver, artifact: Artifact, payload: bytes, library: _Library) -> None:
        self.driver = driver
        self.artifact = artifact
        self.payload = payload
        self.is_released = False
        self._library = library
        self._lock = threading.Lock()

    @property
    def library(self) -> Any:
        """The ``CUlibrary``; raises as `check`."""
        self.check()
        return self._library.handle

    def check(self) -> None:
        """See to it that the hold was not released.

        Raises
        ------
        ModuleUnloaded
            It was.
        """
        if self.is_released:
            artifact = self.artifact
            raise ModuleUnloaded(
                f"the module of the {artifact.kind} of {artifact.arch}, key {artifact.key}, was unloaded; "
                "load it again",
                result=None,
                name=None,
                kind=artifact.kind,
                arch=artifact.arch,
                key=artifact.key,
                driver_version=self.driver.version,
            )

    def release(self) -> None:
        """Give the library up; the last one to do so unloads it. In a forked child the driver is left alone."""
        try:
            # First of all, as in a forked child the locks may be held by a thread that is not there.
            self.driver.check()
        except ForkedContext:
            self.is_released = True
            return
        with self._lock:
            if self.is_released:
                return
            self.is_released = True
        _release(self.driver, self._library)


class _Library:
    __slots__ = ("handle", "identity", "lock", "users")

    def __init__(self, identity: tuple[Key, bytes]) -> None:
        self.identity = identity
        self.handle: Any = None
        self.users = 0
        # Held while the driver loads, so that a long JIT of one key does not hold up the others.
        self.lock = threading.Lock()


# By key and payload: an artifact made by hand may have any key, and must not get another one's kernels.
_libraries: dict[tuple[Key, bytes], _Library] = {}
_libraries_lock = threading.Lock()


def hold(driver: Driver, artifact: Artifact, payload: bytes) -> Hold:
    """Load an artifact, or take a share in what is loaded of its key.

    Raises
    ------
    LoadError
        The driver refused; nothing was loaded.
    """
    with _libraries_lock:
        identity = artifact.key, payload
        library = _libraries.setdefault(identity, _Library(identity))
        library.users += 1
    try:
        with library.lock:
            if library.handle is None:
                library.handle = driver.load_library(artifact, payload)
    except BaseException:
        _release(driver, library)
        raise
    return Hold(driver, artifact, payload, library)


def _release(driver: Driver, library: _Library) -> None:
    with _libraries_lock:
        library.users -= 1
        if library.users:
            return
        del _libraries[library.identity]
    if library.handle is not None:
        driver.call("cuLibraryUnload", library.handle)
