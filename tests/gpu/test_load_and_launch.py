"""Real artifacts loaded into a real driver and launched on a real device, checked against numpy."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_memory import DeviceArray, checked, with_ptx_version

from kernelstore import Artifact, Kernel, Key, load
from kernelstore.cuda import driver
from kernelstore.errors import (
    InvalidPTX,
    KernelNotFound,
    LaunchError,
    ModuleUnloaded,
    NeedsLink,
    NoBinary,
    UnsupportedPTX,
)

pytestmark = pytest.mark.gpu

Build = Callable[..., Artifact]
OnDevice = Callable[[Any], DeviceArray]

SAXPY = """
template<class T> __global__ void saxpy(T a, const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""
ADD_ONE = 'extern "C" __global__ void add_one(int* a) { a[blockIdx.x * blockDim.x + threadIdx.x] += 1; }'
# Long enough that what does not wait for it sees what was there before.
SLOW_SET = """
extern "C" __global__ void slow_set(int* a, int value, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    a[0] = value;
}
"""


def launch_saxpy(kernel: Kernel, on_device: OnDevice, dtype: Any, stream: object = None) -> None:
    """Launch it for a thousand elements and check the result."""
    x, y = np.arange(1000, dtype=dtype), np.ones(1000, dtype)
    on_x, on_y = on_device(x), on_device(y)
    kernel.launch(4, 256, (dtype(2), on_x, on_y, np.int32(1000)), stream=stream)
    np.testing.assert_array_equal(on_y.get(), 2 * x + y)


# Arguments


@pytest.mark.parametrize(("name", "dtype"), [("saxpy<float>", np.float32), ("saxpy<double>", np.float64)])
def test_a_template_computes_what_numpy_does(build: Build, on_device: OnDevice, name: str, dtype: Any) -> None:
    launch_saxpy(load(build(SAXPY, "saxpy<float>", "saxpy<double>")).get_kernel(name), on_device, dtype)


def test_python_numbers_and_plain_addresses_will_do(build: Build, on_device: OnDevice) -> None:
    kernel = load(build(SAXPY, "saxpy<float>")).get_kernel("saxpy<float>")
    x, y = on_device(np.full(10, 3, np.float32)), on_device(np.zeros(10, np.float32))
    kernel.launch((1,), (32, 1, 1), [0.5, int(x.pointer), y.pointer, 10])
    np.testing.assert_array_equal(y.get(), np.full(10, 1.5, np.float32))


ECHO = """
struct Pair { double a; int b; };
struct Bytes { char c[3]; };
struct Half { unsigned short bits; };
template<class T> __device__ void put(unsigned char* out, int at, const T& value) {
    const unsigned char* from = reinterpret_cast<const unsigned char*>(&value);
    for (int i = 0; i < sizeof(T); ++i) out[at * 16 + i] = from[i];
}
extern "C" __global__ void echo(unsigned char* out, bool a, char b, short c, int d, unsigned e, long long f, size_t g,
                                float h, double i, Pair j, Bytes k, float4 l, Half m, float2 n) {
    put(out, 0, a); put(out, 1, b); put(out, 2, c); put(out, 3, d); put(out, 4, e); put(out, 5, f); put(out, 6, g);
    put(out, 7, h); put(out, 8, i); put(out, 9, j); put(out, 10, k); put(out, 11, l); put(out, 12, m); put(out, 13, n);
}
"""


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_double), ("b", ctypes.c_int))


