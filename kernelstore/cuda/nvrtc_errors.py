"""What a failed run of NVRTC means: the error with an excerpt of the source, and what to do about it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelstore.arch import Arch
from kernelstore.cuda.toolkit_names import TOOLKIT_NAMES
from kernelstore.errors import CompileError, InvalidOption, ToolchainError, UnsupportedArch

__all__ = ["Asked", "Nvrtc", "header_remedy", "refusal"]

# Of a log of this many characters or more, a message shows the beginning: template errors run to megabytes. The
# error's `log` field has it all.
_LOG_SHOWN = 16_000
_LINES_AROUND = 3
# NVRTC's name for a program that was given none.
_UNNAMED = "default_program"

_ERROR_LINE = re.compile(r"^(.+?)\(([0-9]+)\): (?:catastrophic )?error\b", re.MULTILINE)
_MISSING_HEADER = re.compile(r'(?:could not|cannot) open source file "([^"]+)"')
_NAME_EXPRESSION = re.compile(r"#pragma nv_mangled_name (.*)")
# What NVRTC's front end and ptxas say of options that NVRTC itself passed on.
_PASSED_ON_OPTION = re.compile(
    r"^(?:Command-line error: invalid |\s*ptxas fatal\s*: (?:Unknown option|Invalid value .* for option"
    r"|argument expected after|'.*': expected a number))",
    re.MULTILINE,
)
_C_HEADER = re.compile(r"(assert|ctype|errno|float|inttypes|limits|math|stddef|stdint|stdio|stdlib|string|time)\.h")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run was asked for, as errors report it."""

    source: str
    name: str
    options: tuple[str, ...]
    name_expressions: tuple[str, ...]
    headers: Mapping[str, str]
    arch: Arch


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """The NVRTC that ran, as errors report it.

    Parameters
    ----------
    version : tuple[int, int]
        Such as ``(13, 5)``.
    library : Path or None
        The libnvrtc; ``None`` where it cannot be told.
    supported : tuple of int
        Numbers of the archs that it compiles for, in order.
    toolchain : str
        With its build, where that is known: ``"nvrtc 13.5.37"``.
    """

    version: tuple[int, int]
    library: Path | None
    supported: tuple[int, ...]
    toolchain: str

    def __str__(self) -> str:
        return "NVRTC {}.{}".format(*self.version)


def refusal(asked: Asked, result: str, log: str, nvrtc: Nvrtc) -> ToolchainError | UnsupportedArch | CompileError:
    """Return the error that NVRTC's result and log mean."""
    if result == "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE":
        return ToolchainError(
            f"NVRTC cannot use its builtins: {log or result}\n"
            f"Library: {nvrtc.library}. Its libnvrtc-builtins must be beside it and of the same version; "
            f"install both: pip install 'kernelstore[cu{nvrtc.version[0]}]'",
            library=nvrtc.library,
            log=log,
        )
    if _is_about_arch(asked.arch, result, log, nvrtc.supported):
        return UnsupportedArch(
            f"{nvrtc} does not compile for {asked.arch}. It knows "
            f"{', '.join(f'sm_{number}' for number in nvrtc.supported)}; with suffix a from sm_90 on, with suffix f "
            f"from sm_100 on. Library: {nvrtc.library}",
            arch=str(asked.arch),
            toolchain=nvrtc.toolchain,
            supported=nvrtc.supported,
        )
    return _compile_error(asked, result, log, nvrtc)


def header_remedy(major: int) -> str:
    """Return how to get the CUDA headers of a major version."""
    suffix = f"-cu{major}" if major < 13 else ""
    return (
        f"pip install nvidia-cuda-runtime{suffix} nvidia-cuda-cccl{suffix} of NVRTC's version, or set CUDA_HOME to a "
        f"toolkit of CUDA {major}"
    )


def _is_about_arch(arch: Arch, result: str, log: str, supported: Sequence[int]) -> bool:
    if result == "NVRTC_ERROR_INVALID_OPTION":
        return "--gpu-architecture" in log or arch.major * 10 + arch.minor not in supported
    # An arch that NVRTC knows with a suffix that it does not, such as sm_80a, fails in the front end.
    return "--nv_arch" in log and "Command-line error:" in log


def _compile_error(asked: Asked, result: str, log: str, nvrtc: Nvrtc) -> CompileError:
    invalid_option = result == "NVRTC_ERROR_INVALID_OPTION" or bool(_PASSED_ON_OPTION.search(log))
    shown = asked.name or _UNNAMED
    parts = [
        f"an option for {shown} is not valid ({result})" if invalid_option else f"{shown} does not compile ({result})",
        log if len(log) < _LOG_SHOWN else f"{log[:_LOG_SHOWN]}\n... ({len(log)} characters in all)",
        _excerpt(asked, log),
        *_hints(asked.options, log, nvrtc.version[0]),
        f"Compiled for {asked.arch} by {nvrtc} ({nvrtc.library}) with {list(asked.options)}",
    ]
    return (InvalidOption if invalid_option else CompileError)(
        "\n".join(part for part in parts if part),
        log=log,
        options=asked.options,
        toolchain=nvrtc.toolchain,
        result=result,
        name=asked.name,
        arch=str(asked.arch),
    )


def _excerpt(asked: Asked, log: str) -> str:
    """Return the source lines around the first error that is in a text we have."""
    texts = {asked.name or _UNNAMED: asked.source, **asked.headers}
    for match in _ERROR_LINE.finditer(log):
        text = texts.get(match[1])
        if text is not None:
            return f"{match[1]}:\n{_numbered(text, int(match[2]))}"
    return ""


def _numbered(text: str, line: int) -> str:
    # NVRTC counts line feeds; str.splitlines would also split at form feeds and others.
    lines = text.split("\n")
    first, last = max(1, line - _LINES_AROUND), min(len(lines), line + _LINES_AROUND)
    return "\n".join(
        f"{'>' if number == line else ' '}{number:5} | {lines[number - 1].rstrip(chr(13))}"
        for number in range(first, last + 1)
    )


def _hints(options: Sequence[str], log: str, major: int) -> list[str]:
    hints = []
    if missing := _MISSING_HEADER.search(log):
        searched = _include_dirs(options)
        hints.append(
            f"Searched for {missing[1]!r}: {', '.join(searched) if searched else 'no directory, none was given'}. "
            f"{_header_hint(missing[1], major)}"
        )
    if "__nv_name_map" in log:
        # Each of these lines follows an error about it.
        unknown = [text.strip() for text in dict.fromkeys(_NAME_EXPRESSION.findall(log))]
        hints.append(f"Name expressions that the program does not have: {', '.join(unknown)}")
    return hints


def _header_hint(spelling: str, major: int) -> str:
    if spelling.partition("/")[0] in TOOLKIT_NAMES:
        return f"It belongs to the CUDA headers: {header_remedy(major)}"
    if match := _C_HEADER.fullmatch(spelling):
        return f"NVRTC has no C library: include <cuda/std/c{match[1]}>"
    return "Pass its directory as include_dirs, or its text as headers"


def _include_dirs(options: Sequence[str]) -> list[str]:
    found = []
    for option, following in itertools.zip_longest(options, options[1:], fillvalue=""):
        if option in ("-I", "--include-path"):
            found.append(following)
        elif option.startswith("--include-path="):
            found.append(option.partition("=")[2])
        elif option.startswith("-I"):
            found.append(option[2:].removeprefix("="))
    return found
