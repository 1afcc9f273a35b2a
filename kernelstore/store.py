"""`Store`: one SQLite file of compiled kernels, and the only owner of transactions on it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kernelstore import choice, plugins, settings
from kernelstore.artifact import Artifact, ArtifactInfo, Program
from kernelstore.codecs import Codec
from kernelstore.db import blob, programs, rows, statements
from kernelstore.db.connection import LOCK_TIMEOUT_S
from kernelstore.db.file import SharedLock, prepare
from kernelstore.db.pool import Pool
from kernelstore.db.tally import HeaderRow, Tally
from kernelstore.errors import InvalidArgument, InvalidType, KeyNotFound, PayloadCorrupt, StoreError
from kernelstore.explanation import Asked, Difference, Explanation, Stored
from kernelstore.key import Key

if TYPE_CHECKING:
    import sqlalchemy

    from kernelstore.db.adhoc import SqlResult
    from kernelstore.db.stats import StoreStats

__all__ = ["Store"]

# How long closing and exit wait for the write lock to flush the tally.
_EXIT_TIMEOUT_S = 5.0

_KEYS_PER_PAGE = 1000

# A header's row that is in use is written anew so often, to tell it from those that may go.
_HEADER_TOUCH_NS = 86_400 * 10**9

_logger = logging.getLogger("kernelstore.store")


class Store:
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
        self._path = _checked_path(path)
        self._codec: Codec = plugins.load("codecs", codec)
        if not isinstance(lock_timeout_s, (int, float)) or not 0 < lock_timeout_s <= 86400:
            raise InvalidArgument(f"lock_timeout_s is a number of seconds above 0, not {lock_timeout_s!r}")
        # First of all: beside a file that is not ours no lock file is left.
        prepare(self._path, timeout_s=lock_timeout_s)
        lock = SharedLock(self._path, timeout_s=lock_timeout_s)
        self._tally = Tally()
        self._pool = Pool(self._path, self._tally, timeout_s=lock_timeout_s)
        self._finalizer = weakref.finalize(self, _finish, self._pool, lock)

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
        StoreClosed, StoreLocked, StoreFull, StoreReadOnly, StoreError
            Nothing was written.

        Notes
        -----
        Cost: encoding, then one write transaction.
        """
        encoder = self._codec if codec is None else plugins.load("codecs", codec)
        prepared = [rows.Row(artifact, encoder) for artifact in artifacts]
        programs = {row.program.key: row.program for row in prepared if row.program is not None}
        program_rows = {key: rows.program_row(program) for key, program in programs.items()}
        with self._pool.write() as connection:
            ids: dict[Key, int] = {}
            for row in prepared:
                rows.insert(connection, row, program_rows, ids)
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
        with self._pool.write() as connection:
            return rows.delete(connection, statements.DELETE_ARTIFACT, {"key": Key(key)})

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

    # -- what people ask ------------------------------------------------------------------------------------------

    def search(
        self, *, symbol: str | None = None, arch: str | None = None, kind: str | None = None, limit: int | None = None
    ) -> Iterator[ArtifactInfo]:
        """Yield what matches all conditions, newest use first, without payloads.

        Parameters
        ----------
        symbol : str, optional
            Case-sensitive glob over name expressions and lowered names, such as ``"saxpy*"``.
        arch, kind : str, optional
            Exactly these.
        limit : int, optional
            At most so many, ≥ 0.

        Raises
        ------
        InvalidArch, UnknownPlugin, InvalidArgument
            A condition is of no use.
        StoreError
            The file cannot be read.

        Notes
        -----
        Cost: one indexed read for 200 results; no transaction is open between two pages.
        """
        from kernelstore.db import queries  # SQLAlchemy: 160 ms

        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise InvalidArgument(f"limit is a whole number from 0 on, not {limit!r}")
        if kind is not None:
            plugins.load("kinds", kind)
        self._flush_for_reading()
        return queries.search(self._engine(), queries.matches(symbol, arch, kind), limit)

    def find(self, prefix: str) -> Key:
        """Return the one key whose hex form begins with `prefix`.

        Raises
        ------
        InvalidArgument
            `prefix` is not 1 to 64 hex digits, or several keys begin with it.
        KeyNotFound
            None does.

        Notes
        -----
        Cost: one indexed read.
        """
        from kernelstore.db import queries  # SQLAlchemy: 160 ms

        digits = prefix.lower() if isinstance(prefix, str) else ""
        if re.fullmatch(r"[0-9a-f]{1,64}", digits) is None:
            raise InvalidArgument(f"{prefix!r} begins no key; a key is 64 hex digits")
        keys = queries.with_prefix(self._engine(), digits, 2)
        if not keys:
            raise KeyNotFound(f"{self._path} has no artifact {digits}...", key=digits)
        if len(keys) > 1:
            raise InvalidArgument(f"several keys begin with {digits}: {keys[0]}, {keys[1]}, ...; give more digits")
        return keys[0]

    def info(self, key: Key | bytes | str) -> ArtifactInfo:
        """Return what is known of one artifact, without its payload.

        Raises
        ------
        KeyNotFound
            There is none.

        Notes
        -----
        Cost: one indexed read.
        """
        from kernelstore.db import queries  # SQLAlchemy: 160 ms

        key = Key(key)
        self._flush_for_reading()
        for info in queries.search(self._engine(), [queries.has_key(key)], 1):
            return info
        raise KeyNotFound(f"{self._path} has no artifact {key}", key=key)

    def program(self, key: Key | bytes | str) -> Program | None:
        """Return the stored program with that key, with its source, or ``None``.

        Notes
        -----
        Cost: one indexed read.
        """
        return programs.with_key(self._pool, Key(key))

    def find_program(self, program: Key | bytes | str) -> Key:
        """Return the key of the one program that is meant: by its name, its key, or the key of one of its artifacts.

        Parameters
        ----------
        program : Key, bytes or str
            Of a key given as text the first digits will do.

        Raises
        ------
        InvalidType, InvalidArgument
            `program` is neither, or several are meant.
        KeyNotFound
            None is.
        StoreError
            The file cannot be read.

        Notes
        -----
        Cost: one or two indexed reads.
        """
        return programs.find(self._pool, program)

    def compare(self, first: Key | bytes | str, second: Key | bytes | str) -> tuple[Difference, ...]:
        """Tell in which parts two artifacts, or two programs, differ: what `first` has and `second` has not.

        Parameters
        ----------
        first, second : Key, bytes or str
            Keys of artifacts or of programs.

        Raises
        ------
        InvalidType, InvalidArgument
            One is no key.
        KeyNotFound
            One is not there.
        StoreError
            The file cannot be read.

        Notes
        -----
        Cost: two indexed reads for each.
        """
        return programs.compare(self._pool, Key(first), Key(second))

    def best_for(
        self,
        program: Key | bytes | str,
        compute_capability: tuple[int, int],
        driver_version: int | None = None,
    ) -> ArtifactInfo | None:
        """Return the stored artifact of a program that would serve a device, or ``None``. Needs no GPU.

        Parameters
        ----------
        program : Key, bytes or str
            Key of the program, or its name: then the newest program of that name.
        compute_capability : tuple[int, int]
            The device's, such as ``(9, 0)``.
        driver_version : int, optional
            Such as 13000. ``None`` leaves the driver out of the choice.

        Raises
        ------
        InvalidType, InvalidArgument
            A parameter is of no use.
        StoreError
            The file cannot be read.

        Notes
        -----
        Cost: two or three indexed reads, no transaction; no use is counted. Cubins that a driver made of PTX are not
        considered, as they serve that driver alone.
        """
        if isinstance(program, str) and re.fullmatch(r"[0-9a-fA-F]{64}", program) is None:
            found = self._pool.read(statements.KEY_OF_NAMED_PROGRAM, {"name": program})
            if not found:
                return None
            program = Key(found[0][0])
        _check_device(compute_capability, driver_version)
        stored = {Key(row[1]): row for row in self._pool.read(statements.ARTIFACTS_OF_PROGRAM, {"key": Key(program)})}
        infos = [rows.info_of(row) for row in stored.values()]
        best = next(iter(choice.candidates(infos, compute_capability, driver_version=driver_version)), None)
        if best is None:
            return None
        found = self._pool.read(statements.SYMBOLS_OF_ARTIFACT, {"artifact_id": stored[best.key][0]})
        return dataclasses.replace(best, symbols=tuple(rows.symbol_of(row) for row in found))

    def sql(
        self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = (), *, timeout_s: float = 10.0
    ) -> SqlResult:
        """Run one statement that reads, over the tables of ``docs/schema.md``.

        Parameters
        ----------
        statement : str
            One SELECT.
        parameters : sequence or mapping
            For its placeholders.
        timeout_s : float
            After so long it is interrupted, > 0.

        Raises
        ------
        SqlError
            The statement is wrong, would write, is more than one, or took too long.
        StoreError
            The file cannot be read.

        Notes
        -----
        Cost: the statement's own, on a connection that cannot write.
        """
        from kernelstore.db import adhoc

        if not isinstance(statement, str):
            raise InvalidType(f"a statement is text, not {type(statement).__name__}")
        if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise InvalidArgument(f"timeout_s is a number of seconds above 0, not {timeout_s!r}")
        self._flush_for_reading()
        return adhoc.run(self._path, statement, parameters, timeout_s)

    def stats(self) -> StoreStats:
        """Return the store's figures; those of this process that wait to be written are included.

        Notes
        -----
        Cost: a scan of the artifacts' index and a few small reads.
        """
        from kernelstore.db import stats  # SQLAlchemy: 160 ms

        return stats.collect(self._engine(), self._path, self._tally.counters())

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
        """Return what is stored of a program, without payloads and symbols.

        Notes
        -----
        Cost: one indexed read, no transaction.
        """
        return [rows.info_of(row) for row in self._pool.read(statements.ARTIFACTS_OF_PROGRAM, {"key": program})]

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

    def stored_artifacts(self, program: Key) -> list[Stored]:
        """Return what is known of a program's artifacts, newest first; empty where it is not stored.

        Notes
        -----
        Cost: one indexed read.
        """
        return programs.artifacts_of(self._pool, program)

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
        if self._tally:
            with self._pool.write():
                pass

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

    def _engine(self) -> sqlalchemy.Engine:
        self._pool.check_open()
        from kernelstore.db import queries  # SQLAlchemy: 160 ms

        return queries.engine(self._path, self._pool.timeout_s)

    def _flush_for_reading(self) -> None:
        self._pool.check_open()
        # So that people see this process's own hits. Where that cannot be written, they see the file as it is.
        try:
            self.flush()
        except StoreError as error:
            _logger.debug("uses not written before a search: %s", error)

    def _drop_damaged(self, key: Key, artifact_id: int, checksum: bytes, error: PayloadCorrupt) -> None:
        self._tally.count("corrupt", error.reason)
        _logger.warning("dropped a damaged row: %s; it will be compiled again", error)
        try:
            with self._pool.write() as connection:
                rows.delete(connection, statements.DELETE_DAMAGED, {"artifact_id": artifact_id, "checksum": checksum})
        except StoreError as failure:
            _logger.warning("the damaged row of %s stays for now: %s", key, failure)


