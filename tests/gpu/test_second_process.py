"""Compile and store in one process; in the next one load, launch and check against numpy without NVRTC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernelstore.cli.demo import DEMOS

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys
from kernelstore import Compiler, Store
from kernelstore.cli.demo import DEMOS
from kernelstore.cli.demo.device import run

path, file, may_compile = sys.argv[1:]
if not may_compile:
    from kernelstore.cuda import nvrtc
    nvrtc.compile_program = None
demo = next(demo for demo in DEMOS if demo.file == file)
with Store(path) as store, Compiler(store) as compiler:
    module = compiler.module(
        demo.source, name=demo.file, options=demo.options, name_expressions=demo.name_expressions
    )
    mismatches = [line for launch in demo.launches for line in run(module, launch)]
    print(mismatches, store.stats().compiles, "libnvrtc" in open("/proc/self/maps").read())
"""


@pytest.mark.parametrize("file", [demo.file for demo in DEMOS])
def test_the_second_process_launches_what_the_first_one_compiled(
    path: Path, file: str, run_python: Callable[..., str]
) -> None:
    first = run_python(SCRIPT, path, file, "yes")
    second = run_python(SCRIPT, path, file, "")

    assert first.split() == ["[]", "1", "True"]
    assert second.split() == ["[]", "1", "False"]
