"""What user headers cost a hit: 0, 10, 100 and 400 generated ones, and CUTLASS, beside NVRTC's compile.

Four costs for each: the scan in a new process that knows nothing (the first compile pays it), the same with the
memo of the store, the key again in a process that has it, and the check of a module that is held. The floor is as
many stats. CUTLASS is taken from the wheel `nvidia-cutlass`, downloaded and unpacked, and copied to a directory of its
own, so that it counts as user code; it needs a toolkit with the runtime's headers (CUDA_HOME).

    python benchmarks/bench_headers.py --cutlass DIRECTORY --runs 9 --save headers_cpu
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import child, parser, report, summary

_ASK = """
import json, os, sys, time
from kernelstore import Compiler, Store, header_memo
path, source, directory, options, repeats = sys.argv[1:]
source, options = open(source).read(), tuple(options.split())
def request():
    return compiler._request(source, 'cubin', arch='sm_90', name='', options=options, name_expressions=(),
                             include_dirs=(directory,), headers=None, extra=b'')
compiler = Compiler(Store(path))
compiler.store.recall_headers(['/'])  # the connection is not what is measured
started = time.perf_counter()
asked = request()
first = time.perf_counter() - started
again, holds, stats = [], [], []
for _ in range(int(repeats)):
    started = time.perf_counter()
    asked = request()
    again.append(time.perf_counter() - started)
    started = time.perf_counter()
    held = asked.trace.holds()
    holds.append(time.perf_counter() - started)
    files = [path for path, stamp in asked.trace.places.items() if stamp]
    started = time.perf_counter()
    for file in files:
        os.stat(file)
    stats.append(time.perf_counter() - started)
assert asked.uncacheable is None, asked.uncacheable[:200]
assert held
median = lambda values: sorted(values)[len(values) // 2] * 1e3
print(json.dumps({'first_ms': first * 1e3, 'again_ms': median(again), 'holds_ms': median(holds),
                  'stats_ms': median(stats), 'headers': len(asked.program.user_headers),
                  'places': len(asked.trace.places)}))
compiler.store.close()
"""

_COMPILE = """
import json, sys, time
from kernelstore import Compiler, Store
path, source, directory, options, _ = sys.argv[1:]
compiler = Compiler(Store(path))
took, hits = [], []
for cache in (False, True, True):
    started = time.perf_counter()
    artifact = compiler.compile(open(source).read(), arch='sm_90', options=tuple(options.split()),
                                include_dirs=(directory,), cache=cache)
    took.append((time.perf_counter() - started) * 1e3)
    hits.append(artifact.from_cache)
assert hits == [False, False, True], hits
print(json.dumps({'compile_ms': artifact.compile_ms, 'hit_in_process_ms': took[2]}))
compiler.store.close()
"""

_KERNEL = '\nextern "C" __global__ void k(float* a) { a[threadIdx.x] += 1.f; }\n'

# 200 lines and five includes each, as headers have.
_BODY = "".join(
    f"template<class T> __device__ T f{{}}_{line}(T a) {{ return a * T({line}); }} // it's\n" for line in range(200)
)


def generated(directory: Path, count: int) -> str:
    """Write headers that include each other, some beside, some by the path, and return a program for them."""
    for number in range(count):
        includes = [(number * 5 + step) for step in range(1, 6) if number * 5 + step < count]
        spelled = [f'"h{other}.h"' if other % 2 else f"<s/h{other}.h>" for other in includes]
        text = "#pragma once\n" + "".join(f"#include {name}\n" for name in spelled) + _BODY.replace("{}", str(number))
        (directory / "s").mkdir(parents=True, exist_ok=True)
        (directory / "s" / f"h{number}.h").write_text(text.replace("{{", "{").replace("}}", "}"))
    return ("#include <s/h0.h>" if count else "") + _KERNEL


def cutlass(directory: Path, wheel: Path) -> str:
    """Copy CUTLASS's headers and return a program that includes most of them."""
    source = next(path.parent for path in sorted(wheel.rglob("cutlass/cutlass.h"))).parent
    for name in ("cutlass", "cute"):
        shutil.copytree(source / name, directory / name)
    return "#include <cute/tensor.hpp>\n#include <cutlass/gemm/device/gemm.h>" + _KERNEL


def measured(work: Path, source: str, options: str, runs: int) -> dict[str, Any]:
    program = work / "k.cu"
    program.write_text(source)
    include = work / "include"
    include.mkdir(exist_ok=True)
    for path in (*include.rglob("*"), include):
        # Older than the margin: what people's headers are.
        os.utime(path, (time.time() - 1000,) * 2)
    time.sleep(2.5)
    cold, warm = [], []
    for run in range(runs):
        path = work / f"{run}.db"
        cold.append(json.loads(child(_ASK, path, program, include, options, 1)[1]))
        warm.append(json.loads(child(_ASK, path, program, include, options, 15)[1]))
    compiled = [json.loads(child(_COMPILE, work / f"c{run}.db", program, include, options, 0)[1]) for run in range(3)]
    return {
        "headers": warm[0]["headers"],
        "places": warm[0]["places"],
        "bytes": sum(path.stat().st_size for path in include.rglob("*") if path.is_file()),
        "new process, no memo, ms": summary([one["first_ms"] for one in cold]),
        "new process, memo, ms": summary([one["first_ms"] for one in warm]),
        "same process, key again, ms": summary([one["again_ms"] for one in warm]),
        "same process, held module, ms": summary([one["holds_ms"] for one in warm]),
        "as many stats, ms": summary([one["stats_ms"] for one in warm]),
        "hit in process, ms": summary([one["hit_in_process_ms"] for one in compiled]),
        "nvrtc compile, ms": summary([one["compile_ms"] for one in compiled]),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=9)
    arguments.add_argument("--cutlass", metavar="DIRECTORY", type=Path, help="the unpacked wheel nvidia-cutlass")
    given = arguments.parse_args()
    results = {}
    for count in (0, 10, 100, 400, "cutlass"):
        if count == "cutlass" and given.cutlass is None:
            continue
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            if count == "cutlass":
                source = cutlass(work / "include", given.cutlass)
            else:
                source = generated(work / "include", int(count))
            options = "-std=c++17 -default-device" if count == "cutlass" else "-std=c++17"
            results[str(count)] = measured(work, source, options, given.runs)
        print(count, json.dumps(results[str(count)], indent=2))
    report(given.save, "bench_headers", results)


if __name__ == "__main__":
    main()
