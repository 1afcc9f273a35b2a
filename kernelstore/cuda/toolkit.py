"""Find NVRTC's library and the CUDA headers of its version, by a few stats and without importing ``cuda``.

``cuda.pathfinder`` answers the same questions in 73 ms, loading libnvrtc takes 8-17 ms and importing its bindings
60-140 ms; a process that only gets hits should pay for none of them.
"""

# Hundreds of paths in a few ms: os.path takes a third of the time of pathlib.
# ruff: noqa: PTH113, PTH116, PTH119, PTH123, PTH208
from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import site
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelstore.cuda.toolkit_names import INCLUDED, TOOLKIT_NAMES

__all__ = [
    "HeaderUnit",
    "defined_macros",
    "find_headers",
    "find_nvrtc",
    "is_toolkit_dir",
    "shadowed_names",
    "toolkit_dir_version",
]

_LOG = logging.getLogger(__name__)
# Where cuda.pathfinder looks in site-packages, in its order (1.1 to 1.9), whatever the version of cuda-bindings: with
# both wheels installed, bindings 12.9 load libnvrtc.so.13.
_WHEEL_LIBRARIES = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
_CONDA_LIBRARIES = ("lib64", "lib")
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
# Include directories below a toolkit's own: CUDA 13 moved CCCL to include/cccl.
_CCCL = "cccl"
_BUNDLED = ".nvrtc_headers_version"
_SYSTEM = "/usr/local/cuda"
_RUNTIME_HEADER = "cuda_runtime_api.h"
_CCCL_VERSION_HEADERS = ("cuda/std/__cccl/version.h", "cub/version.cuh")
# NVRTC of this version was the first to bundle headers.
_FIRST_WITH_HEADERS = (13, 5)
# As in `kernelstore.header_memo`.
_MARGIN_NS = 2 * 10**9
_CUDART_VERSION = re.compile(rb"^#define\s+CUDART_VERSION\s+([0-9]+)", re.MULTILINE)
_CCCL_VERSION = re.compile(rb"^\s*#\s*define\s+(CCCL_VERSION|CUB_VERSION)\s+([0-9]+)", re.MULTILINE)
# CUDART_VERSION is at byte 6143 of 600 KB, CCCL_VERSION within the first 4 KB.
_HEAD_BYTES = 16_384
_DIST_INFO = re.compile(r"nvidia_cuda_(runtime|cccl|crt|nvcc)(?:_cu([0-9]+))?-([0-9.]+)\.dist-info")
_TOOLKIT_COMPONENTS = {"cuda_cudart": "runtime", "cuda_cccl": "cccl", "cuda_crt": "crt", "cuda_nvcc": "nvcc"}


@dataclass(frozen=True, slots=True)
class HeaderUnit:
    """CUDA headers of one version.

    Parameters
    ----------
    version : str
        Another text for other headers, wherever they lie: ``"bundled 13.5.37"``, ``"cudart 12.9.79 cccl 2.8.2
        (12.9.27)"``, or ``"cudart 13.0 cccl 3.0.1 tree 5f1c0a9e"`` where only the headers themselves can tell: names
        and sizes of those in the upper two levels.
    directories : tuple of str
        Where they lie; empty for those that NVRTC bundles.
    bundled : str or None
        Build of the NVRTC that bundles them.
    """

    version: str
    directories: tuple[str, ...] = ()
    bundled: str | None = None

    @property
    def include_dirs(self) -> tuple[str, ...]:
        """Directories to search after the user's own, in this order.

        Those of NVRTC are extracted by the first compile that wants them (0.2-2 s) and checked by the others (150
        stats, 1-3 ms), so ask only to compile: a hit needs `version` alone. Empty, with a line in the log, where
        they can be extracted nowhere.
        """
        if self.bundled is None:
            return self.directories
        from kernelstore.cuda.bundled import bundled_headers  # 5-10 ms: tempfile, shutil

        directory = bundled_headers(self.bundled)
        if directory is None:
            _LOG.warning("the headers of NVRTC %s can be extracted nowhere; set CUDA_HOME to a toolkit", self.bundled)
            return ()
        return str(directory), str(directory / _CCCL)


