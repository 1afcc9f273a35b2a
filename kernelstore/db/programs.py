"""Programs as stored: found by key, by name or by likeness, in literal SQL, as a compiling process asks too."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from types import SimpleNamespace
from typing import Any, TypeGuard

from kernelstore import choice, explanation
from kernelstore.artifact import ArtifactInfo, Program
from kernelstore.db import rows, statements
from kernelstore.db.pool import Pool
from kernelstore.errors import InvalidArgument, KeyNotFound
from kernelstore.explanation import Asked, Difference, Explanation
from kernelstore.key import Key

__all__ = ["artifacts_of", "best_for", "compare", "explain", "find", "with_key"]

# Bounds of the search for the nearest program: rows looked at, by name and by age; of these the sources read.
_SAME_NAME_ROWS = 50
_NEWEST_ROWS = 200
_SOURCES = 50
_SOURCE_BYTES = 32 * 2**20

_MAX_ARTIFACTS = 1000

_logger = logging.getLogger("kernelstore.store")


def with_key(pool: Pool, key: Key) -> Program | None:
    """Return the program with that key, with its source, or ``None``."""
    return _program(pool.read(statements.PROGRAM_WITH_KEY, {"key": key}))


def artifacts_of(pool: Pool, program: Key) -> list[ArtifactInfo]:
    """Return what is known of a program's artifacts but their symbols, newest first; empty where it is not stored."""
    found = pool.read(statements.ARTIFACTS_OF_PROGRAM, {"key": program, "limit": _MAX_ARTIFACTS})
    return [rows.info_of(row) for row in found]


def best_for(
    pool: Pool, program: Key | bytes | str, compute_capability: tuple[int, int], driver_version: int | None
) -> ArtifactInfo | None:
    """Return what serves a device best of the program with that key, or of the newest one with that name."""
    if _is_name(program):
        named = pool.read(statements.PROGRAMS_WITH_NAME, {"name": program, "limit": 1})
        if not named:
            return None
        program = named[0][1]
    found = choice.candidates(artifacts_of(pool, Key(program)), compute_capability, driver_version=driver_version)
    if not found:
        return None
    symbols = pool.read(statements.SYMBOLS_OF_ARTIFACT, {"key": found[0].key})
    return dataclasses.replace(found[0], symbols=tuple(map(rows.symbol_of, symbols)))


def find(pool: Pool, program: Key | bytes | str) -> Key:
    """Return the key of the one program with that name or key, or with an artifact of that key.

    Raises
    ------
    InvalidArgument
        Several are meant.
    KeyNotFound
        None is.
    """
    if _is_name(program):
        named = pool.read(statements.PROGRAMS_WITH_NAME, {"name": program, "limit": 3})
        keys = [Key(key) for _, key, *_ in named] or _with_prefix(pool, program)
    else:
        key = Key(program)
        found = pool.read(statements.PROGRAMS_WITH_PREFIX, {"low": key, "high": key, "limit": 2})
        keys = [Key(found_key) for (found_key,) in found]
    shown = program if isinstance(program, str) else str(Key(program))
    if not keys:
        raise KeyNotFound(f"{pool.path} has no program {shown}", key=shown)
    if len(keys) > 1:
        listed = ", ".join(str(key)[:12] for key in keys)
        raise InvalidArgument(f"several programs are called {shown!r}: {listed}; give one by its key")
    return keys[0]


def compare(pool: Pool, first: Key, second: Key) -> tuple[Difference, ...]:
    """Tell how two artifacts, or two programs, differ; `first` is the one that is told of.

    Raises
    ------
    KeyNotFound
        One of the two is not there.
    """
    one, other = _asked(pool, first), _asked(pool, second)
    found: list[Difference] = []
    if one.program.key != other.program.key:
        imported = [str(key) for key, side in ((first, one), (second, other)) if not side.program.part_digests]
        if imported:
            found.append(Difference("program", f"not known of {' and '.join(imported)}, which was made elsewhere"))
        else:
            found += explanation.between(one.program, other.program)
    for part in ("kind", "arch", "toolchain"):
        mine, theirs = getattr(one, part), getattr(other, part)
        if None not in (one.kind, other.kind) and mine != theirs:
            found.append(Difference(part, f"{mine or 'not known'}, the other has {theirs or 'not known'}"))
    if not found and first != second and None not in (one.kind, other.kind):
        found.append(explanation.OTHER_PLACES)
    return tuple(found)


