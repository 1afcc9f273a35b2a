"""Launches: every kind of argument to the last byte, configurations, streams, and what is refused."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_driver import IMAGE, FakeDriver

from kernelstore import Artifact, Kernel, Key, Symbol, load
from kernelstore.cuda.arguments import Parameter
from kernelstore.errors import DriverError, LaunchError

STRUCT = "b8[16] align 8"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver().install(monkeypatch)


def kernel_of(fake: FakeDriver, *declared: str) -> Kernel:
    """A kernel `k` with these parameters, as an artifact of `Compiler` declares them."""
    parameters = [Parameter.parse(text) for text in declared]
    fake.kernels = {"k": [parameter.size_bytes for parameter in parameters if parameter is not None]}
    assert len(fake.kernels["k"]) == len(declared)
    return kernel_with(Symbol("k", parameters=declared))


def kernel_with(*symbols: Symbol) -> Kernel:
    return load(Artifact(Key(bytes(32)), "cubin", "sm_90", IMAGE, symbols=symbols)).get_kernel("k")


def packed(fake: FakeDriver, declared: str, value: object) -> bytes:
    kernel_of(fake, declared).launch(1, 1, (value,))
    (argument,) = fake.launches[-1].arguments
    return argument


# Arguments


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_double), ("b", ctypes.c_int))


RECORD = np.dtype([("a", "f8"), ("b", "i4"), ("pad", "i4")])
CAI = SimpleNamespace(__cuda_array_interface__={"data": (0xDEAD0000, False), "shape": (4,), "version": 3})
EMPTY = SimpleNamespace(__cuda_array_interface__={"data": (0, False), "shape": (0,), "version": 3})


@pytest.mark.parametrize(
    ("declared", "value", "expected"),
    [
        # Python numbers, by the declared type. NVRTC declares int as u32.
        ("f32", 1.5, struct.pack("<f", 1.5)),
        ("f32", 3, struct.pack("<f", 3)),
        ("f64", 0.1, struct.pack("<d", 0.1)),
        ("f16", 1.5, struct.pack("<e", 1.5)),
        ("f32", float("inf"), struct.pack("<f", float("inf"))),
        ("u8", 255, b"\xff"),
        ("u8", True, b"\x01"),
        ("u8", -128, b"\x80"),
        ("s8", -1, b"\xff"),
        ("u16", 65535, b"\xff\xff"),
        ("u32", 2**32 - 1, b"\xff\xff\xff\xff"),
        ("u32", -1, b"\xff\xff\xff\xff"),
        ("s32", -(2**31), struct.pack("<i", -(2**31))),
        ("b32", 7, struct.pack("<I", 7)),
        ("u64", 2**64 - 1, b"\xff" * 8),
        ("u64", -1, b"\xff" * 8),
        ("s64", -(2**63), struct.pack("<q", -(2**63))),
        # numpy scalars and 0-d arrays.
        ("f32", np.float32(0.1), np.float32(0.1).tobytes()),
        ("f64", np.float64(0.1), np.float64(0.1).tobytes()),
        ("u8", np.bool_(True), b"\x01"),
        ("u8", np.int8(-1), b"\xff"),
        ("u8", np.uint8(200), b"\xc8"),
        ("u16", np.int16(-2), b"\xfe\xff"),
        ("u32", np.int32(-5), struct.pack("<i", -5)),
        ("u32", np.uint32(2**31), struct.pack("<I", 2**31)),
        ("s32", np.uint32(2**31), struct.pack("<I", 2**31)),
        ("u64", np.int64(-5), struct.pack("<q", -5)),
        ("u64", np.uint64(2**63), struct.pack("<Q", 2**63)),
        ("u64", np.uintp(0xABC), struct.pack("<Q", 0xABC)),
        ("u32", np.array(7, np.int32), struct.pack("<i", 7)),
        ("f32", np.array(0.5, np.float32), struct.pack("<f", 0.5)),
        # Halves. NVRTC declares __half as a struct of two bytes.
        ("f16", np.float16(1.5), struct.pack("<e", 1.5)),
        ("b16", np.float16(1.5), struct.pack("<e", 1.5)),
        ("u16", np.float16(1.5), struct.pack("<e", 1.5)),
        ("b8[2] align 2", np.float16(1.5), struct.pack("<e", 1.5)),
        ("b8[2] align 2", np.uint16(0x3FC0), b"\xc0\x3f"),
        # Pointers.
        ("u64", 0, bytes(8)),
        ("u64", 0x7FFF12345678, struct.pack("<Q", 0x7FFF12345678)),
        ("u64", CAI, struct.pack("<Q", 0xDEAD0000)),
        ("u64", EMPTY, bytes(8)),
        ("u64", SimpleNamespace(ptr=0x1234), struct.pack("<Q", 0x1234)),
        ("u64", SimpleNamespace(ptr=np.uint64(0x1234)), struct.pack("<Q", 0x1234)),
        ("u64", SimpleNamespace(handle=0x5678), struct.pack("<Q", 0x5678)),
        ("b64", CAI, struct.pack("<Q", 0xDEAD0000)),
        ("u64", ctypes.c_void_p(0x99), struct.pack("<Q", 0x99)),
        # Structs by value.
        (STRUCT, Pair(0.5, -3), struct.pack("<di4x", 0.5, -3)),
        (STRUCT, np.array([(0.5, -3, 0)], RECORD)[0], struct.pack("<dii", 0.5, -3, 0)),
        (STRUCT, np.array((0.5, -3, 0), RECORD), struct.pack("<dii", 0.5, -3, 0)),
        (STRUCT, np.complex128(1 + 2j), struct.pack("<dd", 1, 2)),
        (STRUCT, bytes(range(16)), bytes(range(16))),
        (STRUCT, bytearray(range(16)), bytes(range(16))),
        (STRUCT, memoryview(bytes(range(16))), bytes(range(16))),
        (STRUCT, (ctypes.c_float * 4)(1, 2, 3, 4), struct.pack("<4f", 1, 2, 3, 4)),
        ("b8[8] align 4", np.complex64(1 + 2j), struct.pack("<ff", 1, 2)),
        ("b8[3]", b"abc", b"abc"),
        # ctypes numbers.
        ("f32", ctypes.c_float(0.5), struct.pack("<f", 0.5)),
        ("u32", ctypes.c_int(-5), struct.pack("<i", -5)),
        ("u8", ctypes.c_bool(True), b"\x01"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else repr(value)[:40],
)
def test_an_argument_reaches_the_driver_to_the_last_byte(
    fake: FakeDriver, declared: str, value: object, expected: bytes
) -> None:
    assert packed(fake, declared, value) == expected


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_not_a_number_keeps_its_sign_and_payload(fake: FakeDriver, dtype: Any) -> None:
    width = np.dtype(dtype).itemsize
    bits = {2: 0xFE01, 4: 0xFFC00001, 8: 0xFFF8000000000001}[width]
    value = np.frombuffer(bits.to_bytes(width, "little"), dtype)[0]
    assert packed(fake, f"f{width * 8}", value) == value.tobytes()


def test_objects_of_cuda_bindings_are_pointers(fake: FakeDriver) -> None:
    from cuda.bindings import driver

    assert packed(fake, "u64", driver.CUdeviceptr(0xABCDEF)) == struct.pack("<Q", 0xABCDEF)
    buffer = SimpleNamespace(handle=driver.CUdeviceptr(0xABCDEF))
    assert packed(fake, "u64", buffer) == struct.pack("<Q", 0xABCDEF)


def test_a_variable_of_a_module_is_a_pointer(fake: FakeDriver) -> None:
    kernel = kernel_of(fake, "u64")
    fake.globals = {"table": (0xABC000, 64)}
    table = load(Artifact(Key(bytes(32)), "cubin", "sm_90", IMAGE)).get_global("table")
    kernel.launch(1, 1, (table,))
    assert fake.launches[-1].arguments == [struct.pack("<Q", 0xABC000)]


def test_many_arguments_keep_their_order_and_alignment(fake: FakeDriver) -> None:
    declared = ("u8", "f64", "u16", "b8[16] align 16", "f32", "u64", "b8[3]", "u32")
    values = (1, 2.0, 3, bytes(range(16)), np.float32(5), CAI, b"abc", -8)
    kernel_of(fake, *declared).launch(1, 1, values)
    assert fake.launches[-1].arguments == [
        b"\x01",
        struct.pack("<d", 2),
        b"\x03\x00",
        bytes(range(16)),
        struct.pack("<f", 5),
        struct.pack("<Q", 0xDEAD0000),
        b"abc",
        struct.pack("<i", -8),
    ]


def test_a_kernel_without_parameters_takes_none(fake: FakeDriver) -> None:
    kernel = kernel_of(fake)
    kernel.launch(1, 1)
    kernel.launch(1, 1, ())
    assert [launch.arguments for launch in fake.launches] == [[], []]
    with pytest.raises(LaunchError, match=r"k takes 0 arguments \(\), and 1 were given"):
        kernel.launch(1, 1, (1,))


def test_a_list_and_changing_types_are_packed_afresh(fake: FakeDriver) -> None:
    kernel = kernel_of(fake, "u64", "f32")
    for args in ([1, 2.0], (CAI, 3), (np.uint64(4), np.float32(5)), (1, 2.0)):
        kernel.launch(1, 1, args)  # type: ignore[arg-type]
    assert [
        (struct.unpack("<Q", a)[0], struct.unpack("<f", b)[0]) for a, b in (x.arguments for x in fake.launches)
    ] == [
        (1, 2.0),
        (0xDEAD0000, 3.0),
        (4, 5.0),
        (1, 2.0),
    ]


def test_threads_do_not_share_a_launchs_bytes(fake: FakeDriver) -> None:
    kernel = kernel_of(fake, "u64", "u64")
    barrier = threading.Barrier(8)

    def use(number: int) -> None:
        barrier.wait()
        for index in range(200):
            kernel.launch(1, 1, (number, index))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = {tuple(struct.unpack("<Q", x)[0] for x in launch.arguments) for launch in fake.launches}
    assert seen == {(number, index) for number in range(8) for index in range(200)}


@pytest.mark.parametrize(
    ("declared", "value", "reason"),
    [
        # Ranges.
        ("u8", 256, "out of range"),
        ("u8", -129, "out of range"),
        ("s8", 128, "out of range"),
        ("u32", 2**32, "out of range"),
        ("u32", -(2**31) - 1, "out of range"),
        ("s32", 2**31, "out of range"),
        ("u64", 2**64, "out of range"),
        ("f32", 1e39, "out of range"),
        ("f16", 70000.0, "out of range"),
        ("f64", 10**400, "out of range"),
        # Classes.
        ("u32", 1.0, "convert it to an integer first"),
        ("u64", 1.0, "convert it to an integer first"),
        ("b32", 1.0, "give a numpy scalar"),
        ("u32", np.float32(1), "float32 is of another class"),
        ("f32", np.int32(1), "int32 is of another class"),
        ("u32", ctypes.c_float(1), "of another class"),
        ("f32", ctypes.c_int(1), "of another class"),
        ("f32", CAI, "no number, structure or bytes"),
        ("f64", CAI, "no number, structure or bytes"),
        ("f32", 1 + 2j, "no number, structure or bytes"),
        ("u32", None, "no number, structure or bytes"),
        ("u64", None, "it is no pointer: give an int"),
        ("u64", "x", "it is no pointer"),
        ("u64", object(), "it is no pointer"),
        # Sizes.
        ("f32", np.float64(1), "float64 has 8 bytes, not 4"),
        ("f64", np.float32(1), "float32 has 4 bytes, not 8"),
        ("u64", np.int32(1), "int32 has 4 bytes, not 8"),
        ("u32", np.int64(1), "int64 has 8 bytes, not 4"),
        ("u32", np.array(1), "int64 has 8 bytes, not 4"),
        ("f32", np.float16(1), "float16 has 2 bytes, not 4"),
        ("u64", ctypes.c_int(1), "it has 4 bytes, not 8"),
        (STRUCT, b"short", "it has 5 bytes, not 16"),
        (STRUCT, (ctypes.c_float * 3)(), "it has 12 bytes, not 16"),
        (STRUCT, np.array((0,), [("a", "i4")])[()], "has 4 bytes, not 16"),
        # Structs.
        (STRUCT, 1, "a struct is given as"),
        (STRUCT, 1.0, "give a numpy scalar"),
        (STRUCT, CAI, "no number, structure or bytes"),
        ("b8[2] align 2", 1.5, "give a numpy scalar"),
        ("b8[8] align 4", 1, "a struct is given as"),
        ("u64", b"12345678", "bytes are for structs"),
        ("u64", Pair(), "it has 16 bytes, not 8"),
        # Host memory.
        ("u64", np.zeros(4, np.float32), "array in host memory"),
        (STRUCT, np.zeros(4, np.float32), "array in host memory"),
        ("u32", np.array(1, ">i4"), "byte order"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_does_not_fit_is_refused(fake: FakeDriver, declared: str, value: object, reason: str) -> None:
    kernel = kernel_of(fake, "f32", declared)
    with pytest.raises(LaunchError, match=reason) as caught:
        kernel.launch(1, 1, (1.0, value))
    assert f"argument 1 of k is {type(value).__name__}".replace("memmap", "") in str(caught.value).replace(
        f"{type(value).__module__}.", ""
    )
    assert f"declared as {declared}" in str(caught.value)
    assert (caught.value.index, caught.value.declared) == (1, declared)
    assert fake.launches == []


def test_an_array_is_told_with_its_shape(fake: FakeDriver) -> None:
    with pytest.raises(LaunchError, match=r"numpy\.ndarray of shape \(2, 3\).*copy it to the device"):
        kernel_of(fake, "u64").launch(1, 1, (np.zeros((2, 3)),))


def test_an_object_that_cannot_tell_its_address_is_refused(fake: FakeDriver) -> None:
    class NeedsGrad:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("call detach() first")

    with pytest.raises(LaunchError, match=r"call detach\(\) first"):
        kernel_of(fake, "u64").launch(1, 1, (NeedsGrad(),))


def test_a_wrong_number_of_arguments_is_told_with_the_types(fake: FakeDriver) -> None:
    kernel = kernel_of(fake, "f32", "u64", STRUCT)
    for args in ((), (1.0,), (1.0, 0, bytes(16), 4)):
        with pytest.raises(
            LaunchError, match=r"k takes 3 arguments \(f32, u64, b8\[16\] align 8\), and \d were"
        ) as caught:
            kernel.launch(1, 1, args)
        assert caught.value.expected == ("f32", "u64", STRUCT)
    assert fake.launches == []


@pytest.mark.parametrize("args", [1, None, "ab", np.zeros(2), {1: 2}, {1, 2}, iter((1, 2))], ids=repr)
def test_arguments_are_a_tuple_or_a_list(fake: FakeDriver, args: Any) -> None:
    kernel = kernel_of(fake, "u32", "u32")
    kernel.launch(1, 1, (1, 2))
    with pytest.raises(LaunchError, match=r"tuple or list, such as \(x,\)"):
        kernel.launch(1, 1, args)


# Arguments of kernels whose types are not known


def test_sizes_from_the_driver_check_what_has_no_types(fake: FakeDriver) -> None:
    fake.kernels = {"k": [8, 4, 16]}
    kernel = kernel_with()
    kernel.launch(1, 1, (0x1234, np.float32(2), bytes(16)))
    kernel.launch(1, 1, (CAI, np.int32(2), Pair()))
    assert [launch.arguments[:2] for launch in fake.launches] == [
        [struct.pack("<Q", 0x1234), struct.pack("<f", 2)],
        [struct.pack("<Q", 0xDEAD0000), struct.pack("<i", 2)],
    ]
    for args, reason in (
        ((0, 2, bytes(16)), "only its size is known; give a numpy scalar"),
        ((0, 2.0, bytes(16)), "give a numpy scalar"),
        ((2.0, np.int32(2), bytes(16)), "give a numpy scalar"),
        ((0, np.float64(2), bytes(16)), "float64 has 8 bytes, not 4"),
        ((0, np.int32(2), bytes(15)), "it has 15 bytes, not 16"),
        ((0,), r"takes 3 arguments \(8 bytes, 4 bytes, 16 bytes\)"),
    ):
        with pytest.raises(LaunchError, match=reason):
            kernel.launch(1, 1, args)
    assert len(fake.launches) == 2


def test_types_of_a_newer_ptx_fall_back_to_the_drivers_sizes(fake: FakeDriver) -> None:
    fake.kernels = {"k": [4]}
    kernel_with(Symbol("k", parameters=("e4m3x4",))).launch(1, 1, (np.uint32(1),))
    assert fake.launches[-1].arguments == [b"\x01\0\0\0"]


@pytest.mark.parametrize("how", ["missing", "unsupported"])
def test_without_types_and_sizes_nothing_is_launched(fake: FakeDriver, how: str) -> None:
    fake.kernels = {"k": [4]}
    if how == "missing":
        fake.missing = {"cuKernelGetParamInfo"}
    else:
        fake.fail["cuKernelGetParamInfo"] = 801
    kernel = kernel_with()
    with pytest.raises(LaunchError, match="driver is too old to tell them"):
        kernel.launch(1, 1, (np.int32(1),))
    assert fake.launches == []


# Grid, block and shared memory


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, (1, 1, 1)),
        (70000, (70000, 1, 1)),
        ((2,), (2, 1, 1)),
        ((2, 3), (2, 3, 1)),
        ((2, 3, 4), (2, 3, 4)),
        ([2, 3, 4], (2, 3, 4)),
        (np.int64(5), (5, 1, 1)),
        ((np.int32(5), 6), (5, 6, 1)),
        (2**31 - 1, (2**31 - 1, 1, 1)),
    ],
)
def test_grid_and_block_are_one_to_three_sizes(fake: FakeDriver, value: Any, expected: tuple[int, int, int]) -> None:
    kernel = kernel_of(fake)
    kernel.launch(value, 1)
    kernel.launch(1, value)
    assert (fake.launches[0].grid, fake.launches[1].block) == (expected, expected)


@pytest.mark.parametrize(
    "value", [0, -1, 2**32, 1.0, "1", (), (1, 2, 3, 4), (1, 0), (1, -1, 1), (1.0, 1, 1), (1, 2.5), (2**32, 1, 1)]
)
@pytest.mark.parametrize("which", ["grid", "block", "cluster"])
def test_sizes_that_are_none_are_refused(fake: FakeDriver, which: str, value: Any) -> None:
    arguments: dict[str, Any] = {"grid": 1, "block": 1} | {which: value}
    with pytest.raises(LaunchError, match=f"{which} is an int or 1 to 3 of them, each from 1"):
        kernel_of(fake).launch(**arguments)
    assert fake.launches == []


@pytest.mark.parametrize("which", ["grid", "block"])
def test_grid_and_block_must_be_given(fake: FakeDriver, which: str) -> None:
    arguments: dict[str, Any] = {"grid": 1, "block": 1} | {which: None}
    with pytest.raises(LaunchError, match=f"{which} is an int"):
        kernel_of(fake).launch(**arguments)


def test_shared_memory_up_to_48_kb_needs_nothing(fake: FakeDriver) -> None:
    kernel_of(fake).launch(1, 1, shared_mem_bytes=48 * 1024)
    assert fake.launches[-1].shared_mem_bytes == 48 * 1024
    assert fake.kernel_settings == []


def test_more_shared_memory_is_asked_for_once(fake: FakeDriver) -> None:
    kernel = kernel_of(fake)
    for shared_mem_bytes in (100_000, 100_000, 60_000, np.int64(120_000), 100_000):
        kernel.launch(1, 1, shared_mem_bytes=shared_mem_bytes)  # type: ignore[arg-type]
    assert fake.kernel_settings == [
        ("MAX_DYNAMIC_SHARED_SIZE_BYTES", 100_000, 0),
        ("MAX_DYNAMIC_SHARED_SIZE_BYTES", 120_000, 0),
    ]
    assert [launch.shared_mem_bytes for launch in fake.launches] == [100_000, 100_000, 60_000, 120_000, 100_000]


def test_more_shared_memory_is_asked_for_on_the_streams_device(fake: FakeDriver) -> None:
    kernel = kernel_of(fake)
    fake.stream_contexts = {0x55: 0x7001}
    kernel.launch(1, 1, shared_mem_bytes=100_000)
    kernel.launch(1, 1, shared_mem_bytes=100_000, stream=0x55)
    assert [device for _, _, device in fake.kernel_settings] == [0, 1]
    assert [launch.device for launch in fake.launches] == [0, 1]
    assert fake.context == 0x7000


def test_static_shared_memory_counts(fake: FakeDriver) -> None:
    fake.kernel_attributes["CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"] = 1024
    kernel = kernel_of(fake)
    kernel.launch(1, 1, shared_mem_bytes=47 * 1024)
    assert fake.kernel_settings == []
    kernel.launch(1, 1, shared_mem_bytes=47 * 1024 + 1)
    kernel.launch(1, 1, shared_mem_bytes=232_448 - 1024)
    assert len(fake.kernel_settings) == 2
    with pytest.raises(LaunchError, match="device 0 allows 231424 beside the kernel's 1024 static ones") as caught:
        kernel.launch(1, 1, shared_mem_bytes=232_448 - 1023)
    assert caught.value.limit_bytes == 231_424
    assert len(fake.launches) == 3


@pytest.mark.parametrize("value", [-1, 1.5, "1"])
def test_shared_memory_is_a_number_of_bytes(fake: FakeDriver, value: Any) -> None:
    with pytest.raises(LaunchError, match="shared_mem_bytes is an int"):
        kernel_of(fake).launch(1, 1, shared_mem_bytes=value)


# Cooperative and cluster launches


def test_a_cooperative_launch_says_so(fake: FakeDriver) -> None:
    kernel_of(fake, "u32").launch((4, 2), (32, 2), (7,), cooperative=True, stream=0x55, shared_mem_bytes=100)
    (launch,) = fake.launches
    assert launch.attributes == {"cooperative": 1}
    assert (launch.grid, launch.block, launch.stream) == ((4, 2, 1), (32, 2, 1), 0x55)
    assert (launch.shared_mem_bytes, launch.arguments) == (100, [b"\x07\0\0\0"])


def test_a_cluster_launch_says_its_size(fake: FakeDriver) -> None:
    kernel = kernel_of(fake)
    kernel.launch((4, 2), 32, cluster=(2, 2))
    kernel.launch(4, 32, cluster=2, cooperative=True)
    kernel.launch(4, 32)
    assert [launch.attributes for launch in fake.launches] == [
        {"cluster": (2, 2, 1)},
        {"cluster": (2, 1, 1), "cooperative": 1},
        {},
    ]


def test_clusters_above_the_portable_size_are_asked_for_once(fake: FakeDriver) -> None:
    kernel = kernel_of(fake)
    for _ in range(2):
        kernel.launch(16, 32, cluster=16)
    kernel.launch(16, 32, cluster=8)
    assert fake.kernel_settings == [("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1, 0)]


def test_a_grid_is_a_multiple_of_its_cluster(fake: FakeDriver) -> None:
    with pytest.raises(LaunchError, match=r"\(5, 1, 1\) blocks is no multiple of a cluster of \(2, 1, 1\)"):
        kernel_of(fake).launch(5, 32, cluster=2)
    assert fake.launches == []


def test_a_cooperative_launch_without_a_context_gets_one(fake: FakeDriver) -> None:
    kernel = kernel_of(fake)
    fake.context = 0
    kernel.launch(1, 1, cooperative=True)
    assert len(fake.launches) == 1


# Streams


class Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x51


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 0),
        (0, 0),
        (2, 2),
        (0x50, 0x50),
        (Protocol(), 0x51),
        (SimpleNamespace(__cuda_stream__=(0, 0x52)), 0x52),
        (SimpleNamespace(cuda_stream=0x53, device="cuda:0"), 0x53),
        (SimpleNamespace(ptr=0x54), 0x54),
        (SimpleNamespace(ptr=0), 0),
        (SimpleNamespace(handle=0x55), 0x55),
    ],
)
def test_a_stream_of_any_framework_is_taken(fake: FakeDriver, stream: object, handle: int) -> None:
    kernel_of(fake).launch(1, 1, stream=stream)
    assert fake.launches[-1].stream == handle


def test_streams_of_cuda_bindings_are_taken(fake: FakeDriver) -> None:
    from cuda.bindings import driver

    kernel = kernel_of(fake)
    kernel.launch(1, 1, stream=driver.CUstream(0x56))
    kernel.launch(1, 1, stream=SimpleNamespace(handle=driver.CUstream(0x57)))
    assert [launch.stream for launch in fake.launches] == [0x56, 0x57]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (object(), "has none of"),
        ("stream", "has none of"),
        (1.5, "has none of"),
        (-1, "is no handle"),
        (SimpleNamespace(__cuda_stream__=(1, 0x52)), "version 1; this release knows 0"),
        (SimpleNamespace(__cuda_stream__=0x52), "gives no handle"),
    ],
)
def test_what_is_no_stream_is_refused(fake: FakeDriver, stream: object, reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        kernel_of(fake).launch(1, 1, stream=stream)
    assert fake.launches == []


def test_a_launch_synchronises_nothing(fake: FakeDriver) -> None:
    kernel = kernel_of(fake, "u64")
    fake.calls.clear()
    kernel.launch(1, 1, (CAI,), stream=Protocol())
    assert fake.calls == ["cuLaunchKernel"]


# What the driver refuses


@pytest.mark.parametrize(
    ("number", "error", "reason"),
    [
        (1, LaunchError, "CUDA_ERROR_INVALID_VALUE .*device's limits"),
        (701, LaunchError, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES .*more registers"),
        (720, LaunchError, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE .*fewer blocks"),
        (912, LaunchError, "CUDA_ERROR_INVALID_CLUSTER_SIZE .*clusters of this size"),
        (700, DriverError, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ],
)
@pytest.mark.parametrize("cooperative", [False, True])
def test_a_launch_that_the_driver_refuses_has_its_error(
    fake: FakeDriver, number: int, error: type[Exception], reason: str, cooperative: bool
) -> None:
    kernel = kernel_of(fake, "u32")
    fake.fail |= {"cuLaunchKernel": number, "cuLaunchKernelEx": number}
    with pytest.raises(error, match=reason) as caught:
        kernel.launch(3, 2048, (1,), cooperative=cooperative)
    assert type(caught.value) is error
    assert (caught.value.result, caught.value.kind, caught.value.arch) == (number, "cubin", "sm_90")  # type: ignore[attr-defined]
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert "k with grid (3, 1, 1), block (2048, 1, 1), 0 bytes" in told
