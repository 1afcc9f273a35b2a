"""The headers that NVRTC brings along, extracted once per build into the user's cache directory.

Many processes may want them at once, any of them may be killed, and files in cache directories get deleted. So a tree
is extracted beside its place and renamed into it; it counts as whole while its directories have the times that
were noted when it was sealed; and a tree that does not is mended file by file, so that a compile that reads it
meanwhile never finds a header absent.
"""

# Hundreds of paths in a few ms: os.path takes a third of the time of pathlib.
# ruff: noqa: PTH116
from __future__ import annotations

import contextlib
import fcntl
import filecmp
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kernelstore import settings
from kernelstore.cuda import nvrtc
from kernelstore.errors import ToolchainError

__all__ = ["bundled_headers"]

_LOG = logging.getLogger(__name__)
# Extraction takes 0.1-2 s. Who has waited this long for another process extracts too, which is safe.
_LOCK_TIMEOUT_S = 20.0
_LOCK_POLL_S = 0.02
# Trees that killed processes left half-extracted.
_ABANDONED_S = 3600.0


def bundled_headers(build: str) -> Path | None:
    """Return a directory with the headers of this NVRTC, extracted now if they are not there yet.

    Parameters
    ----------
    build : str
        Of the NVRTC that cuda.bindings loads, such as ``"13.5.37"``: the directory's name.

    Returns
    -------
    Path or None
        In the user's cache directory, else (read-only home) in the directory for temporary files. ``None`` where
        neither can be used. 150 stats where they are there, 0.2-2 s where they are not.
    """
    for_temporary_files = Path(tempfile.gettempdir(), f"kernelstore-headers-{os.geteuid()}")
    for root in (settings.cache_directory() / "headers", for_temporary_files):
        try:
            return _directory_in(root, build)
        except (OSError, ToolchainError) as error:
            _LOG.info("headers of NVRTC %s cannot be kept in %s: %s", build, root, error)
    return None


def _directory_in(root: Path, build: str) -> Path:
    _make_private(root)
    tree, seal = root / build, root / f"{build}.seal"
    if _is_whole(tree, seal):
        return tree
    with _locked(root / f"{build}.lock"):
        if not _is_whole(tree, seal):
            _sweep(root)
            _extract(tree, seal)
    return tree


def _make_private(root: Path) -> None:
    # One by one: with parents=True the upper one would get the umask's mode.
    root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    # Another user's headers would be compiled into our kernels.
    if found.st_uid != os.geteuid() or found.st_mode & 0o022 or not os.path.isdir(root) or root.is_symlink():
        raise PermissionError(f"{root} is not a directory that only this user can write")


def _extract(tree: Path, seal: Path) -> None:
    if nvrtc.build() != tree.name:
        raise ToolchainError(
            f"headers of NVRTC {tree.name} are wanted, but {nvrtc.build()} is loaded",
            library=nvrtc.library_path(),
            log="",
        )
    scratch = Path(tempfile.mkdtemp(prefix=".extracting-", dir=tree.parent))
    try:
        fresh = scratch / "headers"
        nvrtc.install_bundled_headers(fresh)
        try:
            fresh.rename(tree)
        except OSError:
            _mend(fresh, tree)
        sealed = scratch / "seal"
        sealed.write_text(_describe(tree), encoding="utf-8", errors="surrogateescape")
        sealed.replace(seal)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _mend(fresh: Path, tree: Path) -> None:
    """Make `tree` hold what `fresh` holds; each file is replaced at once, those that are right stay."""
    for directory, _, files in os.walk(fresh):
        target = tree / Path(directory).relative_to(fresh)
        if not target.is_dir():
            target.unlink(missing_ok=True)
            target.mkdir(parents=True)
        for name in files:
            source, destination = Path(directory, name), target / name
            if destination.is_dir() and not destination.is_symlink():
                shutil.rmtree(destination)
            if not (destination.is_file() and filecmp.cmp(source, destination, shallow=False)):
                source.replace(destination)


def _describe(tree: Path) -> str:
    """Return the boot, and for each directory its time (s), the size of its files (bytes) and its path."""
    lines = [_boot()]
    for directory, _, _ in os.walk(tree):
        seconds, size = int(os.stat(directory).st_mtime), _size_of_files(directory)
        lines.append(f"{seconds} {size} {os.path.relpath(directory, tree)}")
    return "\n".join(lines)


def _is_whole(tree: Path, seal: Path) -> bool:
    """Whether no file was added, renamed or removed since the tree was sealed.

    After a reboot sizes are compared too: a crash of the machine may leave files empty.
    """
    try:
        boot, *lines = seal.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
        same_boot = boot == _boot()
        for line in lines:
            seconds, size, path = line.split(" ", 2)
            directory = os.path.join(tree, path)
            if int(os.stat(directory).st_mtime) != int(seconds):
                return False
            if not same_boot and _size_of_files(directory) != int(size):
                return False
    except (OSError, ValueError):
        return False
    return len(lines) > 0


def _size_of_files(directory: str) -> int:
    with os.scandir(directory) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock, or go on without it where it cannot be had in time or the file system has no locks."""
    with path.open("ab") as file:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_LOCK_POLL_S)
                    continue
            except OSError as error:
                _LOG.debug("no lock on %s: %s", path, error)
            break
        yield


def _sweep(root: Path) -> None:
    for path in root.glob(".extracting-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
