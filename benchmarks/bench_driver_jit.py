"""PTX to machine code: the driver's whole-program JIT, the driver's linker, nvJitLink, and NVRTC's own cubin.

For each the time it takes, the size of the cubin, registers and stack of the kernel, and how fast the kernel runs.
Both linkers compile PTX as relocatable code, which costs where functions are called; the driver gives its JIT's code
to nobody, so it has no size here. All times are taken in one process, in turn, with the driver's compute cache off.

    python benchmarks/bench_driver_jit.py --runs 15 --save driver_jit_h200
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

# Before the driver is initialised: it would answer from its cache.
os.environ["CUDA_CACHE_DISABLE"] = "1"

import numpy as np
from measure import parser, report, summary

from kernelstore import Artifact, Compiler, Store, choice, load
from kernelstore.arch import Arch
from kernelstore.cuda import driver, nvjitlink
from kernelstore.errors import KernelStoreError
from kernelstore.linker import Linker

_COUNT = 1 << 20
_LAUNCHES = 20

_PLAIN = """
extern "C" __global__ void kernel(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 1.5f * x[i] + 1.0f;
}
"""
_TERMS = "\n".join(f"    s = fmaf(s, 0.5f, sinf(v * {term}.25f));" for term in range(60))
_INLINED = f"""
extern "C" __global__ void kernel(float* x, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i], s = 0;
{_TERMS}
    x[i] = s;
}}
"""
_CALLS = """
__device__ __noinline__ float turn(float x, float y, int n) {
    float s = y;
    for (int i = 0; i < n; i++) s = fmaf(s, 0.99f, __sinf(x + i));
    return s;
}
__device__ __noinline__ float fold(float a, float b, float c, float d) { return turn(a, b, 3) + turn(c, d, 5); }
extern "C" __global__ void kernel(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v[8];
    for (int k = 0; k < 8; k++) v[k] = x[(i + k) % n];
    for (int k = 0; k < 16; k++) v[k & 7] = fold(v[k & 7], v[k + 1 & 7], v[k + 2 & 7], v[k + 3 & 7]);
    x[i] = v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7];
}
"""
_SORT = """
#include <cub/block/block_radix_sort.cuh>
extern "C" __global__ void kernel(float* x, int n) {
    using Sort = cub::BlockRadixSort<float, 256, 4>;
    __shared__ typename Sort::TempStorage storage;
    float keys[4];
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    for (int k = 0; k < 4; k++) keys[k] = x[(first + k) % n];
    Sort(storage).Sort(keys);
    for (int k = 0; k < 4; k++) x[(first + k) % n] = keys[k];
}
"""
_PROGRAMS = {
    "plain": (_PLAIN, ()),
    "60 terms, inlined": (_INLINED, ()),
    "calls, not inlined": (_CALLS, ()),
    "CUB block sort": (_SORT, ("-std=c++17",)),
}


def main() -> None:
    """Measure and print one table per program."""
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=15, help="times that each way is taken")
    given = options.parse_args()
    device = driver.initialise().make_current()
    arch = Arch(*driver.compute_capability(device))
    print(f"{driver.device_name(device)}, libcuda {driver.driver_build()}, nvJitLink {_told(nvjitlink.build)}")
    results = {}
    for name, (source, flags) in _PROGRAMS.items():
        results[name] = _measure(source, flags, arch, given.runs)
        _print(name, results[name])
    report(given.save, "PTX to machine code: ms, bytes, registers; the kernel's us", results)


def _measure(source: str, flags: tuple[str, ...], arch: Arch, runs: int) -> dict[str, dict[str, Any]]:
    loaded = driver.initialise()
    results: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory() as place,
        Store(f"{place}/cache.db") as store,
        Compiler(store, options=flags) as compiler,
    ):

        def by_nvrtc() -> Artifact:
            return compiler.compile(source, arch=str(arch), cache=False)

        ptx = _for_driver(compiler.compile(source, "ptx", arch=str(arch.as_virtual()), cache=False), loaded.version)

        def by_driver_linker() -> Artifact:
            return Artifact.from_bytes(loaded.link_ptx(ptx, ptx.payload))

        def by_nvjitlink() -> Artifact:
            return Linker().link([ptx], arch=str(arch))

        ways: dict[str, Callable[[], Artifact]] = {
            "driver JIT": lambda: ptx,
            "driver's linker": by_driver_linker,
            "nvJitLink": by_nvjitlink,
            "NVRTC's cubin": by_nvrtc,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for run in range(runs + 1):
            for name, way in ways.items():
                if "error" in results.get(name, {}):
                    continue
                try:
                    started = time.perf_counter()
                    artifact = way()
                    with load(artifact) as module:
                        kernel = module.get_kernel("kernel")
                        took_ms = (time.perf_counter() - started) * 1000
                        took_us = _speed_us(kernel)
                        attributes = dataclasses.asdict(kernel.attributes)
                except KernelStoreError as error:
                    results[name] = {"error": str(error)}
                    continue
                if run:  # the first one loads compilers
                    times[name].append(took_ms)
                    speeds[name].append(took_us)
                results[name] = {
                    "arch": artifact.arch,
                    "size_bytes": None if artifact.kind == "ptx" else artifact.size_bytes,
                    "attributes": attributes,
                }
    for name, result in results.items():
        if times[name]:
            result |= {"to_kernel_ms": summary(times[name]), "kernel_us": summary(speeds[name])}
    return results


def _for_driver(ptx: Artifact, version: int) -> Artifact:
    # NVRTC writes its own, newest `.version`, which the driver may not know; nothing in these programs needs it.
    newest = choice.newest_ptx(version)
    if newest is None or ptx.ptx_version is None or ptx.ptx_version <= newest:
        return ptx
    had, has = (b".version %d.%d" % divmod(number, 100) for number in (ptx.ptx_version, newest))
    return dataclasses.replace(ptx, payload=ptx.payload.replace(had, has, 1), ptx_version=newest)


def _speed_us(kernel: Any) -> float:
    """Return the shortest of some launches: a kernel cannot run faster than its code lets it."""
    from cuda.bindings import driver as api

    def checked(answer: tuple[Any, ...]) -> Any:
        assert int(answer[0]) == 0, answer
        return answer[1] if len(answer) > 1 else None

    memory = checked(api.cuMemAlloc(4 * _COUNT))
    begin, end = checked(api.cuEventCreate(0)), checked(api.cuEventCreate(0))
    try:
        checked(api.cuMemsetD32(memory, 0x3F800000, _COUNT))
        shortest = float("inf")
        for _ in range(_LAUNCHES):
            checked(api.cuEventRecord(begin, 0))
            kernel.launch(_COUNT // 256, 256, (int(memory), np.int32(_COUNT)))
            checked(api.cuEventRecord(end, 0))
            checked(api.cuEventSynchronize(end))
            shortest = min(shortest, checked(api.cuEventElapsedTime(begin, end)) * 1000)
        return shortest
    finally:
        checked(api.cuEventDestroy(begin))
        checked(api.cuEventDestroy(end))
        checked(api.cuMemFree(memory))


def _told(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except KernelStoreError as error:
        return f"none ({error})".partition("\n")[0]


def _print(program: str, ways: dict[str, dict[str, Any]]) -> None:
    print(f"\n{program}: medians (p90)")
    print(f"{'':18}{'to the kernel, ms':>22}{'bytes':>10}{'arch':>12}{'registers':>11}{'local':>7}{'kernel, us':>18}")
    for name, result in ways.items():
        if "error" in result:
            print(f"{name:18}{result['error'][:100]}")
            continue
        taken, speed, attributes = result["to_kernel_ms"], result["kernel_us"], result["attributes"]
        print(
            f"{name:18}{taken['median']:>13.2f} ({taken['p90']:.2f}){result['size_bytes'] or '-':>10}"
            f"{result['arch']:>12}{attributes['registers']:>11}{attributes['local_bytes']:>7}"
            f"{speed['median']:>11.2f} ({speed['p90']:.2f})"
        )


if __name__ == "__main__":
    main()
