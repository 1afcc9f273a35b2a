"""Rows: artifacts and programs as the tables keep them, made before a transaction and written within it."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernelstore import plugins
from kernelstore.arch import Arch
from kernelstore.artifact import Artifact, ArtifactInfo, Program, Symbol
from kernelstore.codecs import Codec
from kernelstore.db import blob, statements
from kernelstore.db.tally import ScanRow
from kernelstore.errors import InvalidArgument, InvalidType, PayloadCorrupt, UnknownPlugin
from kernelstore.key import Key

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "Row",
    "delete",
    "info_of",
    "insert",
    "program_of",
    "program_row",
    "scan_row",
    "symbol_of",
    "text_of_scan",
]

# SQLite holds no blob above 1 GB (SQLITE_MAX_LENGTH); the rest is room for the row.
MAX_PAYLOAD_BYTES = 2**30 - 2**20

# Sources compress to a quarter, and are read only by `show` and by a rebuild.
_SOURCE_CODEC = "lz4"

_BUILD = re.compile(r"\b(\d{1,9})\.(\d{1,9})\.(\d{1,9})\b", re.ASCII)


@dataclass(slots=True)
class Row:
    """An artifact's rows, made before the transaction so that nothing slow happens inside it."""

    artifact: dict[str, Any]
    blob: dict[str, Any]
    symbols: list[dict[str, Any]]
    program: Program | None

    def __init__(self, artifact: Artifact, codec: Codec) -> None:
        if not isinstance(artifact, Artifact):
            raise InvalidType(f"a store holds artifacts, not {type(artifact).__name__}")
        _check(artifact)
        if len(artifact.payload) > MAX_PAYLOAD_BYTES:
            raise InvalidArgument(
                f"a payload of {len(artifact.payload)} bytes is too large, {MAX_PAYLOAD_BYTES} can be stored"
            )
        plugins.load("kinds", artifact.kind).check(artifact.payload, artifact.arch)
        arch = Arch.parse(artifact.arch)
        build = _BUILD.search(artifact.toolchain or "")
        major, minor, patch = (int(part) for part in build.groups()) if build else (None, None, None)
        self.program = artifact.program
        self.blob = blob.seal(artifact, codec)
        self.artifact = {
            "key": artifact.key,
            "kind": artifact.kind,
            "arch": artifact.arch,
            "arch_major": arch.major,
            "arch_minor": arch.minor,
            "arch_suffix": arch.suffix,
            "toolchain": artifact.toolchain,
            "toolchain_major": major,
            "toolchain_minor": minor,
            "toolchain_build": patch,
            "driver_version": artifact.driver_version,
            "ptx_version": artifact.ptx_version,
            "origin": artifact.origin,
            "relocatable": int(artifact.relocatable),
            "size_bytes": len(artifact.payload),
            "stored_size_bytes": len(self.blob["data"]),
            "payload_sha256": hashlib.sha256(artifact.payload, usedforsecurity=False).digest(),
            "compile_ms": float(artifact.compile_ms),
            "created_at_ns": time.time_ns(),
        }
        self.symbols = []
        for symbol in artifact.symbols:
            values = {name: getattr(symbol, name) for name in symbol.__slots__}
            values["parameters"] = None if symbol.parameters is None else json.dumps(symbol.parameters)
            self.symbols.append(values)


_ORIGINS = frozenset({"nvrtc", "driver-jit", "nvjitlink", "import"})
_NUMBERS = (
    "registers",
    "shared_bytes",
    "local_bytes",
    "stack_bytes",
    "constant_bytes",
    "spill_store_bytes",
    "spill_load_bytes",
)
# A compile of eleven days; more is no measurement.
_MAX_MS = 10**9