@pytest.mark.parametrize("with_types", [True, False])
def test_every_kind_of_argument_arrives_to_the_last_byte(build: Build, on_device: OnDevice, with_types: bool) -> None:
    artifact = build(ECHO)
    values: list[tuple[object, bytes]] = [
        (np.bool_(True), b"\x01"),
        (np.int8(-2), struct.pack("<b", -2)),
        (np.int16(-3000), struct.pack("<h", -3000)),
        (np.int32(-(2**31)), struct.pack("<i", -(2**31))),
        (np.uint32(2**32 - 1), struct.pack("<I", 2**32 - 1)),
        (np.int64(-(2**62)), struct.pack("<q", -(2**62))),
        (np.uint64(2**63), struct.pack("<Q", 2**63)),
        (np.float32(0.1), np.float32(0.1).tobytes()),
        (np.float64(0.1), np.float64(0.1).tobytes()),
        (Pair(0.25, -7), struct.pack("<di", 0.25, -7)),
        (b"abc", b"abc"),
        (np.arange(4, dtype=np.float32).tobytes(), np.arange(4, dtype=np.float32).tobytes()),
        (np.float16(1.5), np.float16(1.5).tobytes()),
        (np.complex64(1 + 2j), np.complex64(1 + 2j).tobytes()),
    ]
    if with_types:
        python = {0: True, 1: -2, 2: -3000, 3: -(2**31), 4: 2**32 - 1, 5: -(2**62), 6: 2**63, 8: 0.1}
        given = [python.get(index, value) for index, (value, _) in enumerate(values)]
    else:
        # As of a cubin made elsewhere; the driver tells the sizes.
        artifact = dataclasses.replace(artifact, symbols=(), key=Key(bytes(32)))
        given = [value for value, _ in values]
    out = on_device(np.zeros(len(values) * 16, np.uint8))
    kernel = load(artifact).get_kernel("echo")
    kernel.launch(1, 1, (out, *given))
    got = out.get().tobytes()
    assert [got[16 * i : 16 * i + len(expected)] for i, (_, expected) in enumerate(values)] == [x for _, x in values]
    with pytest.raises(LaunchError, match="takes 15 arguments"):
        kernel.launch(1, 1, (out, *given[:-1]))


def test_half_precision(build: Build, on_device: OnDevice) -> None:
    source = """
    #include <cuda_fp16.h>
    extern "C" __global__ void scale(__half a, __half* x) { x[threadIdx.x] = __hmul(a, x[threadIdx.x]); }
    """
    x = np.arange(64, dtype=np.float16)
    on_x = on_device(x)
    load(build(source)).get_kernel("scale").launch(1, 64, (np.float16(1.5), on_x))
    np.testing.assert_array_equal(on_x.get(), np.float16(1.5) * x)


def test_a_zero_size_array_is_a_null_pointer(build: Build, on_device: OnDevice) -> None:
    class Empty:
        __cuda_array_interface__ = {"data": (0, False), "shape": (0,), "typestr": "<f4", "version": 3}  # noqa: RUF012

    load(build(SAXPY, "saxpy<float>")).get_kernel("saxpy<float>").launch(1, 1, (1.0, Empty(), Empty(), 0))
    checked(driver.initialise().api.cuCtxSynchronize())


# Configurations


REVERSE = """
extern "C" __global__ void reverse(int* a, int n) {
    extern __shared__ int tile[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = a[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) a[i] = tile[n - 1 - i];
}
"""


