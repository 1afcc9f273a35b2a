"""What compiles: NVRTC with its build, and the toolkit headers that a program includes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kernelstore.cuda import toolkit
from kernelstore.errors import StoreError
from kernelstore.request import Request
from kernelstore.store import Store

__all__ = ["Toolchain"]


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compiler and the headers for one request.

    Parameters
    ----------
    text : str
        Such as ``"nvrtc 13.5.37"``. Where the program includes toolkit headers it names them too: those of the
        request's own `-I` directories, then those that kernelstore finds.
    headers : HeaderUnit or None
        Those that kernelstore finds.
    identity : str
        What goes into the key: the text, and with debug information the directories of the headers.
    """

    text: str
    headers: toolkit.HeaderUnit | None
    identity: str

    @classmethod
    def expected(cls, request: Request, store: Store | None) -> Toolchain:
        """Return the toolchain that this process would load, without loading it.

        Notes
        -----
        Cost: a few stats and, once per process, one indexed read: the store remembers the build of a library by
        its stat. Only where it does not, or the library is not from a wheel, is NVRTC loaded and asked (100 ms).
        """
        return cls._of(request, _remembered_build(store) or _nvrtc().build())

    @classmethod
    def loaded(cls, request: Request, expected: Toolchain) -> Toolchain:
        """Return the toolchain that this process really has loaded, after `expected`.

        Another package may have loaded a libnvrtc of its own first; then that one compiles.
        """
        nvrtc = _nvrtc()
        if nvrtc.library_path() == toolkit.find_nvrtc():
            return expected
        return cls._of(request, nvrtc.build())

    def uncacheable(self, request: Request) -> str | None:
        """Return why the toolkit's own headers make the request one that cannot be keyed; ``None`` where they do not.

        Its computed includes were resolved as if no toolkit header defined their macros.

        Notes
        -----
        Cost: for a program with computed includes, a reading of the toolkit's headers, once per process (0.1 s).
        """
        if not request.macros:
            return None
        directories = (*request.toolkit_dirs, *(() if self.headers is None else self.headers.include_dirs))
        defined = toolkit.defined_macros(directories, request.macros)
        return f"computed include: a toolkit header defines {', '.join(defined)}" if defined else None

    @classmethod
    def _of(cls, request: Request, build: str) -> Toolchain:
        text = f"nvrtc {build}"
        if not request.external and request.uncacheable is None:
            return cls(text, None, text)
        headers = toolkit.find_headers(build, toolkit.find_nvrtc())
        own = [toolkit.toolkit_dir_version(path) or path for path in request.toolkit_dirs]
        named = [*own, headers.version if headers is not None else "no toolkit headers"]
        text = f"{text} with {', '.join(named)}"
        identity = text
        if request.shows_paths:
            places = (*request.toolkit_dirs, *(headers.include_dirs if headers is not None else ()))
            identity = "\0".join((text, *map(os.path.realpath, places)))
        return cls(text, headers, identity)


def _remembered_build(store: Store | None) -> str | None:
    library = toolkit.find_nvrtc()
    if library is None or store is None:
        return None
    signature = _signature(library)
    try:
        build = store.toolchain_build(str(library), signature)
    except StoreError:
        return None
    if build is None and _nvrtc().library_path() == library:
        build = _nvrtc().build()
        store.remember_toolchain(str(library), signature, build)
    return build


def _nvrtc() -> ModuleType:
    from kernelstore.cuda import nvrtc  # 6 ms, for those who compile

    return nvrtc


def _signature(library: Path) -> str:
    found = library.stat()
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"