def find_nvrtc() -> Path | None:
    """Return the libnvrtc that ``cuda.bindings`` would load, symbolic links resolved.

    Returns
    -------
    Path or None
        That of a wheel or of a conda environment. ``None`` where only the dynamic linker can tell (a system's
        toolkit): load it and ask `kernelstore.cuda.nvrtc.library_path`, which also knows of a libnvrtc that something
        else in this process had loaded before. A few stats.
    """
    for directory in _library_dirs():
        for soname in _SONAMES:
            path = os.path.join(directory, soname)
            if os.path.isfile(path):
                return Path(os.path.realpath(path))
    return None


def find_headers(build: str, library: Path | None) -> HeaderUnit | None:
    """Return the CUDA headers to compile with.

    In this order: headers of NVRTC's own major and minor version that include CCCL, from wheels, ``$CUDA_HOME``,
    ``$CUDA_PATH``, the toolkit around NVRTC, ``/usr/local/cuda-M.m``, ``/usr/local/cuda``; those that NVRTC bundles
    (13.5 and newer; extracted on first use); those of its own version without CCCL; those of its major version.
    Never those of another one: mixing them compiles, with wrong results.

    Parameters
    ----------
    build : str
        NVRTC's, such as ``"13.5.37"``.
    library : Path or None
        Its libnvrtc.

    Returns
    -------
    HeaderUnit or None
        Kept for the process; a search takes 0.5-2 ms. NVRTC is not loaded.
    """
    return _search(
        build,
        None if library is None else os.fspath(library),
        os.environ.get("CUDA_HOME", ""),
        os.environ.get("CUDA_PATH", ""),
        tuple(sys.path),
    )


def is_toolkit_dir(path: str | os.PathLike[str]) -> bool:
    """Return whether an include directory is a toolkit's own, so that what it holds is external (a few stats)."""
    return any(
        os.path.exists(os.path.join(path, marker))
        for marker in (_RUNTIME_HEADER, "cuda/std/version", "cuda/std/detail/__config", _BUNDLED)
    )


def toolkit_dir_version(path: str | os.PathLike[str]) -> str | None:
    """Return a text for the version of a toolkit's include directory that the caller named himself.

    ``None`` for a directory that is not a toolkit's. Nothing in such a directory is scanned, so this text must
    stand for it in the toolchain. Of a CCCL outside a toolkit (a checkout, which people edit) it covers all contents:
    200 ms, again in the same process 20-60 ms; otherwise 1 ms.
    """
    if not is_toolkit_dir(path):
        return None
    directory = os.path.realpath(path)
    root = os.path.dirname(directory) if os.path.basename(directory) == _CCCL else directory
    is_release = os.path.exists(os.path.join(root, _RUNTIME_HEADER)) or os.path.exists(os.path.join(root, _BUNDLED))
    release = _cudart_version(root)
    return _version_text((directory,), _patches(root, 12 if release is None else release[0]), deep=not is_release)


def shadowed_names(user_dir: str | os.PathLike[str]) -> list[str]:
    """Return what in a user's include directory toolkit headers would read: ``cub`` for theirs, or ``version``.

    ``#include <cub/cub.cuh>`` then finds the user's file on one machine and, if that one lacks the file, the
    toolkit's. Sorted; empty for a directory that does not exist. One listing of the directory.
    """
    try:
        entries = frozenset(os.listdir(user_dir))
    except OSError:
        return []
    missing = [name for name in INCLUDED if name.split("/")[0] in entries]
    included = [name for name in missing if os.path.isfile(os.path.join(user_dir, name))]
    return sorted({*(TOOLKIT_NAMES & entries), *included})


