"""Loading: an artifact into the CUDA driver, and from there its kernels, launches and variables."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kernelstore import plugins
from kernelstore.artifact import Artifact, Symbol
from kernelstore.cuda import driver
from kernelstore.cuda.kernel import Kernel, KernelAttributes
from kernelstore.cuda.library import Hold, hold
from kernelstore.errors import (
    InvalidArgument,
    InvalidImage,
    InvalidType,
    KernelNotFound,
    LoadError,
    NeedsLink,
    PayloadRejected,
)
from kernelstore.kinds import Kind

__all__ = ["Global", "Kernel", "KernelAttributes", "Module", "load"]


def load(artifact: Artifact, *, device: int | None = None) -> Module:
    """Place an artifact into the CUDA driver.

    Parameters
    ----------
    artifact : Artifact
        A cubin, PTX or fatbin.
    device : int, optional
        Ordinal of the device to load for. ``None`` is the current context's, or 0 where no context is current.
        Where no context of that device is current, its primary context is made current to the calling thread.

    Returns
    -------
    Module
        It stays loaded until `Module.unload`; neither garbage collection nor the end of the process unloads it.

    Raises
    ------
    NeedsLink
        The artifact is LTO-IR or relocatable; the driver was not touched.
    NoDriver
        There is no libcuda, or no device.
    ForkedContext
        This process was forked from one that had used CUDA.
    InvalidImage, NoBinary, InvalidPTX, NoJitCompiler, UnsupportedPTX, DriverError
        The driver refused, and nothing was loaded. The driver may put this off until `Module.get_kernel`.

    Notes
    -----
    The driver holds one library per key and process, whatever the number of modules, contexts and devices.
    """
    if not isinstance(artifact, Artifact):
        raise InvalidType(f"load takes an Artifact, not {type(artifact).__name__}; for a file use Artifact.from_file")
    if device is not None and not isinstance(device, int):
        raise InvalidType(f"a device is an ordinal such as 0, not {device!r:.100}")
    plugin = plugins.load("kinds", artifact.kind)
    if artifact.relocatable or not plugin.loadable:
        what = "relocatable (compiled with -rdc=true)" if plugin.loadable else "input of a link"
        raise _withheld(NeedsLink, artifact, f"is {what}; link it to a cubin first")
    # PTX has to end with a NUL, which is what its normal form is.
    payload = plugin.normalise(artifact.payload) if plugin.is_text else artifact.payload
    _check(artifact, plugin, payload)
    cuda_driver = driver.initialise()
    if device is not None and not 0 <= device < cuda_driver.call("cuDeviceGetCount"):
        raise InvalidArgument(f"there is no device {device}; there are {cuda_driver.call('cuDeviceGetCount')}")
    device = cuda_driver.make_current(device)
    return Module(hold(cuda_driver, artifact, payload), device)


def _check(artifact: Artifact, plugin: Kind, payload: bytes) -> None:
    # What a driver makes of damaged bytes is not defined: docs/decisions/0005-checked-before-the-driver.md.
    try:
        plugin.check(payload, artifact.arch)
    except PayloadRejected as error:
        raise _withheld(InvalidImage, artifact, f"was not given to the driver: {error}") from error


def _withheld(cls: type[LoadError], artifact: Artifact, why: str) -> LoadError:
    """Make the error for an artifact that the driver did not see."""
    return cls(
        f"the {artifact.kind} of {artifact.arch}, key {artifact.key}, {why}",
        result=None,
        name=None,
        kind=artifact.kind,
        arch=artifact.arch,
        key=artifact.key,
        driver_version=None,
    )


class Module:
    """An artifact placed into the driver; `load` makes it. The driver calls it a library (``CUlibrary``).

    Threads may share it.
    """

    def __init__(self, held: Hold, device: int) -> None:
        self.artifact = held.artifact
        self._hold = held
        self._driver = held.driver
        self._device = device

    @property
    def handle(self) -> int:
        """The ``CUlibrary``.

        Raises
        ------
        ModuleUnloaded
            The module was unloaded.
        """
        return int(self._hold.library)

    def get_kernel(self, name: str) -> Kernel:
        """Return a kernel, loaded into the current context and ready to launch.

        Parameters
        ----------
        name : str
            The name expression as it was compiled, the lowered name, or the plain name of an ``extern "C"`` kernel.

        Raises
        ------
        KernelNotFound
            There is no such kernel; the message lists those that there are.
        ModuleUnloaded
            The module was unloaded.
        LoadError
            The driver refuses the payload, which a lazily loaded library tells only now.
        """
        library = self._hold.library
        symbol = self._symbol(name, "kernel")
        lowered = name if symbol is None else symbol.lowered_name
        device = self._driver.make_current(default=self._device)
        try:
            kernel = self._driver.get_kernel(library, lowered, artifact=self.artifact, payload=self._hold.payload)
        except KernelNotFound:
            raise self._not_found(name, "kernel") from None
        declared = None if symbol is None else symbol.parameters
        return Kernel(self._hold, kernel, name=name, lowered_name=lowered, declared=declared, device=device)

    def get_global(self, name: str) -> Global:
        """Return where a ``__device__`` or ``__constant__`` variable lies in the current context.

        Parameters
        ----------
        name : str
            The name expression, with or without its ``&``, the lowered name, or the plain name.

        Raises
        ------
        KernelNotFound
            There is no such variable; the message lists what there is.
        ModuleUnloaded
            The module was unloaded.
        LoadError
            The driver refuses the payload.
        """
        library = self._hold.library
        symbol = self._symbol(name, "variable") or self._symbol(f"&{name}", "variable")
        lowered = name if symbol is None else symbol.lowered_name
        self._driver.make_current(default=self._device)
        try:
            handle, size_bytes = self._driver.get_global(library, lowered, artifact=self.artifact)
        except KernelNotFound:
            raise self._not_found(name, "variable") from None
        return Global(name, handle, size_bytes)

    def unload(self) -> None:
        """Give the module up; the last module of its key unloads it from the driver. A second call does nothing.

        Its kernels raise `ModuleUnloaded` from now on. Launches that still run are the caller's to wait for. In a
        forked child the driver is left alone.
        """
        self._hold.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unload()

    def __repr__(self) -> str:
        state = ", unloaded" if self._hold.is_released else ""
        return f"<Module {self.artifact.kind} {self.artifact.arch} {str(self.artifact.key)[:12]}{state}>"

    def _symbol(self, name: str, what: str) -> Symbol | None:
        if not isinstance(name, str):
            raise InvalidType(f"a {what} is asked for by its name, a str, not {name!r:.100}")
        symbols = [symbol for symbol in self.artifact.symbols if symbol.what == what]
        # Expressions first: several of them may have one lowered name, and any of these will do.
        for known in ("name_expression", "lowered_name"):
            for symbol in symbols:
                if getattr(symbol, known) == name:
                    return symbol
        return None

    def _not_found(self, name: str, what: str) -> KernelNotFound:
        available = [symbol.name for symbol in self.artifact.symbols if symbol.what == what]
        if not available and what == "kernel":
            available = self._driver.kernel_names(self._hold.library)
        there = ", ".join(dict.fromkeys(available)) or f"no {what}s that are known by name"
        message = f"the {self.artifact.kind} for {self.artifact.arch} has no {what} {name!r}; it has {there}"
        if any(symbol.name == name and symbol.what != what for symbol in self.artifact.symbols):
            message += f". {name!r} is a {'variable: use get_global' if what == 'kernel' else 'kernel: use get_kernel'}"
        elif not name.startswith("_Z"):
            expression = name if what == "kernel" else f"&{name.removeprefix('&')}"
            lowered = _lowered_like(name, available)
            message += (
                f'. Without extern "C", C++ lowers names: compile with name_expressions=({expression!r},), or ask for '
                f"{lowered!r}"
                if lowered
                else f". {name!r} may be asked for once it is compiled with name_expressions=({expression!r},)"
            )
        return KernelNotFound(message, name=name, available=tuple(available))


@dataclass(frozen=True, slots=True)
class Global:
    """A variable of a module, in the context where it was asked for; launches take it as a pointer.

    Parameters
    ----------
    name : str
        As it was asked for.
    handle : int
        Device address.
    size_bytes : int
        Its size.
    """

    name: str
    handle: int
    size_bytes: int


def _lowered_like(name: str, available: list[str]) -> str | None:
    # Itanium mangling writes an identifier after its length: _Z5plainPi.
    plain = name.removeprefix("&").split("<", 1)[0].rsplit("::", 1)[-1].strip()
    return next((known for known in available if known.startswith("_Z") and f"{len(plain)}{plain}" in known), None)
