"""Taking verbose lines out of a log: exact texts of NVRTC 12.9 and 13.5, and the real NVRTC."""

from __future__ import annotations

import pytest

from kernelstore.arch import Arch
from kernelstore.cuda import nvrtc, ptxas
from kernelstore.cuda.ptxas import Usage
from kernelstore.errors import ToolchainError

ONE = """\
ptxas info    : 16 bytes gmem, 32 bytes cmem[3], 8 bytes cmem[4]
ptxas info    : Compiling entry function '_Z2tkIiEvPT_' for 'sm_80'
ptxas info    : Function properties for _Z2tkIiEvPT_
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 18 registers, used 1 barriers, 256 bytes smem, 24 bytes lmem, 360 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 2.943 ms
"""
ONE_USAGE = Usage(
    registers=18,
    shared_bytes=256,
    local_bytes=24,
    stack_bytes=8,
    spill_store_bytes=4,
    spill_load_bytes=12,
    constant_bytes=368,
)


def test_the_numbers_of_one_kernel() -> None:
    assert ptxas.split_log(ONE) == ({"_Z2tkIiEvPT_": ONE_USAGE}, "")


def test_memory_that_is_not_named_is_not_used_and_constants_may_be_untold() -> None:
    log = """\
ptxas info    : 16 bytes gmem
ptxas info    : Compiling entry function 'empty' for 'sm_90a'
ptxas info    : Function properties for empty
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers
ptxas info    : Compile time = 1.209 ms"""
    assert ptxas.split_log(log) == ({"empty": Usage(4, 0, 0, 0, 0, 0, None)}, "")


def test_functions_that_kernels_call_do_not_confuse() -> None:
    """Their lines stand behind a kernel's (inlined frames) or before it (-G, -rdc=true), without registers."""
    helper = """\
ptxas info    : Function properties for _Z6helperfi
ptxas         .     264 bytes stack frame, 7 bytes spill stores, 9 bytes spill loads
ptxas info    : Compile time = 21.766 ms
"""
    kernel = """\
ptxas info    : Compiling entry function 'k1' for 'sm_90'
ptxas info    : Function properties for k1
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 256 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compile time = 11.725 ms
"""
    for log in (helper + kernel, kernel + helper):
        usage, rest = ptxas.split_log(log)
        assert rest == ""
        # The stack of what it calls is the kernel's too.
        assert usage["k1"] == Usage(24, 256, 0, 256, 0, 0, None)
        assert usage["_Z6helperfi"] == Usage(None, None, None, 264, 7, 9, None)


@pytest.mark.parametrize(
    "message",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        "ptxas warning : Registers are spilled to local memory in function 'k', 572 bytes spill stores",
        "ptxas warning : Value of threads per SM for entry k2 is out of range. .minnctapersm will be ignored",
        "ptxas fatal   : Unresolved extern function '_Z3extf'",
        "ptxas application ptx input, line 21; error   : Instruction 'wgmma.fence' not supported",
        'k.cu(1): warning #177-D: variable "unused" was declared but never referenced\n  int unused;\n      ^',
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        "note: ptxas info    : Compile time = 1.0 ms",
    ],
)
def test_messages_stay(message: str) -> None:
    for log in (f"{message}\n{ONE}", f"{ONE}{message}", f"{ONE}{message}\n{ONE}"):
        usage, rest = ptxas.split_log(log)
        assert rest == message
        assert usage == {"_Z2tkIiEvPT_": ONE_USAGE}


def test_an_overridden_register_limit_is_said_only_when_verbose() -> None:
    log = """\
ptxas info    : Overriding global maxrregcount 32 with entry-specific value 24 of .maxnreg
ptxas info    : Overriding maximum register limit 256 for 'empty' with  32 of maxrregcount option
"""
    assert ptxas.split_log(log) == ({}, "")


def test_a_log_without_verbose_lines_is_as_it_was() -> None:
    log = "k.cu(3): warning #177-D: x\n\n  indented\n\ttabbed"
    assert ptxas.split_log(log) == ({}, log)
    assert ptxas.split_log("") == ({}, "")


SOURCE = """
__device__ int gtab[4]={1,2,3,4}; __constant__ float cc[8];
__device__ __noinline__ float helper(float x, int n) {
    float a[64];
    for (int i = 0; i < n; i++) a[i & 63] = x * i + a[(i * 7) & 63];
    return a[n & 63] + cc[n & 7];
}
extern "C" __global__ void k1(float *o, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = o[threadIdx.x];
    __syncthreads();
    o[threadIdx.x] = helper(s[63 - threadIdx.x], n) + gtab[n & 3];
}
template <class T> __global__ void tk(T *p) { int unused = 3; *p += 1; }
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("options", [(), ("-G",), ("-rdc=true",), ("--maxrregcount=32", "-lineinfo")])
def test_a_verbose_compile_leaves_the_log_of_one_that_is_not(arch: str, options: tuple[str, ...]) -> None:
    """C37."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

    def log_of(*more: str) -> str:
        return nvrtc.compile_program(
            SOURCE,
            name="k.cu",
            options=(*options, *more),
            name_expressions=("tk<int>",),
            headers={},
            arch=Arch.parse(arch),
        ).log

    try:
        quiet = log_of()
    except ToolchainError:
        pytest.skip("libnvrtc is not installed")
    usage, rest = ptxas.split_log(log_of("--ptxas-options=-v"))
    assert rest == quiet
    assert "unused" in rest
    assert usage["k1"].shared_bytes == 256
    assert usage["k1"].registers in range(1, 256)
    assert usage["_Z2tkIiEvPT_"].registers in range(1, 256)
    assert usage["_Z2tkIiEvPT_"].shared_bytes == 0
