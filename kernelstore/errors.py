"""Every error that kernelstore raises, under one root.

::

    KernelStoreError
    |-- InvalidArgument (ValueError)      a value no call can use
    |   |-- InvalidArch                   text that names no arch
    |   |-- ArchRequired                  no arch given and no device to take it from
    |   |-- UnsupportedArch               this NVRTC cannot compile for it
    |   |-- UnknownPlugin                 no codec, kind or policy of that name
    |   `-- PayloadRejected               bytes that are not what their kind says
    |-- InvalidType (TypeError)           a value of the wrong type
    |-- CompilerClosed (ValueError)       used after close
    |-- StoreError
    |   |-- StoreClosed (ValueError)      used after close
    |   |-- KeyNotFound (KeyError)        store[key], del store[key]
    |   |-- StoreUnavailable (OSError)    cannot be opened, read or written now
    |   |   |-- StoreLocked (TimeoutError)
    |   |   |-- StoreReadOnly (PermissionError)
    |   |   |-- StoreFull
    |   |   `-- WalTooLong              a reader never ends
    |   |-- StoreCorrupt                  the file is damaged
    |   |-- SqlError (ValueError)         a statement given by the caller failed
    |   `-- UnusableFile                  will not be touched
    |       |-- NotADatabase
    |       |-- ForeignFile               another application's database
    |       |-- SchemaTooNew
    |       `-- SqliteTooOld
    |-- PayloadCorrupt (ValueError)       a stored blob does not decode to what its row says
    |-- CompileError (RuntimeError)       the program does not compile
    |   `-- InvalidOption (ValueError)
    |-- LinkError (RuntimeError)          a linker refuses its inputs
    |-- ToolchainError (RuntimeError)     NVRTC or its parts cannot be used
    |-- RebuildRefused (RuntimeError)     a stored program is no longer what was stored
    `-- LoadError (RuntimeError)          the CUDA driver refused
        |-- NoDriver                      no libcuda, or no device
        |-- DriverError                   any CUresult without a class of its own
        |-- InvalidImage                  200
        |-- NoBinary                      209
        |-- InvalidPTX                    218
        |-- NoJitCompiler                 221
        |-- UnsupportedPTX                222
        |-- NeedsLink                     LTO-IR or relocatable code
        |-- ForkedContext                 a child of a process that used CUDA
        |-- ModuleUnloaded                used after unload
        `-- LaunchError                   arguments or configuration of a launch
    KernelNotFound (LookupError)          also under the root

    RuntimeWarning
    |-- StoreWarning                      the store cannot be used just now
    `-- UncacheableWarning                a program is compiled each time

`Store` raises these; `Compiler` and the adapters degrade: a broken store costs a compile and a counter.
Each error carries its facts as attributes and survives pickling.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArchRequired",
    "CompileError",
    "CompilerClosed",
    "DriverError",
    "ForeignFile",
    "ForkedContext",
    "InvalidArch",
    "InvalidArgument",
    "InvalidImage",
    "InvalidOption",
    "InvalidPTX",
    "InvalidType",
    "KernelNotFound",
    "KernelStoreError",
    "KeyNotFound",
    "LaunchError",
    "LinkError",
    "LoadError",
    "ModuleUnloaded",
    "NeedsLink",
    "NoBinary",
    "NoDriver",
    "NoJitCompiler",
    "NotADatabase",
    "PayloadCorrupt",
    "PayloadRejected",
    "RebuildRefused",
    "SchemaTooNew",
    "SqlError",
    "SqliteTooOld",
    "StoreClosed",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreLocked",
    "StoreReadOnly",
    "StoreUnavailable",
    "StoreWarning",
    "ToolchainError",
    "UncacheableWarning",
    "UnknownPlugin",
    "UnsupportedArch",
    "UnsupportedPTX",
    "UnusableFile",
    "WalTooLong",
]


class KernelStoreError(Exception):
    """The root of all errors of this package.

    Parameters
    ----------
    message : str
        What happened, with which values, and what to do.
    **fields : object
        Facts about the error, kept as attributes under the same names.
    """

    def __init__(self, message: str, **fields: object) -> None:
        # Exception.__init__ by name: a builtin base (OSError, KeyError) would read meaning into the arguments.
        Exception.__init__(self, message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(cls: type[KernelStoreError], message: str, fields: dict[str, object]) -> KernelStoreError:
    return cls(message, **fields)


class InvalidArgument(KernelStoreError, ValueError):
    """A value that no call can use; nothing was written."""


class InvalidArch(InvalidArgument):
    """Text that names no arch. Field: ``arch``."""


class ArchRequired(InvalidArgument):
    """No arch was given and there is no device to take it from."""


class UnsupportedArch(InvalidArgument):
    """This NVRTC cannot compile for the arch; no row was written. Fields: ``arch``, ``toolchain``, ``supported``."""


class UnknownPlugin(InvalidArgument):
    """No codec, kind or policy has that name. Fields: ``group``, ``name``, ``known``."""


class PayloadRejected(InvalidArgument):
    """Bytes that are not what their kind says; nothing was written. Fields: ``kind``, ``reason``."""


class InvalidType(KernelStoreError, TypeError):
    """A value of the wrong type; nothing was written."""


class CompilerClosed(KernelStoreError, ValueError):
    """The compiler was used after `Compiler.close`; nothing was compiled."""


class StoreError(KernelStoreError):
    """Something about the store or its file."""


class StoreClosed(StoreError, ValueError):
    """The store was used after `Store.close`. Field: ``path``."""


class KeyNotFound(StoreError, KeyError):
    """No artifact has the key. Field: ``key``."""


class StoreUnavailable(StoreError, OSError):
    """The file cannot be opened, read or written now; it is as it was. Field: ``path``."""


class StoreLocked(StoreUnavailable, TimeoutError):
    """Another process held the write lock for longer than the deadline; nothing was written. Field: ``path``."""


class StoreReadOnly(StoreUnavailable, PermissionError):
    """The file or its directory cannot be written by this user; nothing was written. Field: ``path``."""


class StoreFull(StoreUnavailable):
    """The disk, a quota or SQLite's page limit is reached; the transaction was rolled back. Field: ``path``."""


