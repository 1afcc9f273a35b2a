#!/bin/sh
# Make the compiled samples beside this script, which stand for what NVRTC does not write. They are committed: CI has no
# nvcc, no CUDA 12.9 and no device. Made with nvcc 13.0.88, NVRTC 12.9.86 and driver 580.
#
#   sh make_nvcc_samples.sh                       what nvcc and nvlink make
#   PYTHON12=python sh make_nvcc_samples.sh       also old_abi_*: a Python with cuda-bindings and NVRTC 12.9
#   DEVICE=1 sh make_nvcc_samples.sh              also driver_jit_*: with an sm_90 device
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

cat >"$work/scale.cu" <<'CU'
struct Pair { int a[4]; };
__constant__ float factors[2];
__device__ int launches;
static __device__ __noinline__ float scaled(float x, int which) { return x * factors[which & 1] + launches; }
extern "C" __global__ void scale(float a, const float* x, float* y, Pair pair, char n) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) y[threadIdx.x] = a * scaled(tile[31 - threadIdx.x], pair.a[n & 3]);
}
CU
cat >"$work/other.cu" <<'CU'
extern __device__ int launches;
extern "C" __global__ void count(int* out) { out[0] = launches; }
CU

nvcc="nvcc -std=c++17"
$nvcc -arch=sm_90a -cubin -o sm_90a.cubin "$work/scale.cu"
$nvcc -arch=sm_90 -rdc=true -cubin -o relocatable_sm_90.cubin "$work/scale.cu"
$nvcc -arch=sm_90 -ptx -o compute_90.ptx "$work/scale.cu"
$nvcc -arch=sm_90 -rdc=true -ptx -o unresolved_compute_90.ptx "$work/other.cu"
$nvcc -arch=sm_90 -dlto -ltoir -o compute_90.ltoir "$work/scale.cu"
$nvcc -gencode arch=compute_90a,code=sm_90a -fatbin -o sm_90a.fatbin "$work/scale.cu"
$nvcc -gencode "arch=compute_90a,code=[sm_90a,compute_90a]" -rdc=true -fatbin -o relocatable_sm_90a.fatbin \
    "$work/other.cu"
$nvcc -gencode arch=compute_80,code=sm_80 -gencode arch=compute_100f,code=compute_100f -fatbin -o two_archs.fatbin \
    "$work/scale.cu"

# Parts for two archs, linked for one: the notes of both are kept.
$nvcc -arch=sm_90a -rdc=true -cubin -o "$work/a.cubin" "$work/scale.cu"
$nvcc -arch=sm_90 -rdc=true -cubin -o "$work/b.cubin" "$work/other.cu"
nvlink -arch=sm_90a "$work/a.cubin" "$work/b.cubin" -o linked_sm_90a.cubin

if [ -n "${PYTHON12:-}" ]; then
    "$PYTHON12" - "$work/scale.cu" <<'PY'
import sys

from cuda.bindings import nvrtc

source = open(sys.argv[1], "rb").read()
for arch in ("sm_75", "sm_90a"):
    _, program = nvrtc.nvrtcCreateProgram(source, b"scale.cu", 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, 1, [f"-arch={arch}".encode()])
    assert result == 0, result
    buffer = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, buffer)
    open(f"old_abi_{arch}.cubin", "wb").write(buffer)
PY
fi

if [ -n "${DEVICE:-}" ]; then
    python3 - <<'PY'
import ctypes

cuda = ctypes.CDLL("libcuda.so.1")
context, state, cubin, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
ptx = b""".version 7.0
.target sm_80
.address_size 64
.global .align 4 .b8 tab[16];
.visible .entry k(.param .u64 out, .param .f32 a) {
    .reg .b64 %rd<2>; .reg .f32 %f<2>; .shared .align 4 .b8 tile[64];
    ld.param.u64 %rd1, [out]; ld.param.f32 %f1, [a];
    st.shared.f32 [tile+4], %f1; bar.sync 0; ld.shared.f32 %f0, [tile+4]; st.global.f32 [%rd1], %f0; ret;
}
\0"""
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuLinkCreate_v2(0, None, None, ctypes.byref(state)) == 0
assert cuda.cuLinkAddData_v2(state, 1, ptx, len(ptx), b"k.ptx", 0, None, None) == 0
assert cuda.cuLinkComplete(state, ctypes.byref(cubin), ctypes.byref(size)) == 0
open("driver_jit_of_compute_80.cubin", "wb").write(ctypes.string_at(cubin, size.value))
PY
fi
