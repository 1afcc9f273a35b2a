"""The kernels of ``kernelstore demo``: real CUDA C++, small enough to read, each with its answer from numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DEMOS", "DEMO_ARCHS", "Argument", "Demo", "Launch"]

Argument = npt.NDArray[Any] | np.generic
"""An array is a device buffer of that content, passed as a pointer; a scalar is passed by value."""

DEMO_ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")

_STANDARD = ("-std=c++17",)
_THREADS = 256
# Not a multiple of the block, so that the last one is partly idle.
_COUNT = 10_000


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch and what numpy says of its result.

    Parameters
    ----------
    kernel : str
        Name expression, or plain name of an ``extern "C"`` kernel.
    grid, block : tuple of int
        Blocks, and threads per block, along x, y, z; each at least 1.
    arguments : callable
        Takes a random generator; gives the kernel's arguments in order.
    expected : callable
        Takes these arguments as they were before the launch; gives, by position, what arrays hold after it.
    variables : mapping of str to array
        Content of global variables by name expression, written before the launch.
    rtol : float
        Relative tolerance; 0.0 means equal.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: Callable[[np.random.Generator], tuple[Argument, ...]]
    expected: Callable[[tuple[Any, ...]], Mapping[int, npt.NDArray[Any]]]
    variables: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    rtol: float = 0.0

    def mismatches(self, before: tuple[Argument, ...], after: tuple[Argument, ...]) -> list[str]:
        """Return a line for each array that does not hold what numpy says; ``[]`` if all do."""
        lines = []
        for position, expected in self.expected(before).items():
            found = np.asarray(after[position])
            right = np.isclose(found, expected, rtol=self.rtol, atol=self.rtol)
            if not right.all():
                first = int(np.flatnonzero(~right)[0])
                lines.append(
                    f"{self.kernel}: argument {position} differs in {np.count_nonzero(~right)} of {right.size} places, "
                    f"first at {first}: {found[first]} for {expected[first]}"
                )
        return lines


@dataclass(frozen=True, slots=True)
class Demo:
    """One program of the demo.

    Parameters
    ----------
    file : str
        In this package, such as ``"saxpy.cu"``: also the program's name.
    title : str
        What it shows, in a few words.
    launches : tuple of Launch
        Checked where there is a GPU.
    name_expressions : tuple of str
        What is asked for by name.
    options : tuple of str
        NVRTC options.
    needs_headers : bool
        Whether it includes headers of the toolkit.
    """

    file: str
    title: str
    launches: tuple[Launch, ...]
    name_expressions: tuple[str, ...] = ()
    options: tuple[str, ...] = _STANDARD
    needs_headers: bool = False

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.file.removesuffix(".cu")

    @property
    def source(self) -> str:
        """The program's text. One read of a file of the package."""
        return resources.files(__name__).joinpath(self.file).read_text(encoding="utf-8")