def explain(pool: Pool, asked: Asked) -> Explanation:
    """Tell whether `asked` is stored, and if not, how it differs from the nearest that is.

    Notes
    -----
    Cost: three indexed reads for a hit or a known program; otherwise at most 250 rows and 50 sources.
    """
    assert asked.key is not None
    if pool.read(statements.ARTIFACT_WITH_KEY, {"key": asked.key}):
        return Explanation(asked.key, asked.key)
    program = with_key(pool, asked.program.key) or _nearest(pool, asked.program)
    stored = [] if program is None else artifacts_of(pool, program.key)
    if program is None or not stored:
        return Explanation(None, None)
    return explanation.against(asked, program, stored)


def _nearest(pool: Pool, program: Program) -> Program | None:
    candidates: dict[int, tuple[int, bool, int, int]] = {}
    limits = [(statements.NEWEST_PROGRAMS, {"limit": _NEWEST_ROWS})]
    if program.name:
        named: dict[str, Any] = {"name": program.name, "limit": _SAME_NAME_ROWS}
        limits.insert(0, (statements.PROGRAMS_WITH_NAME, named))
    for statement, parameters in limits:
        for row_id, _, name, digests, size_bytes in pool.read(statement, parameters):
            equal = explanation.equal_parts(program.part_digests, _digests(digests))
            candidates[row_id] = equal, name == program.name, row_id, size_bytes
    best: tuple[tuple[int, bool, float], Program] | None = None
    left_bytes = _SOURCE_BYTES
    for equal, same_name, row_id, size_bytes in sorted(candidates.values(), reverse=True)[:_SOURCES]:
        left_bytes -= size_bytes
        # In order of likeness but for the source: what comes after cannot be nearer, or costs too much to read.
        if best is not None and ((equal, same_name) < best[0][:2] or left_bytes < 0):
            break
        stored = _program(pool.read(statements.PROGRAM_WITH_ID, {"id": row_id}))
        likeness = None if stored is None else explanation.likeness(program, stored)
        if stored is not None and likeness is not None and (best is None or likeness > best[0]):
            best = likeness, stored
    return None if best is None else best[1]


def _program(found: list[Any]) -> Program | None:
    if not found:
        return None
    try:
        return rows.program_of(SimpleNamespace(**dict(zip(statements.PROGRAM_COLUMNS, found[0], strict=True))))
    except (ValueError, KeyError, TypeError) as error:
        # No checksum covers these rows; what does not decode is as good as absent.
        _logger.warning("a damaged row of a program is passed over: %s", error)
        return None


def _digests(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return {str(label): str(digest) for label, digest in found.items()} if isinstance(found, dict) else {}


def _is_name(program: Key | bytes | str) -> TypeGuard[str]:
    return isinstance(program, str) and re.fullmatch(r"[0-9a-fA-F]{64}", program) is None


def _with_prefix(pool: Pool, prefix: str) -> list[Key]:
    digits = prefix.lower()
    if re.fullmatch(r"[0-9a-f]{1,64}", digits) is None:
        return []
    low, high = bytes.fromhex(digits.ljust(64, "0")), bytes.fromhex(digits.ljust(64, "f"))
    found = pool.read(statements.PROGRAMS_WITH_PREFIX, {"low": low, "high": high, "limit": 3})
    return [Key(key) for (key,) in found]


def _asked(pool: Pool, key: Key) -> Asked:
    found = pool.read(statements.ARTIFACT_WITH_KEY, {"key": key})
    if not found:
        program = with_key(pool, key)
        if program is None:
            raise KeyNotFound(f"{pool.path} has no artifact and no program {key}", key=key)
        return Asked(program)
    kind, arch, toolchain, program_key = found[0]
    program = None if program_key is None else with_key(pool, Key(program_key))
    # An import has no program; its own key stands for one that equals no other.
    return Asked(program or Program(key, "", ""), key, kind, arch, toolchain)
