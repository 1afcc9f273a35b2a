"""The demo's kernels compile for each of its archs, and their launches fit what PTX declares."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernelstore.arch import Arch
from kernelstore.cli.demo import DEMO_ARCHS, DEMOS, Demo, Launch
from kernelstore.cuda import nvrtc, ptxas, toolkit
from kernelstore.errors import ToolchainError

LAUNCHES = [pytest.param(demo, launch, id=launch.kernel) for demo in DEMOS for launch in demo.launches]
PTX_SIZES = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "u32": 4, "b32": 4, "s32": 4, "f32": 4, "u64": 8, "b64": 8, "f64": 8}


@pytest.fixture(scope="module")
def include_options() -> tuple[str, ...]:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        unit = toolkit.find_headers(nvrtc.build(), nvrtc.library_path())
    except ToolchainError:
        pytest.skip("libnvrtc is not installed")
    return () if unit is None else tuple(f"-I{directory}" for directory in unit.include_dirs)


def compile_demo(demo: Demo, arch: str, include_options: tuple[str, ...]) -> nvrtc.Output:
    if demo.needs_headers and not include_options:
        pytest.skip(f"no CUDA headers for NVRTC {nvrtc.build()} are installed")
    return nvrtc.compile_program(
        demo.source,
        name=demo.file,
        options=(*demo.options, "--ptxas-options=-v", *(include_options if demo.needs_headers else ())),
        name_expressions=demo.name_expressions,
        headers={},
        arch=Arch.parse(arch),
    )


def parameters(ptx: bytes, entry: str) -> list[int]:
    """Return the sizes of an entry's parameters in bytes."""
    text = ptx.decode().split(f".entry {entry}(")[1].split(")")[0]
    return [
        PTX_SIZES[kind] * int(count or 1)
        for kind, count in re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^\[\],]*(?:\[(\d+)\])?", text)
    ]


def check(demo: Demo, output: nvrtc.Output) -> None:
    assert output.cubin is not None
    assert output.ptx is not None
    usage, log = ptxas.split_log(output.log)
    assert log == "", "a demo that warns is no demo"
    for launch in demo.launches:
        entry = output.lowered_names.get(launch.kernel, launch.kernel)
        assert usage[entry].registers
        sizes = [
            8 if isinstance(argument, np.ndarray) else argument.itemsize
            for argument in launch.arguments(np.random.default_rng(0))
        ]
        assert parameters(output.ptx, entry) == sizes
        assert set(launch.variables) <= set(output.lowered_names)


@pytest.mark.parametrize("demo", DEMOS, ids=lambda demo: demo.name)
def test_a_demo_compiles_for_hopper(demo: Demo, include_options: tuple[str, ...]) -> None:
    check(demo, compile_demo(demo, "sm_90", include_options))


@pytest.mark.long
@pytest.mark.parametrize("arch", DEMO_ARCHS)
@pytest.mark.parametrize("demo", DEMOS, ids=lambda demo: demo.name)
def test_a_demo_compiles_for_every_arch(demo: Demo, arch: str, include_options: tuple[str, ...]) -> None:
    """A minute or two: a CUB kernel takes 2-4 s."""
    check(demo, compile_demo(demo, arch, include_options))


@pytest.mark.parametrize("demo", [demo for demo in DEMOS if not demo.needs_headers], ids=lambda demo: demo.name)
@pytest.mark.parametrize("arch", DEMO_ARCHS)
def test_a_demo_without_headers_compiles_for_every_arch(
    demo: Demo, arch: str, include_options: tuple[str, ...]
) -> None:
    check(demo, compile_demo(demo, arch, include_options))


@pytest.mark.parametrize(("demo", "launch"), LAUNCHES)
def test_a_launch_accepts_its_answer_and_nothing_else(demo: Demo, launch: Launch) -> None:
    before = launch.arguments(np.random.default_rng(1))
    expected = launch.expected(before)
    assert expected
    after = tuple(expected.get(position, argument) for position, argument in enumerate(before))
    for position, answer in expected.items():
        # What the kernel leaves as it was must not pass for an answer.
        assert answer.shape == np.asarray(before[position]).shape
        assert not np.array_equal(answer, before[position])
    assert launch.mismatches(before, after) == []
    for position, answer in expected.items():
        wrong = answer.copy()
        wrong[-1] += 1
        found = launch.mismatches(before, (*after[:position], wrong, *after[position + 1 :]))
        assert len(found) == 1
        assert f"argument {position} differs in 1 of {answer.size} places, first at {answer.size - 1}" in found[0]


@pytest.mark.parametrize(("demo", "launch"), LAUNCHES)
def test_a_launch_covers_its_data(demo: Demo, launch: Launch) -> None:
    threads = launch.grid[0] * launch.block[0]
    longest = max(np.size(argument) for argument in launch.arguments(np.random.default_rng(2)))
    per_thread = {"block_sort": 8, "half_axpy": 2}.get(demo.name, 1)
    assert threads * per_thread >= longest
    assert launch.grid[1:] == launch.block[1:] == (1, 1)


def test_inputs_follow_the_generator_alone() -> None:
    for demo in DEMOS:
        for launch in demo.launches:
            one, other = (launch.arguments(np.random.default_rng(3)) for _ in range(2))
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_names_of_demos_are_their_files() -> None:
    assert len({demo.name for demo in DEMOS}) == len(DEMOS)
    for demo in DEMOS:
        assert demo.source.strip()
        assert demo.needs_headers == ("#include" in demo.source)
        assert "-std=c++17" in demo.options