def _blocks(count: int, threads: int = _THREADS) -> tuple[int, int, int]:
    return -(-count // threads), 1, 1


def _axpy(scalar: type[np.generic]) -> Callable[[np.random.Generator], tuple[Argument, ...]]:
    def arguments(random: np.random.Generator) -> tuple[Argument, ...]:
        x, y = (random.integers(-100, 100, _COUNT).astype(scalar) for _ in range(2))
        return scalar(3), x, y, np.int32(_COUNT)

    return arguments


def _axpy_expected(arguments: tuple[Any, ...]) -> Mapping[int, npt.NDArray[Any]]:
    a, x, y, _ = arguments
    return {2: a * x + y}


def _saxpy(kernel: str, scalar: type[np.generic]) -> Launch:
    # Small whole numbers: the result is exact in every type, with or without fused multiply-add.
    return Launch(kernel, _blocks(_COUNT), (_THREADS, 1, 1), _axpy(scalar), _axpy_expected)


_SORT_THREADS, _SORT_ITEMS, _SORT_BLOCKS = 128, 8, 4
_SORT_TILE = _SORT_THREADS * _SORT_ITEMS


def _sort_arguments(random: np.random.Generator) -> tuple[Argument, ...]:
    keys = random.integers(-(2**31), 2**31, _SORT_BLOCKS * _SORT_TILE).astype(np.int32)
    return keys, np.zeros_like(keys)


def _sort_expected(arguments: tuple[Any, ...]) -> Mapping[int, npt.NDArray[Any]]:
    return {1: np.sort(arguments[0].reshape(-1, _SORT_TILE), axis=1).ravel()}


def _reduce_arguments(random: np.random.Generator) -> tuple[Argument, ...]:
    numbers = random.integers(-1000, 1000, _COUNT).astype(np.int32)
    return numbers, np.zeros(_blocks(_COUNT)[0], np.int32), np.int32(_COUNT)


def _tiles(numbers: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """Return an array of shape (tiles, width), zeros behind the last number."""
    return np.pad(numbers, (0, -numbers.size % width)).reshape(-1, width)


def _reduce_expected(arguments: tuple[Any, ...]) -> Mapping[int, npt.NDArray[Any]]:
    return {1: _tiles(arguments[0], _THREADS).sum(axis=1, dtype=np.int32)}


def _scan_arguments(random: np.random.Generator) -> tuple[Argument, ...]:
    numbers = random.integers(-1000, 1000, _COUNT).astype(np.int32)
    return numbers, np.zeros_like(numbers), np.int32(_COUNT)


def _scan_expected(arguments: tuple[Any, ...]) -> Mapping[int, npt.NDArray[Any]]:
    return {1: _tiles(arguments[0], _THREADS).cumsum(axis=1, dtype=np.int32).ravel()[:_COUNT]}


def _polynomial_arguments(random: np.random.Generator) -> tuple[Argument, ...]:
    points = (random.uniform(-1, 1, _COUNT) + 1j * random.uniform(-1, 1, _COUNT)).astype(np.complex64)
    return points, np.zeros_like(points), np.int32(_COUNT)


def _polynomial_expected(arguments: tuple[Any, ...]) -> Mapping[int, npt.NDArray[Any]]:
    return {1: np.polyval([0.5, -1.0, 0.25, 2.0, -0.125], arguments[0].astype(np.complex128))}


def _half_arguments(random: np.random.Generator) -> tuple[Argument, ...]:
    # Whole numbers below 2048 are exact in half precision.
    x, y = (random.integers(-100, 100, _COUNT).astype(np.float16) for _ in range(2))
    return np.float32(3), x, y, np.int32(_COUNT // 2)


def _warp_arguments(random: np.random.Generator) -> tuple[Argument, ...]:
    numbers = random.integers(-1000, 1000, _COUNT).astype(np.int32)
    return numbers, np.zeros(_blocks(_COUNT)[0] * _THREADS // 32, np.int32), np.int32(_COUNT)


def _warp_expected(arguments: tuple[Any, ...]) -> Mapping[int, npt.NDArray[Any]]:
    sums = np.zeros_like(arguments[1])
    tiles = _tiles(arguments[0], 32)
    sums[: len(tiles)] = tiles.sum(axis=1, dtype=np.int32)
    return {1: sums}


_TABLE = np.linspace(0.0, 15.0, 16, dtype=np.float32) ** 2


def _look_up_arguments(random: np.random.Generator) -> tuple[Argument, ...]:
    index = random.integers(0, 16, _COUNT).astype(np.int32)
    return index, np.zeros(_COUNT, np.float32), np.int32(_COUNT)


def _look_up_expected(arguments: tuple[Any, ...]) -> Mapping[int, npt.NDArray[Any]]:
    return {1: _TABLE[arguments[0]]}


_SORT = f"block_sort<int, {_SORT_THREADS}, {_SORT_ITEMS}>"
_REDUCE = f"block_reduce<int, {_THREADS}>"
_SCAN = f"block_scan<int, {_THREADS}>"
_BLOCK = (_THREADS, 1, 1)

DEMOS = (
    Demo("saxpy.cu", 'plain kernel, extern "C"', (_saxpy("saxpy", np.float32),)),
    Demo(
        "saxpy_template.cu",
        "one template, three instantiations by name expression",
        (_saxpy("saxpy<float>", np.float32), _saxpy("saxpy<double>", np.float64), _saxpy("saxpy<int>", np.int32)),
        name_expressions=("saxpy<double>", "saxpy<float>", "saxpy<int>"),
    ),
    Demo(
        "block_sort.cu",
        "CUB block radix sort",
        (Launch(_SORT, (_SORT_BLOCKS, 1, 1), (_SORT_THREADS, 1, 1), _sort_arguments, _sort_expected),),
        name_expressions=(_SORT,),
        needs_headers=True,
    ),
    Demo(
        "block_reduce.cu",
        "CUB block reduce",
        (Launch(_REDUCE, _blocks(_COUNT), _BLOCK, _reduce_arguments, _reduce_expected),),
        name_expressions=(_REDUCE,),
        needs_headers=True,
    ),
    Demo(
        "block_scan.cu",
        "CUB block scan",
        (Launch(_SCAN, _blocks(_COUNT), _BLOCK, _scan_arguments, _scan_expected),),
        name_expressions=(_SCAN,),
        needs_headers=True,
    ),
    Demo(
        "polynomial.cu",
        "cuda::std array, complex and span",
        (Launch("polynomial", _blocks(_COUNT), _BLOCK, _polynomial_arguments, _polynomial_expected, rtol=1e-5),),
        needs_headers=True,
    ),
    Demo(
        "half_axpy.cu",
        "half precision, cuda_fp16.h",
        (Launch("half_axpy", _blocks(_COUNT // 2), _BLOCK, _half_arguments, _axpy_expected),),
        needs_headers=True,
    ),
    Demo(
        "warp_sum.cu",
        "cooperative groups",
        (Launch("warp_sum", _blocks(_COUNT), _BLOCK, _warp_arguments, _warp_expected),),
        needs_headers=True,
    ),
    Demo(
        "look_up.cu",
        "variable in constant memory, by name expression",
        (
            Launch(
                "look_up",
                _blocks(_COUNT),
                _BLOCK,
                _look_up_arguments,
                _look_up_expected,
                variables={"&table": _TABLE},
            ),
        ),
        name_expressions=("&table",),
    ),
)
