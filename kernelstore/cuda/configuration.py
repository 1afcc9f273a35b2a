"""Configuration of a launch: grids, blocks and clusters, and streams of any framework."""

from __future__ import annotations

import operator
from typing import Any

from kernelstore.cuda.arguments import told
from kernelstore.errors import LaunchError

__all__ = ["dimensions", "stream_handle"]

_MAX_DIMENSION = 2**32 - 1


def dimensions(value: object, what: str) -> tuple[int, int, int]:
    """Read a grid, block or cluster.

    Parameters
    ----------
    value : int or sequence of 1 to 3 int
        Along x, y, z, each ≥ 1; what is missing is 1.
    what : str
        Name for messages.

    Raises
    ------
    LaunchError
        `value` is something else.
    """
    # The common forms first; launches are hot.
    if type(value) is int and 0 < value <= _MAX_DIMENSION:
        return value, 1, 1
    if type(value) is tuple and 1 <= len(value) <= 3:
        x, y, z = value if len(value) == 3 else (*value, 1, 1)[:3]
        if type(x) is type(y) is type(z) is int and x > 0 and y > 0 and z > 0 and x | y | z <= _MAX_DIMENSION:
            return x, y, z
    sizes = value if isinstance(value, (tuple, list)) else (value,)
    try:
        x, y, z = (operator.index(size) for size in (*sizes, 1, 1)[:3])
    except (TypeError, ValueError):
        x = y = z = 0
    if not (1 <= len(sizes) <= 3 and all(0 < size <= _MAX_DIMENSION for size in (x, y, z))):
        raise LaunchError(f"{what} is an int or 1 to 3 of them, each from 1 to {_MAX_DIMENSION}, not {value!r:.100}")
    return x, y, z


def stream_handle(stream: object) -> int:
    """Return the CUstream of a stream of any framework.

    Parameters
    ----------
    stream : int or object or None
        ``None`` is the legacy default stream. Objects are asked for ``__cuda_stream__`` (a method or a tuple:
        version 0 and handle), ``cuda_stream`` (PyTorch), ``ptr`` (CuPy), ``handle`` (cuda.core), in this order.

    Raises
    ------
    LaunchError
        `stream` is something else.
    """
    if stream is None:
        return 0
    try:
        handle = int(stream) if isinstance(stream, int) else _asked_stream(stream)
    except (TypeError, ValueError) as error:
        raise LaunchError(f"stream {told(stream)} gives no handle ({error})") from error
    if not 0 <= handle < 2**64:
        raise LaunchError(f"stream {handle} is no handle")
    return handle


def _asked_stream(stream: Any) -> int:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ValueError(f"__cuda_stream__ of version {version}; this release knows 0")
        return int(handle)
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        if handle is not None:
            return int(handle)
    # CUstream of cuda.bindings.
    if hasattr(stream, "getPtr"):
        return int(stream)
    raise TypeError("it has none of __cuda_stream__, cuda_stream, ptr and handle")
