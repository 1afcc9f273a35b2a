"""`Compiler`: a request becomes a hit, or one run of NVRTC whose artifacts are stored."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kernelstore import plugins, serving, settings, stored
from kernelstore.arch import Arch
from kernelstore.artifact import Artifact
from kernelstore.errors import (
    ArchRequired,
    InvalidArgument,
    InvalidOption,
    InvalidType,
    KernelStoreError,
    NoDriver,
    PayloadRejected,
    StoreError,
    StoreWarning,
    ToolchainError,
    UncacheableWarning,
    UnknownPlugin,
)
from kernelstore.explanation import Asked, Difference, Explanation
from kernelstore.header_memo import Trace
from kernelstore.key import Key
from kernelstore.options import Options, checked_options, checked_text
from kernelstore.request import Request, checked_dirs, checked_headers, checked_names, target
from kernelstore.store import Store
from kernelstore.toolchain import Toolchain

if TYPE_CHECKING:
    from kernelstore.loader import Kernel, Module

__all__ = ["Compiler"]

# What NVRTC makes; other kinds are imported or linked.
_COMPILED_KINDS = ("cubin", "ptx", "ltoir")

_logger = logging.getLogger("kernelstore.compiler")


class Compiler:
    """A front end to NVRTC that asks a store first.

    Trouble with the store costs a compile and a warning, never the program.

    Parameters
    ----------
    store : Store, optional
        ``None`` opens the default store at the first compile; ``KERNELSTORE_DISABLE=1`` means no store.
    options : sequence of str
        NVRTC options, each one element, before those of each call.
    include_dirs : sequence of str or path
        Directories of user headers, before those of each call.

    Raises
    ------
    InvalidType, InvalidArgument
        A parameter is of no use.

    Notes
    -----
    Neither the driver nor NVRTC is loaded before it is needed; a hit of `compile` loads neither. Threads may share
    a compiler.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        options: Sequence[str] = (),
        include_dirs: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        settings.configure_logging()
        if store is not None and not isinstance(store, Store):
            raise InvalidType(f"store is a Store, not {store!r}; for a path use Compiler(Store(path))")
        Options.read(options)
        self._store = store
        self._owns_store = store is None
        self._options = tuple(options)
        self._include_dirs = checked_dirs(include_dirs)
        self._modules: dict[tuple[object, ...], _Held] = {}
        self._stored_modules: dict[tuple[object, ...], Module] = {}
        self._kernels: dict[tuple[Module, str], Kernel] = {}
        self._held: list[Module] = []
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    @property
    def store(self) -> Store | None:
        """The store in use; ``None`` where it is disabled or cannot be opened."""
        if self._store is None and self._owns_store and not settings.flag("DISABLE"):
            with self._lock:
                if self._store is None and self._owns_store:
                    try:
                        self._store = Store()
                    except (StoreError, InvalidArgument) as error:
                        self._owns_store = False
                        self._warn_about_store("opening the default store", error)
        return None if settings.flag("DISABLE") else self._store

    def compile(
        self,
        source: str,
        kind: str = "cubin",
        *,
        arch: str | None = None,
        name: str = "",
        options: Sequence[str] = (),
        name_expressions: Iterable[str] = (),
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        headers: Mapping[str, str] | None = None,
        extra: bytes = b"",
        codec: str | None = None,
        cache: bool = True,
    ) -> Artifact:
        """Return the compiled program, from the store or from NVRTC. Needs no GPU.

        A run for a cubin makes its PTX too; both are stored, in one transaction.

        Parameters
        ----------
        source : str
            CUDA C++ text.
        kind : str
            ``"cubin"``, ``"ptx"`` or ``"ltoir"``.
        arch : str, optional
            Such as ``"sm_90a"``. ``None`` takes the one among the options, else that of the current device.
        name : str
            Name of the program, for messages and for ``__FILE__``; with a directory, quoted includes are looked for
            there.
        options : sequence of str
            NVRTC options, each one element, after the compiler's own. Their order counts.
        name_expressions : iterable of str
            Names to instantiate and to find later: ``"saxpy<float>"``, ``"&table"``. Their order does not count.
        include_dirs : sequence of str or path
            Directories of user headers, after the compiler's own.
        headers : mapping of str to str, optional
            Headers by content, under the spelling that includes them.
        extra : bytes
            More input for the key, such as a version that the caller vouches for.
        codec : str, optional
            How the artifacts are stored; ``None`` takes the store's.
        cache : bool
            ``False`` compiles without looking and without storing.

        Raises
        ------
        InvalidType, InvalidArgument
            A parameter is of no use: `ArchRequired` where there is neither an arch nor a device.
        CompileError
            The program does not compile; `InvalidOption` where an option is at fault. Nothing was stored.
        UnsupportedArch
            This NVRTC cannot compile for the arch.
        ToolchainError
            NVRTC cannot be used.

        Notes
        -----
        Cost: a hit is one indexed read; a miss is one run of NVRTC and one write transaction.
        """
        request = self._request(
            source,
            kind,
            arch=arch,
            name=name,
            options=options,
            name_expressions=name_expressions,
            include_dirs=include_dirs,
            headers=headers,
            extra=extra,
        )
        return self._obtain_of_any(request, cache=cache, codec=codec)

    def _obtain_of_any(self, request: Request, *, cache: bool, codec: str | None = None) -> Artifact:
        try:
            return self._obtain(request, cache=cache, codec=codec)
        except ToolchainError as error:
            found = serving.of_any_toolchain(request, self.store if cache else None)
            if found is None:
                raise
            _logger.info("served what %s made, as there is no compiler here: %s", found.toolchain, error)
            return found

    def _obtain(self, request: Request, *, cache: bool, codec: str | None = None) -> Artifact:
        if codec is not None:
            plugins.load("codecs", codec)
        store = self.store if cache else None
        if store is not None and request.uncacheable is not None:
            self._warn_uncacheable(store, request)
            store = None
        expected = Toolchain.expected(request, self.store)
        found = self._look_up(store, request, expected)
        if found is not None:
            return found
        toolchain = Toolchain.loaded(request, expected)
        if toolchain is not expected:
            found = self._look_up(store, request, toolchain)
            if found is not None:
                return found
        if store is not None and _logger.isEnabledFor(logging.DEBUG):
            self._log_miss(store, request, toolchain)
        artifacts = self._compile(request, toolchain)
        if store is not None:
            if not request.unchanged():
                # NVRTC may have read another text than the key tells.
                store.count("not_stored", "header changed")
                _logger.info("a header of %s changed meanwhile; nothing is stored", request.name or "a program")
            elif not _is_as_asked(request):
                store.count("not_stored", "compiled after -G")
            else:
                self._keep(store, artifacts, codec)
        return artifacts[0]

    def module(
        self,
        source: str,
        *,
        arch: str | None = None,
        name: str = "",
        options: Sequence[str] = (),
        name_expressions: Iterable[str] = (),
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        headers: Mapping[str, str] | None = None,
        extra: bytes = b"",
        cache: bool = True,
    ) -> Module:
        """Return the program compiled and loaded for the current device; parameters and errors as `compile`.

        The module is held until `close`: asking again is a dictionary lookup, unless a user header changed. Where
        NVRTC is absent or does not know the device, or the driver refuses the cubin, the next best of what is stored
        is loaded instead: a compatible cubin of any toolchain, then PTX, whose cubin is kept
        (``docs/how-it-works.md``, "Choosing for a device").

        Raises
        ------
        LoadError
            The driver refused all that there is; the stored rows are kept. `NoDriver` where there is no GPU.

        Notes
        -----
        Cost: in the same process, a dictionary lookup and one stat for each user header and each place searched
        before it; otherwise `compile` and the driver's load.
        """
        from kernelstore.cuda import driver  # 15 ms with the loader, for those who load

        name_expressions = checked_names(name_expressions)
        headers = checked_headers(headers)
        place = driver.current_device()
        try:
            asked = (
                source,
                arch,
                name,
                tuple(options),
                name_expressions,
                tuple(os.fspath(path) for path in include_dirs),
                tuple(headers.items()),
                extra,
                place,
            )
            held = self._modules.get(asked) if cache else None
        except TypeError as error:
            # What is no key of a dictionary is no parameter either; looked at here, so that a hit does not pay for it.
            checked_options(options)
            checked_dirs(include_dirs)
            raise InvalidType(
                f"source, arch and name are str, extra is bytes; these are {source!r:.80}, {arch!r:.80}, {name!r:.80} "
                f"and {extra!r:.80}"
            ) from error
        if held is not None and held.trace.holds():
            return held.module
        request = self._request(
            source,
            "cubin",
            arch=arch,
            name=name,
            options=options,
            name_expressions=name_expressions,
            include_dirs=include_dirs,
            headers=headers,
            extra=extra,
        )
        if held is not None and request.uncacheable is None and request.program.key == held.program_key:
            held.trace = request.trace
            return held.module
        module = serving.module_for_device(
            request,
            self.store if cache else None,
            lambda wanted: self._obtain(wanted, cache=cache),
            chosen=arch is not None or request.options.arch is not None,
        )
        # What cannot be keyed may compile to something else the next time.
        keyed = cache and request.uncacheable is None and request.unchanged()
        with self._lock:
            self._held.append(module)
            if keyed:
                now = self._modules.get(asked)
                if now is not None and now.program_key == request.program.key:
                    return now.module
                self._modules[asked] = _Held(module, request.program.key, request.trace)
        return module

    def kernel(
        self,
        source: str,
        name_expression: str,
        *,
        arch: str | None = None,
        name: str = "",
        options: Sequence[str] = (),
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        headers: Mapping[str, str] | None = None,
        extra: bytes = b"",
        cache: bool = True,
    ) -> Kernel:
        """Return one kernel of the program, ready to launch on the current device.

        Parameters
        ----------
        source : str
            CUDA C++ text.
        name_expression : str
            The kernel as CUDA C++ names it: ``"saxpy<float>"``, ``"plain"``.
        arch, name, options, include_dirs, headers, extra, cache
            As `compile`.

        Raises
        ------
        CompileError
            Also where the program has no such kernel.
        LoadError
            The driver refused; the stored row is kept.

        Notes
        -----
        Cost: as `module`.
        """
        module = self.module(
            source,
            arch=arch,
            name=name,
            options=options,
            name_expressions=(name_expression,),
            include_dirs=include_dirs,
            headers=headers,
            extra=extra,
            cache=cache,
        )
        kernel = self._kernels.get((module, name_expression))
        if kernel is None:
            kernel = self._kernels[module, name_expression] = module.get_kernel(name_expression)
        return kernel

    def explain(
        self,
        source: str,
        kind: str = "cubin",
        *,
        arch: str | None = None,
        name: str = "",
        options: Sequence[str] = (),
        name_expressions: Iterable[str] = (),
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        headers: Mapping[str, str] | None = None,
        extra: bytes = b"",
    ) -> Explanation:
        """Tell whether `compile` with the same parameters would hit, and if not, what differs from what is stored.

        Nothing is compiled, written or counted.

        Raises
        ------
        InvalidType, InvalidArgument
            As `compile`.
        StoreError
            The file cannot be read.
        ToolchainError
            NVRTC cannot be used.

        Notes
        -----
        Cost: three indexed reads where the program is stored; otherwise at most 250 rows and 50 sources.
        """
        request = self._request(
            source,
            kind,
            arch=arch,
            name=name,
            options=options,
            name_expressions=name_expressions,
            include_dirs=include_dirs,
            headers=headers,
            extra=extra,
        )
        if request.uncacheable is not None:
            return Explanation(None, None, (Difference("uncacheable", request.uncacheable),))
        store = self.store
        if store is None:
            return Explanation(None, None, (Difference("store", "disabled, or it cannot be opened"),))
        return store.explain_request(_asked(request, Toolchain.expected(request, store)))

    def rebuild(self, program: Key | bytes | str, arch: str, *, kind: str = "cubin") -> Artifact:
        """Compile a stored program for another GPU, from what is stored of it, and store the artifact.

        It gets the very key that `compile` of the original request would give it, and is a hit if it is there; without
        NVRTC, as there, that of another toolchain.

        Parameters
        ----------
        program : Key, bytes or str
            A program's name or key, or the key of one of its artifacts; of a key as text the first digits will do.
        arch : str
            Such as ``"sm_100a"``.
        kind : str
            ``"cubin"``, ``"ptx"`` or ``"ltoir"``.

        Raises
        ------
        KeyNotFound
            There is no such program.
        RebuildRefused
            A header has changed, or the key cannot be made again; nothing was compiled or written.
        InvalidType, InvalidArgument, CompileError, ToolchainError
            As `compile`; `InvalidArgument` also where several programs are meant.
        StoreError
            There is no store, or it cannot be read.

        Notes
        -----
        Cost: three indexed reads, then as `compile`. The working directory is that of now: relative include
        directories have to be where they were.
        """
        _check_kind(kind)
        wanted = target(kind, Arch.parse(arch))
        request = stored.request_of(self._needed_store().stored_program(program), kind, wanted)
        return self._obtain_of_any(request, cache=True)

    def stored_module(self, program: Key | bytes | str, *, arch: str | None = None) -> Module:
        """Return a stored program loaded for the current device, where its sources are not at hand.

        Parameters
        ----------
        program : Key, bytes or str
            As `rebuild`.
        arch : str, optional
            Exactly this one; ``None`` takes the best for the device.

        Raises
        ------
        KeyNotFound, InvalidType, InvalidArgument
            There is no such program, or several.
        NoBinary
            No stored artifact of it serves the device.
        LoadError
            The driver refused; the stored row is kept. `NoDriver` where there is no GPU.
        StoreError
            There is no store, or it cannot be read.

        Notes
        -----
        Cost: in the same process, a dictionary lookup; otherwise four indexed reads and the driver's load. The
        module is held until `close`.
        """
        from kernelstore.cuda import driver
        from kernelstore.loader import load  # 15 ms, for those who load

        program = program if isinstance(program, str) else Key(program)
        if arch is not None:
            Arch.parse(arch)
        place = driver.current_device()
        asked = ("stored program", program, arch, place)
        module = self._stored_modules.get(asked)
        if module is not None:
            return module
        store = self._needed_store()
        module = load(
            stored.best_artifact(
                store,
                store.find_program(program),
                compute_capability=driver.compute_capability(place),
                arch=arch,
                driver_version=driver.driver_version(),
            )
        )
        with self._lock:
            self._held.append(module)
            return self._stored_modules.setdefault(asked, module)

    def close(self) -> None:
        """Unload the modules, and close the store if the compiler opened it; a second call does nothing."""
        with self._lock:
            self._kernels.clear()
            self._modules.clear()
            self._stored_modules.clear()
            while self._held:
                self._held.pop().unload()
            store, self._store = (self._store, None) if self._owns_store else (None, self._store)
            self._owns_store = False
        if store is not None:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- a request ------------------------------------------------------------------------------------------------

    def _request(
        self,
        source: str,
        kind: str,
        *,
        arch: str | None,
        name: str,
        options: Sequence[str],
        name_expressions: Iterable[str],
        include_dirs: Sequence[str | os.PathLike[str]],
        headers: Mapping[str, str] | None,
        extra: bytes,
    ) -> Request:
        checked_text(source, "source")
        checked_text(name, "name")
        _check_kind(kind)
        if not isinstance(extra, bytes):
            raise InvalidType(f"extra is bytes, not {extra!r:.200}")
        Options.read(options)
        read = Options.read((*self._options, *options))
        if read.lto and kind != "ltoir":
            raise InvalidOption(f"-dlto makes LTO-IR only, and {kind} was asked for; use kind='ltoir'", options=options)
        dirs = (*read.include_dirs, *self._include_dirs, *checked_dirs(include_dirs))
        return Request(
            source=source,
            name=name,
            kind=kind,
            arch=target(kind, _arch(arch, read.arch)),
            options=read,
            name_expressions=checked_names(name_expressions),
            include_dirs=dirs,
            headers=checked_headers(headers),
            extra=extra,
            memo=self.store,
        )

    def _compile(self, request: Request, toolchain: Toolchain) -> list[Artifact]:
        from kernelstore import build  # NVRTC's bindings and what reads its output: 100 ms that a hit does without

        artifacts = build.run(request, toolchain)
        compile_ms = artifacts[0].compile_ms
        _logger.info("compiled %s for %s in %.1f ms", request.name or "a program", request.arch, compile_ms)
        store = self.store
        if store is not None:
            store.count("compile")
            store.count("compile_us", value=round(compile_ms * 1000))
        return artifacts

    # -- the store, which may fail --------------------------------------------------------------------------------

    def _look_up(self, store: Store | None, request: Request, toolchain: Toolchain) -> Artifact | None:
        if store is None:
            return None
        try:
            return store.get(request.artifact_key(request.kind, request.arch, toolchain.identity))
        except (StoreError, UnknownPlugin) as error:
            self._warn_about_store("looking up a kernel", error)
            return None

    def _log_miss(self, store: Store, request: Request, toolchain: Toolchain) -> None:
        try:
            _logger.debug("%s: %s", request.name or "a program", store.explain_request(_asked(request, toolchain)))
        except StoreError as error:
            _logger.debug("a miss that cannot be explained: %s", error)

    def _needed_store(self) -> Store:
        store = self.store
        if store is None:
            raise StoreError("there is no store to take a program from: it is disabled, or cannot be opened")
        return store

    def _keep(self, store: Store, artifacts: Sequence[Artifact], codec: str | None) -> None:
        try:
            store.put(*artifacts, codec=codec)
        except (StoreError, PayloadRejected, InvalidArgument) as error:
            store.count("not_stored", type(error).__name__)
            self._warn_about_store("storing a kernel", error)

    def _warn_about_store(self, doing: str, error: KernelStoreError) -> None:
        _logger.info("%s failed: %s", doing, error)
        cause = type(error).__name__
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(
                f"{doing} failed, kernels are compiled without it: {error}", StoreWarning, stacklevel=_outside()
            )

    def _warn_uncacheable(self, store: Store, request: Request) -> None:
        reason = request.uncacheable
        assert reason is not None
        store.count("uncacheable", reason.partition(":")[0])
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(
                f"{request.name or 'a program'} is compiled each time, it cannot be keyed: {reason}",
                UncacheableWarning,
                stacklevel=_outside(),
            )


