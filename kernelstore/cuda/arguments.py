"""Arguments of a launch: Python values to the bytes that a kernel's declared parameters take.

What a parameter takes follows from its declared PTX type:

===============  =====================================================================================
``u8`` … ``s64``  bool and int in the range of the signed or the unsigned type (NVRTC declares ``int``
                 as ``u32``); numpy and ctypes integers of the same size
``u64``          also pointers: int, cuda.bindings handles, objects with ``__cuda_array_interface__``,
                 ``ptr`` (CuPy memory) or ``handle`` (cuda.core buffers)
``f16, f32, f64``  int and float; numpy and ctypes floats of the same size
``u16, b16``     also `numpy.float16`
``b8[N]``        structs by value: ctypes structures, numpy scalars and 0-d arrays, bytes; N bytes of them
===============  =====================================================================================

Of a kernel whose types are not known (a cubin made elsewhere) the driver tells the sizes: any numpy or ctypes
scalar, struct or bytes of the size will do, and for 8 bytes also pointers, where an int is an address. An int of
another size and a float are refused, as nothing says how to convert them.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kernelstore.errors import LaunchError

__all__ = ["Frame", "Packer", "Parameter", "told"]

_DECLARED = re.compile(r"\.?(b?[bfsu])(8|16|32|64|128)(x2)?(?:\[([0-9]+)\])?(?: align ([0-9]+))?", re.ASCII)
# struct's codes by size in bytes; the signed ones are the same in lower case.
_FLOAT_CODES = {2: "e", 4: "f", 8: "d"}
_INT_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One declared parameter.

    Parameters
    ----------
    declared : str
        As PTX declares it: ``"f32"``, ``"b8[16] align 4"``; ``"8 bytes"`` where only the size is known.
    what : str
        ``"int"``, ``"float"``, ``"bits"`` (no type), ``"struct"``, or ``"unknown"``.
    size_bytes, align_bytes : int
        Size and alignment.
    is_signed : bool
        Whether it is declared as signed.
    """

    declared: str
    what: str
    size_bytes: int
    align_bytes: int
    is_signed: bool = False

    @classmethod
    def parse(cls, declared: str) -> Parameter | None:
        """Read a declared type; ``None`` for one that this release does not know."""
        match = _DECLARED.fullmatch(declared.strip())
        if match is None:
            return None
        letter, bits, pair, count, align = match.groups()
        size = int(bits) // 8 * (2 if pair else 1)
        natural = size
        what = {"u": "int", "s": "int", "f": "float"}.get(letter, "bits")
        if pair or size > 8:
            what = "bits"
        if count is not None:
            size *= int(count)
            what = "struct"
        return cls(declared, what, size, int(align or natural), letter == "s")

    @classmethod
    def of_size(cls, size_bytes: int) -> Parameter:
        """Describe a parameter of which only the size is known."""
        return cls(f"{size_bytes} bytes", "unknown", size_bytes, 16)


class Frame:
    """Memory of one launch: the arguments' bytes, and an array of pointers to them at `address`."""

    __slots__ = ("_pointers", "address", "buffer")

    def __init__(self, offsets: Sequence[int], size_bytes: int) -> None:
        self.buffer = ctypes.create_string_buffer(size_bytes)
        start = ctypes.addressof(self.buffer)
        self._pointers = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)


