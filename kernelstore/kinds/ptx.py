"""PTX: assembly text for a virtual arch, which the driver compiles for its device."""

from __future__ import annotations

import re

from kernelstore.arch import Arch
from kernelstore.artifact import Symbol
from kernelstore.errors import InvalidArch, PayloadRejected
from kernelstore.kinds import Description, Kind

__all__ = ["PLUGIN", "entries", "variables"]

# Everything up to .address_size, comments included; NVRTC's banner takes 200 bytes.
_HEAD_BYTES = 4096

_VERSION = re.compile(r"^\s*\.version\s+(\d+)\.(\d+)", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+sm_(\w+)", re.MULTILINE)
_BUILD = re.compile(r"^// Cuda compilation tools, release [\d.]+, V(\d+\.\d+\.\d+)", re.MULTILINE)
_ENTRY = re.compile(r"^[ \t]*(?:\.(?:visible|weak|extern)\s+)*\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?", re.MULTILINE)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+\d+)"
    r"(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?\s+[\w$%]+(?:\[(?P<count>\d+)\])?"
)
_VARIABLE = re.compile(
    r"^(?:\.(?:visible|weak|common)\s+)?\.(?:global|const)\s+(?:\.\w+\s+(?:\d+\s+)?)*([\w$%]+)", re.MULTILINE
)
_EXTERN_FUNCTION = re.compile(r"^\s*\.extern\s+\.func\b", re.MULTILINE)
# Functions that the driver itself provides.
_KNOWN_EXTERN = re.compile(r"\b(?:vprintf|malloc|free|__assertfail|cuda\w*)\b")


def entries(text: str) -> dict[str, tuple[str, ...]]:
    """Return the kernels of PTX text: lowered name to parameter types as PTX declares them.

    A struct of 16 bytes is ``"b8[16] align 4"``. Linear in the text.
    """
    return {
        match[1]: tuple(_type(parameter) for parameter in _PARAMETER.finditer(match[2] or ""))
        for match in _ENTRY.finditer(text)
    }


def variables(text: str) -> list[str]:
    """Return the lowered names of the variables at module scope."""
    return _VARIABLE.findall(text)


def _type(parameter: re.Match[str]) -> str:
    if parameter["count"] is None:
        return parameter["type"]
    align = f" align {parameter['align']}" if parameter["align"] else ""
    return f"{parameter['type']}[{parameter['count']}]{align}"


def _head(payload: bytes) -> str:
    return payload[:_HEAD_BYTES].decode(errors="replace")


def _recognises(payload: bytes) -> bool:
    head = _head(payload)
    return _VERSION.search(head) is not None and _TARGET.search(head) is not None


def _normalise(payload: bytes) -> bytes:
    # The driver reads PTX as a C string.
    return payload.rstrip(b"\0") + b"\0"


def _check(payload: bytes, arch: str) -> None:
    target = _target(payload)
    if target != Arch.parse(arch):
        raise PayloadRejected(f"this PTX is for {target}, not for {arch}", kind="ptx", reason="arch")
    if payload.find(b"\0") != len(payload) - 1:
        raise PayloadRejected("PTX ends with its one NUL, and this does not", kind="ptx", reason="NUL")


def _target(payload: bytes) -> Arch:
    head = _head(payload)
    target = _TARGET.search(head)
    if target is None or _VERSION.search(head) is None:
        raise PayloadRejected(
            f"this is no PTX: {payload[:24]!r} begins no .version and .target", kind="ptx", reason="no header"
        )
    try:
        return Arch.parse(f"compute_{target[1]}")
    except InvalidArch as error:
        raise PayloadRejected(f"this PTX has the target sm_{target[1]}", kind="ptx", reason="arch") from error


def _describe(payload: bytes) -> Description:
    target = _target(payload)
    try:
        text = payload.rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise PayloadRejected(f"this PTX is no UTF-8 text at byte {error.start}", kind="ptx", reason="text") from None
    if "\0" in text:
        raise PayloadRejected("this PTX holds a NUL, where the driver would stop reading", kind="ptx", reason="NUL")
    head = _head(payload)
    version = _VERSION.search(head)
    assert version is not None
    build = _BUILD.search(head)
    kernels = [Symbol(name, parameters=types) for name, types in entries(text).items()]
    return Description(
        arch=str(target),
        # The front end of nvcc and of NVRTC alike; the banner does not tell which of them ran.
        toolchain=f"nvvm {build[1]}" if build is not None else None,
        ptx_version=int(version[1]) * 100 + int(version[2]),
        relocatable=_needs_link(text),
        symbols=(*kernels, *(Symbol(name, what="variable") for name in variables(text))),
    )


def _needs_link(text: str) -> bool:
    for match in _EXTERN_FUNCTION.finditer(text):
        declaration = text[match.end() : text.find(";", match.end())]
        if _KNOWN_EXTERN.search(declaration) is None:
            return True
    return False


PLUGIN = Kind(
    name="ptx",
    suffix=".ptx",
    is_text=True,
    loadable=True,
    arch_of=Arch.as_virtual,
    recognises=_recognises,
    normalise=_normalise,
    check=_check,
    describe=_describe,
)
