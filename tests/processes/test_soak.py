"""The soak run of `benchmarks/soak.py`, short: everything at once on one file, with kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.parametrize("seconds", [8, pytest.param(600, marks=pytest.mark.long)])
def test_the_file_agrees_with_what_was_acknowledged(seconds: int) -> None:
    run = subprocess.run([sys.executable, SOAK, "--seconds", str(seconds)], capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stdout + run.stderr
    done = {line[:24].strip(): float(line[24:]) for line in run.stdout.splitlines()}
    for name in ("killed", "stopped", "puts acknowledged", "deletes acknowledged", "uses written", "hits checked"):
        assert done[name] > 0, name
