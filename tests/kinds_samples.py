"""Payloads of all kinds: from this machine's NVRTC, and from nvcc, NVRTC 12.9 and a driver, committed as files."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from kernelstore import plugins
from kernelstore.arch import Arch
from kernelstore.cuda import nvrtc
from kernelstore.kinds import Kind

pytest.importorskip("cuda.bindings.nvrtc")

ASSETS = Path(__file__).parent / "assets"

# Large is of doubles: after a compile with -G, NVRTC 12.9 makes 488 KB of PTX of it for sm_100 and sm_120 where it is of
# bytes, in 30 s.
# Three kernels, a device function that stays one, variables of every sort, a string literal and shared memory.
SOURCE = """
struct Pair { int a[4]; };
#if __CUDA_ARCH__ >= 700
struct Large { double a[750]; };
#else
struct Large { double a[375]; };
#endif
__constant__ int table[7];
__device__ float sums[3];
static __device__ int hidden[5];
__device__ const char* message = "hello";
__device__ __noinline__ int helper(int x) { return x * table[x & 3] + hidden[x % 5]; }
extern "C" __global__ void mixed(float a, const float* x, float* y, Pair pair, char n) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[0] = a * tile[31 - threadIdx.x] + helper(pair.a[n & 3]) + sums[n % 3] + message[n];
    hidden[n % 5] = n;
}
template<class T> __global__ void stack(const T* in, T* out, int n) {
    volatile T copy[20];
    for (int i = 0; i < 20; i++) copy[i] = in[i];
    out[0] = copy[n] + copy[n + 1];
}
template __global__ void stack<int>(const int*, int*, int);
extern "C" __global__ void large(Large large, int n, int* out) { out[0] = large.a[n]; }
extern "C" __global__ void empty() {}
"""
KERNELS = {
    "mixed": ("f32", "u64", "u64", "b8[16] align 4", "u8"),
    "_Z5stackIiEvPKT_PS0_i": ("u64", "u64", "u32"),
    "large": ("b8[6000] align 8", "u32", "u64"),
    "empty": (),
}
VARIABLES = {"table", "sums", "hidden", "message"}


@functools.cache
def compiled(arch: str, *options: str, source: str = SOURCE) -> nvrtc.Output:
    """What NVRTC makes of a source, each asked for once."""
    return nvrtc.compile_program(
        source,
        name="sample.cu",
        options=(*options, "--ptxas-options=-v") if "-dlto" not in options else options,
        name_expressions=(),
        headers={},
        arch=Arch.parse(arch),
    )


def cubin(arch: str = "sm_90", *options: str) -> bytes:
    payload = compiled(arch, *options).cubin
    assert payload is not None
    return payload


def ptx(arch: str = "compute_90", *options: str) -> bytes:
    payload = compiled(arch, *options).ptx
    assert payload is not None
    return payload


def ltoir() -> bytes:
    payload = compiled("compute_90", "-dlto").ltoir
    assert payload is not None
    return payload


def asset(name: str) -> bytes:
    return (ASSETS / name).read_bytes()


# By kind, a payload and an arch that it is for. A kind without a sample fails the contract: add one here.
SAMPLES = {
    "cubin": (lambda: cubin("sm_90a"), "sm_90a"),
    "ptx": (ptx, "compute_90"),
    "ltoir": (ltoir, "compute_90"),
    "fatbin": (lambda: asset("two_archs.fatbin"), "sm_80"),
}


def sample(kind: str) -> tuple[bytes, str]:
    """Return a payload of that kind, and an arch that it is for."""
    make, arch = SAMPLES[kind]
    return make(), arch


def load_kind(name: str) -> Kind:
    plugin: Kind = plugins.load("kinds", name)
    return plugin