class Packer:
    """Packs the arguments of one kernel.

    Parameters
    ----------
    kernel : str
        Name for messages.
    parameters : sequence of Parameter
        Its declared parameters, in order.
    """

    def __init__(self, kernel: str, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        self._kernel = kernel
        self._offsets: list[int] = []
        end = 0
        for parameter in self.parameters:
            offset = -(-end // parameter.align_bytes) * parameter.align_bytes
            self._offsets.append(offset)
            end = offset + parameter.size_bytes
        self._size_bytes = max(end, 1)
        # By the types of the arguments, which say all that is to be checked and converted but ranges.
        self._plans: dict[tuple[type, ...], _Plan] = {}
        # Frames that no launch uses now; a launch appends its frame when the driver has copied the arguments, that
        # is, when its call returns. list.pop and list.append are atomic, so threads need no lock.
        self.free: list[Frame] = []

    def pack(self, args: Sequence[object]) -> Frame:
        """Write the arguments into a frame, to be appended to `free` after the launch.

        Raises
        ------
        LaunchError
            There are too few or too many, or one does not fit its parameter.
        """
        if type(args) is not tuple:
            args = self._as_tuple(args)
        try:
            # This is the hot path: two dictionary lookups and one call of struct for plain scalars.
            plan = self._plans.get(tuple(map(type, args))) or self._plan(args)
            frame = self.free.pop() if self.free else Frame(self._offsets, self._size_bytes)
            if plan.conversions:
                values = list(args)
                for index, convert in plan.conversions:
                    values[index] = convert(values[index])
                plan.pack_into(frame.buffer, 0, *values)
            else:
                plan.pack_into(frame.buffer, 0, *args)
        except (_Refused, struct.error, OverflowError, IndexError):
            return self._pack_singly(args)
        return frame

    def _as_tuple(self, args: object) -> tuple[object, ...]:
        if isinstance(args, (tuple, list)):
            return tuple(args)
        raise LaunchError(
            f"the arguments of {self._kernel} are a tuple or list, such as (x,) for one, not {told(args)}"
        )

    def _plan(self, args: Sequence[object]) -> _Plan:
        if len(args) != len(self.parameters):
            declared = tuple(parameter.declared for parameter in self.parameters)
            raise LaunchError(
                f"{self._kernel} takes {len(declared)} arguments ({', '.join(declared)}), and {len(args)} were given",
                expected=declared,
            )
        types: tuple[Any, ...] = tuple(map(type, args))
        layout, end, conversions = "<", 0, []
        for index, (parameter, cls) in enumerate(zip(self.parameters, types, strict=True)):
            code, convert = _way(parameter, cls)
            layout += f"{self._offsets[index] - end}x{code}"
            end = self._offsets[index] + parameter.size_bytes
            if convert is not None:
                conversions.append((index, convert))
        plan = self._plans[types] = _Plan(struct.Struct(layout).pack_into, tuple(conversions))
        return plan

    def _pack_singly(self, args: Sequence[object]) -> Frame:
        """Pack one by one what cannot be packed at once: negative int for unsigned types; and say what is wrong."""
        frame = Frame(self._offsets, self._size_bytes)
        for index, (parameter, value) in enumerate(zip(self.parameters, args, strict=True)):
            try:
                cls: Any = type(value)
                code, convert = _way(parameter, cls)
                given: Any = value if convert is None else convert(value)
                if convert is None and isinstance(given, int) and given < 0 and parameter.what != "float":
                    # PTX of CUDA C++ declares int as u32, so negative numbers are good too.
                    code = code.lower()
                struct.pack_into(f"<{code}", frame.buffer, self._offsets[index], given)
            except _Refused as refusal:
                reason = str(refusal)
            except (struct.error, OverflowError):
                reason = "it is out of range"
            else:
                continue
            raise LaunchError(
                f"argument {index} of {self._kernel} is {told(value)}, but it is declared as {parameter.declared}: "
                f"{reason}",
                index=index,
                declared=parameter.declared,
            )
        return frame


class _Refused(Exception):
    """A value cannot be converted; the text says why and what to do."""


_Convert = Callable[[Any], int | bytes]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to pack arguments of given types."""

    pack_into: Callable[..., None]
    conversions: tuple[tuple[int, _Convert], ...]


@lru_cache(maxsize=1024)
def _way(parameter: Parameter, cls: Any) -> tuple[str, _Convert | None]:
    """Return struct's code for a value of a class, and what turns the value into what struct takes for it.

    `None` converts nothing: struct takes Python's and numpy's numbers alike. All that is checked here is checked
    once for a class, and struct checks ranges.
    """
    # numpy is known by the names of its classes: importing it would cost 60 to 100 ms, and who passes none of its
    # objects need not have it. numpy.float64 is a float, so numpy comes first.
    bases = {base.__name__ for base in cls.__mro__ if base.__module__ == "numpy"}
    as_bytes = f"{parameter.size_bytes}s"
    if "generic" in bases and not bases & {"flexible", "void"}:
        code = _numpy_code(parameter, cls)
        if code is not None:
            return code, None
    if bases & {"generic", "ndarray"}:
        return as_bytes, _numpy_bytes(parameter)
    if issubclass(cls, int):
        return _int_code(parameter), None
    if issubclass(cls, float):
        return _float_code(parameter), None
    if issubclass(cls, (bytes, bytearray, memoryview)):
        return as_bytes, _plain_bytes(parameter)
    if any(base.__module__ == "_ctypes" for base in cls.__mro__):
        _check_ctypes(parameter, cls)
        return as_bytes, bytes
    if parameter.size_bytes != 8 or parameter.what == "float":
        raise _Refused("it is no number, structure or bytes of that type")
    return "Q", _address


def _int_code(parameter: Parameter) -> str:
    if parameter.what == "float":
        return _FLOAT_CODES[parameter.size_bytes]
    if parameter.what == "unknown" and parameter.size_bytes != 8:
        raise _Refused("only its size is known; give a numpy scalar, such as numpy.int32(1)")
    if parameter.what == "struct" or parameter.size_bytes not in _INT_CODES:
        raise _Refused("a struct is given as a ctypes structure, a numpy scalar or bytes")
    code = _INT_CODES[parameter.size_bytes]
    return code.lower() if parameter.is_signed else code


def _float_code(parameter: Parameter) -> str:
    if parameter.what == "float":
        return _FLOAT_CODES[parameter.size_bytes]
    if parameter.what == "int":
        raise _Refused("convert it to an integer first")
    raise _Refused("nothing says how to convert it; give a numpy scalar, such as numpy.float32(1)")


def _numpy_code(parameter: Parameter, cls: Any) -> str | None:
    try:
        dtype = cls().dtype
        _check_dtype(parameter, dtype)
    except (TypeError, _Refused):
        # Told with the value at hand.
        return None
    size: int = dtype.itemsize
    if dtype.kind == "b":
        return "?"
    if dtype.kind in "iu" and size in _INT_CODES:
        return _INT_CODES[size] if dtype.kind == "u" else _INT_CODES[size].lower()
    # Not halves: struct keeps no payloads of their NaNs.
    return _FLOAT_CODES[size] if dtype.kind == "f" and size in (4, 8) else None


def _numpy_bytes(parameter: Parameter) -> _Convert:
    def convert(value: Any) -> bytes:
        if getattr(value, "ndim", 0):
            raise _Refused(
                "it is an array in host memory, which a kernel cannot read; copy it to the device and pass that "
                "array, or for a struct by value its tobytes()"
            )
        _check_dtype(parameter, value.dtype)
        content: bytes = value.tobytes()
        return content

    return convert


def _check_dtype(parameter: Parameter, dtype: Any) -> None:
    if dtype.itemsize != parameter.size_bytes:
        raise _Refused(f"{dtype} has {dtype.itemsize} bytes, not {parameter.size_bytes}")
    if not dtype.isnative:
        raise _Refused(f"{dtype} is not in the byte order of the GPU")
    # numpy.float16 also for u16, by which PTX names the bits of a half.
    is_half = dtype.kind == "f" and parameter.size_bytes == 2
    if (parameter.what == "int" and dtype.kind not in "iub" and not is_half) or (
        parameter.what == "float" and dtype.kind != "f"
    ):
        raise _Refused(f"{dtype} is of another class; convert it first")


def _check_ctypes(parameter: Parameter, cls: Any) -> None:
    size = ctypes.sizeof(cls)
    if size != parameter.size_bytes:
        raise _Refused(f"it has {size} bytes, not {parameter.size_bytes}")
    code = getattr(cls, "_type_", None)
    is_float = code in ("f", "d", "g")
    is_simple = isinstance(code, str)
    if (parameter.what == "float" and not is_float) or (parameter.what == "int" and (is_float or not is_simple)):
        raise _Refused("it is of another class; convert it first")


def _plain_bytes(parameter: Parameter) -> _Convert:
    if parameter.what not in ("struct", "unknown"):
        raise _Refused("bytes are for structs by value")

    def convert(value: Any) -> bytes:
        content = bytes(value)
        if len(content) != parameter.size_bytes:
            raise _Refused(f"it has {len(content)} bytes, not {parameter.size_bytes}")
        return content

    return convert


def _address(value: Any) -> int:
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None:
            # (address, read only). Zero-size arrays may have address 0.
            return int(interface["data"][0] or 0)
        for name in ("ptr", "handle"):
            address = getattr(value, name, None)
            if address is not None:
                return int(address)
        # Handles of cuda.bindings: CUdeviceptr, CUtexObject.
        if hasattr(value, "getPtr"):
            return int(value)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise _Refused(f"its address cannot be had ({error})") from error
    raise _Refused(
        "it is no pointer: give an int (0 for null), or an object with __cuda_array_interface__, ptr or handle"
    )


def told(value: object) -> str:
    """Name a value for a message: its class, with the shape of an array or the value of a number."""
    cls = type(value)
    name = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
    shape = getattr(value, "shape", None)
    if shape:
        return f"{name} of shape {tuple(shape)}"
    return f"{name} {value!r:.60}" if isinstance(value, (int, float)) else name