def _check(artifact: Artifact) -> None:
    """Refuse values that the columns could not hold, before anything is made of them."""
    if not isinstance(artifact.payload, bytes):
        raise InvalidType(f"a payload is bytes, not {type(artifact.payload).__name__}")
    Key(artifact.key)
    for name in ("kind", "arch", "origin", "log"):
        _check_text(name, getattr(artifact, name))
    if artifact.origin not in _ORIGINS:
        raise InvalidArgument(f"origin is one of {', '.join(sorted(_ORIGINS))}, not {artifact.origin!r:.200}")
    if artifact.toolchain is not None:
        _check_text("toolchain", artifact.toolchain)
    _check_number("driver_version", artifact.driver_version)
    _check_number("ptx_version", artifact.ptx_version)
    if not isinstance(artifact.relocatable, bool):
        raise InvalidType(f"relocatable is True or False, not {artifact.relocatable!r:.200}")
    if not isinstance(artifact.compile_ms, (int, float)):
        raise InvalidType(f"compile_ms is a number, not {artifact.compile_ms!r:.200}")
    if not 0 <= artifact.compile_ms <= _MAX_MS:
        raise InvalidArgument(f"compile_ms is a time of 0 to {_MAX_MS} ms, not {artifact.compile_ms!r:.200}")
    if not isinstance(artifact.symbols, tuple):
        raise InvalidType(f"symbols are a tuple of Symbol, not {artifact.symbols!r:.200}")
    for symbol in artifact.symbols:
        _check_symbol(symbol)
    if artifact.program is not None:
        _check_program(artifact.program)


def _check_symbol(symbol: object) -> None:
    if not isinstance(symbol, Symbol):
        raise InvalidType(f"symbols are a tuple of Symbol, and {symbol!r:.200} is none")
    _check_text("a symbol's name", symbol.lowered_name)
    _check_text("a symbol's name", symbol.name)
    if symbol.what not in {"kernel", "variable"}:
        raise InvalidArgument(f"a symbol is a 'kernel' or a 'variable', not {symbol.what!r:.200}")
    if symbol.parameters is not None:
        if not isinstance(symbol.parameters, tuple):
            raise InvalidType(f"parameters are a tuple of str, not {symbol.parameters!r:.200}")
        for parameter in symbol.parameters:
            _check_text("a parameter", parameter)
    for name in _NUMBERS:
        _check_number(name, getattr(symbol, name))


def _check_program(program: object) -> None:
    if not isinstance(program, Program):
        raise InvalidType(f"program is a Program, not {program!r:.200}")
    Key(program.key)
    _check_text("a program's name", program.name)
    _check_text("a program's source", program.source)
    for text in (*program.options, *program.name_expressions, *program.external_includes):
        _check_text("a program's text", text)
    for item in (*program.headers.items(), *program.part_digests.items()):
        for text in item:
            _check_text("a program's text", text)


def _check_number(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name} is a whole number or None, not {value!r:.200}")
    if not 0 <= value < 2**31:
        raise InvalidArgument(f"{name} is from 0 to 2**31 - 1, not {value!r:.200}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidType(f"{name} is a str, not {value!r:.200}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} holds a lone surrogate, which is no text: {value!r:.200}") from None


def insert(
    connection: sqlite3.Connection, row: Row, program_rows: Mapping[Key, dict[str, Any]], ids: dict[Key, int]
) -> None:
    """Write one artifact with its blob, symbols and program; `ids` remembers the programs written so far."""
    program_id = None
    if row.program is not None:
        key = row.program.key
        if key not in ids:
            found = connection.execute(statements.PROGRAM_ID, {"key": key}).fetchall()
            found = found or connection.execute(statements.INSERT_PROGRAM, program_rows[key]).fetchall()
            ids[key] = found[0][0]
        program_id = ids[key]
    columns = row.artifact | {"program_id": program_id}
    inserted = connection.execute(statements.INSERT_ARTIFACT, columns).fetchall()
    if not inserted and connection.execute(statements.DELETE_WITHOUT_BLOB, {"key": columns["key"]}).fetchall():
        inserted = connection.execute(statements.INSERT_ARTIFACT, columns).fetchall()
    if not inserted:
        return
    artifact_id = inserted[0][0]
    connection.execute(statements.INSERT_BLOB, row.blob | {"artifact_id": artifact_id})
    connection.executemany(statements.INSERT_SYMBOL, [values | {"artifact_id": artifact_id} for values in row.symbols])


def delete(connection: sqlite3.Connection, statement: str, parameters: Mapping[str, object]) -> bool:
    """Run a statement that deletes artifacts, then their programs if nothing is left of them; tell whether it did."""
    rows = connection.execute(statement, parameters).fetchall()
    for (program_id,) in rows:
        if program_id is not None:
            connection.execute(statements.DELETE_PROGRAM_IF_UNUSED, {"id": program_id})
    return bool(rows)