def _finish(pool: Pool, lock: SharedLock) -> None:
    """Flush and close; runs once, by `Store.close`, when the store is collected, or at exit."""
    if pool.tally:
        try:
            with pool.write(timeout_s=_EXIT_TIMEOUT_S):
                pass
        except StoreError as error:
            lost = pool.tally.uses().total()
            _logger.warning("%d uses and the counters of this process are lost: %s", lost, error)
    pool.close()
    lock.release()


def _fits(path: str, row: HeaderRow) -> bool:
    # Some file systems number above SQLite's integers; a name of other bytes than UTF-8 is no TEXT.
    return path.isprintable() and all(-(2**63) <= number < 2**63 for number in row[:5])


def _checked_path(path: str | os.PathLike[str] | None) -> Path:
    given = settings.default_path() if path is None else path
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidType(f"a path is text or a path object, not {given!r:.200}")
    text = os.fspath(given)
    if not isinstance(text, str):
        raise InvalidType(f"a path is text, not {text!r:.200}")
    if not text or "\0" in text:
        raise InvalidArgument(f"{text!r:.200} is no path of a store; leave it out for the default store")
    try:
        os.fsencode(text)
        resolved = Path(text).expanduser().resolve()
    except (OSError, RuntimeError, UnicodeError) as error:
        # A loop of links, a user that is not known, a lone surrogate.
        raise InvalidArgument(f"{text!r:.200} is no path of a store: {error}") from error
    # os.path answers False where pathlib raises: whether the file can be reached shows when it is opened.
    if os.path.isdir(resolved):
        raise InvalidArgument(f"{resolved} is a directory; give a file in it, such as {resolved / 'cache.db'}")
    return resolved


def _check_device(compute_capability: object, driver_version: object) -> None:
    is_pair = isinstance(compute_capability, tuple) and len(compute_capability) == 2
    if not is_pair or not all(type(part) is int and part >= 0 for part in compute_capability):  # type: ignore[attr-defined]
        raise InvalidArgument(f"a compute capability is a pair such as (9, 0), not {compute_capability!r:.100}")
    if driver_version is not None and (type(driver_version) is not int or driver_version <= 0):
        raise InvalidArgument(f"a driver version is a number such as 13000, not {driver_version!r:.100}")


def _reopen(path: str, codec: str, lock_timeout_s: float) -> Store:
    return Store(path, codec=codec, lock_timeout_s=lock_timeout_s)
