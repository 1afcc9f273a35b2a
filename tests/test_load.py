"""Loading into the driver: one library per key, contexts, names, and an error for each way the driver refuses."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_driver import IMAGE, FakeDriver

from kernelstore import Artifact, Key, Symbol, load
from kernelstore.cuda import driver
from kernelstore.errors import (
    DriverError,
    ForkedContext,
    InvalidArgument,
    InvalidImage,
    InvalidPTX,
    InvalidType,
    KernelNotFound,
    LoadError,
    ModuleUnloaded,
    NeedsLink,
    NoBinary,
    NoDriver,
    NoJitCompiler,
    UnsupportedPTX,
)

SAXPY = Symbol("_Z5saxpyIfEvT_PKS0_PS0_i", "saxpy<float>", parameters=("f32", "u64", "u64", "u32"))
PTX = b".version 9.5\n.target sm_90\n.address_size 64\n"


def artifact(kind: str = "cubin", *, key: int = 1, **changes: Any) -> Artifact:
    fields: dict[str, Any] = {
        "arch": "compute_90" if kind == "ptx" else "sm_90",
        "payload": PTX + b"\0" if kind == "ptx" else IMAGE,
        "ptx_version": 905 if kind == "ptx" else None,
        "symbols": (SAXPY,),
    }
    return Artifact(Key(bytes([key]) * 32), kind, **(fields | changes))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver().install(monkeypatch)


def has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


without_libcuda = pytest.mark.skipif(has_libcuda(), reason="this machine has libcuda; needs one without")


# Libraries


def test_modules_of_one_key_share_one_library(fake: FakeDriver) -> None:
    first, second = load(artifact()), load(artifact())
    assert fake.count("cuLibraryLoadData") == 1
    assert first.handle == second.handle
    assert first.artifact.key == second.artifact.key


def test_other_keys_are_other_libraries(fake: FakeDriver) -> None:
    assert load(artifact(key=1)).handle != load(artifact(key=2)).handle


def test_the_last_unload_unloads_the_library(fake: FakeDriver) -> None:
    first, second = load(artifact()), load(artifact())
    kernel = second.get_kernel("saxpy<float>")
    first.unload()
    first.unload()
    assert fake.unloaded == []
    kernel.launch(1, 32, (1.0, 0, 0, 1))
    second.unload()
    assert len(fake.unloaded) == 1
    load(artifact())
    assert fake.count("cuLibraryLoadData") == 2


def test_an_unloaded_module_says_so(fake: FakeDriver) -> None:
    with load(artifact()) as module:
        kernel = module.get_kernel("saxpy<float>")
    for use in (
        lambda: module.get_kernel("saxpy<float>"),
        lambda: module.get_global("table"),
        lambda: module.handle,
        lambda: kernel.launch(1, 32, (1.0, 0, 0, 1)),
        lambda: kernel.handle,
        lambda: kernel.attributes,
        lambda: kernel.to_cuda_core(),
    ):
        with pytest.raises(ModuleUnloaded, match="was unloaded; load it again") as caught:
            use()
        assert caught.value.key == module.artifact.key
    assert fake.launches == []
    assert "unloaded" in repr(module)


def test_nothing_is_unloaded_by_garbage_collection(fake: FakeDriver) -> None:
    load(artifact()).get_kernel("saxpy<float>")
    assert fake.unloaded == []


def test_threads_that_load_one_key_load_it_once(fake: FakeDriver) -> None:
    barrier, failures = threading.Barrier(8), []

    def use() -> None:
        try:
            barrier.wait()
            for _ in range(50):
                module = load(artifact())
                module.get_kernel("saxpy<float>").launch(1, 32, (1.0, 0, 0, 1))
                barrier.wait()
                module.unload()
                barrier.wait()
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert fake.count("cuLibraryLoadData") == fake.count("cuLibraryUnload") == 50
    assert len(fake.launches) == 400


def test_ptx_reaches_the_driver_with_one_nul(fake: FakeDriver) -> None:
    for key, payload in enumerate((PTX, PTX + b"\0", PTX + b"\0\0")):
        load(artifact("ptx", key=key, payload=payload))
    assert fake.payloads == [PTX + b"\0"] * 3


@pytest.mark.parametrize("value", [b"\x7fELF", "a.cubin", None])
def test_only_artifacts_are_loaded(fake: FakeDriver, value: object) -> None:
    with pytest.raises(InvalidType, match=r"Artifact\.from_file"):
        load(value)  # type: ignore[arg-type]
    assert fake.calls == []


# Names


@pytest.mark.parametrize("name", ["saxpy<float>", "_Z5saxpyIfEvT_PKS0_PS0_i"])
def test_a_kernel_has_its_name_expression_and_its_lowered_name(fake: FakeDriver, name: str) -> None:
    kernel = load(artifact()).get_kernel(name)
    assert kernel.name == name
    assert kernel.handle == load(artifact()).get_kernel("saxpy<float>").handle
    assert isinstance(kernel.handle, int)


def test_every_spelling_that_was_compiled_names_the_kernel(fake: FakeDriver) -> None:
    """C01: both spell one lowered name."""
    spellings = ("mul<size_t,float>", "mul<unsigned long,float>")
    symbols = tuple(Symbol("_Z3mulImfEvPT_T0_", spelling) for spelling in spellings)
    fake.kernels = {"_Z3mulImfEvPT_T0_": [8, 4]}
    module = load(artifact(symbols=symbols))
    assert len({module.get_kernel(spelling).handle for spelling in spellings}) == 1


def test_a_plain_name_is_found_where_nothing_is_known_of_the_symbols(fake: FakeDriver) -> None:
    fake.kernels = {"plain": []}
    load(artifact(symbols=())).get_kernel("plain").launch(1, 1)
    assert len(fake.launches) == 1


def test_a_kernel_that_is_not_there_is_told_with_those_that_are(fake: FakeDriver) -> None:
    """C33: a kernel without extern "C", asked for by its plain name."""
    fake.kernels = {"_Z5plainPi": [8]}
    module = load(artifact(symbols=(Symbol("_Z5plainPi"),)))
    with pytest.raises(KernelNotFound) as caught:
        module.get_kernel("plain")
    assert caught.value.available == ("_Z5plainPi",)
    assert str(caught.value) == (
        "the cubin for sm_90 has no kernel 'plain'; it has _Z5plainPi. Without extern \"C\", C++ lowers names: compile "
        "with name_expressions=('plain',), or ask for '_Z5plainPi'"
    )
    assert isinstance(caught.value, LookupError)


def test_the_driver_lists_the_kernels_of_an_artifact_without_symbols(fake: FakeDriver) -> None:
    fake.kernels = {"b": [], "a": []}
    module = load(artifact(symbols=()))
    with pytest.raises(KernelNotFound, match="it has a, b"):
        module.get_kernel("c")
    fake.missing = {"cuLibraryGetKernelCount"}
    with pytest.raises(KernelNotFound, match="no kernels that are known by name"):
        module.get_kernel("c")


def test_variables_and_kernels_are_not_mixed_up(fake: FakeDriver) -> None:
    module = load(artifact(symbols=(SAXPY, Symbol("table", "&table", "variable"))))
    with pytest.raises(KernelNotFound, match="use get_global"):
        module.get_kernel("&table")
    with pytest.raises(KernelNotFound, match="use get_kernel"):
        module.get_global("saxpy<float>")


@pytest.mark.parametrize("name", ["&ns::table", "ns::table", "_ZN2ns5tableE"])
def test_a_variable_has_its_name_expression_and_its_lowered_name(fake: FakeDriver, name: str) -> None:
    fake.globals = {"_ZN2ns5tableE": (0xABC000, 1024)}
    found = load(artifact(symbols=(Symbol("_ZN2ns5tableE", "&ns::table", "variable"),))).get_global(name)
    assert (found.handle, found.size_bytes) == (0xABC000, 1024)


def test_a_variable_that_is_not_there_is_told(fake: FakeDriver) -> None:
    module = load(artifact(symbols=(SAXPY, Symbol("table", "&table", "variable"))))
    with pytest.raises(KernelNotFound, match=r"has no variable 'tabel'; it has &table"):
        module.get_global("tabel")


@pytest.mark.parametrize("name", [b"saxpy", None, 3])
def test_a_name_is_a_str(fake: FakeDriver, name: object) -> None:
    with pytest.raises(InvalidType):
        load(artifact()).get_kernel(name)  # type: ignore[arg-type]


# What the driver refuses


REFUSALS = [
    (200, InvalidImage, "does not recognise"),
    (209, NoBinary, "compile for the device's own arch"),
    (218, InvalidPTX, "JIT rejects"),
    (221, NoJitCompiler, "JIT .* is absent; cubins still load"),
    (222, UnsupportedPTX, "newer than this driver"),
    (2, DriverError, "CUDA_ERROR_OUT_OF_MEMORY"),
    (300, DriverError, "CUDA_ERROR_INVALID_SOURCE"),
]


@pytest.mark.parametrize(("number", "error", "text"), REFUSALS)
@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"])
def test_each_refusal_has_its_error_wherever_it_shows(
    fake: FakeDriver, call: str, number: int, error: type[LoadError], text: str
) -> None:
    """C38, C39, C42, C45. A lazily loaded library tells its fault only when a kernel is asked for."""
    fake.fail[call] = number
    ptx = artifact("ptx")
    with pytest.raises(error, match=text) as caught:
        load(ptx).get_kernel("saxpy<float>")
    fault = caught.value
    assert type(fault) is error
    assert (fault.result, fault.kind, fault.arch, fault.key) == (number, "ptx", "compute_90", ptx.key)
    assert fault.driver_version == 13000
    assert fault.name.startswith("CUDA_ERROR_")
    for told in (fault.name, str(number), "ptx", "compute_90", str(ptx.key), "13000", call):
        assert told in str(fault)
    again = pickle.loads(pickle.dumps(fault))
    assert (type(again), str(again), again.fields) == (error, str(fault), fault.fields)


def test_a_result_that_cuda_python_cannot_name_is_a_driver_error(fake: FakeDriver) -> None:
    fake.fail["cuLibraryLoadData"] = 5555
    with pytest.raises(DriverError, match="cuLibraryLoadData failed: 5555 is not a valid CUresult") as caught:
        load(artifact())
    assert caught.value.key == artifact().key


def test_unsupported_ptx_names_its_version(fake: FakeDriver) -> None:
    """C38: the driver alone does not say which part is too new."""
    fake.fail["cuLibraryLoadData"] = 222
    with pytest.raises(UnsupportedPTX, match=r"compute_90.*\.version 9\.5; driver version 13000") as caught:
        load(artifact("ptx"))
    assert caught.value.ptx_version == 905


def test_invalid_ptx_carries_the_log_of_the_jit(fake: FakeDriver) -> None:
    fake.fail["cuLibraryLoadData"] = 218
    fake.jit_log = b"ptxas application ptx input, line 3; fatal : Parsing error near 'oops'"
    with pytest.raises(InvalidPTX, match="near 'oops'") as caught:
        load(artifact("ptx"))
    assert caught.value.log == fake.jit_log.decode()
    assert fake.count("cuLinkDestroy") == 1


def test_invalid_ptx_without_a_log_is_still_told(fake: FakeDriver) -> None:
    fake.fail |= {"cuLibraryLoadData": 218, "cuLinkCreate": 801}
    with pytest.raises(InvalidPTX) as caught:
        load(artifact("ptx"))
    assert caught.value.log == ""


def test_no_binary_names_the_device(fake: FakeDriver) -> None:
    """C39."""
    fake.device_attributes["CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"] = 7
    fake.device_attributes["CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"] = 5
    fake.fail["cuLibraryLoadData"] = 209
    with pytest.raises(NoBinary, match=r"sm_90.*\nDevice 0 has compute capability 7\.5"):
        load(artifact())


def test_a_cubin_loads_where_ptx_finds_no_jit(fake: FakeDriver) -> None:
    """C45."""
    fake.fail["cuLibraryLoadData"] = 221
    with pytest.raises(NoJitCompiler):
        load(artifact("ptx", key=2))
    del fake.fail["cuLibraryLoadData"]
    load(artifact(key=1)).get_kernel("saxpy<float>")


def test_a_refused_load_leaves_nothing_behind(fake: FakeDriver) -> None:
    fake.fail["cuLibraryLoadData"] = 209
    for _ in range(2):
        with pytest.raises(NoBinary):
            load(artifact())
    assert fake.unloaded == []
    del fake.fail["cuLibraryLoadData"]
    module = load(artifact())
    module.unload()
    assert len(fake.unloaded) == 1


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("ltoir", {"payload": b"\xedCN\x7f"}, "input of a link"),
        ("cubin", {"relocatable": True}, "relocatable"),
        ("ptx", {"relocatable": True}, "relocatable"),
    ],
)
def test_what_must_be_linked_does_not_reach_the_driver(
    fake: FakeDriver, kind: str, changes: dict[str, Any], text: str
) -> None:
    """C30, C32."""
    unlinked = artifact(kind, **changes)
    with pytest.raises(NeedsLink, match=f"{text}.*link it") as caught:
        load(unlinked)
    assert (caught.value.kind, caught.value.key) == (kind, unlinked.key)
    assert fake.calls == []


# Contexts and devices


def test_without_a_context_the_primary_one_is_retained(fake: FakeDriver) -> None:
    load(artifact())
    assert fake.context == 0x7000
    assert fake.count("cuDevicePrimaryCtxRetain") == 1


def test_a_current_context_is_left_alone(fake: FakeDriver) -> None:
    fake.context = 0x7001
    load(artifact()).get_kernel("saxpy<float>")
    assert fake.context == 0x7001
    assert fake.count("cuCtxSetCurrent") == fake.count("cuDevicePrimaryCtxRetain") == 0


def test_a_device_that_is_asked_for_is_made_current(fake: FakeDriver) -> None:
    load(artifact(), device=1)
    assert driver.current_device() == 1
    load(artifact(), device=0)
    assert driver.current_device() == 0
    assert fake.count("cuLibraryLoadData") == 1


@pytest.mark.parametrize("device", [-1, 2])
def test_a_device_that_is_not_there_is_told(fake: FakeDriver, device: int) -> None:
    with pytest.raises(InvalidArgument, match="there are 2"):
        load(artifact(), device=device)
    with pytest.raises(InvalidType):
        load(artifact(), device="cuda:0")  # type: ignore[arg-type]


def test_a_kernel_works_on_another_device(fake: FakeDriver) -> None:
    """C43: loaded on device 0, asked for and launched on device 1."""
    module = load(artifact())
    kernel = module.get_kernel("saxpy<float>")
    fake.context = 0x7001
    kernel.launch(1, 32, (1.0, 0, 0, 1))
    module.get_kernel("saxpy<float>").launch(1, 32, (1.0, 0, 0, 1))
    assert [launch.device for launch in fake.launches] == [1, 1]
    assert fake.count("cuLibraryLoadData") == 1


def test_a_kernel_works_after_a_context_reset(fake: FakeDriver) -> None:
    """C43."""
    module = load(artifact())
    kernel = module.get_kernel("saxpy<float>")
    fake.reset_primary_context(0)
    kernel.launch(1, 32, (1.0, 0, 0, 1))
    fake.reset_primary_context(0)
    module.get_kernel("saxpy<float>").launch(1, 32, (1.0, 0, 0, 1))
    assert len(fake.launches) == 2
    assert fake.count("cuDevicePrimaryCtxRetain") == 3


def test_a_thread_without_a_context_gets_that_of_the_modules_device(fake: FakeDriver) -> None:
    kernel = load(artifact(), device=1).get_kernel("saxpy<float>")
    thread = threading.Thread(target=kernel.launch, args=(1, 32, (1.0, 0, 0, 1)))
    thread.start()
    thread.join()
    assert [launch.device for launch in fake.launches] == [1]


def test_devices_are_described(fake: FakeDriver) -> None:
    assert driver.device_count() == 2
    assert driver.current_device() == 0
    assert driver.compute_capability() == (9, 0)
    assert driver.compute_capability(1) == (9, 0)
    assert driver.device_name() == "Fake H200"
    assert driver.driver_version() == 13000
    assert fake.context == 0


def test_attributes_are_those_of_the_current_device(fake: FakeDriver) -> None:
    fake.kernel_attributes |= {
        "CU_FUNC_ATTRIBUTE_NUM_REGS": 24,
        "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 1024,
        "CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES": 8,
        "CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES": 16,
        "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 512,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 48128,
        "CU_FUNC_ATTRIBUTE_BINARY_VERSION": 90,
        "CU_FUNC_ATTRIBUTE_PTX_VERSION": 89,
    }
    attributes = load(artifact()).get_kernel("saxpy<float>").attributes
    assert (attributes.registers, attributes.shared_bytes, attributes.constant_bytes) == (24, 1024, 8)
    assert (attributes.local_bytes, attributes.max_threads_per_block) == (16, 512)
    assert (attributes.max_dynamic_shared_bytes, attributes.binary_version, attributes.ptx_version) == (48128, 90, 89)


# No driver, and fork


def test_without_a_device_there_is_no_driver(fake: FakeDriver) -> None:
    fake.fail["cuInit"] = 100
    with pytest.raises(NoDriver, match="CUDA_ERROR_NO_DEVICE") as caught:
        load(artifact())
    assert (caught.value.result, caught.value.driver_version) == (100, 13000)
    assert driver.device_count() == 0
    assert driver.driver_version() == 13000
    del fake.fail["cuInit"]
    load(artifact())


def test_other_failures_of_the_driver_are_told(fake: FakeDriver) -> None:
    fake.fail["cuInit"] = 803
    with pytest.raises(DriverError, match="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"):
        load(artifact())


def test_the_toolkits_stub_is_no_driver(fake: FakeDriver) -> None:
    fake.fail["cuInit"], fake.version = 34, None
    assert driver.driver_version() is None
    with pytest.raises(NoDriver, match="STUB_LIBRARY"):
        load(artifact())


@without_libcuda
def test_without_libcuda_only_loading_fails() -> None:
    """C48: a machine that only compiles."""
    assert driver.driver_version() is None
    assert driver.device_count() == 0
    with pytest.raises(NoDriver, match="libcuda cannot be loaded") as caught:
        load(artifact())
    assert caught.value.driver_version is None
    for ask in (driver.current_device, driver.compute_capability, driver.device_name):
        with pytest.raises(NoDriver):
            ask()


def test_the_driver_is_not_touched_before_the_first_load(run_python: Callable[..., str]) -> None:
    run_python(
        "import sys, kernelstore, kernelstore.loader, kernelstore.cuda.driver\n"
        "kernelstore.cuda.driver.driver_version()\n"
        "assert 'cuda.bindings' not in sys.modules\n"
        "assert 'numpy' not in sys.modules"
    )


def in_child(check: Callable[[], None]) -> str:
    """Run `check` in a forked child; return what went wrong there."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            check()
            text = ""
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_that_cuda_cannot_be_used(fake: FakeDriver) -> None:
    """C44."""
    module = load(artifact())
    kernel = module.get_kernel("saxpy<float>")

    def check() -> None:
        for use in (
            lambda: load(artifact()),
            lambda: load(artifact(key=2)),
            lambda: module.get_kernel("saxpy<float>"),
            lambda: kernel.launch(1, 32, (1.0, 0, 0, 1)),
            lambda: kernel.launch(1, 32, (1.0, 0, 0, 1), cooperative=True),
            lambda: kernel.attributes,
            lambda: driver.current_device(),
        ):
            with pytest.raises(ForkedContext, match="spawn"):
                use()
        # What needs no context goes on.
        assert driver.driver_version() == 13000
        module.unload()
        assert fake.unloaded == []

    assert in_child(check) == ""
    kernel.launch(1, 32, (1.0, 0, 0, 1))
    module.unload()
    assert len(fake.unloaded) == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_a_process_without_cuda_may_load(fake: FakeDriver) -> None:
    assert driver.driver_version() == 13000
    assert in_child(lambda: load(artifact()).get_kernel("saxpy<float>").launch(1, 32, (1.0, 0, 0, 1))) == ""


def test_a_child_of_another_librarys_cuda_is_told_so(fake: FakeDriver) -> None:
    """C44: there cuInit answers CUDA_ERROR_NOT_INITIALIZED."""
    fake.fail["cuInit"] = 3
    with pytest.raises(ForkedContext, match="spawn"):
        load(artifact())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_does_not_wait_for_locks_of_the_parents_threads(fake: FakeDriver) -> None:
    from kernelstore.cuda import library

    module = load(artifact())

    def check() -> None:
        with pytest.raises(ForkedContext):
            load(artifact(key=2))
        module.unload()

    with library._libraries_lock, driver._process.lock:
        assert in_child(check) == ""


def test_cuda_core_that_is_not_installed_is_told(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = load(artifact()).get_kernel("saxpy<float>")
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(ImportError, match=r"kernelstore\[cuda-core\]"):
        kernel.to_cuda_core()
