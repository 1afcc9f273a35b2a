"""Checked calls of NVRTC, through ``cuda.bindings.nvrtc``; nothing else in the package calls it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kernelstore.arch import Arch
from kernelstore.cuda.nvrtc_errors import Asked, Nvrtc, header_remedy, refusal
from kernelstore.errors import CompileError, InvalidArgument, ToolchainError

__all__ = [
    "Output",
    "build",
    "compile_program",
    "has_bundled_headers",
    "install_bundled_headers",
    "library_path",
    "supported_archs",
    "version",
]

_BANNER = re.compile(rb"Cuda compilation tools, release [0-9.]+, V([0-9.]+)")
# The first major version that was seen to keep nothing of a -G compile.
_FIRST_CLEAN_MAJOR = 13
_debug_compiled = threading.Event()


@dataclass(frozen=True, slots=True)
class Output:
    """What one successful run of NVRTC gave.

    Parameters
    ----------
    ptx : bytes or None
        PTX text with exactly one trailing NUL; ``None`` with ``-dlto``.
    cubin : bytes or None
        ``None`` for a ``compute_*`` arch and with ``-dlto``.
    ltoir : bytes or None
        ``None`` without ``-dlto``.
    lowered_names : dict of str to str
        Each name expression, as asked for, to its lowered name.
    log : str
        NVRTC's log with no white space at its end; ``""`` where it said nothing.
    """

    ptx: bytes | None = field(repr=False)
    cubin: bytes | None = field(repr=False)
    ltoir: bytes | None = field(repr=False)
    lowered_names: dict[str, str]
    log: str = field(repr=False)


def compile_program(
    source: str,
    *,
    name: str,
    options: Sequence[str],
    name_expressions: Sequence[str],
    headers: Mapping[str, str],
    arch: Arch,
    resource_usage: bool = False,
) -> Output:
    """Compile one program; the GIL is not held while NVRTC works.

    Parameters
    ----------
    source : str
        CUDA C++ text.
    name : str
        Name of the program in messages; ``""`` for NVRTC's own.
    options : sequence of str
        NVRTC options, each one element, without the arch.
    name_expressions : sequence of str
        Kernels and variables whose lowered names are wanted, such as ``"saxpy<float>"`` and ``"&table"``.
    headers : mapping of str to str
        Headers by content, under the names that ``#include`` spells.
    arch : Arch
        ``sm_*`` gives PTX and cubin, ``compute_*`` PTX alone.
    resource_usage : bool
        Whether ptxas adds to the log what each kernel uses; `kernelstore.cuda.ptxas.split_log` reads it.

    Raises
    ------
    InvalidArgument
        A NUL, at which NVRTC would stop reading, or a lone surrogate in one of the texts; NVRTC was not called.
    UnsupportedArch
        This NVRTC does not compile for `arch`.
    InvalidOption
        NVRTC or ptxas does not take one of the options.
    CompileError
        The program does not compile, or has no such name expression.
    ToolchainError
        NVRTC or its builtins cannot be loaded.
    """
    request = Asked(source, name, tuple(options), tuple(dict.fromkeys(name_expressions)), headers, arch)
    nvrtc = _loaded()
    flags = [f"--gpu-architecture={arch}".encode(), *(_encode(option, "option") for option in request.options)]
    if resource_usage:
        flags.append(b"--ptxas-options=-v")
    expressions = [_encode(expression, "name expression") for expression in request.name_expressions]
    result, program = nvrtc.nvrtcCreateProgram(
        _encode(source, "source"),
        _encode(name, "name"),
        len(headers),
        [_encode(text, f"header {spelling!r}") for spelling, text in headers.items()],
        [_encode(spelling, "header name") for spelling in headers],
    )
    if result != 0:
        _fail(request, result.name, "")
    if "--device-debug" in request.options and version()[0] < _FIRST_CLEAN_MAJOR:
        _debug_compiled.set()
    try:
        for expression in expressions:
            (result,) = nvrtc.nvrtcAddNameExpression(program, expression)
            if result != 0:
                _fail(request, result.name, "")
        (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").rstrip()
        if result != 0:
            _fail(request, result.name, log)
        ptx = _read(nvrtc, program, "PTX").rstrip(b"\0")
        return Output(
            # With -dlto NVRTC's PTX is a lone NUL (NVIDIA/cuda-python#2351).
            ptx=ptx + b"\0" if ptx else None,
            cubin=_read(nvrtc, program, "CUBIN") or None,
            ltoir=_read(nvrtc, program, "LTOIR") or None,
            lowered_names=_lowered_names(nvrtc, program, request, expressions, log),
            log=log,
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def leaks_debug() -> bool:
    """Return whether this process's NVRTC may compile as if for debugging, unasked.

    NVRTC 12.9.86 keeps something of each ``-G`` compile: later ones without it gave other, up to eighty times larger
    PTX for sm_100 and sm_120 in the same process. 13.5.37 does not. The output is right, but is not what its options
    mean.
    """
    return _debug_compiled.is_set()


@functools.cache
def version() -> tuple[int, int]:
    """Return NVRTC's major and minor version, such as ``(13, 5)``; raises `ToolchainError`."""
    result, major, minor = _loaded().nvrtcVersion()
    if result != 0:
        raise ToolchainError(f"nvrtcVersion failed with {result.name}", library=library_path(), log="")
    return int(major), int(minor)


