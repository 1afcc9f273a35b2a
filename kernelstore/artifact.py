"""Artifacts: one compiled output with its description, and the program it was made from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelstore import plugins
from kernelstore.arch import Arch
from kernelstore.errors import InvalidArgument, InvalidType, PayloadRejected
from kernelstore.key import Key, key_of

if TYPE_CHECKING:
    from kernelstore.kinds import Kind

__all__ = ["Artifact", "ArtifactInfo", "Program", "Symbol"]


@dataclass(frozen=True, slots=True)
class Symbol:
    """One kernel or variable of an artifact.

    Parameters
    ----------
    lowered_name : str
        The name in the payload, such as ``"_Z5saxpyIfEvT_PKS0_PS0_i"``.
    name_expression : str or None
        The name as the caller spelled it, such as ``"saxpy<float>"``; ``None`` where nobody asked for it.
    what : str
        ``"kernel"`` or ``"variable"``.
    parameters : tuple of str, or None
        Parameter types as PTX declares them: ``"f32"``, ``"u64"``, ``"b8[16] align 4"`` for a struct of 16
        bytes. ``None`` where they are not known.
    registers, shared_bytes, local_bytes, stack_bytes, constant_bytes, spill_store_bytes, spill_load_bytes
        Per-thread registers; static shared memory per block; local memory and stack frame per thread; constant
        banks; spills. As ptxas reports them (``--ptxas-options=-v``); ``None`` where they are not known.
    """

    lowered_name: str
    name_expression: str | None = None
    what: str = "kernel"
    parameters: tuple[str, ...] | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    local_bytes: int | None = None
    stack_bytes: int | None = None
    constant_bytes: int | None = None
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None

    @property
    def name(self) -> str:
        """The name expression, or the lowered name where there is none."""
        return self.name_expression if self.name_expression is not None else self.lowered_name

    def to_json(self) -> list[Any]:
        """The fields in their order, for the blob's header."""
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def from_json(cls, values: list[Any]) -> Symbol:
        """Read what `to_json` wrote."""
        lowered_name, name_expression, what, parameters, *usage = values
        return cls(lowered_name, name_expression, what, None if parameters is None else tuple(parameters), *usage)


@dataclass(frozen=True, slots=True)
class Program:
    """What was compiled: source, name, options and headers, under one key.

    Parameters
    ----------
    key : Key
        SHA-256 over the parts (``docs/how-it-works.md``).
    name : str
        As given to NVRTC; ``""`` for none.
    source : str
        CUDA C++ text.
    options : tuple of str
        NVRTC options in order, without the arch, equal spellings made equal.
    name_expressions : tuple of str
        Sorted, each once.
    headers : mapping of str to str
        Headers passed by content.
    external_includes : tuple of str
        Sorted spellings of the includes that a toolkit has to provide.
    user_headers : mapping of str to str
        Spellings of the user's header files to 16 hex digits of their SHA-256; a second file of one spelling has
        ``(2)`` behind it.
    part_digests : mapping of str to str
        Label of each part of the key to 16 hex digits of its digest, so that two programs can be compared.
    include_dirs : tuple of str, or None
        Directories on the include path as they were spelled, for a rebuild; no part of the key. ``None`` where the
        release that stored it did not keep them.
    extra : bytes or None
        What the caller added to the key; ``None`` as with `include_dirs`.
    """

    key: Key
    name: str
    source: str
    options: tuple[str, ...] = ()
    name_expressions: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    external_includes: tuple[str, ...] = ()
    user_headers: Mapping[str, str] = field(default_factory=dict)
    part_digests: Mapping[str, str] = field(default_factory=dict)
    include_dirs: tuple[str, ...] | None = None
    extra: bytes | None = None


