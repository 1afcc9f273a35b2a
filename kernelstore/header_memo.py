"""Header files read once: what is in one, kept by its stamp, in the process and in a memo that is passed in."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kernelstore.directives import Directives
from kernelstore.errors import InvalidArgument, StoreError

__all__ = [
    "HeaderFile",
    "HeaderRow",
    "Memo",
    "Signature",
    "directory_signature",
    "is_settled",
    "read_headers",
    "signature_of",
]

Signature = tuple[int, int, int, int, int]
"""Device, inode, size in bytes, mtime and ctime in ns."""

HeaderRow = tuple[int, int, int, int, int, bytes, str]
"""A row of the table `header` behind its path: a signature, SHA-256, what was read in the text."""

# A file that was written so shortly before it was read could be written once more within one tick of the file
# system's clock, and keep its stamp (git, "racy-git"). FAT has the coarsest clock: 2 s.
_MARGIN_NS = 2 * 10**9

# A generated table as text; NVRTC takes seconds for it.
_MAX_BYTES = 32 * 2**20

# Raise it whenever `directives` reads a text differently: rows of other releases are then no use.
_FORM = "3"

# About 100 MB; a process that compiles that much starts anew.
_MAX_KEPT = 50_000

_kept: dict[str, HeaderFile] = {}


class Memo(Protocol):
    """What outlives the process: rows by absolute path."""

    def recall_headers(self, paths: Sequence[str]) -> Mapping[str, HeaderRow]:
        """Return the rows of those paths that have one; may raise `StoreError`."""
        ...

    def remember_headers(self, rows: Mapping[str, HeaderRow]) -> None:
        """Keep rows, at some time."""
        ...

    def recall_scan(self, asked: bytes) -> str | None:
        """Return what was kept of a scan; may raise `StoreError`."""
        ...

    def remember_scan(self, asked: bytes, text: str) -> None:
        """Keep it, at some time."""
        ...


@dataclass(frozen=True, slots=True)
class HeaderFile:
    """A header as it was read.

    Parameters
    ----------
    signature : Signature
        Its stamp.
    digest : bytes
        SHA-256 of its content, 32 bytes.
    directives : Directives
        What its text asks for.
    settled : bool
        Whether the stamp proves the content: it was older than any clock's tick when the file was read.
    """

    signature: Signature
    digest: bytes
    directives: Directives
    settled: bool


@dataclass(slots=True)
class Trace:
    """Every place that a scan looked at, to tell cheaply whether a new scan could find something else.

    Parameters
    ----------
    places : dict of str to (Signature or None)
        Paths as they were asked for, relative ones from the working directory; ``None``: no file there.
    settled : bool
        Whether everything was old enough when it was read that its stamp proves its content.
    directories : dict of str to (Signature or None)
        Directories in which a new file could hide a toolkit's.
    working_dir : str or None
        Where the working directory reached the output.
    """

    places: dict[str, Signature | None]
    settled: bool
    directories: dict[str, Signature | None] = field(default_factory=dict)
    working_dir: str | None = None

    def same_files(self) -> bool:
        """Return whether every place still has the stamp that it had. One stat for each."""
        return all(signature_of(path) == signature for path, signature in self.places.items())

    def holds(self) -> bool:
        """Return whether the scan is sure to find the same again. One stat for each place."""
        return (
            self.settled
            and self.same_files()
            and all(directory_signature(path) == signature for path, signature in self.directories.items())
            and (self.working_dir is None or os.getcwd() == self.working_dir)  # noqa: PTH109 - a us matters here
        )


def signature_of(path: str) -> Signature | None:
    """Return the stamp of what NVRTC would read at the path; ``None`` where it would go on to the next place."""
    try:
        found = os.stat(path)  # noqa: PTH116 - hundreds of paths
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def directory_signature(path: str) -> Signature | None:
    """Return the stamp of a directory, which changes with every new name in it; ``None`` where there is none."""
    try:
        found = os.stat(path or ".")  # noqa: PTH116
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_settled(signature: Signature | None) -> bool:
    """Return whether a stamp that was just taken is old enough to tell a later write by it."""
    return signature is None or max(signature[3:]) + _MARGIN_NS < time.time_ns()


def read_headers(stamps: Mapping[str, Signature | None], memo: Memo | None) -> Iterator[tuple[str, HeaderFile | str]]:
    """Yield each path with what is in the file, or with the reason why that cannot be keyed.

    Parameters
    ----------
    stamps : mapping of str to Signature
        What `signature_of` said of the paths just now.
    memo : Memo, optional
        Asked once for all paths that this process does not know.

    Raises
    ------
    InvalidArgument
        One is a named pipe.
    """
    working_dir = os.getcwd() if any(not os.path.isabs(path) for path in stamps) else ""  # noqa: PTH109, PTH117
    absolute = {path: os.path.join(working_dir, path) for path in stamps}
    known: dict[str, HeaderFile] = {}
    for path, signature in stamps.items():
        kept = _kept.get(absolute[path])
        if kept is not None and kept.signature == signature:
            known[path] = kept
    unknown = [path for path in stamps if path not in known]
    if unknown and memo is not None:
        rows = _recalled(memo, [absolute[path] for path in unknown])
        for path in unknown:
            row = rows.get(absolute[path])
            recalled = None if row is None or row[:5] != stamps[path] else _unpacked(absolute[path], row)
            if recalled is not None:
                known[path] = _keep(absolute[path], recalled)
    fresh: dict[str, HeaderRow] = {}
    for path in stamps:
        file = known.get(path) or _read(path)
        if path not in known and isinstance(file, HeaderFile) and file.settled:
            _keep(absolute[path], file)
            fresh[absolute[path]] = _packed(absolute[path], file)
        yield path, file
    if fresh and memo is not None:
        memo.remember_headers(fresh)


def _recalled(memo: Memo, paths: Sequence[str]) -> Mapping[str, HeaderRow]:
    try:
        return memo.recall_headers(paths)
    except StoreError:
        # Reading the headers costs more and answers the same.
        return {}


def _keep(path: str, file: HeaderFile) -> HeaderFile:
    if len(_kept) >= _MAX_KEPT:
        _kept.clear()
    _kept[path] = file
    return file


def _read(path: str) -> HeaderFile | str:
    started_ns = time.time_ns()
    try:
        with open(path, "rb", opener=_without_waiting) as stream:
            before = os.fstat(stream.fileno())
            if stat.S_ISFIFO(before.st_mode):
                # NVRTC opens it and waits for a writer, for ever.
                raise InvalidArgument(f"header {path} is a named pipe, which NVRTC cannot read; make it a file")
            if not stat.S_ISREG(before.st_mode):
                return f"header that is no regular file: {path}"
            if before.st_size > _MAX_BYTES:
                return f"large header: {path}"
            content = stream.read(_MAX_BYTES + 1)
            after = os.fstat(stream.fileno())
    except OSError as error:
        return f"unreadable header: {path}: {error.strerror}"
    signature = (after.st_dev, after.st_ino, after.st_size, after.st_mtime_ns, after.st_ctime_ns)
    unchanged = before.st_ctime_ns == after.st_ctime_ns and before.st_mtime_ns == after.st_mtime_ns
    if len(content) != after.st_size:
        return f"header that changes while it is read: {path}"
    settled = unchanged and max(signature[3:]) + _MARGIN_NS < started_ns
    # As bytes that are no UTF-8 may spell a file's name, they are kept.
    directives = Directives.read(content.decode("utf-8", "surrogateescape"))
    return HeaderFile(signature, hashlib.sha256(content, usedforsecurity=False).digest(), directives, settled)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _packed(path: str, file: HeaderFile) -> HeaderRow:
    text = file.directives.to_json()
    checksum = _checksum(path, file.signature, file.digest, text)
    return *file.signature, file.digest, f'{{"checksum":"{checksum}","read":{text}}}'


def _unpacked(path: str, row: HeaderRow) -> HeaderFile | None:
    # A damaged row would hide an include, so it has a checksum; one of another release has another form.
    *_, digest, packed = row
    text = packed[38:-1]
    if packed[13:29] != _checksum(path, row[:5], digest, text):
        return None
    return HeaderFile(row[:5], digest, Directives.from_json(text), settled=True)


def _checksum(path: str, signature: Signature, digest: bytes, text: str) -> str:
    content = "\0".join((_FORM, path, *map(str, signature), digest.hex(), text))
    return hashlib.sha256(content.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()[:16]
