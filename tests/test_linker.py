"""Linking with a real nvJitLink: what goes together, what is refused before it would go wrong silently, and the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kernelstore import Artifact, Compiler, Linker, Store
from kernelstore.cuda import nvjitlink, nvrtc
from kernelstore.errors import (
    InvalidArch,
    InvalidArgument,
    InvalidType,
    KernelStoreError,
    LinkError,
    PayloadRejected,
    StoreWarning,
    ToolchainError,
)

CALLER = """
extern __device__ float twice(float x);
template<class T> __global__ void apply(T* a) { a[threadIdx.x] = twice(a[threadIdx.x]); }
"""
CALLEE = "__device__ float twice(float x) { return 2 * x; }"
NAME = "apply<float>"
LOWERED = "_Z5applyIfEvPT_"

Rows = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture(autouse=True)
def release() -> tuple[int, int]:
    try:
        found = nvjitlink.version()
    except ToolchainError:
        pytest.skip("nvJitLink is not installed")
    if found < nvrtc.version():
        pytest.skip("nvJitLink is older than NVRTC")
    return found


@pytest.fixture
def pair(compiler: Compiler) -> Callable[..., list[Artifact]]:
    """Caller and callee of one link."""

    def compile_both(kind: str = "ltoir", arch: str = "compute_80") -> list[Artifact]:
        options = () if kind == "ltoir" else ("-rdc=true",)
        arguments: dict[str, Any] = {"kind": kind, "arch": arch, "options": options}
        return [
            compiler.compile(CALLER, name_expressions=(NAME,), **arguments),
            compiler.compile(CALLEE, **arguments),
        ]

    return compile_both


@pytest.fixture
def count_links(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    nvjitlink.build()
    links: list[object] = []
    link = nvjitlink.link
    monkeypatch.setattr(nvjitlink, "link", lambda *arguments: links.append(arguments) or link(*arguments))
    return lambda: len(links)


@pytest.mark.parametrize(
    ("kind", "arch"), [("ltoir", "compute_80"), ("ptx", "compute_80"), ("cubin", "sm_90")], ids=lambda text: text
)
def test_two_inputs_become_one_cubin(pair: Callable[..., list[Artifact]], kind: str, arch: str) -> None:
    linked = Linker().link(pair(kind, arch), arch="sm_90")

    assert (linked.kind, linked.arch, linked.origin) == ("cubin", "sm_90", "nvjitlink")
    assert linked.toolchain == f"nvjitlink {nvjitlink.build()}"
    assert not linked.relocatable
    assert linked.compile_ms > 0


def test_lto_ir_and_ptx_go_together(pair: Callable[..., list[Artifact]]) -> None:
    caller, _ = pair("ltoir")
    _, callee = pair("ptx")

    assert Linker().link([caller, callee], arch="sm_90a").arch == "sm_90a"


def test_names_are_kept_and_resource_usage_is_that_of_the_cubin(pair: Callable[..., list[Artifact]]) -> None:
    for kind, parameters in (("ltoir", ("8 bytes",)), ("ptx", ("u64",))):
        (symbol,) = Linker().link(pair(kind), arch="sm_90").symbols

        assert (symbol.name_expression, symbol.lowered_name, symbol.what) == (NAME, LOWERED, "kernel")
        assert symbol.parameters == parameters
        assert symbol.registers


def test_a_link_is_stored_under_its_inputs_and_found_again(
    store: Store, pair: Callable[..., list[Artifact]], count_links: Callable[[], int], rows: Rows
) -> None:
    inputs = pair()
    first = Linker(store).link(inputs, arch="sm_90")
    second = Linker(store).link(inputs, arch="sm_90")

    assert count_links() == 1
    assert (first.from_cache, second.from_cache) == (False, True)
    assert (second.payload, second.symbols) == (first.payload, first.symbols)
    store.flush()
    assert rows("SELECT arch, origin, usage_count FROM artifact WHERE kind = 'cubin'") == [("sm_90", "nvjitlink", 1)]
    assert rows("SELECT reason, value FROM counter WHERE name = 'link'") == [("nvjitlink", 1)]


def test_the_key_differs_with_everything_that_decides_the_output(
    pair: Callable[..., list[Artifact]], compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, callee = pair()
    other = compiler.compile(CALLEE.replace("2", "3"), "ltoir", arch="compute_80")
    linker = Linker()

    keys = [
        linker.link(inputs, arch=arch, options=options).key
        for inputs, arch, options in (
            ([caller, callee], "sm_90", ()),
            ([caller, callee], "sm_90a", ()),
            ([caller, callee], "sm_100", ()),
            ([caller, callee], "sm_90", ("-g",)),
            ([caller, callee], "sm_90", ("-lineinfo",)),
            ([callee, caller], "sm_90", ()),
            ([caller, other], "sm_90", ()),
            # Made by hand, with a key of another payload.
            ([caller, dataclasses.replace(other, key=callee.key)], "sm_90", ()),
        )
    ]
    monkeypatch.setattr(nvjitlink, "build", lambda: "99.0.1")
    keys.append(linker.link([caller, callee], arch="sm_90").key)

    assert len(set(keys)) == len(keys)
    assert caller.key not in keys


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made_by", "said"),
    [
        ("nvrtc {older}.9.86", "same major version"),
        ("nvrtc {major}.99.1", "newer than the linker"),
        ("nvrtc {newer}.0.1", "newer than the linker"),
        (None, "is not known"),
    ],
)
def test_lto_ir_of_another_release_is_refused(
    pair: Callable[..., list[Artifact]], store: Store, release: tuple[int, int], made_by: str | None, said: str
) -> None:
    """nvJitLink itself would link it without a word."""
    caller, callee = pair()
    major = release[0]
    toolchain = made_by and made_by.format(major=major, older=major - 1, newer=major + 1)

    with pytest.raises(LinkError, match=said) as caught:
        Linker(store).link([caller, dataclasses.replace(callee, toolchain=toolchain)], arch="sm_90")

    assert caught.value.result is None
    assert str(callee.key) in str(caught.value)
    assert len(store) == 2


def test_ptx_of_a_newer_version_is_refused(pair: Callable[..., list[Artifact]]) -> None:
    caller, callee = pair("ptx")

    with pytest.raises(LinkError, match=r"\.version 99\.0 is newer than the linker's"):
        Linker().link([caller, dataclasses.replace(callee, ptx_version=9900)], arch="sm_90")


@pytest.mark.parametrize(
    ("kind", "made_for", "arch"),
    [
        ("ltoir", "compute_90", "sm_89"),
        ("ptx", "compute_90", "sm_80"),
        ("ptx", "compute_90a", "sm_90"),
        ("ptx", "compute_90a", "sm_100"),
        ("cubin", "sm_80", "sm_86"),
    ],
)
def test_an_arch_that_does_not_reach_the_target_is_refused(
    pair: Callable[..., list[Artifact]], kind: str, made_for: str, arch: str
) -> None:
    with pytest.raises(LinkError, match=f"{made_for} does not reach {arch}"):
        Linker().link(pair(kind, made_for), arch=arch)


def test_a_symbol_that_nobody_has_is_told_with_the_log(pair: Callable[..., list[Artifact]], store: Store) -> None:
    caller, _ = pair("ptx")

    with pytest.raises(LinkError, match="_Z5twicef") as caught:
        Linker(store).link([caller], arch="sm_90")

    assert "_Z5twicef" in caught.value.log
    assert caught.value.result.startswith("ERROR_")
    assert "-arch=sm_90" in caught.value.options
    assert len(store) == 2


def test_an_option_that_nvjitlink_does_not_know_is_told(pair: Callable[..., list[Artifact]]) -> None:
    with pytest.raises(LinkError, match="ERROR_UNRECOGNIZED_OPTION"):
        Linker().link(pair(), arch="sm_90", options=("-frobnicate",))


def test_an_arch_that_nvjitlink_does_not_know_is_told(pair: Callable[..., list[Artifact]]) -> None:
    """nvJitLink 12.9 has crashed on one."""
    with pytest.raises(LinkError, match="does not know sm_999"):
        Linker().link(pair(), arch="sm_999")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"artifacts": []}, InvalidArgument),
        ({"artifacts": b"payload"}, InvalidType),
        ({"artifacts": [b"payload"]}, InvalidType),
        ({"arch": "compute_90"}, InvalidArch),
        ({"arch": "90"}, InvalidArch),
        ({"options": "-g"}, InvalidType),
        ({"options": (1,)}, InvalidType),
        ({"options": ("-arch=sm_80",)}, InvalidArgument),
        ({"options": ("-lto",)}, InvalidArgument),
        ({"options": ("g",)}, InvalidArgument),
        ({"options": ("-g\0",)}, InvalidArgument),
        ({"options": ("-Xptxas=--options-file=o",)}, InvalidArgument),
        ({"options": ("-Xptxas=-optf=o",)}, InvalidArgument),
    ],
)
def test_arguments_of_no_use_are_refused(
    pair: Callable[..., list[Artifact]], arguments: dict[str, Any], error: type[KernelStoreError]
) -> None:
    given: dict[str, Any] = {"artifacts": pair(), "arch": "sm_90"} | arguments

    with pytest.raises(error):
        Linker().link(given.pop("artifacts"), **given)


def test_one_artifact_is_not_several(pair: Callable[..., list[Artifact]]) -> None:
    with pytest.raises(InvalidType, match="not one Artifact"):
        Linker().link(pair()[0], arch="sm_90")  # type: ignore[arg-type]


def test_a_cubin_that_is_whole_is_no_input(compiler: Compiler) -> None:
    with pytest.raises(InvalidArgument, match="no input of a link"):
        Linker().link([compiler.compile(CALLEE, arch="sm_90")], arch="sm_90")


def test_damaged_input_never_reaches_the_linker(pair: Callable[..., list[Artifact]]) -> None:
    caller, callee = pair()

    with pytest.raises(PayloadRejected):
        Linker().link([caller, dataclasses.replace(callee, payload=b"rubbish")], arch="sm_90")


def test_a_linker_is_given_a_store_not_a_path(tmp_path: object) -> None:
    with pytest.raises(InvalidType, match="a Store"):
        Linker(str(tmp_path))  # type: ignore[arg-type]


def test_a_store_that_fails_costs_a_link_and_a_warning(store: Store, pair: Callable[..., list[Artifact]]) -> None:
    inputs = pair()
    store.close()

    with pytest.warns(StoreWarning):
        assert not Linker(store).link(inputs, arch="sm_90").from_cache


def test_nvjitlink_that_is_not_there_is_told_with_what_to_install(
    run_python: Callable[..., str],
) -> None:
    printed = run_python(
        "import sys; sys.modules['cuda.bindings.nvjitlink'] = None\n"
        "from kernelstore.cuda import nvjitlink\n"
        "from kernelstore.errors import ToolchainError\n"
        "try: nvjitlink.version()\n"
        "except ToolchainError as error: print(error)"
    )

    assert "pip install nvidia-nvjitlink" in printed
