"""``kernelstore doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from kernelstore import __version__, settings
from kernelstore.cli import text
from kernelstore.cli.options import db_option, json_option
from kernelstore.cuda import driver, nvrtc, toolkit
from kernelstore.errors import KernelStoreError
from kernelstore.store import Store

__all__ = ["command"]

_PACKAGES = ("sqlalchemy", "alembic", "lz4", "xxhash", "numpy", "cuda-python", "cuda-bindings", "cuda-core")

# SQLite before 3.51.3, but for two backports, can lose commits when a checkpoint meets one ("WAL-reset bug").
_FIXED = (3, 51, 3)
_BACKPORTS = ((3, 50, 7), (3, 44, 6))


@dataclass(frozen=True, slots=True)
class _Finding:
    """One line of the report; `problem` says what to do about it."""

    topic: str
    value: str
    problem: str | None = None


@click.command("doctor")
@db_option
@json_option
def command(db: Path | None, as_json: bool) -> None:
    """Tell what this machine and this store are, and what is wrong with them. Exit status 1 if something is.

    \b
    Example:
      kernelstore doctor --db cache.db
    """
    findings = [*_python(), *_store(db), *_nvrtc(), *_driver()]
    if as_json:
        text.dump_json(findings)
    else:
        width = max(len(finding.topic) for finding in findings)
        for finding in findings:
            click.echo(f"{finding.topic:<{width}}  {finding.value}")
            if finding.problem is not None:
                click.echo(f"{'':<{width}}  -> {finding.problem}")
    if any(finding.problem is not None for finding in findings):
        raise SystemExit(1)


def _python() -> Iterator[_Finding]:
    yield _Finding("kernelstore", f"{__version__} on Python {platform.python_version()}, {platform.platform()}")
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    yield _Finding("packages", ", ".join(versions))
    version = sqlite3.sqlite_version_info
    fixed = version >= _FIXED or any(version[:2] == b[:2] and version >= b for b in _BACKPORTS)
    note = "" if fixed else "; has the WAL-reset bug, which guarded checkpoints avoid"
    yield _Finding("SQLite", sqlite3.sqlite_version + note)
    named = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("KERNELSTORE_")]
    yield _Finding("environment", ", ".join(named) or "no KERNELSTORE_* set")


def _store(db: Path | None) -> Iterator[_Finding]:
    if db is None and settings.flag("DISABLE"):
        yield _Finding("store", "disabled by KERNELSTORE_DISABLE")
        return
    try:
        path = settings.default_path() if db is None else db
    except KernelStoreError as error:
        yield _Finding("store", "none", str(error))
        return
    if not path.exists():
        yield _Finding("store", f"none yet at {path}")
        return
    try:
        with Store(path) as store:
            stats = store.stats()
            path = store.path
    except KernelStoreError as error:
        yield _Finding("store", str(db or "default"), str(error))
        return
    yield _Finding("store", f"{path}, {stats.artifacts} artifacts, {text.size(stats.file_bytes)}")
    yield _Finding("WAL", text.size(stats.wal_bytes))
    yield _permissions(path)
    yield _permissions(path.parent)


def _permissions(path: Path) -> _Finding:
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    # A directory with the sticky bit, such as /tmp, lets nobody replace another's file.
    open_to_all = mode & 0o002 and not mode & stat.S_ISVTX
    problem = f"everybody can write it: chmod o-w {path}" if open_to_all else None
    return _Finding("permissions", f"{path}: {mode:04o}, owner {found.st_uid}", problem)


def _nvrtc() -> Iterator[_Finding]:
    try:
        build = nvrtc.build()
    except KernelStoreError as error:
        yield _Finding("NVRTC", "not usable", str(error))
        return
    archs = nvrtc.supported_archs()
    yield _Finding("NVRTC", f"{build} from {nvrtc.library_path()}, for sm_{min(archs)} to sm_{max(archs)}")
    headers = toolkit.find_headers(build, toolkit.find_nvrtc())
    if headers is None:
        remedy = (
            "programs that include <cuda_fp16.h> or <cub/cub.cuh> need pip install nvidia-cuda-runtime nvidia-cuda-cccl"
        )
        yield _Finding("CUDA headers", "none", remedy)
    else:
        yield _Finding("CUDA headers", f"{headers.version}: {', '.join(headers.include_dirs)}")


def _driver() -> Iterator[_Finding]:
    version = driver.driver_version()
    if version is None:
        yield _Finding("CUDA driver", "none: everything but loading works")
        return
    yield _Finding("CUDA driver", f"{version} (CUDA {version // 1000}.{version % 1000 // 10})")
    try:
        count = driver.device_count()
    except KernelStoreError as error:
        yield _Finding("devices", "none usable", str(error))
        return
    for device in range(count):
        major, minor = driver.compute_capability(device)
        yield _Finding(f"device {device}", f"{driver.device_name(device)}, sm_{major}{minor}")
    try:
        newest = nvrtc.version()
    except KernelStoreError:
        return
    if newest[0] > version // 1000:
        remedy = (
            f"cubins of NVRTC {newest[0]} need a driver for CUDA {newest[0]}: install kernelstore[cu{version // 1000}]"
        )
        yield _Finding("driver and NVRTC", f"NVRTC {newest[0]}.{newest[1]} is of a newer major", remedy)
    elif newest > (version // 1000, version % 1000 // 10):
        yield _Finding("driver and NVRTC", "NVRTC is newer: its cubins load, its PTX does not (222)")
    else:
        yield _Finding("driver and NVRTC", "fit together")
