"""Many processes on one cache: hits a second and their latency, and one cold kernel that 32 processes want.

The same blobs in each cache: cubins of 3 to 80 KB. Every process of a run takes hits of random keys for as long as the
others; in the runs "with a writer" one more process puts new entries as fast as it can meanwhile. For the cold kernel
each process looks it up and, where it is absent, compiles it with NVRTC and puts it; kernelstore's own `Compiler` does
so with single flight, the others have none.

    pip install "kernelstore[cu13,bench]"
    python benchmarks/bench_contention.py --save contention
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import random
import tempfile
import time
from array import array
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

from measure import parser, report, summary
from peers import PEERS, Cache

from kernelstore import Artifact, Compiler, Key, Store

_SPAWN = multiprocessing.get_context("spawn")

_KERNEL = """
extern "C" __global__ void k{name}(float* x, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = x[i % n];
    #pragma unroll
    for (int j = 0; j < {terms}; j++) v = v * x[(i + j * {name} + 7) % (n + j)] + sqrtf(v + j);
    x[i] = v;
}}
"""

# Some two seconds of NVRTC.
_COLD = _KERNEL.format(name="cold", terms=300).replace("j * cold", "j * 3")


def main() -> None:
    """Measure and print two tables."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=1.0, help="how long each run takes hits")
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    options.add_argument("--askers", type=int, default=32, help="processes that want the cold kernel")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        artifacts = _artifacts(place)
        sizes = [len(artifact.payload) for artifact in artifacts]
        results: dict[str, Any] = {"blob_bytes": {"median": sorted(sizes)[len(sizes) // 2], "max": max(sizes)}}
        results["hits"] = {peer: {} for peer in PEERS}
        print(
            f"{'hits':<34}{'processes':>10}{'writer':>8}{'hits/s':>10}{'p50 us':>9}"
            f"{'p99 us':>10}{'p99.9 us':>10}{'max us':>11}"
        )
        for count in given.processes:
            for with_writer in (False, True):
                for peer in PEERS:
                    took = _hits(place, peer, artifacts, count, with_writer, given.seconds)
                    results["hits"][peer][f"{count}{' and a writer' if with_writer else ''}"] = took
                    print(
                        f"{peer:<34}{count:>10}{'yes' if with_writer else '':>8}{took['hits_per_s']:>10.0f}"
                        f"{took['median']:>9.1f}{took['p99']:>10.1f}{took['p999']:>10.1f}{took['max']:>11.1f}",
                        flush=True,
                    )
        results["cold"] = _cold(place, given.askers)
    report(
        given.save, "Many processes on one cache: hits a second, latency in us; compiles of one cold kernel", results
    )


def _artifacts(place: Path) -> list[Artifact]:
    with Store(place / "made.db") as store, Compiler(store) as compiler:
        return [
            dataclasses.replace(
                compiler.compile(_KERNEL.format(name=name, terms=terms), arch="sm_90"), from_cache=False
            )
            for name, terms in enumerate([1, 8, 24, 48] * 8)
        ]


# -- hits ------------------------------------------------------------------------------------------------------------


def _hits(
    place: Path, peer: str, artifacts: list[Artifact], count: int, with_writer: bool, seconds: float
) -> dict[str, Any]:
    path = Path(tempfile.mkdtemp(dir=place))
    cache = PEERS[peer](path)
    for artifact in artifacts:
        cache.put(artifact)
    cache.close()
    barrier, stop = _SPAWN.Barrier(count + with_writer + 1), _SPAWN.Event()
    told: Queue[bytes] = _SPAWN.Queue()
    keys = [artifact.key for artifact in artifacts]
    children = [_SPAWN.Process(target=_read, args=(peer, path, keys, barrier, stop, told)) for _ in range(count)]
    if with_writer:
        children.append(_SPAWN.Process(target=_write, args=(peer, path, pickle.dumps(artifacts), barrier, stop, told)))
    for child in children:
        child.start()
    barrier.wait()
    started = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    took_ns, puts, misses = array("q"), 0, 0
    for _ in children:
        kind, content, missed = pickle.loads(told.get())
        misses += missed
        if kind == "read":
            took_ns.frombytes(content)
        else:
            puts = content
    took_s = time.perf_counter() - started
    for child in children:
        child.join()
    ordered = sorted(took_ns)
    return {name: value for name, value in summary([ns / 1000 for ns in ordered]).items() if name != "p90"} | {
        "p999": round(ordered[min(len(ordered) - 1, int(0.999 * len(ordered)))] / 1000, 4),
        "hits_per_s": round(len(ordered) / took_s),
        "misses": misses,
        "puts_per_s": round(puts / took_s) if with_writer else None,
    }


def _read(peer: str, path: Path, keys: list[Key], barrier: Barrier, stop: Event, told: Queue[bytes]) -> None:
    cache = PEERS[peer](path)
    chosen = random.choices(keys, k=1009)
    cache.get(keys[0])
    took_ns, misses = array("q"), 0
    clock = time.perf_counter_ns
    barrier.wait()
    while not stop.is_set():
        # Asking the event takes a system call, so not at each hit; fewer of the slow ones pass in between.
        until = clock() + 5_000_000
        while (started := clock()) < until:
            found = cache.get(chosen[len(took_ns) % 1009])
            took_ns.append(clock() - started)
            misses += found is None
    told.put(pickle.dumps(("read", took_ns.tobytes(), misses)))
    cache.close()


def _write(peer: str, path: Path, pickled: bytes, barrier: Barrier, stop: Event, told: Queue[bytes]) -> None:
    artifacts: list[Artifact] = pickle.loads(pickled)
    cache = PEERS[peer](path)
    puts = 0
    barrier.wait()
    while not stop.is_set():
        artifact = artifacts[puts % len(artifacts)]
        cache.put(dataclasses.replace(artifact, key=Key(puts.to_bytes(32, "big"))))
        puts += 1
    told.put(pickle.dumps(("write", puts, 0)))
    cache.close()


# -- one cold kernel -------------------------------------------------------------------------------------------------


def _cold(place: Path, askers: int) -> dict[str, Any]:
    with Store(place / "cold.db") as store, Compiler(store) as compiler:
        artifact = compiler.compile(_COLD, arch="sm_90", cache=False)
    results: dict[str, Any] = {"one_compile_s": round(artifact.compile_ms / 1000, 3)}
    print(f"\none cold kernel, {results['one_compile_s']} s of NVRTC, {askers} processes")
    for peer in PEERS:
        if peer == "kernelstore, uses not counted":
            continue
        path = Path(tempfile.mkdtemp(dir=place))
        PEERS[peer](path).close()
        barrier = _SPAWN.Barrier(askers + 1)
        told: Queue[bool] = _SPAWN.Queue()
        children = [
            _SPAWN.Process(target=_ask, args=(peer, path, pickle.dumps(artifact), barrier, told)) for _ in range(askers)
        ]
        for child in children:
            child.start()
        barrier.wait()
        started = time.perf_counter()
        compiles = sum(told.get() for _ in children)
        took_s = time.perf_counter() - started
        for child in children:
            child.join()
        results[peer] = {
            "compiles": compiles,
            "seconds": round(took_s, 3),
            "of_one_compile": round(took_s / results["one_compile_s"], 2),
        }
        print(
            f"{peer:<34}{compiles:>4} compiles{took_s:>9.2f} s = {results[peer]['of_one_compile']} x one compile",
            flush=True,
        )
    return results


def _ask(peer: str, path: Path, pickled: bytes, barrier: Barrier, told: Queue[bool]) -> None:
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    artifact: Artifact = pickle.loads(pickled)
    cache: Cache | None = None
    if peer == "kernelstore":
        compiler = Compiler(Store(path / "cache.db"))
    else:
        cache = PEERS[peer](path)
        compiler = Compiler(Store(path.with_suffix(f".{os.getpid()}") / "unused.db"))
    barrier.wait()
    if cache is None:
        compiled = not compiler.compile(_COLD, arch="sm_90").from_cache
    else:
        compiled = cache.get(artifact.key) is None
        if compiled:
            cache.put(dataclasses.replace(compiler.compile(_COLD, arch="sm_90", cache=False), key=artifact.key))
        cache.close()
    told.put(compiled)
    compiler.store.close()


if __name__ == "__main__":
    main()