@functools.cache
def build() -> str:
    """Return NVRTC's version with its build, such as ``"13.5.37"``.

    It is in the first lines of any PTX: one compile of an empty program, 30-70 ms, once per process. Raises
    `ToolchainError`.
    """
    arch = Arch.parse(f"compute_{supported_archs()[-1]}")
    output = compile_program("", name="", options=(), name_expressions=(), headers={}, arch=arch)
    match = _BANNER.search(output.ptx or b"")
    if match is None:
        raise ToolchainError("NVRTC's PTX does not tell its build", library=library_path(), log=output.log)
    return match[1].decode()


@functools.cache
def supported_archs() -> tuple[int, ...]:
    """Return the numbers of the archs that this NVRTC compiles for, in order, 90 for ``sm_90``.

    They have no suffixes. Raises `ToolchainError`.
    """
    result, numbers = _loaded().nvrtcGetSupportedArchs()
    if result != 0:
        raise ToolchainError(f"nvrtcGetSupportedArchs failed with {result.name}", library=library_path(), log="")
    return tuple(sorted(numbers))


@functools.cache
def library_path() -> Path | None:
    """Return the libnvrtc that this process uses, symbolic links resolved.

    It is loaded if it was not yet (`ToolchainError` where it cannot be). ``None`` where it cannot be told.
    """
    _loaded()
    return _library_path()


@functools.cache
def has_bundled_headers() -> bool:
    """Return whether this NVRTC brings CUDA and CCCL headers of its own (13.5 and newer); raises `ToolchainError`."""
    return _bundled_installer() is not None


def install_bundled_headers(directory: str | os.PathLike[str]) -> None:
    """Extract NVRTC's own headers: 2,377 files and 21 MB for 13.5, in 0.1 to 1 s.

    Parameters
    ----------
    directory : path
        Made if it is absent. It becomes one include directory, its ``cccl`` the other.

    Raises
    ------
    ToolchainError
        NVRTC has none, cannot be loaded, or cannot write there; some files may be left.
    """
    install = _bundled_installer()
    if install is None:
        major, minor = version()
        raise ToolchainError(
            f"NVRTC {major}.{minor} ({library_path()}) has no headers of its own; {header_remedy(major)}",
            library=library_path(),
            log="",
        )
    log = ctypes.c_char_p()
    if (result := install(os.fsencode(directory), 0, ctypes.byref(log))) != 0:
        said = (log.value or b"").decode(errors="replace")
        raise ToolchainError(
            f"NVRTC's headers cannot be extracted into {os.fspath(directory)}: nvrtcResult {result} {said}".rstrip(),
            library=library_path(),
            log=said,
        )


@functools.cache
def _loaded() -> Any:
    """Return ``cuda.bindings.nvrtc`` with its library loaded: 60-140 ms for the import, 8-17 ms for the library."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise ToolchainError(
            f"NVRTC cannot be loaded: {error}\nInstall it: pip install 'kernelstore[cu13]' (or kernelstore[cu12])",
            library=None,
            log=str(error),
        ) from error
    return nvrtc


def _bundled_installer() -> Callable[..., int] | None:
    """Return ``nvrtcInstallBundledHeaders`` of the loaded library, or ``None`` if it has none.

    By ctypes: bindings older than the library (13.0 to 13.3 with NVRTC 13.5) lack it, and those that have it leave out
    what NVRTC says of a failure. Source: nvrtc.h of 13.5.
    """
    path = library_path()
    install = None if path is None else getattr(ctypes.CDLL(os.fspath(path)), "nvrtcInstallBundledHeaders", None)
    if install is not None:
        install.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_char_p)]
        install.restype = ctypes.c_int
    return install


def _library_path() -> Path | None:
    try:
        # Imported and asked already by cuda.bindings, which loads its library through it: this reads its memo.
        from cuda.pathfinder import load_nvidia_dynamic_lib

        found = load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, OSError, RuntimeError):
        found = None
    if found is None:
        found = next(iter(_mapped_libraries()), None)
    return None if found is None else Path(os.path.realpath(found))


def _mapped_libraries() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return []
    return re.findall(r"(/\S.*/libnvrtc\.so[.0-9]*)$", maps, re.MULTILINE)


def _encode(text: str, what: str) -> bytes:
    if "\0" in text:
        raise InvalidArgument(f"a NUL at character {text.index(chr(0))} of the {what}, where NVRTC would stop reading")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the {what} cannot be encoded as UTF-8: {error}") from None


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    result, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    if result != 0 or not size:
        return b""
    # A bytearray: NVRTC writes into it, and a bytes object of length 1 is shared by the whole interpreter.
    buffer = bytearray(size)
    (result,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return bytes(buffer) if result == 0 else b""


def _lowered_names(nvrtc: Any, program: Any, request: Asked, expressions: Sequence[bytes], log: str) -> dict[str, str]:
    names = {}
    for expression, encoded in zip(request.name_expressions, expressions, strict=True):
        result, lowered = nvrtc.nvrtcGetLoweredName(program, encoded)
        if result != 0:
            _fail(request, result.name, f"{log}\nno lowered name for {expression!r}".lstrip())
        names[expression] = lowered.decode()
    return names


def _fail(request: Asked, result: str, log: str) -> NoReturn:
    raise refusal(request, result, log, Nvrtc(version(), library_path(), supported_archs(), _toolchain(request)))


def _toolchain(request: Asked) -> str:
    # build() compiles an empty program: were it asked because that failed, it would never end.
    if request.source:
        with contextlib.suppress(ToolchainError, CompileError):
            return f"nvrtc {build()}"
    return "nvrtc {}.{}".format(*version())
