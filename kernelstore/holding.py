"""Holding: the modules that a compiler loaded, until it is closed, by what was asked for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelstore.errors import CompilerClosed
from kernelstore.header_memo import Trace
from kernelstore.key import Key
from kernelstore.locks import new_lock

if TYPE_CHECKING:
    from kernelstore.loader import Kernel, Module

__all__ = ["Held", "Holding"]


@dataclass(slots=True)
class Held:
    """A module that was loaded, and what tells whether it is still the one that is asked for.

    Parameters
    ----------
    program_key : Key
        The program's.
    trace : Trace or None
        Where its headers were looked for; ``None`` for a stored program, which stays what it is.
    """

    module: Module
    program_key: Key
    trace: Trace | None = None


class Holding:
    """Modules and their kernels. Threads may share it."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._held: dict[Hashable, Held] = {}
        self._kernels: dict[tuple[Module, str], Kernel] = {}
        self._modules: list[Module] = []
        self._is_closed = False

    def check_open(self) -> None:
        """Raise `CompilerClosed` after `close`."""
        if self._is_closed:
            raise CompilerClosed("the compiler is closed, and its modules are unloaded; make another one")

    def find(self, asked: Hashable) -> Held | None:
        """Return what is held for a request; its trace may not hold any more."""
        return self._held.get(asked)

    def hold(self, held: Held, asked: Hashable | None) -> Module:
        """Hold a module until `close`, and return the one to use: another thread's, where that was faster.

        Parameters
        ----------
        asked : hashable
            What `find` finds it by; ``None``: it is not to be found.

        Raises
        ------
        CompilerClosed
            The compiler was closed meanwhile; the module is unloaded.
        """
        with self._lock:
            if not self._is_closed:
                self._modules.append(held.module)
                if asked is None:
                    return held.module
                now = self._held.get(asked)
                if now is None or now.program_key != held.program_key:
                    now = self._held[asked] = held
                return now.module
        held.module.unload()
        raise CompilerClosed("the compiler was closed while it loaded a module; make another one")

    def kernel(self, module: Module, name_expression: str) -> Kernel:
        """Return the kernel of a module, the same one each time."""
        kernel = self._kernels.get((module, name_expression))
        if kernel is None:
            kernel = self._kernels[module, name_expression] = module.get_kernel(name_expression)
        return kernel

    def close(self) -> None:
        """Unload all; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            self._kernels.clear()
            self._held.clear()
            while self._modules:
                self._modules.pop().unload()
