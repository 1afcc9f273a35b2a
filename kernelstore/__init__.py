"""Compiled CUDA kernels in one SQLite file.

Compile once; every later process loads the cubin straight into the CUDA driver. `Store` is the file, `Compiler`
turns programs into artifacts through it, `load` places an artifact into the driver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelstore import errors
    from kernelstore.artifact import Artifact, ArtifactInfo, Program, Symbol
    from kernelstore.compiler import Compiler
    from kernelstore.explanation import Difference, Explanation
    from kernelstore.key import Key
    from kernelstore.linker import Linker
    from kernelstore.loader import Kernel, Module, load
    from kernelstore.store import Store

__all__ = [
    "Artifact",
    "ArtifactInfo",
    "Compiler",
    "Difference",
    "Explanation",
    "Kernel",
    "Key",
    "Linker",
    "Module",
    "Program",
    "Store",
    "Symbol",
    "errors",
    "load",
]
__version__ = "0.1.0"

# Names are lazy (PEP 562), so that `import kernelstore` costs no sqlite3, no NVRTC and no driver.
_HOME = {
    "Artifact": "artifact",
    "ArtifactInfo": "artifact",
    "Compiler": "compiler",
    "Difference": "explanation",
    "Explanation": "explanation",
    "Kernel": "loader",
    "Key": "key",
    "Linker": "linker",
    "Module": "loader",
    "Program": "artifact",
    "Store": "store",
    "Symbol": "artifact",
    "load": "loader",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("kernelstore.errors")
    if name in _HOME:
        value = getattr(importlib.import_module(f"kernelstore.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kernelstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
