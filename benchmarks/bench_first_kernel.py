"""A new process to its first launchable kernel: kernelstore cold and warm, beside plain NVRTC and a cubin file.

Each way runs in new processes, in turn, with the driver's compute cache off. Where there is no GPU, "launchable"
is "verified bytes in memory", and nothing touches the driver. Times are of the whole process, and from its first
line to the kernel.

    python benchmarks/bench_first_kernel.py --runs 15 --save first_kernel_h200
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from measure import child, device, parser, report, summary

from kernelstore import Compiler, Store
from kernelstore.cli.demo import DEMOS

_CLOCK = "import time; started = time.perf_counter()\n"
_DONE = "print((time.perf_counter() - started) * 1000)"

_KERNELSTORE = (
    _CLOCK
    + """
import sys
from kernelstore import Compiler, Store
path, source, name, arch, options, names, launchable = sys.argv[1:8]
names = tuple(filter(None, names.split("|")))
compiler = Compiler(Store(path))
given = dict(name=name, options=tuple(options.split()), name_expressions=names)
if launchable:
    kernel = compiler.module(open(source).read(), **given).get_kernel(launchable)
else:
    compiler.compile(open(source).read(), arch=arch, **given)
"""
    + _DONE
)

_NVRTC = (
    _CLOCK
    + """
import sys
from cuda.bindings import nvrtc
path, source, name, arch, options, names, launchable, *dirs = sys.argv[1:]
def check(result):
    assert result[0] == 0, result
    return result[1] if len(result) > 1 else None
program = check(nvrtc.nvrtcCreateProgram(open(source).read().encode(), name.encode(), 0, [], []))
names = [part.encode() for part in names.split("|") if part]
for part in names:
    check(nvrtc.nvrtcAddNameExpression(program, part))
flags = [f"--gpu-architecture={arch}".encode(), *map(str.encode, options.split()), *(f"-I{d}".encode() for d in dirs)]
check(nvrtc.nvrtcCompileProgram(program, len(flags), flags))
cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
check(nvrtc.nvrtcGetCUBIN(program, cubin))
wanted = launchable.encode()
if wanted in names:
    wanted = check(nvrtc.nvrtcGetLoweredName(program, wanted))
"""
)

_FILE = (
    _CLOCK
    + """
import sys
path, source, name, arch, options, names, launchable, lowered = sys.argv[1:]
cubin = open(path, "rb").read()
wanted = lowered.encode()
def check(result):
    assert result[0] == 0, result
    return result[1] if len(result) > 1 else None
"""
)

_LOAD = """
if launchable:
    from cuda.bindings import driver
    check(driver.cuInit(0))
    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
    check(driver.cuCtxSetCurrent(context))
    library = check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    check(driver.cuKernelGetFunction(check(driver.cuLibraryGetKernel(library, wanted))))
"""

_PROGRAMS = ("saxpy_template", "half_axpy", "block_sort")


def main() -> None:
    """Measure and print one table per program."""
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=15, help="processes for each way")
    given = options.parse_args()
    gpu = device()
    arch = "sm_90" if gpu is None else gpu.split(", ")[1]
    results = {}
    for demo in DEMOS:
        if demo.name in _PROGRAMS:
            results[demo.name] = _measure(demo, arch, launchable=gpu is not None, runs=given.runs)
            _print(demo.name, arch, results[demo.name])
    report(given.save, "new process to first launchable kernel, ms", results)


def _measure(demo: object, arch: str, *, launchable: bool, runs: int) -> dict[str, dict[str, dict[str, float]]]:
    from kernelstore.cuda import nvrtc, toolkit
    from kernelstore.db.file import prepare

    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        source = root / demo.file
        source.write_text(demo.source)
        names = "|".join(demo.name_expressions)
        kernel = demo.launches[0].kernel if launchable else ""
        common = (source, demo.file, arch, " ".join(demo.options), names, kernel)
        with Store(root / "warm.db") as store, Compiler(store) as compiler:
            artifact = compiler.compile(
                demo.source, arch=arch, name=demo.file, options=demo.options, name_expressions=demo.name_expressions
            )
        lowered = next((s.lowered_name for s in artifact.symbols if s.name == kernel), kernel)
        (root / "kernel.cubin").write_bytes(artifact.payload)
        unit = toolkit.find_headers(nvrtc.build(), toolkit.find_nvrtc()) if demo.needs_headers else None
        include_dirs = () if unit is None else unit.include_dirs

        def cold() -> tuple[float, str]:
            path = root / "cold.db"
            for old in root.glob("cold.db*"):
                old.unlink()
            prepare(path)
            return child(_KERNELSTORE, path, *common)

        ways: dict[str, Callable[[], tuple[float, str]]] = {
            "cubin file": lambda: child(_FILE + _LOAD + _DONE, root / "kernel.cubin", *common, lowered),
            "kernelstore, warm": lambda: child(_KERNELSTORE, root / "warm.db", *common),
            "kernelstore, cold": cold,
            "NVRTC": lambda: child(_NVRTC + _LOAD + _DONE, "", *common, *include_dirs),
        }
        whole: dict[str, list[float]] = {name: [] for name in ways}
        inside: dict[str, list[float]] = {name: [] for name in ways}
        for run in range(runs + 1):
            for name, way in ways.items():
                wall_ms, printed = way()
                if run:  # the first one fills the page cache
                    whole[name].append(wall_ms)
                    inside[name].append(float(printed))
    return {name: {"process": summary(whole[name]), "to kernel": summary(inside[name])} for name in ways}


def _print(program: str, arch: str, ways: dict[str, dict[str, dict[str, float]]]) -> None:
    floor = ways["cubin file"]["process"]["median"]
    print(f"\n{program} for {arch}: ms, medians (p90)")
    print(f"{'':20}{'whole process':>20}{'of the floor':>14}{'to the kernel':>20}")
    for name, taken in ways.items():
        process, kernel = taken["process"], taken["to kernel"]
        print(
            f"{name:20}{process['median']:>11.1f} ({process['p90']:.1f}){process['median'] / floor:>12.2f} x"
            f"{kernel['median']:>12.1f} ({kernel['p90']:.1f})"
        )


if __name__ == "__main__":
    main()