class WalTooLong(StoreUnavailable):
    """The WAL is over its limit, as a reader holds up its clean-up; nothing was written. Field: ``path``."""


class StoreCorrupt(StoreError):
    """SQLite reports damage in the file, which was not changed. Field: ``path``."""


class SqlError(StoreError, ValueError):
    """A statement given by the caller failed; nothing was written. Field: ``statement``."""


class UnusableFile(StoreError):
    """The file is not, or not yet, a store of this release; it is byte for byte as it was. Field: ``path``."""


class NotADatabase(UnusableFile):
    """The file is not an SQLite database. Field: ``path``."""


class ForeignFile(UnusableFile):
    """The file is another application's database. Fields: ``path``, ``application_id``."""


class SchemaTooNew(UnusableFile):
    """A newer release made the file. Fields: ``path``, ``revision``, ``known_revision``."""


class SqliteTooOld(UnusableFile):
    """This Python's SQLite lacks what the schema needs. Fields: ``version``, ``minimum``."""


class PayloadCorrupt(KernelStoreError, ValueError):
    """A stored blob does not decode to what its row says. Fields: ``codec``, ``reason``."""


class CompileError(KernelStoreError, RuntimeError):
    """The program does not compile; no row was written.

    Fields: ``log``, ``options``, ``toolchain``, ``result`` (NVRTC's name of it), ``name``, ``arch``.
    """


class InvalidOption(CompileError, ValueError):
    """NVRTC, or kernelstore, does not take one of the options; no row was written. Fields as `CompileError`."""


class LinkError(KernelStoreError, RuntimeError):
    """The linker, or kernelstore before it, refuses the inputs or an option; no row was written.

    Fields: ``log``, ``options``, ``toolchain`` (of the linker), ``result`` (its name of it, or ``None``), ``arch``.
    """


class ToolchainError(KernelStoreError, RuntimeError):
    """NVRTC, its builtins or its headers, or nvJitLink, cannot be used.

    Fields: ``library`` (path or ``None``), ``log``.
    """


class RebuildRefused(KernelStoreError, RuntimeError):
    """A stored program would get another key now, or is not wholly known; nothing was compiled or written.

    Fields: ``program`` (its key), ``parts`` (labels of what differs, such as ``"external includes"``).
    """


class LoadError(KernelStoreError, RuntimeError):
    """The CUDA driver refused. The row is kept: it may be good for other machines.

    Fields: ``result`` (CUresult as int, or ``None``), ``name`` (CUresult's name), ``kind``, ``arch``, ``key``,
    ``driver_version``.
    """


class NoDriver(LoadError):
    """There is no CUDA driver or no device on this machine."""


class DriverError(LoadError):
    """A CUresult without a class of its own."""


class InvalidImage(LoadError):
    """CUDA_ERROR_INVALID_IMAGE (200): the driver does not recognise the payload."""


class NoBinary(LoadError):
    """CUDA_ERROR_NO_BINARY_FOR_GPU (209): nothing in the payload, or nothing stored, runs on this device.

    Field: ``archs`` (kind and arch of each stored artifact, where the program was looked for).
    """


class InvalidPTX(LoadError):
    """CUDA_ERROR_INVALID_PTX (218): the driver's JIT rejects the PTX. Field: ``log`` (the JIT's)."""


class NoJitCompiler(LoadError):
    """CUDA_ERROR_JIT_COMPILER_NOT_FOUND (221): the driver's PTX JIT is absent; cubins still load."""


class UnsupportedPTX(LoadError):
    """CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222): the PTX is newer than the driver. Field: ``ptx_version``."""


class NeedsLink(LoadError):
    """LTO-IR and relocatable code must be linked before they can be loaded."""


class ForkedContext(LoadError):
    """This process was forked from one that had initialised CUDA, where CUDA cannot be used."""


class ModuleUnloaded(LoadError):
    """The module was used after `Module.unload`."""


class LaunchError(LoadError):
    """Arguments or configuration of a launch that the kernel cannot take; nothing was launched."""


class KernelNotFound(KernelStoreError, LookupError):
    """The module has no symbol of that name. Fields: ``name``, ``available``."""


class StoreWarning(RuntimeWarning):
    """The store cannot be used just now: kernels are compiled and returned, not stored."""


class UncacheableWarning(RuntimeWarning):
    """A program cannot be keyed: it is compiled each time."""