@functools.lru_cache(maxsize=64)
def defined_macros(include_dirs: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the names that a header in the directories defines as macros, sorted.

    Kept for the process: 0.1 s for the 2,000 headers of a toolkit, 1 s where they are not in memory.
    """
    definition = re.compile(rb"\bdefine[ \t]+(%s)\b" % b"|".join(re.escape(name.encode()) for name in names))
    found = set()
    for include in include_dirs:
        for directory, _, files in os.walk(include):
            for name in files:
                found.update(definition.findall(_head(os.path.join(directory, name), -1)))
    return tuple(sorted(name.decode() for name in found))


def _library_dirs() -> Iterator[str]:
    for relative in _WHEEL_LIBRARIES:
        for packages in _site_packages():
            yield os.path.join(packages, relative)
    if conda := os.environ.get("CONDA_PREFIX"):
        for relative in _CONDA_LIBRARIES:
            yield os.path.join(conda, relative)


def _site_packages() -> list[str]:
    """Return the site-packages directories in the order of cuda.pathfinder."""
    found = site.getsitepackages()
    if site.ENABLE_USER_SITE and (user := site.getusersitepackages()):
        found.insert(1 if sys.prefix != sys.base_prefix else 0, user)
    return found


@functools.lru_cache(maxsize=16)
def _search(
    build: str, library: str | None, cuda_home: str, cuda_path: str, sys_path: tuple[str, ...]
) -> HeaderUnit | None:
    major, minor = (int(number) for number in build.split(".")[:2])
    # Own version without CCCL, then own major version: what is left where nothing better is found.
    spare: dict[bool, tuple[str, ...]] = {}
    for include_dirs in _candidates(major, minor, library, (cuda_home, cuda_path), sys_path):
        release = _cudart_version(include_dirs[0])
        if release == (major, minor) and _cccl_version(include_dirs) is not None:
            return _unit(include_dirs, major)
        if release is not None and release[0] == major:
            spare.setdefault(release == (major, minor), include_dirs)
    if (major, minor) >= _FIRST_WITH_HEADERS:
        return HeaderUnit(f"bundled {build}", bundled=build)
    found = spare.get(True) or spare.get(False)
    return None if found is None else _unit(found, major)


def _unit(include_dirs: tuple[str, ...], major: int) -> HeaderUnit:
    return HeaderUnit(_version_text(include_dirs, _patches(include_dirs[0], major)), include_dirs)


def _candidates(
    major: int, minor: int, library: str | None, roots: tuple[str, ...], sys_path: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Yield include directories that may be a unit, best first; the first one of each holds the runtime's headers."""
    around = None if library is None else os.path.dirname(os.path.dirname(library))
    packages = [] if around is None else [os.path.dirname(os.path.dirname(around))]
    for directory in dict.fromkeys([*packages, *sys_path]):
        if major >= 13:
            yield from _toolkit(os.path.join(directory, "nvidia", f"cu{major}"))
        else:
            yield from _split_wheels(os.path.join(directory, "nvidia"))
    for root in (*roots, around, f"{_SYSTEM}-{major}.{minor}", _SYSTEM):
        if root:
            yield from _toolkit(root)


def _toolkit(root: str) -> Iterator[tuple[str, ...]]:
    include = os.path.join(root, "include")
    if os.path.isfile(os.path.join(include, _RUNTIME_HEADER)):
        include = os.path.realpath(include)
        cccl = os.path.join(include, _CCCL)
        yield (include, cccl) if os.path.isdir(cccl) else (include,)


def _split_wheels(nvidia: str) -> Iterator[tuple[str, ...]]:
    """Yield what the wheels of CUDA 12 make up, each in a directory of its own."""
    if os.path.isfile(os.path.join(nvidia, "cuda_runtime", "include", _RUNTIME_HEADER)):
        directories = (os.path.join(nvidia, name, "include") for name in ("cuda_runtime", "cuda_cccl", "cuda_nvcc"))
        yield tuple(directory for directory in directories if os.path.isdir(directory))


def _cudart_version(include: str) -> tuple[int, int] | None:
    path = os.path.join(include, _RUNTIME_HEADER)
    match = _CUDART_VERSION.search(_head(path)) or _CUDART_VERSION.search(_head(path, -1))
    return None if match is None else (int(match[1]) // 1000, int(match[1]) % 1000 // 10)


def _cccl_version(include_dirs: tuple[str, ...]) -> str | None:
    for include in include_dirs:
        for header in _CCCL_VERSION_HEADERS:
            if match := _CCCL_VERSION.search(_head(os.path.join(include, header))):
                number = int(match[2])
                # CCCL_VERSION is MMMmmmppp, CUB_VERSION MMMmmmpp.
                step = 1000 if match[1] == b"CCCL_VERSION" else 100
                return f"{number // (1000 * step)}.{number // step % 1000}.{number % step}"
    return None


def _head(path: str, size: int = _HEAD_BYTES) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return b""


def _patches(include: str, major: int) -> dict[str, str]:
    """Return the versions that packages tell of the parts of a unit; empty where none does."""
    root = os.path.dirname(include)
    if os.path.basename(os.path.dirname(root)) == "nvidia":
        return _wheel_versions(os.path.dirname(os.path.dirname(root)), major)
    try:
        parts = json.loads(_head(os.path.join(root, "version.json"), -1))
        return {name: parts[part]["version"] for part, name in _TOOLKIT_COMPONENTS.items() if part in parts}
    except (ValueError, TypeError, KeyError):
        return {}


def _wheel_versions(packages: str, major: int) -> dict[str, str]:
    versions = {}
    for entry in os.listdir(packages):
        # Names of CUDA 12's wheels end in _cu12, those of CUDA 13's do not.
        match = _DIST_INFO.fullmatch(entry)
        if match is not None and (match[2] == str(major) or (match[2] is None and major >= 13)):
            versions[match[1]] = match[3]
    return versions if "runtime" in versions or "cccl" in versions else {}


def _version_text(include_dirs: tuple[str, ...], patches: dict[str, str], *, deep: bool = False) -> str:
    parts = []
    if release := _cudart_version(include_dirs[0]):
        parts.append(f"cudart {patches.get('runtime') or f'{release[0]}.{release[1]}'}")
    if cccl := _cccl_version(include_dirs):
        parts.append(f"cccl {cccl}")
        if "cccl" in patches:
            parts.append(f"({patches['cccl']})")
    parts.extend(f"{name} {patches[name]}" for name in ("crt", "nvcc") if name in patches)
    if (release and "runtime" not in patches) or (cccl and "cccl" not in patches) or not parts:
        parts.append(f"tree {_tree_digest(include_dirs, deep=deep)}")
    return " ".join(parts)


def _tree_digest(include_dirs: tuple[str, ...], *, deep: bool) -> str:
    """Return 8 hex digits over names and contents of all headers, or over names and sizes of the upper two levels."""
    digest = hashlib.sha256(usedforsecurity=False)
    for include in include_dirs:
        for directory, children, files in os.walk(include):
            relative = os.path.relpath(directory, include)
            if relative != "." and not deep:
                children.clear()
            children.sort()
            for name in sorted(files):
                if not name.startswith(".nvrtc"):
                    path = os.path.join(directory, name)
                    told = _content_digest(path) if deep else str(os.stat(path).st_size)
                    digest.update(f"{relative}/{name}\0{told}\0".encode(errors="replace"))
    return digest.hexdigest()[:8]


def _content_digest(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        # A link to nowhere, as editors leave them.
        return ""
    if not stat.S_ISREG(found.st_mode):
        return ""
    stamp = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    # A younger file could be written once more and keep its stamp: docs/headers.md, "The memo".
    if max(stamp[2:]) + _MARGIN_NS > time.time_ns():
        return _content_digest_at.__wrapped__(path, stamp)
    return _content_digest_at(path, stamp)


@functools.lru_cache(maxsize=10_000)
def _content_digest_at(path: str, _stamp: tuple[int, ...]) -> str:
    return hashlib.sha256(_head(path, -1), usedforsecurity=False).hexdigest()