@dataclasses.dataclass(slots=True)
class _Held:
    """A module that was loaded, and what tells whether it is still the one that is asked for."""

    module: Module
    program_key: Key
    trace: Trace


def _is_as_asked(request: Request) -> bool:
    from kernelstore.cuda import nvrtc

    return request.options.debug or not nvrtc.leaks_debug()


def _asked(request: Request, toolchain: Toolchain) -> Asked:
    key = request.artifact_key(request.kind, request.arch, toolchain.identity)
    return Asked(request.program, key, request.kind, str(request.arch), toolchain.text)


def _check_kind(kind: str) -> None:
    if not isinstance(kind, str) or kind not in _COMPILED_KINDS:
        plugins.load("kinds", kind)
        raise InvalidArgument(f"NVRTC makes {', '.join(_COMPILED_KINDS)}, not {kind!r}")


def _arch(given: str | None, among_options: Arch | None) -> Arch:
    if given is not None:
        if among_options is not None:
            raise InvalidArgument(f"arch={given!r} was given, and {among_options} among the options; give one")
        return Arch.parse(given)
    if among_options is not None:
        return among_options
    from kernelstore.cuda import driver  # 5 ms, where no arch was given

    try:
        return Arch(*driver.compute_capability(driver.current_device()))
    except NoDriver as error:
        raise ArchRequired("no arch was given, and there is no device to take it from; give arch='sm_90'") from error


def _outside() -> int:
    """Return the stack level of the first caller outside this package, for warnings."""
    import sys

    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kernelstore":
        level, frame = level + 1, frame.f_back
    return level
