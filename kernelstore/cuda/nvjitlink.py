"""Checked calls of nvJitLink, through ``cuda.bindings.nvjitlink``; nothing else in the package calls it.

It needs neither a GPU nor a driver. Wheel: ``nvidia-nvjitlink``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from kernelstore.arch import Arch
from kernelstore.errors import LinkError, PayloadRejected, ToolchainError
from kernelstore.kinds.cubin import PLUGIN as CUBIN

__all__ = ["build", "knows", "link", "version"]

# Names of nvJitLinkInputType.
_INPUT_TYPES = {"ptx": "PTX", "ltoir": "LTOIR", "cubin": "CUBIN"}

# What 12.9 and 13.5 take or refuse in words. Given another number, such as 999, 12.9 has crashed the process.
_SAFE_NUMBERS = frozenset(
    (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121)
)  # fmt: skip
_SAFE_RELEASE = (13, 5)

_EMPTY = b".version 6.3\n.target sm_75\n.address_size 64\n"


@functools.cache
def version() -> tuple[int, int]:
    """Return nvJitLink's major and minor version, such as ``(13, 5)``; raises `ToolchainError`."""
    major, minor = _loaded().version()
    return int(major), int(minor)


@functools.cache
def build() -> str:
    """Return nvJitLink's version with its build, such as ``"13.5.37"``.

    Its ptxas notes it in what it makes: one link of an empty module, 10-60 ms, once per process. Raises
    `ToolchainError`, also where nvJitLink is older than 12.8.
    """
    try:
        # 12.9 writes notes from sm_100 on only, which came with 12.8.
        cubin, _ = link([("ptx", _EMPTY)], ("-arch=sm_100",))
        toolchain = CUBIN.describe(cubin).toolchain
    except (LinkError, PayloadRejected) as error:
        raise ToolchainError(f"nvJitLink does not tell its build: {error}", library=None, log="") from error
    if toolchain is None:
        raise ToolchainError("nvJitLink's output does not tell its build", library=None, log="")
    return toolchain.rpartition(" ")[2]


def knows(arch: Arch) -> bool:
    """Whether nvJitLink may be given that arch; a release newer than this table may. Raises `ToolchainError`."""
    return arch.major * 10 + arch.minor in _SAFE_NUMBERS or version() > _SAFE_RELEASE


def link(inputs: Sequence[tuple[str, bytes]], options: Sequence[str]) -> tuple[bytes, str]:
    """Link, and return the cubin and the log; the GIL is not held meanwhile.

    Parameters
    ----------
    inputs : sequence of (str, bytes)
        Kind (``"ptx"``, ``"ltoir"``, ``"cubin"``) and payload of each, in order.
    options : sequence of str
        nvJitLink's, each one element, with ``-arch=sm_90`` of an arch that it `knows`, and ``-lto`` for LTO-IR.

    Raises
    ------
    LinkError
        nvJitLink refuses an input or an option; its log is a field.
    ToolchainError
        nvJitLink cannot be loaded.
    """
    nvjitlink = _loaded()
    handle = None
    try:
        handle = nvjitlink.create(len(options), list(options))
        for index, (kind, payload) in enumerate(inputs):
            kind_number = getattr(nvjitlink.InputType, _INPUT_TYPES[kind])
            nvjitlink.add_data(handle, kind_number, payload, len(payload), f"input{index}.{kind}")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        return bytes(cubin), _log(nvjitlink, handle, "info")
    except nvjitlink.nvJitLinkError as error:
        log = "" if handle is None else _log(nvjitlink, handle, "error")
        raise LinkError(
            f"nvJitLink {version()[0]}.{version()[1]} failed with {error}; options {list(options)}\n{log}".rstrip(),
            log=log,
            options=tuple(options),
            toolchain=f"nvjitlink {version()[0]}.{version()[1]}",
            result=str(error).partition(" ")[0],
            arch=None,
        ) from error
    finally:
        if handle is not None:
            nvjitlink.destroy(handle)


@functools.cache
def _loaded() -> Any:
    """Return ``cuda.bindings.nvjitlink`` with its library loaded, some 100 ms."""
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()
    except (ImportError, OSError, RuntimeError) as error:
        raise ToolchainError(
            f"nvJitLink cannot be loaded: {error}\nInstall it: pip install nvidia-nvjitlink (or nvidia-nvjitlink-cu12)",
            library=None,
            log=str(error),
        ) from error
    return nvjitlink


def _log(nvjitlink: Any, handle: int, which: str) -> str:
    buffer = bytearray(getattr(nvjitlink, f"get_{which}_log_size")(handle))
    if buffer:
        getattr(nvjitlink, f"get_{which}_log")(handle, buffer)
    return buffer.split(b"\0", 1)[0].decode(errors="replace").rstrip()