def program_row(program: Program) -> dict[str, Any]:
    """Return the columns of a program."""
    codec: Codec = plugins.load("codecs", _SOURCE_CODEC)
    source = program.source.encode()
    kept: dict[str, Any] = {
        "headers": dict(program.headers),
        "external_includes": program.external_includes,
        "user_headers": dict(program.user_headers),
    }
    if program.include_dirs is not None:
        kept["include_dirs"] = program.include_dirs
    if program.extra is not None:
        kept["extra"] = program.extra.hex()
    dependencies = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()
    return {
        "key": program.key,
        "name": program.name,
        "source": codec.encode(source),
        "source_codec": codec.name,
        "source_size_bytes": len(source),
        "source_sha256": hashlib.sha256(source, usedforsecurity=False).digest(),
        "options": json.dumps(program.options),
        "name_expressions": json.dumps(program.name_expressions),
        "part_digests": json.dumps(dict(program.part_digests)),
        "dependencies": codec.encode(dependencies),
        "dependencies_size_bytes": len(dependencies),
        "created_at_ns": time.time_ns(),
    }


def program_of(row: Any) -> Program:
    """Return the program that a row of the table holds."""
    codec: Codec = plugins.load("codecs", row.source_codec)
    dependencies = json.loads(codec.decode(row.dependencies, row.dependencies_size_bytes))
    return Program(
        key=Key(row.key),
        name=row.name,
        source=codec.decode(row.source, row.source_size_bytes).decode(),
        options=tuple(json.loads(row.options)),
        name_expressions=tuple(json.loads(row.name_expressions)),
        headers=dependencies["headers"],
        external_includes=tuple(dependencies["external_includes"]),
        user_headers=dependencies.get("user_headers", {}),
        part_digests=json.loads(row.part_digests),
        # Rows of the first releases lack them.
        include_dirs=tuple(dependencies["include_dirs"]) if "include_dirs" in dependencies else None,
        extra=bytes.fromhex(dependencies["extra"]) if "extra" in dependencies else None,
    )


def info_of(row: tuple[Any, ...], symbols: tuple[Symbol, ...] = ()) -> ArtifactInfo:
    """Return what a row of `statements.ARTIFACTS_OF_PROGRAM` tells."""
    key, kind, arch, toolchain, driver_version, ptx_version, origin, relocatable, *rest = row
    size_bytes, stored_size_bytes, payload_sha256, compile_ms, created_at_ns, last_access_ns, *rest = rest
    usage_count, pinned, program_key, program_name = rest
    return ArtifactInfo(
        key=Key(key),
        kind=kind,
        arch=arch,
        toolchain=toolchain,
        driver_version=driver_version,
        ptx_version=ptx_version,
        origin=origin,
        relocatable=bool(relocatable),
        size_bytes=size_bytes,
        stored_size_bytes=stored_size_bytes,
        payload_sha256=payload_sha256,
        compile_ms=compile_ms,
        created_at_ns=created_at_ns,
        last_access_ns=last_access_ns,
        usage_count=usage_count,
        pinned=bool(pinned),
        program_key=Key(program_key),
        program_name=program_name,
        symbols=symbols,
    )


def symbol_of(row: tuple[Any, ...]) -> Symbol:
    """Return the symbol of a row of `statements.SYMBOLS_OF_ARTIFACT`."""
    lowered_name, name_expression, what, parameters, *usage = row
    declared = None if parameters is None else tuple(json.loads(parameters))
    return Symbol(lowered_name, name_expression, what, declared, *usage)


def scan_row(text: str) -> ScanRow:
    """Return the columns of a scan behind its key."""
    encoded = text.encode("utf-8", "surrogateescape")
    codec: Codec = plugins.load("codecs", _SOURCE_CODEC)
    return codec.encode(encoded), codec.name, len(encoded)


def text_of_scan(row: ScanRow) -> str | None:
    """Return the text of a scan; ``None`` where the row is damaged."""
    found, codec, size_bytes = row
    try:
        decoded: bytes = plugins.load("codecs", codec).decode(found, size_bytes)
        return decoded.decode("utf-8", "surrogateescape")
    except (PayloadCorrupt, UnknownPlugin, UnicodeDecodeError):
        return None