@dataclass(frozen=True, slots=True)
class Artifact:
    """One compiled output: bytes that a driver or linker takes, and what is known of them.

    Parameters
    ----------
    key : Key
        What it is stored under.
    kind : str
        ``"cubin"``, ``"ptx"``, ``"ltoir"`` or ``"fatbin"``.
    arch : str
        ``"sm_90a"`` for cubins, ``"compute_90"`` for PTX and LTO-IR.
    payload : bytes
        The uncompressed bytes. PTX ends with exactly one NUL, as the driver wants it.
    toolchain : str or None
        What made it, with its build: ``"nvrtc 13.5.37"``.
    driver_version : int or None
        ``cuDriverGetVersion()`` where it was made, such as 13050; ``None`` where no driver was present.
    ptx_version : int or None
        PTX ISA version as major * 100 + minor: 905 for ``.version 9.5``; ``None`` for other kinds.
    origin : str
        ``"nvrtc"``, ``"driver-jit"``, ``"nvjitlink"`` or ``"import"``.
    relocatable : bool
        Whether it must be linked before it can be loaded (``-rdc=true``).
    symbols : tuple of Symbol
        Kernels and asked-for variables.
    log : str
        The compiler's log, replayed on a hit.
    compile_ms : float
        Time that making it took; 0.0 for imports.
    program : Program or None
        What it was made from; ``None`` for imports and on hits.
    from_cache : bool
        Whether it was read from a store.
    """

    key: Key
    kind: str
    arch: str
    payload: bytes = field(repr=False)
    toolchain: str | None = None
    driver_version: int | None = None
    ptx_version: int | None = None
    origin: str = "nvrtc"
    relocatable: bool = False
    symbols: tuple[Symbol, ...] = ()
    log: str = field(default="", repr=False)
    compile_ms: float = 0.0
    program: Program | None = field(default=None, repr=False)
    from_cache: bool = False

    @property
    def size_bytes(self) -> int:
        """Length of the payload in bytes."""
        return len(self.payload)

    @classmethod
    def from_bytes(cls, payload: bytes, *, kind: str | None = None, arch: str | None = None) -> Artifact:
        """Make an artifact of a kernel compiled elsewhere.

        Parameters
        ----------
        payload : bytes
            A cubin, PTX text or fatbin, as nvcc writes them.
        kind : str, optional
            ``None`` recognises it by its bytes.
        arch : str, optional
            ``None`` reads it from the payload.

        Raises
        ------
        InvalidType
            `payload` is not bytes.
        PayloadRejected
            The bytes are of no kind, or not of `kind`, or they are cut off or damaged, or hold nothing for `arch`.
        InvalidArgument
            The payload does not tell its arch and none was given, or it tells another one.
        """
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise InvalidType(f"a payload is bytes, not {type(payload).__name__}; for a path use Artifact.from_file")
        plugin = _recognise(bytes(payload)) if kind is None else plugins.load("kinds", kind)
        payload = plugin.normalise(bytes(payload))
        found = plugin.describe(payload)
        arch = _settle_arch(arch, found.arch, plugin)
        # Here and not at the put, so that the error stands where the file is named.
        plugin.check(payload, arch)
        return cls(
            key=key_of(
                [
                    ("origin", b"import"),
                    ("kind", plugin.name.encode()),
                    ("arch", arch.encode()),
                    ("payload", hashlib.sha256(payload, usedforsecurity=False).digest()),
                ]
            ),
            kind=plugin.name,
            arch=arch,
            payload=payload,
            toolchain=found.toolchain,
            ptx_version=found.ptx_version,
            origin="import",
            relocatable=found.relocatable,
            symbols=found.symbols,
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, kind: str | None = None, arch: str | None = None) -> Artifact:
        """Make an artifact of a file that nvcc or another compiler wrote; otherwise as `from_bytes`.

        Raises
        ------
        OSError
            The file cannot be read.
        """
        return cls.from_bytes(Path(path).read_bytes(), kind=kind, arch=arch)


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """What a store knows of one artifact, without its bytes. Times are Unix nanoseconds."""

    key: Key
    kind: str
    arch: str
    toolchain: str | None
    driver_version: int | None
    ptx_version: int | None
    origin: str
    relocatable: bool
    size_bytes: int
    stored_size_bytes: int
    payload_sha256: bytes
    compile_ms: float
    created_at_ns: int
    last_access_ns: int
    usage_count: int
    pinned: bool
    program_key: Key | None
    program_name: str | None
    symbols: tuple[Symbol, ...] = ()

    @property
    def saved_ms(self) -> float:
        """Compile time that its hits saved."""
        return self.compile_ms * self.usage_count


def _recognise(payload: bytes) -> Kind:
    for name in plugins.names("kinds"):
        plugin: Kind = plugins.load("kinds", name)
        if plugin.recognises(payload):
            return plugin
    raise PayloadRejected(
        f"these {len(payload)} bytes, beginning {payload[:8]!r}, are of no known kind "
        f"({', '.join(plugins.names('kinds'))}); for LTO-IR name it: kind='ltoir'",
        kind=None,
        reason="not recognised",
    )


def _settle_arch(given: str | None, found: str | None, plugin: Kind) -> str:
    if given is None and found is None:
        raise InvalidArgument(f"this {plugin.name} does not tell its arch; give one, such as arch='sm_90'")
    if given is None:
        assert found is not None
        return found
    wanted = plugin.arch_of(Arch.parse(given))
    if found is not None and str(wanted) != found:
        raise InvalidArgument(f"arch {given!r} was given, but this {plugin.name} is for {found}")
    return str(wanted)