@pytest.mark.parametrize("size_bytes", [1024, 48 * 1024, 48 * 1024 + 4, 96 * 1024])
def test_dynamic_shared_memory_beyond_48_kb(build: Build, on_device: OnDevice, size_bytes: int) -> None:
    a = np.arange(size_bytes // 4, dtype=np.int32)
    on_a = on_device(a)
    kernel = load(build(REVERSE)).get_kernel("reverse")
    for expected in (a[::-1], a):
        kernel.launch(1, 256, (on_a, len(a)), shared_mem_bytes=size_bytes)
        np.testing.assert_array_equal(on_a.get(), expected)
    assert kernel.attributes.max_dynamic_shared_bytes >= size_bytes


def test_static_shared_memory_counts(build: Build, on_device: OnDevice, device: int) -> None:
    source = """
    extern "C" __global__ void k(int* a) {
        __shared__ int fixed[2048]; extern __shared__ int tile[];
        fixed[threadIdx.x] = a[threadIdx.x]; tile[threadIdx.x] = 2 * fixed[threadIdx.x]; __syncthreads();
        a[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x] + fixed[threadIdx.x];
    }
    """
    kernel = load(build(source)).get_kernel("k")
    assert kernel.attributes.shared_bytes == 8192
    limit = driver.initialise().device_attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", device) - 8192
    a = on_device(np.arange(32, dtype=np.int32))
    for shared_mem_bytes in (40 * 1024, 41 * 1024, limit):
        a.set(np.arange(32))
        kernel.launch(1, 32, (a,), shared_mem_bytes=shared_mem_bytes)
        np.testing.assert_array_equal(a.get(), 2 * np.arange(31, -1, -1) + np.arange(32))
    with pytest.raises(LaunchError, match=f"allows {limit} beside the kernel's 8192 static ones"):
        kernel.launch(1, 32, (a,), shared_mem_bytes=limit + 1)


def test_a_cooperative_launch_may_synchronise_its_grid(build: Build, on_device: OnDevice) -> None:
    source = """
    #include <cooperative_groups.h>
    extern "C" __global__ void k(int* a, int* b) {
        a[blockIdx.x] = blockIdx.x + 1;
        cooperative_groups::this_grid().sync();
        int sum = 0;
        for (int i = 0; i < gridDim.x; ++i) sum += ((volatile int*)a)[i];
        b[blockIdx.x] = sum;
    }
    """
    kernel = load(build(source)).get_kernel("k")
    a, b = on_device(np.zeros(16, np.int32)), on_device(np.zeros(16, np.int32))
    kernel.launch(16, 1, (a, b), cooperative=True)
    np.testing.assert_array_equal(b.get(), np.full(16, 136))
    with pytest.raises(LaunchError, match="CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE") as caught:
        kernel.launch(1_000_000, 1024, (a, b), cooperative=True)
    assert caught.value.result == 720


@pytest.mark.parametrize(("grid", "cluster"), [(8, 1), (8, 2), ((4, 2), (2, 2)), (16, 8), (16, 16)])
def test_clusters(build: Build, on_device: OnDevice, device: int, grid: Any, cluster: Any) -> None:
    if driver.compute_capability(device) < (9, 0):
        pytest.skip("no clusters before compute capability 9.0")
    source = """
    extern "C" __global__ void k(unsigned* a) {
        unsigned blocks, rank;
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        if (threadIdx.x == 0) { atomicAdd(a + rank, 1u); atomicMax(a + 16, blocks); }
    }
    """
    a = on_device(np.zeros(17, np.uint32))
    load(build(source)).get_kernel("k").launch(grid, 32, (a,), cluster=cluster)
    size, blocks = int(np.prod(cluster)), int(np.prod(grid))
    expected = [blocks // size] * size + [0] * (16 - size) + [size]
    np.testing.assert_array_equal(a.get(), expected)


def test_a_block_that_is_too_large_is_a_launch_error(build: Build, on_device: OnDevice) -> None:
    kernel = load(build(ADD_ONE)).get_kernel("add_one")
    a = on_device(np.zeros(32, np.int32))
    with pytest.raises(LaunchError, match=r"add_one with grid \(1, 1, 1\), block \(2048, 1, 1\)"):
        kernel.launch(1, 2048, (a,))
    kernel.launch(1, 32, (a,))
    np.testing.assert_array_equal(a.get(), np.ones(32))


# Streams


def check_stream(build: Build, on_device: OnDevice, stream: object, handle: int) -> None:
    """The launch is in that stream: it is not done when the call returns, and is when the stream is."""
    api = driver.initialise().api
    kernel = load(build(SLOW_SET)).get_kernel("slow_set")
    a = on_device(np.zeros(1, np.int32))
    # The first launch may load lazily.
    kernel.launch(1, 1, (a, 1, 0), stream=stream)
    checked(api.cuCtxSynchronize())
    kernel.launch(1, 1, (a, 2, 200_000_000), stream=stream)
    (status,) = api.cuStreamQuery(api.CUstream(handle))
    assert status.name == "CUDA_ERROR_NOT_READY"
    checked(api.cuStreamSynchronize(api.CUstream(handle)))
    np.testing.assert_array_equal(a.get(), [2])


def test_the_legacy_default_stream(build: Build, on_device: OnDevice) -> None:
    check_stream(build, on_device, None, 0)


@pytest.mark.parametrize("form", ["int", "CUstream"])
def test_a_stream_of_the_driver(build: Build, on_device: OnDevice, form: str) -> None:
    api = driver.initialise().api
    stream = checked(api.cuStreamCreate(int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)))
    check_stream(build, on_device, int(stream) if form == "int" else stream, int(stream))
    checked(api.cuStreamDestroy(stream))


def test_a_stream_of_cuda_core(build: Build, on_device: OnDevice) -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    check_stream(build, on_device, stream, int(stream.handle))


def test_a_stream_and_a_tensor_of_pytorch(build: Build, on_device: OnDevice) -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    check_stream(build, on_device, stream, stream.cuda_stream)
    tensor = torch.zeros(64, dtype=torch.int32, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    load(build(ADD_ONE)).get_kernel("add_one").launch(2, 32, (tensor,), stream=stream)
    stream.synchronize()
    assert tensor.tolist() == [1] * 64
    with pytest.raises(LaunchError):
        load(build(ADD_ONE)).get_kernel("add_one").launch(2, 32, (torch.zeros(64, dtype=torch.int32),))


def test_a_stream_and_an_array_of_cupy(build: Build, on_device: OnDevice) -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    check_stream(build, on_device, stream, stream.ptr)
    with stream:
        array = cupy.zeros(64, cupy.int32)
    kernel = load(build(ADD_ONE)).get_kernel("add_one")
    kernel.launch(2, 32, (array,), stream=stream)
    kernel.launch(2, 32, (array.data,), stream=stream)
    stream.synchronize()
    assert array.get().tolist() == [2] * 64


# Modules, names, variables


def test_variables_are_read_and_written(build: Build, on_device: OnDevice) -> None:
    source = """
    namespace ns { __device__ int table[16]; __constant__ float factor; }
    extern "C" __global__ void k(float* a) { a[threadIdx.x] = ns::table[threadIdx.x] * ns::factor; }
    extern "C" __global__ void twice(int* table) { table[threadIdx.x] *= 2; }
    """
    module = load(build(source, "&ns::table", "&ns::factor", "k", "twice"))
    table, factor = module.get_global("&ns::table"), module.get_global("ns::factor")
    assert (table.size_bytes, factor.size_bytes) == (64, 4)
    api = driver.initialise().api
    content, value = np.arange(16, dtype=np.int32), np.float32([0.5])
    checked(api.cuMemcpyHtoD(api.CUdeviceptr(table.handle), content.ctypes.data, 64))
    checked(api.cuMemcpyHtoD(api.CUdeviceptr(factor.handle), value.ctypes.data, 4))
    a = on_device(np.zeros(16, np.float32))
    module.get_kernel("twice").launch(1, 16, (table,))
    module.get_kernel("k").launch(1, 16, (a,))
    np.testing.assert_array_equal(a.get(), content)
    with pytest.raises(KernelNotFound, match="&ns::factor, &ns::table"):
        module.get_global("nothing")


def test_a_kernel_that_is_not_there(build: Build) -> None:
    artifact = build("__global__ void plain(int* p) { p[0] = 1; }", "plain")
    assert load(artifact).get_kernel("plain").handle == load(artifact).get_kernel("_Z5plainPi").handle
    with pytest.raises(KernelNotFound, match="it has plain"):
        load(artifact).get_kernel("other")
    unknown = dataclasses.replace(artifact, symbols=(), key=Key(bytes(32)))
    with pytest.raises(KernelNotFound, match=r"it has _Z5plainPi.*ask for '_Z5plainPi'"):
        load(unknown).get_kernel("plain")


def test_modules_share_a_library_until_the_last_is_unloaded(build: Build, on_device: OnDevice) -> None:
    artifact = build(ADD_ONE)
    first, second = load(artifact), load(artifact)
    kernels = first.get_kernel("add_one"), second.get_kernel("add_one")
    assert first.handle == second.handle
    assert kernels[0].handle == kernels[1].handle
    first.unload()
    a = on_device(np.zeros(32, np.int32))
    kernels[1].launch(1, 32, (a,))
    np.testing.assert_array_equal(a.get(), np.ones(32))
    with pytest.raises(ModuleUnloaded):
        kernels[0].launch(1, 32, (a,))
    second.unload()
    with load(artifact) as third:
        third.get_kernel("add_one").launch(1, 32, (a,))
        np.testing.assert_array_equal(a.get(), np.full(32, 2))


def test_attributes_are_what_ptxas_said(build: Build) -> None:
    source = """
    extern "C" __global__ void __launch_bounds__(256) k(float* a) {
        __shared__ float tile[512];
        tile[threadIdx.x] = a[threadIdx.x]; __syncthreads();
        a[threadIdx.x] = sinf(tile[255 - threadIdx.x]);
    }
    """
    artifact = build(source)
    (symbol,) = [symbol for symbol in artifact.symbols if symbol.lowered_name == "k"]
    attributes = load(artifact).get_kernel("k").attributes
    assert attributes.registers == symbol.registers
    assert attributes.shared_bytes == symbol.shared_bytes == 2048
    assert attributes.max_threads_per_block == 256
    major, minor = driver.compute_capability()
    assert attributes.binary_version == 10 * major + minor


def test_a_kernel_of_cuda_core(build: Build, on_device: OnDevice) -> None:
    core = pytest.importorskip("cuda.core")
    module = load(build(SAXPY, "saxpy<float>"))
    kernel = module.get_kernel("saxpy<float>").to_cuda_core()
    module.unload()
    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    x, y = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
    on_x, on_y = on_device(x), on_device(y)
    arguments = (np.float32(2), int(on_x.pointer), int(on_y.pointer), np.int32(1000))
    core.launch(stream, core.LaunchConfig(grid=4, block=256), kernel, *arguments)
    stream.sync()
    np.testing.assert_array_equal(on_y.get(), 2 * x + y)


def test_threads_launch_side_by_side(build: Build, on_device: OnDevice) -> None:
    """A new thread has no current context; its first launch gives it one."""
    kernel = load(build(SLOW_SET)).get_kernel("slow_set")
    arrays = [on_device(np.zeros(1, np.int32)) for _ in range(8)]
    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for value in range(200):
                kernel.launch(1, 1, (arrays[number], 1000 * number + value, 0))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [int(array.get()[0]) for array in arrays] == [1000 * number + 199 for number in range(8)]


# PTX, and what the driver refuses


def test_ptx_is_compiled_by_the_driver(ptx_for_driver: Build, on_device: OnDevice) -> None:
    artifact = ptx_for_driver(SAXPY, "saxpy<float>")
    (symbol,) = [symbol for symbol in artifact.symbols if symbol.what == "kernel"]
    kernel = load(artifact).get_kernel(symbol.lowered_name)
    launch_saxpy(kernel, on_device, np.float32)
    assert kernel.attributes.ptx_version > 0


def test_an_arch_that_does_not_fit_is_no_binary(build: Build, device: int) -> None:
    """C39 (209)."""
    other = "sm_80" if driver.compute_capability(device)[0] != 8 else "sm_90"
    other = "sm_100" if driver.compute_capability(device)[0] == 9 else other
    artifact = build(ADD_ONE, arch=other)
    with pytest.raises(NoBinary, match=f"{other}.*\nDevice {device} has compute capability") as caught:
        load(artifact).get_kernel("add_one")
    assert (caught.value.result, caught.value.arch) == (209, other)


def test_ptx_for_a_newer_arch_is_refused(build: Build, device: int) -> None:
    if driver.compute_capability(device) >= (12, 0):
        pytest.skip("no newer arch than this device's")
    made = build(ADD_ONE, kind="ptx", arch="sm_120")
    artifact = Artifact.from_bytes(with_ptx_version(made, 807))
    with pytest.raises((NoBinary, InvalidPTX)):
        load(artifact).get_kernel("add_one")


def test_damaged_code_is_an_invalid_image(run_python: Callable[..., str], build: Build, tmp_path: Any) -> None:
    """C42: damage that can be seen does not reach the driver, of which nobody knows what it makes of it."""
    path = tmp_path / "damaged"
    payload = build(ADD_ONE).payload
    path.write_bytes(payload[:64] + bytes(len(payload) - 64))
    script = """
import sys, pathlib
from kernelstore import Artifact, Key, load
from kernelstore.errors import InvalidImage
payload = pathlib.Path(sys.argv[1]).read_bytes()
for number, broken in enumerate((payload[:64], b"hello, this is no code", b"")):
    try:
        load(Artifact(Key(bytes([number]) * 32), "cubin", "sm_90", broken)).get_kernel("add_one")
    except InvalidImage as error:
        print(error.result)
"""
    assert run_python(script, path).split() == ["None"] * 3


def test_broken_ptx_is_refused_with_the_log_of_the_jit(ptx_for_driver: Build) -> None:
    """218."""
    good = ptx_for_driver(ADD_ONE)
    artifact = dataclasses.replace(good, payload=good.payload.replace(b"ret;", b"rat;"), key=Key(bytes(32)))
    with pytest.raises(InvalidPTX) as caught:
        load(artifact).get_kernel("add_one")
    assert caught.value.result == 218
    assert "rat" in caught.value.log or "line" in caught.value.log


def test_ptx_that_is_newer_than_the_driver_is_unsupported(ptx_for_driver: Build) -> None:
    """C38 (222)."""
    good = ptx_for_driver(ADD_ONE)
    old = b".version %d.%d" % divmod(good.ptx_version, 100)  # type: ignore[arg-type]
    artifact = Artifact.from_bytes(good.payload.replace(old, b".version 99.9"))
    with pytest.raises(UnsupportedPTX, match=r"\.version 99\.9; driver version \d+") as caught:
        load(artifact).get_kernel("add_one")
    assert (caught.value.result, caught.value.ptx_version) == (222, 9909)


def test_relocatable_code_needs_a_link(build: Build) -> None:
    """C30, C32."""
    source = "extern __device__ int other(int); " + 'extern "C" __global__ void k(int* a) { a[0] = other(a[0]); }'
    with pytest.raises(NeedsLink):
        load(build(source, options=("-rdc=true",)))
    with pytest.raises(NeedsLink):
        load(build(ADD_ONE, kind="ltoir"))


# Contexts, devices, fork

PRELUDE = """
import os, sys, warnings
import numpy as np
from kernelstore import Artifact, load
from kernelstore.cuda import driver
from kernelstore.errors import ForkedContext, KernelStoreError
artifact = Artifact.from_file(sys.argv[1])

def run(kernel):
    api = driver.initialise().api
    host = np.zeros(32, np.int32)
    status, pointer = api.cuMemAlloc(128)
    assert not status, status
    assert not api.cuMemcpyHtoD(pointer, host.ctypes.data, 128)[0]
    kernel.launch(1, 32, (pointer,))
    assert not api.cuMemcpyDtoH(host.ctypes.data, pointer, 128)[0]
    return host.tolist() == [1] * 32
"""


@pytest.fixture
def cubin_file(build: Build, tmp_path: Any) -> Any:
    path = tmp_path / "add_one.cubin"
    path.write_bytes(build(ADD_ONE).payload)
    return path


def test_a_kernel_works_after_a_context_reset(run_python: Callable[..., str], cubin_file: Any) -> None:
    """C43."""
    script = """
module = load(artifact)
kernel = module.get_kernel("add_one")
print(run(kernel))
d = driver.initialise()
for again in (lambda: kernel, lambda: module.get_kernel("add_one"), lambda: load(artifact).get_kernel("add_one")):
    assert not d.api.cuDevicePrimaryCtxReset(d.api.CUdevice(0))[0]
    d.make_current()
    print(run(again()))
"""
    assert run_python(PRELUDE + script, cubin_file).split() == ["True"] * 4


def test_a_launch_right_after_a_context_reset_finds_a_context(run_python: Callable[..., str], cubin_file: Any) -> None:
    """C43: nobody called `make_current`; the launch itself does."""
    script = """
source = load(artifact)
kernel = source.get_kernel("add_one")
print(run(kernel))
d = driver.initialise()
assert not d.api.cuDevicePrimaryCtxReset(d.api.CUdevice(0))[0]
try:
    kernel.launch(1, 32, (0,))
    print("launched")
except KernelStoreError as error:
    print(type(error).__name__)
"""
    first, then = run_python(PRELUDE + script, cubin_file).split()
    assert (first, then) == ("True", "launched")


def test_a_forked_child_is_told(run_python: Callable[..., str], cubin_file: Any) -> None:
    """C44."""
    script = """
warnings.simplefilter("ignore", DeprecationWarning)
module = load(artifact)
kernel = module.get_kernel("add_one")
print(run(kernel), flush=True)
child = os.fork()
if child == 0:
    for use in (lambda: load(artifact), lambda: module.get_kernel("add_one"), lambda: kernel.launch(1, 1, (0,))):
        try:
            use()
        except ForkedContext:
            print("ForkedContext", flush=True)
    print(driver.driver_version() > 0, flush=True)
    module.unload()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(run(kernel))
"""
    assert run_python(PRELUDE + script, cubin_file).split() == ["True", *["ForkedContext"] * 3, "True", "True"]


def test_a_child_of_another_librarys_cuda_is_told(run_python: Callable[..., str], cubin_file: Any) -> None:
    """C44: cuInit was called, but not by us."""
    script = """
warnings.simplefilter("ignore", DeprecationWarning)
from cuda.bindings import driver as api
assert not api.cuInit(0)[0]
child = os.fork()
if child == 0:
    try:
        load(artifact)
    except ForkedContext:
        print("ForkedContext", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(run(load(artifact).get_kernel("add_one")))
"""
    assert run_python(PRELUDE + script, cubin_file).split() == ["ForkedContext", "True"]


def test_a_child_of_a_process_that_only_compiled_loads_or_is_told(
    run_python: Callable[..., str], cubin_file: Any
) -> None:
    """NVRTC calls cuInit itself where there is a libcuda."""
    script = """
warnings.simplefilter("ignore", DeprecationWarning)
from kernelstore.cuda import nvrtc
nvrtc.build()
child = os.fork()
if child == 0:
    try:
        print(run(load(artifact).get_kernel("add_one")), flush=True)
    except ForkedContext:
        print("ForkedContext", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(run(load(artifact).get_kernel("add_one")))
"""
    child, parent = run_python(PRELUDE + script, cubin_file).split()
    assert child in ("True", "ForkedContext")
    assert parent == "True"


def test_a_kernel_works_on_every_device(run_python: Callable[..., str], cubin_file: Any) -> None:
    """C43: one library, and one kernel, for all devices."""
    if driver.device_count() < 2:
        pytest.skip("one device; needs two")
    script = """
kernel = load(artifact, device=0).get_kernel("add_one")
for device in (0, 1, 0):
    load(artifact, device=device)
    print(driver.current_device() == device and run(kernel))
"""
    assert run_python(PRELUDE + script, cubin_file).split() == ["True"] * 3
