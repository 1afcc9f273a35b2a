"""What benchmarks share: percentiles, the machine's description, results as files."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

_PACKAGES = (
    "xxhash",
    "cuda-bindings",
    "cuda-core",
    "cupy-cuda13x",
    "nvidia-cuda-nvrtc",
    "nvidia-nvjitlink",
    "sqlalchemy",
    "lz4",
    "numpy",
)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, p90, p99 and maximum; with few values p99 is the maximum."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "n": len(ordered),
        "median": round(statistics.median(ordered), 4),
        "p90": round(at(0.90), 4),
        "p99": round(at(0.99), 4),
        "max": round(ordered[-1], 4),
    }


def machine() -> dict[str, Any]:
    """Describe where this ran."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "sqlite": sqlite3.sqlite_version,
        "device": device(),
        "packages": versions,
    }


def device() -> str | None:
    """Name and driver of the first GPU, or ``None``."""
    from kernelstore.cuda import driver

    if driver.device_count() == 0:
        return None
    major, minor = driver.compute_capability(0)
    return f"{driver.device_name(0)}, sm_{major}{minor}, driver {driver.driver_version()}"


def child(script: str, *arguments: object, **environment: str) -> tuple[float, str]:
    """Run a script in a new Python process; return its wall time in ms and what it printed.

    The driver's own compute cache is off: NVRTC and the JIT would answer from it.
    """
    import time

    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        | {"CUDA_CACHE_DISABLE": "1"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    took_ms = (time.perf_counter() - started) * 1000
    if done.returncode:
        raise RuntimeError(done.stderr)
    return took_ms, done.stdout


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    return options


def report(name: str | None, title: str, results: Mapping[str, Any]) -> None:
    """Save the results with the machine's description, if they have a name."""
    if name is None:
        return
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"benchmark": title, "command": "python " + " ".join(sys.argv), "machine": machine(), "results": results}
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"saved {path.relative_to(RESULTS.parents[1])}")
