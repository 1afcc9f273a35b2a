"""`Store`: one SQLite file of compiled kernels, and the only owner of transactions on it."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sqlite3
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kernelstore import plugins, settings
from kernelstore.artifact import Artifact, ArtifactInfo, Program
from kernelstore.codecs import Codec
from kernelstore.db import blob, claims, flusher, programs, rows, statements
from kernelstore.db.claims import Claim
from kernelstore.db.connection import LOCK_TIMEOUT_S
from kernelstore.db.file import SharedLock, prepare
from kernelstore.db.pool import Pool
from kernelstore.db.tally import HeaderRow
from kernelstore.errors import InvalidArgument, InvalidType, KeyNotFound, PayloadCorrupt, StoreError
from kernelstore.explanation import Asked, Explanation
from kernelstore.key import Key
from kernelstore.questions import Questions

__all__ = ["Store"]

# A program waits for its kernel meanwhile, and would rather have it unstored.
_COMPILER_TIMEOUT_S = 5.0

# Where a claim cannot be given back its beat stops, and those who wait take it over.
_END_CLAIM_TIMEOUT_S = 1.0

_KEYS_PER_PAGE = 1000

# A hit on a damaged row waits for no other process's write; the row goes with a later one.
_DROP_TIMEOUT_S = 0.05

_stores: weakref.WeakSet[Store] = weakref.WeakSet()

# A header's row that is in use is written anew so often, to tell it from those that may go.
_HEADER_TOUCH_NS = 86_400 * 10**9

_logger = logging.getLogger("kernelstore.store")


class Store(Questions):
    """A store of compiled kernels in one SQLite file.

    Any number of processes and threads may have the file open. A hit is one indexed read that takes no lock;
    a put is one short transaction. Opening a file that is up to date imports neither SQLAlchemy nor alembic.

    Parameters
    ----------
    path : str or path, optional
        The file; it and its directory are made if absent, readable by this user alone. ``None`` means
        ``$KERNELSTORE_PATH``, else ``cache.db`` in the user's cache directory for kernelstore.
    codec : str
        How new blobs are stored: ``"lz4"`` or ``"none"``. Each row keeps its own.
    lock_timeout_s : float
        How long a write waits for the write lock, > 0.

    Raises
    ------
    InvalidType, InvalidArgument
        A parameter is of no use; nothing was opened.
    UnusableFile
        `NotADatabase`, `ForeignFile` or `SchemaTooNew`: the file was left byte for byte as it was.
    StoreUnavailable
        The file or its directory cannot be opened, made or locked.

    Notes
    -----
    Cost: two connections and two pragmas, about 0.5 ms; 1 s when the file has to be made or upgraded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        codec: str = "lz4",
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        settings.configure_logging()
        self._path = settings.store_path(path)
        self._codec: Codec = plugins.load("codecs", codec)
        if not isinstance(lock_timeout_s, (int, float)) or not 0 < lock_timeout_s <= 86400:
            raise InvalidArgument(f"lock_timeout_s is a number of seconds above 0, not {lock_timeout_s!r}")
        # First of all: beside a file that is not ours no lock file is left.
        prepare(self._path, timeout_s=lock_timeout_s)
        lock = SharedLock(self._path, timeout_s=lock_timeout_s)
        super().__init__(Pool(self._path, timeout_s=lock_timeout_s))
        self._tally = self._pool.tally
        self._finalizer = weakref.finalize(self, _finish, self._pool, lock)
        self._finalizer.atexit = False  # `_finish_all` has one deadline for all of them
        _stores.add(self)

    @property
    def path(self) -> Path:
        """The file, as an absolute path with links resolved."""
        return self._path

    # -- one artifact ---------------------------------------------------------------------------------------------

    def get(self, key: Key | bytes | str) -> Artifact | None:
        """Return the artifact with that key, or ``None``.

        The row is verified against the key before anything is decoded. A damaged row is dropped, counted as
        corrupt, and is a miss.

        Raises
        ------
        InvalidType, InvalidArgument
            `key` is no key.
        StoreClosed, StoreError
            The file cannot be read.

        Notes
        -----
        Cost: one indexed read, no transaction. The use is counted in memory and written later.
        """
        key = Key(key)
        artifact = self._read(key)
        if artifact is None:
            self._tally.count("miss")
        else:
            self._tally.use(key, artifact.compile_ms)
        return artifact

    def peek(self, key: Key | bytes | str) -> Artifact | None:
        """Return the artifact with that key as `get` does, without counting it: for those who look around."""
        return self._read(Key(key))

    def _read(self, key: Key) -> Artifact | None:
        found = self._pool.read(statements.BLOB_OF_KEY, {"key": key})
        if not found:
            _logger.debug("miss %s: absent", key)
            return None
        artifact_id, *row = found[0]
        try:
            artifact = blob.unseal(key, *row)
        except PayloadCorrupt as error:
            self._drop_damaged(key, artifact_id, row[2], error)
            return None
        _logger.debug("hit %s: %s %s, %d bytes", key, artifact.kind, artifact.arch, len(artifact.payload))
        return artifact

    def put(self, *artifacts: Artifact, codec: str | None = None) -> None:
        """Store artifacts, all or none.

        An artifact whose key is there already changes nothing: equal keys mean equal inputs.

        Parameters
        ----------
        *artifacts : Artifact
            Any number.
        codec : str, optional
            ``None`` takes the store's.

        Raises
        ------
        InvalidType, PayloadRejected, InvalidArgument
            An artifact is not what it says; nothing was written.
        StoreClosed, StoreLocked, StoreFull, StoreReadOnly, WalTooLong, StoreError
            Nothing was written.

        Notes
        -----
        Cost: encoding, then one write transaction.
        """
        self._put(artifacts, codec)

    def _put(
        self,
        artifacts: Sequence[Artifact],
        codec: str | None,
        *,
        claim: Claim | None = None,
        timeout_s: float | None = None,
    ) -> None:
        encoder = self._codec if codec is None else plugins.load("codecs", codec)
        prepared = [rows.Row(artifact, encoder) for artifact in artifacts]
        programs = {row.program.key: row.program for row in prepared if row.program is not None}
        program_rows = {key: rows.program_row(program) for key, program in programs.items()}

        def insert(connection: sqlite3.Connection) -> None:
            ids: dict[Key, int] = {}
            for row in prepared:
                rows.insert(connection, row, program_rows, ids)
            if claim is not None:
                claims.end(connection, claim)

        self._pool.write(insert, timeout_s=timeout_s)
        for artifact in artifacts:
            _logger.debug("put %s: %s %s, %d bytes", artifact.key, artifact.kind, artifact.arch, artifact.size_bytes)

    def delete(self, key: Key | bytes | str) -> bool:
        """Remove the artifact with that key, and its program if it was the last of it.

        Returns
        -------
        bool
            Whether there was one.

        Raises
        ------
        InvalidType, InvalidArgument
            `key` is no key.
        StoreClosed, StoreError
            Nothing was removed.

        Notes
        -----
        Cost: one write transaction.
        """
        key = Key(key)
        return self._pool.write(lambda connection: rows.delete(connection, statements.DELETE_ARTIFACT, {"key": key}))

    def __getitem__(self, key: Key | bytes | str) -> Artifact:
        artifact = self.get(key)
        if artifact is None:
            raise KeyNotFound(f"{self._path} has no artifact {Key(key)}", key=Key(key))
        return artifact

    def __setitem__(self, key: Key | bytes | str, artifact: Artifact) -> None:
        if not isinstance(artifact, Artifact):
            raise InvalidType(f"a store holds artifacts, not {type(artifact).__name__}")
        if Key(key) != artifact.key:
            raise InvalidArgument(f"the artifact's own key is {artifact.key}, not {Key(key)}; use store.put(artifact)")
        self.put(artifact)

    def __delitem__(self, key: Key | bytes | str) -> None:
        if not self.delete(key):
            raise KeyNotFound(f"{self._path} has no artifact {Key(key)}", key=Key(key))

    # `key in store` would be out of date when it returns: another process may delete or put. `get` answers both.
    __contains__ = None

    def __iter__(self) -> Iterator[Key]:
        """Yield all keys in order of their putting, in pages, with no transaction in between."""
        last = 0
        while True:
            found = self._pool.read(statements.KEYS_AFTER, {"id": last, "limit": _KEYS_PER_PAGE})
            for _, key in found:
                yield Key(key)
            if len(found) < _KEYS_PER_PAGE:
                return
            last = found[-1][0]

    def __len__(self) -> int:
        count: int = self._pool.read(statements.COUNT_ARTIFACTS, {})[0][0]
        return count

    def __bool__(self) -> bool:
        # An empty store is still a store.
        return True

    # -- what the compiler asks -----------------------------------------------------------------------------------

    def count(self, name: str, reason: str = "", value: int = 1) -> None:
        """Add to a counter of the store; written later, with other writes.

        Raises
        ------
        InvalidType, InvalidArgument
            `value` is no whole number, or none that a counter can hold.
        """
        if not isinstance(name, str) or not isinstance(reason, str) or not isinstance(value, int):
            raise InvalidType(f"a counter has a name, a reason and a whole number, not {(name, reason, value)!r:.200}")
        if not 0 <= value < 2**48:
            raise InvalidArgument(f"a counter grows by 0 to 2**48, not by {value}")
        self._tally.count(name, reason, value)

    def artifacts_of(self, program: Key) -> list[ArtifactInfo]:
        """Return what is stored of a program, newest first, without payloads and symbols.

        Notes
        -----
        Cost: one indexed read, no transaction.
        """
        return programs.artifacts_of(self._pool, program)

    def claim(self, key: Key, dead: bytes | None = None) -> Claim:
        """Claim the compile of an artifact, unless it is there or another process is at it.

        Parameters
        ----------
        dead : bytes, optional
            Nonce of a claim that is given up, and taken over.

        Notes
        -----
        Cost: one short write transaction.
        """
        return claims.take(self._pool, key, dead)

    def look_at_claim(self, key: Key) -> Claim | None:
        """Return how the compile of an artifact stands; ``None`` where nobody claims it.

        Notes
        -----
        Cost: one indexed read, no transaction.
        """
        return claims.look(self._pool, key)

    def beat(self, claim: Claim) -> bool:
        """Tell those who wait that the compile goes on; ``False`` where another process has taken over.

        Notes
        -----
        Cost: one short write transaction.
        """
        return claims.beat(self._pool, claim)

    def put_compiled(self, claim: Claim | None, *artifacts: Artifact, codec: str | None = None) -> None:
        """Store what a compile made and give its claim back, both or neither; errors as `put`.

        Notes
        -----
        Cost: encoding, then one write transaction, which waits for the lock for 5 s at most.
        """
        self._put(artifacts, codec, claim=claim, timeout_s=min(_COMPILER_TIMEOUT_S, self._pool.timeout_s))

    def end_claim(self, claim: Claim, state: str | None = None, log: str | None = None) -> None:
        """Give a claim back; with ``"failed"`` or ``"not_stored"`` its row stays for those who wait.

        Notes
        -----
        Cost: one short write transaction, which waits for the lock for 1 s at most.
        """
        self._pool.write(
            lambda connection: claims.end(connection, claim, state, log),
            timeout_s=min(_END_CLAIM_TIMEOUT_S, self._pool.timeout_s),
        )

    def toolchain_build(self, library: str, signature: str) -> str | None:
        """Return the build that was found in the compiler library with that path and stat signature.

        Notes
        -----
        Cost: one indexed read, no transaction.
        """
        waiting = self._tally.toolchain(library)
        if waiting is not None and waiting[0] == signature:
            return waiting[1]
        found = self._pool.read(statements.TOOLCHAIN_OF_LIBRARY, {"path": library, "signature": signature})
        return found[0][0] if found else None

    def remember_toolchain(self, library: str, signature: str, build: str) -> None:
        """Keep the build of a compiler library; written with the next write."""
        self._tally.remember_toolchain(library, signature, build)

    def explain_request(self, asked: Asked) -> Explanation:
        """Tell whether what is asked for is stored, and if not, how it differs from the nearest. Counts nothing.

        Notes
        -----
        Cost: three indexed reads where the program is stored; otherwise at most 250 rows and 50 sources.
        """
        return programs.explain(self._pool, asked)

    def stored_program(self, program: Key | bytes | str) -> Program:
        """Return the program that `find_program` finds, for a rebuild.

        Notes
        -----
        Cost: two or three indexed reads.
        """
        key = programs.find(self._pool, program)
        found = programs.with_key(self._pool, key)
        if found is None:
            raise KeyNotFound(f"{self._path} has no program {key}", key=key)
        return found

    def recall_headers(self, paths: Sequence[str]) -> dict[str, HeaderRow]:
        """Return what earlier scans read in the header files with these paths, with the stamps that they had.

        Notes
        -----
        Cost: one read with an indexed look-up for each path, no transaction.
        """
        found = self._tally.headers(paths)
        rest = [path for path in paths if path not in found]
        if rest:
            old_ns = time.time_ns() - _HEADER_TOUCH_NS
            for path, *row, last_access_ns in self._pool.read(statements.HEADERS_OF_PATHS, {"paths": json.dumps(rest)}):
                found[path] = columns = tuple(row)
                if last_access_ns < old_ns:
                    self._tally.remember_headers({path: columns})
        return found

    def remember_headers(self, rows: Mapping[str, HeaderRow]) -> None:
        """Keep what was read in header files; written with the next write. What SQLite cannot hold is left out."""
        self._tally.remember_headers({path: row for path, row in rows.items() if _fits(path, row)})

    def recall_scan(self, asked: bytes) -> str | None:
        """Return what was kept of an earlier scan for headers, or ``None``; it tells itself whether it still holds.

        Notes
        -----
        Cost: one indexed read, no transaction.
        """
        waiting = self._tally.scan(asked)
        if waiting is None:
            found = self._pool.read(statements.SCAN_WITH_KEY, {"key": asked})
            if not found:
                return None
            *row, last_access_ns = found[0]
            waiting = tuple(row)
            if last_access_ns < time.time_ns() - _HEADER_TOUCH_NS:
                self._tally.remember_scan(asked, waiting)
        return rows.text_of_scan(waiting)

    def remember_scan(self, asked: bytes, text: str) -> None:
        """Keep what a scan for headers found; written with the next write."""
        self._tally.remember_scan(asked, rows.scan_row(text))

    # -- life -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the uses and counters that wait in this process.

        Raises
        ------
        StoreClosed, StoreError
            They go on waiting.

        Notes
        -----
        Cost: one short write transaction; none when nothing waits.
        """
        flusher.flush(self._pool)

    def close(self) -> None:
        """Flush and close; a second call does nothing. Uses that cannot be written in 5 s are lost, with a warning."""
        self._finalizer()

    def __enter__(self) -> Self:
        self._pool.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({str(self._path)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self._path), self._codec.name, self._pool.timeout_s)

    def _drop_damaged(self, key: Key, artifact_id: int, checksum: bytes, error: PayloadCorrupt) -> None:
        self._tally.count("corrupt", error.reason)
        _logger.warning("dropped a damaged row: %s; it will be compiled again", error)
        damaged = {"artifact_id": artifact_id, "checksum": checksum}
        try:
            self._pool.write(
                lambda connection: rows.delete(connection, statements.DELETE_DAMAGED, damaged),
                timeout_s=_DROP_TIMEOUT_S,
            )
        except StoreError as failure:
            _logger.warning("the damaged row of %s stays for now: %s", key, failure)


def _finish(pool: Pool, lock: SharedLock) -> None:
    """Flush and close; runs once: by `Store.close` or when the store is collected."""
    _flush_or_warn(pool, flusher.EXIT_TIMEOUT_S)
    pool.close()
    lock.release()


def _finish_all() -> None:
    """At exit: flush within one deadline. Nothing is closed for daemon threads, which go on until the very end."""
    deadline = time.monotonic() + flusher.EXIT_TIMEOUT_S
    for store in list(_stores):
        if store._finalizer.detach() is not None:
            _flush_or_warn(store._pool, max(0.0, deadline - time.monotonic()))
            store._pool.close_unused()


def _flush_or_warn(pool: Pool, timeout_s: float) -> None:
    try:
        flusher.flush(pool, timeout_s=timeout_s)
    except StoreError as error:
        flusher.warn_of_loss(pool, error)


atexit.register(_finish_all)


def _fits(path: str, row: HeaderRow) -> bool:
    # Some file systems number above SQLite's integers; a name of other bytes than UTF-8 is no TEXT.
    return path.isprintable() and all(-(2**63) <= number < 2**63 for number in row[:5])


def _reopen(path: str, codec: str, lock_timeout_s: float) -> Store:
    return Store(path, codec=codec, lock_timeout_s=lock_timeout_s)
