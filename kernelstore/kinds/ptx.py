"""PTX: assembly text for a virtual arch, which the driver compiles for its device."""

from __future__ import annotations

import re

from kernelstore.arch import Arch
from kernelstore.artifact import Symbol
from kernelstore.errors import InvalidArch, PayloadRejected
from kernelstore.kinds import Description, Kind

__all__ = ["PLUGIN", "entries", "variables"]

# Comments, then .version and .target, which begin every module. Source: PTX ISA, "Directives".
_HEAD = re.compile(
    rb"((?:\s++|//[^\n]*+|/\*.*?\*/)*+)\.version\s+(\d{1,3})\.(\d{1,2})\b"
    rb"(?:\s++|//[^\n]*+|/\*.*?\*/)*+\.target\s+(sm_\w+)",
    re.DOTALL,
)
_BUILD = re.compile(rb"release [\d.]+, V(\d+\.\d+\.\d+)\b")

# What opens and closes a body, and what may hold braces that do not.
_BRACES = re.compile(r'\{|\}|//[^\n]*|/\*.*?(?:\*/|\Z)|"[^"\n]*"', re.DOTALL)

# The patterns below read text at module level, where neither bodies nor comments are left. None of them can run over
# the start of its next match, so each is linear on any text.
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^()]*)\))?", re.ASCII)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s+(?:\.(?!align)\w+\s+)?(?:\.align\s+\d+\s+)?)?[\w$%]+\s*(?:\[\s*(?P<count>\d+)\s*\])?",
    re.ASCII,
)
# At most alignment, attribute, vector and type stand before a name.
_VARIABLE = re.compile(
    r"\.(?P<extern>extern\s+\.)?(?:global|const)\s+"
    r"(?:\.\w+\s*(?:\([^()]{0,80}\)\s*)?(?:\b\d+\s+)?){1,6}(?P<name>[A-Za-z_$%][\w$]*)",
    re.ASCII,
)
_EXTERN_VARIABLE = re.compile(r"\.extern\s+\.(?:global|const)\b", re.ASCII)
_EXTERN_FUNCTION = re.compile(r"\.extern\s+\.func\s+(?:\([^()]*\)\s*)?([\w$%]+)", re.ASCII)

# The driver itself provides these. Source: CUDA, "PTX Writer's Guide to Interoperability", System Calls.
_SYSTEM_CALLS = frozenset(("vprintf", "malloc", "free", "__assertfail"))


def entries(ptx: str) -> dict[str, tuple[str, ...]]:
    """Read the kernels of PTX text; other text has none.

    Parameters
    ----------
    ptx : str
        A whole module. The time is linear in its length, some 10 ms a megabyte.

    Returns
    -------
    dict of str to tuple of str
        By lowered name, in their order, the types of the parameters as declared: ``"f32"``, ``"u64"`` for pointers
        too, ``"b8[16] align 4"`` for a struct of 16 bytes.
    """
    return _entries(_module_level(ptx))


def variables(ptx: str) -> list[str]:
    """Read the lowered names of the ``.global`` and ``.const`` variables that PTX text defines, in their order.

    Literals of strings (``$str``) are left out. The time is that of `entries`.
    """
    return _variables(_module_level(ptx))


def _module_level(ptx: str) -> str:
    """Return the text without bodies, initialisers and comments."""
    pieces: list[str] = []
    depth = start = 0
    for match in _BRACES.finditer(ptx):
        found = match[0]
        if depth == 0:
            pieces.append(ptx[start : match.start()])
        if found == "{":
            depth += 1
        elif found == "}":
            depth = max(depth - 1, 0)
        start = match.end()
    if depth == 0:
        pieces.append(ptx[start:])
    return " ".join(pieces)


def _entries(text: str) -> dict[str, tuple[str, ...]]:
    return {match[1]: _types(match[2] or "") for match in _ENTRY.finditer(text)}


def _types(parameters: str) -> tuple[str, ...]:
    return tuple(_type(text.strip()) for text in parameters.split(",")) if parameters.strip() else ()


def _type(text: str) -> str:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        # Of a later PTX version. A launch then asks the driver for the size.
        return text
    if match["count"] is None:
        return match["type"]
    return f"{match['type']}[{match['count']}]" + (f" align {match['align']}" if match["align"] else "")


def _variables(text: str) -> list[str]:
    return [
        match["name"]
        for match in _VARIABLE.finditer(text)
        if match["extern"] is None and not match["name"].startswith("$")
    ]


def _needs_link(text: str) -> bool:
    """Whether something is left to a linker; PTX of ``-rdc=true`` that lacks nothing loads as it is."""
    if _EXTERN_VARIABLE.search(text) is not None:
        return True
    return any(name not in _SYSTEM_CALLS for name in _EXTERN_FUNCTION.findall(text))


def _head(payload: bytes) -> tuple[str, re.Match[bytes]]:
    """Return the arch and the match of the head."""
    head = _HEAD.match(payload)
    if head is None:
        raise _rejected(f"{payload[:24]!r} begins no .version and .target", "no PTX")
    target = head[4].decode(errors="replace").replace("sm_", "compute_")
    try:
        Arch.parse(target)
    except InvalidArch:
        raise _rejected(f"its target is {head[4][:40]!r}", "arch") from None
    return target, head


def _text(payload: bytes) -> str:
    try:
        text = payload.rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise _rejected(f"byte {error.start} is no UTF-8", "text") from None
    if "\0" in text:
        raise _rejected(f"it holds a NUL at {text.index(chr(0))}, where the driver would stop reading", "NUL")
    return text


def _recognises(payload: bytes) -> bool:
    return _HEAD.match(payload) is not None


def _normalise(payload: bytes) -> bytes:
    # The driver reads PTX as a C string; NVRTC's ends with one NUL, a file's with none.
    return _text(payload).encode() + b"\0"


def _check(payload: bytes, arch: str) -> None:
    target, _ = _head(payload)
    if target != arch:
        raise _rejected(f"it is for {target}, not for {arch}", "arch")
    if not payload.isascii():
        _text(payload)
    if payload.find(b"\0") != len(payload) - 1:
        raise _rejected("it does not end with its one NUL", "NUL")


def _describe(payload: bytes) -> Description:
    target, head = _head(payload)
    text = _module_level(_text(payload))
    build = _BUILD.search(head[1])
    kernels = [Symbol(name, parameters=types) for name, types in _entries(text).items()]
    return Description(
        arch=target,
        # NVVM wrote it. The banner does not tell whether NVRTC or nvcc called it, and the build is the same for both.
        toolchain=None if build is None else f"nvvm {build[1].decode()}",
        ptx_version=int(head[2]) * 100 + int(head[3]),
        relocatable=_needs_link(text),
        symbols=(*kernels, *(Symbol(name, what="variable") for name in _variables(text))),
    )


def _rejected(what: str, reason: str) -> PayloadRejected:
    return PayloadRejected(f"this is no PTX that can be stored: {what}", kind="ptx", reason=reason)


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
