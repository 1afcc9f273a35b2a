"""The demo: real kernels for four generations; the second run is all hits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernelstore.cli.demo import DEMOS
from kernelstore.cuda import nvrtc, toolkit


def _run(path: Path, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "kernelstore", "demo", "--db", str(path), "--json", *arguments],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("archs", [("sm_90",), pytest.param((), marks=pytest.mark.long)])
def test_the_second_run_is_all_hits(path: Path, archs: tuple[str, ...]) -> None:
    if toolkit.find_headers(nvrtc.build(), toolkit.find_nvrtc()) is None:
        pytest.skip("no CUDA headers of this NVRTC's version here")
    arguments = [part for arch in archs for part in ("--arch", arch)]

    first, second = _run(path, *arguments)["kernels"], _run(path, *arguments)["kernels"]

    assert len(first) == len(DEMOS) * (len(archs) or 4)
    assert not any(made["from_cache"] for made in first)
    assert all(made["from_cache"] for made in second)
    assert all(0 < made["stored_size_bytes"] < made["size_bytes"] for made in first)
    assert sum(made["took_ms"] for made in second) < sum(made["took_ms"] for made in first)
