"""Other caches behind one interface, each used as its own users use it.

They need the extra `bench`. cuTile's functions take any bytes; cuda.core's cache and diskcache are opened once in a
process, as they are meant to be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kernelstore import Artifact, Key, Store

__all__ = ["PEERS", "Cache"]


class Cache(Protocol):
    """What all of them can do."""

    def get(self, key: Key) -> bytes | None:
        """Return the payload with that key."""

    def put(self, artifact: Artifact) -> None:
        """Keep an artifact's payload under its key."""

    def close(self) -> None:
        """Close what is open."""


class _Kernelstore:
    def __init__(self, path: Path) -> None:
        self._store = Store(path / "cache.db")

    def get(self, key: Key) -> bytes | None:
        artifact = self._store.get(key)
        return None if artifact is None else artifact.payload

    def put(self, artifact: Artifact) -> None:
        self._store.put(artifact)

    def close(self) -> None:
        self._store.close()


class _KernelstoreUncounted(_Kernelstore):
    def get(self, key: Key) -> bytes | None:
        artifact = self._store.peek(key)
        return None if artifact is None else artifact.payload


class _CudaCore:
    def __init__(self, path: Path) -> None:
        from cuda.core.utils import FileStreamProgramCache

        self._cache = FileStreamProgramCache(path)

    def get(self, key: Key) -> bytes | None:
        found: bytes | None = self._cache.get(bytes(key))
        return found

    def put(self, artifact: Artifact) -> None:
        self._cache[bytes(artifact.key)] = artifact.payload

    def close(self) -> None:
        self._cache.close()


class _Diskcache:
    def __init__(self, path: Path) -> None:
        import diskcache

        self._cache = diskcache.Cache(str(path))

    def get(self, key: Key) -> bytes | None:
        found: bytes | None = self._cache.get(bytes(key))
        return found

    def put(self, artifact: Artifact) -> None:
        self._cache[bytes(artifact.key)] = artifact.payload

    def close(self) -> None:
        self._cache.close()


class _CuTile:
    def __init__(self, path: Path) -> None:
        from cutile_cache import _cache

        self._path, self._cache = str(path), _cache

    def get(self, key: Key) -> bytes | None:
        found: bytes | None = self._cache.cache_lookup(self._path, str(key))
        return found

    def put(self, artifact: Artifact) -> None:
        self._cache.cache_store(self._path, str(artifact.key), artifact.payload)

    def close(self) -> None:
        pass


PEERS: dict[str, Callable[[Path], Cache]] = {
    "kernelstore": _Kernelstore,
    "kernelstore, uses not counted": _KernelstoreUncounted,
    "cuda.core FileStreamProgramCache": _CudaCore,
    "diskcache": _Diskcache,
    "cuTile": _CuTile,
}
