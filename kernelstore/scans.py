"""Scans: what a program's texts can read, as it was found; kept, and recalled at the cost of one stat for each place.

A scan depends on the includes of a program, not on the rest of its text, so kernels that include the same headers
share one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kernelstore.errors import StoreError
from kernelstore.header_memo import Memo, Signature, Trace, directory_signature, signature_of

__all__ = ["Scan", "recall", "remember"]

# Raise it whenever a scan finds something else in the same files.
_FORM = "1"

# Some 100 KB each, for 400 headers.
_MAX_KEPT = 500

_kept: dict[bytes, Scan] = {}


@dataclass(frozen=True, slots=True)
class Scan:
    """What a program's text can read.

    Parameters
    ----------
    external : tuple of str
        Sorted spellings that a toolkit has to provide.
    uncacheable : str or None
        Why the compile cannot be keyed: a reason to count, and after a colon the place.
    shows_paths : bool
        Whether ``__FILE__`` puts file names into the output.
    macros : tuple of str
        What a toolkit must not define: the macros of computed includes, and the words that they stand for. Sorted.
    files : bytes
        SHA-256 over what the user headers are for the key: for each its content's digest, and what each of its
        includes found. No path is in it. Empty where there are none.
    digests : mapping of str to str
        Spellings of user headers to the first 16 hex digits of their SHA-256, for people.
    trace : Trace
        What was looked at.
    """

    external: tuple[str, ...]
    uncacheable: str | None
    shows_paths: bool
    macros: tuple[str, ...] = ()
    files: bytes = b""
    digests: Mapping[str, str] = field(default_factory=dict)
    trace: Trace = field(default_factory=lambda: Trace({}, settled=True))


def recall(asked: bytes, memo: Memo | None) -> Scan | None:
    """Return an earlier scan if a new one is sure to find the same, or ``None``.

    Parameters
    ----------
    asked : bytes
        SHA-256 over all that the scan started from, 32 bytes.
    memo : Memo, optional
        Asked where this process does not know the scan.

    Notes
    -----
    Cost: one stat for each place that the scan looked at; in a new process one indexed read as well.
    """
    kept = _kept.get(asked)
    if kept is not None:
        return kept if kept.trace.holds() else None
    if memo is None:
        return None
    try:
        text = memo.recall_scan(asked)
    except StoreError:
        # Scanning anew costs more and answers the same.
        return None
    found = None if text is None else _unpacked(asked, text)
    if found is not None:
        _keep(asked, found)
    return found


def remember(asked: bytes, scan: Scan, memo: Memo | None) -> None:
    """Keep a scan, in the process and in the memo. One that stamps do not prove is not kept."""
    if not scan.trace.settled or not scan.trace.places:
        return
    _keep(asked, scan)
    if memo is not None:
        memo.remember_scan(asked, _packed(asked, scan))


def _keep(asked: bytes, scan: Scan) -> None:
    if len(_kept) >= _MAX_KEPT:
        _kept.clear()
    _kept[asked] = scan


def _packed(asked: bytes, scan: Scan) -> str:
    trace = scan.trace
    text = json.dumps(
        {
            "external": scan.external,
            "uncacheable": scan.uncacheable,
            "shows_paths": scan.shows_paths,
            "macros": scan.macros,
            "files": scan.files.hex(),
            "digests": scan.digests,
            "places": list(trace.places),
            "directories": list(trace.directories),
            "stamps": _digest(trace.places.values(), trace.directories.values()),
        },
        separators=(",", ":"),
    )
    return _checksum(asked, text) + text


def _unpacked(asked: bytes, packed: str) -> Scan | None:
    # A damaged row would hide a header, so it has a checksum; one of another release has another.
    checksum, text = packed[:32], packed[32:]
    if checksum != _checksum(asked, text):
        return None
    values = json.loads(text)
    places = {path: signature_of(path) for path in values["places"]}
    directories = {path: directory_signature(path) for path in values["directories"]}
    if values["stamps"] != _digest(places.values(), directories.values()):
        return None
    return Scan(
        external=tuple(values["external"]),
        uncacheable=values["uncacheable"],
        shows_paths=values["shows_paths"],
        macros=tuple(values["macros"]),
        files=bytes.fromhex(values["files"]),
        digests=values["digests"],
        trace=Trace(places, settled=True, directories=directories),
    )


def _digest(*stamps: Iterable[Signature | None]) -> str:
    return hashlib.sha256(repr([list(each) for each in stamps]).encode(), usedforsecurity=False).hexdigest()


def _checksum(asked: bytes, text: str) -> str:
    content = f"{_FORM}\0{asked.hex()}\0{text}"
    return hashlib.sha256(content.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()[:32]
