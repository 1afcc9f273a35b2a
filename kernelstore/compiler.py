"""`Compiler`: the front end to NVRTC that asks a store first, and holds what it loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kernelstore import obtaining, serving, settings, stored
from kernelstore.arch import Arch
from kernelstore.artifact import Artifact
from kernelstore.errors import (
    InvalidOption,
    InvalidType,
    StoreError,
    ToolchainError,
)
from kernelstore.explanation import Explanation
from kernelstore.holding import Held, Holding
from kernelstore.keeping import Keeping
from kernelstore.key import Key
from kernelstore.options import Options, checked_options, checked_text
from kernelstore.request import Request, arch_of, check_kind, checked_dirs, checked_headers, checked_names, target
from kernelstore.store import Store

if TYPE_CHECKING:
    from kernelstore.loader import Kernel, Module

__all__ = ["Compiler"]

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
        self._keeping = Keeping(store, opens_default=store is None)
        self._holding = Holding()
        self._options = tuple(options)
        self._include_dirs = checked_dirs(include_dirs)

    @property
    def store(self) -> Store | None:
        """The store in use; ``None`` where it is disabled or cannot be opened."""
        return self._keeping.store

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
        CompilerClosed
            After `close`.

        Notes
        -----
        Cost: a hit is one indexed read; a miss is one run of NVRTC and one write transaction.
        """
        request = self._request(
            source, kind, arch=arch, name=name, options=options, name_expressions=name_expressions,
            include_dirs=include_dirs, headers=headers, extra=extra,
        )  # fmt: skip
        return self._obtain_of_any(request, cache=cache, codec=codec)

    def _obtain_of_any(self, request: Request, *, cache: bool, codec: str | None = None) -> Artifact:
        try:
            return obtaining.obtain(request, self._keeping, cache=cache, codec=codec)
        except ToolchainError as error:
            found = serving.of_any_toolchain(request, self._keeping if cache else Keeping())
            if found is None:
                raise
            _logger.info("served what %s made, as there is no compiler here: %s", found.toolchain, error)
            return found

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
        try:
            asked = (
                source, arch, name, tuple(options), name_expressions, tuple(os.fspath(path) for path in include_dirs),
                tuple(headers.items()), extra, driver.current_device(),
            )  # fmt: skip
            held = self._holding.find(asked) if cache else None
        except TypeError as error:
            # What is no key of a dictionary is no parameter either; looked at here, so that a hit does not pay for it.
            checked_options(options)
            checked_dirs(include_dirs)
            raise InvalidType(
                f"source, arch and name are str, extra is bytes; these are {source!r:.80}, {arch!r:.80}, {name!r:.80} "
                f"and {extra!r:.80}"
            ) from error
        if held is not None and held.trace is not None and held.trace.holds():
            return held.module
        request = self._request(
            source, "cubin", arch=arch, name=name, options=options, name_expressions=name_expressions,
            include_dirs=include_dirs, headers=headers, extra=extra,
        )  # fmt: skip
        if held is not None and request.uncacheable is None and request.program.key == held.program_key:
            held.trace = request.trace
            return held.module
        module = serving.module_for_device(
            request,
            self._keeping if cache else Keeping(),
            lambda wanted: obtaining.obtain(wanted, self._keeping, cache=cache),
            chosen=arch is not None or request.options.arch is not None,
        )
        # What cannot be keyed may compile to something else the next time.
        keyed = cache and request.uncacheable is None and request.unchanged()
        return self._holding.hold(Held(module, request.program.key, request.trace), asked if keyed else None)

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
            source, arch=arch, name=name, options=options, name_expressions=(name_expression,),
            include_dirs=include_dirs, headers=headers, extra=extra, cache=cache,
        )  # fmt: skip
        return self._holding.kernel(module, name_expression)

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
            source, kind, arch=arch, name=name, options=options, name_expressions=name_expressions,
            include_dirs=include_dirs, headers=headers, extra=extra,
        )  # fmt: skip
        return obtaining.explain(request, self._keeping)

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
        check_kind(kind)
        wanted = target(kind, Arch.parse(arch))
        request = stored.request_of(self._needed_store().stored_program(program), kind, wanted)
        return self._obtain_of_any(request, cache=True)

    def stored_module(self, program: Key | bytes | str, *, arch: str | None = None) -> Module:
        """Return a stored program loaded for the current device, where its sources are not at hand.

        What is stored is chosen from as `module` does: compatible cubins of any toolchain, then PTX, whose cubin is
        kept (``docs/how-it-works.md``, "Choosing for a device"). Nothing is compiled.

        Parameters
        ----------
        program : Key, bytes or str
            As `rebuild`.
        arch : str, optional
            Artifacts of this number and suffix alone, for ``compute_*`` PTX alone; ``None`` takes the best for the
            device.

        Raises
        ------
        KeyNotFound, InvalidType, InvalidArgument
            There is no such program, or several.
        NoBinary
            No stored artifact of it serves the device; those that there are are listed.
        LoadError
            The driver refused; the stored rows are kept. `NoDriver` where there is no GPU.
        StoreError
            There is no store, or it cannot be read.

        Notes
        -----
        Cost: in the same process, a dictionary lookup; otherwise four indexed reads and the driver's load, with PTX
        once its translation. The module is held until `close`.
        """
        from kernelstore.cuda import driver  # 15 ms with the loader, for those who load

        self._holding.check_open()
        program = program if isinstance(program, str) else Key(program)
        wanted = None if arch is None else Arch.parse(arch)
        asked = ("stored program", program, wanted, driver.current_device())
        held = self._holding.find(asked)
        if held is not None:
            return held.module
        store = self._needed_store()
        key = store.find_program(program)
        return self._holding.hold(Held(serving.module_of_stored(store, self._keeping, key, wanted), key), asked)

    def close(self) -> None:
        """Unload the modules, and close the store if the compiler opened it; a second call does nothing.

        All else that is asked of the compiler afterwards raises `CompilerClosed`.
        """
        self._holding.close()
        self._keeping.close()

    def __enter__(self) -> Self:
        self._holding.check_open()
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
        self._holding.check_open()
        checked_text(source, "source")
        checked_text(name, "name")
        check_kind(kind)
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
            arch=target(kind, arch_of(arch, read.arch)),
            options=read,
            name_expressions=checked_names(name_expressions),
            include_dirs=dirs,
            headers=checked_headers(headers),
            extra=extra,
            memo=self.store,
        )

    def _needed_store(self) -> Store:
        self._holding.check_open()
        store = self.store
        if store is None:
            raise StoreError("there is no store to take a program from: it is disabled, or cannot be opened")
        return store
