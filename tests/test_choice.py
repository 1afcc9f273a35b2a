"""Choosing for a device: the table over all archs, with nvJitLink as the oracle, and what a store answers without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_driver import IMAGE, CUresult, FakeDriver

from kernelstore import Artifact, Compiler, Key, Store, choice
from kernelstore.arch import Arch
from kernelstore.artifact import ArtifactInfo, Program
from kernelstore.cuda import nvrtc
from kernelstore.errors import (
    InvalidArgument,
    InvalidType,
    NoBinary,
    NoJitCompiler,
    ToolchainError,
    UnsupportedArch,
    UnsupportedPTX,
)

DEVICES = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)]
PLAIN = ["75", "80", "86", "87", "89", "90", "100", "103", "107", "110", "120", "121"]
NUMBERS = [
    *PLAIN,
    "90a",
    "100a",
    "100f",
    "103a",
    "103f",
    "107a",
    "107f",
    "110a",
    "110f",
    "120a",
    "120f",
    "121a",
    "121f",
]

# Number of a cubin to the devices that it runs on.
CUBINS = {
    "75": ["75"],
    "80": ["80", "86", "89"],
    "86": ["86", "89"],
    "87": ["87"],
    "89": ["89"],
    "90": ["90"],
    "100": ["100", "103", "107"],
    "103": ["103", "107"],
    "107": ["107"],
    "110": ["110"],
    "120": ["120", "121"],
    "121": ["121"],
    "90a": ["90"],
    "100a": ["100"],
    "100f": ["100", "103", "107"],
    "103a": ["103"],
    "103f": ["103", "107"],
    "107a": ["107"],
    "107f": ["107"],
    "110a": ["110"],
    "110f": ["110"],
    "120a": ["120"],
    "120f": ["120", "121"],
    "121a": ["121"],
    "121f": ["121"],
}
K = 'extern "C" __global__ void k(float* a) { a[threadIdx.x] += 1.f; }'


def arch(number: str, kind: str = "cubin") -> Arch:
    return Arch.parse(("sm_" if kind == "cubin" else "compute_") + number)


def served(kind: str, number: str) -> list[str]:
    return [f"{major}{minor}" for major, minor in DEVICES if choice.serves(kind, arch(number, kind), (major, minor))]


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_a_cubin_serves_what_the_table_says(number: str) -> None:
    """C13: sm_120a does not serve 12.1."""
    assert served("cubin", number) == CUBINS[number]


@pytest.mark.parametrize("number", NUMBERS)
def test_ptx_serves_what_the_table_says(number: str) -> None:
    expected = CUBINS[number] if number[-1] in "af" else [device for device in PLAIN if int(device) >= int(number)]

    assert served("ptx", number) == expected


@pytest.mark.parametrize("kind", ["ltoir", "fatbin"])
def test_other_kinds_serve_no_device_as_they_are(kind: str) -> None:
    assert served(kind, "90") == []


def linked(kind: str, numbers: list[str], targets: list[str]) -> dict[str, list[str]]:
    """What nvJitLink links of each arch to each target."""
    from kernelstore.cuda import nvjitlink
    from kernelstore.errors import LinkError

    found = {}
    for number in numbers:
        output = nvrtc.compile_program(
            K, name="", options=("-dlto",) if kind == "ltoir" else (), name_expressions=(), headers={},
            arch=arch(number, kind),
        )  # fmt: skip
        payload = output.ltoir if kind == "ltoir" else output.ptx
        assert payload is not None
        found[number] = []
        for target in targets:
            try:
                nvjitlink.link([(kind, payload)], (f"-arch=sm_{target}", *(("-lto",) if kind == "ltoir" else ())))
            except LinkError:
                continue
            found[number].append(target)
    return found


@pytest.fixture
def known() -> list[str]:
    """The archs that both this NVRTC and this nvJitLink know."""
    nvjitlink = pytest.importorskip("kernelstore.cuda.nvjitlink")
    try:
        newer = nvjitlink.version() >= nvrtc.version()
    except ToolchainError:
        pytest.skip("nvJitLink is not installed")
    if not newer:
        pytest.skip("nvJitLink is older than NVRTC")
    supported = nvrtc.supported_archs()
    return [
        number for number in NUMBERS
        if int(number.rstrip("af")) in supported and not (number.endswith("f") and nvrtc.version() < (12, 9))
    ]  # fmt: skip


def test_nvjitlink_compiles_ptx_for_those_that_the_table_says(known: list[str]) -> None:
    assert linked("ptx", known, known) == {
        number: [target for target in known if choice.links("ptx", arch(number, "ptx"), arch(target))]
        for number in known
    }


def test_nvjitlink_links_lto_ir_for_those_that_the_table_says(known: list[str]) -> None:
    found = linked("ltoir", known, known)

    for number in known:
        allowed = [target for target in known if choice.links("ltoir", arch(number, "ltoir"), arch(target))]
        assert set(allowed) <= set(found[number])
        # Its header tells 101 of LTO-IR for 110, so nvJitLink takes it for 103 too; we do not.
        extra = set(found[number]) - set(allowed)
        assert extra <= ({"103", "103a", "103f", "107", "107a", "107f"} if number.startswith("110") else set())


# -- drivers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ptx_version", "driver_version", "accepted"),
    [
        (808, 12090, True),
        (808, 12080, False),
        (905, 13000, False),
        (905, 12040, False),
        (905, 13050, True),
        (900, 13000, True),
        (805, 12060, True),
        (806, 12060, False),
        (905, 13060, True),
        (999, 14000, True),
        (905, None, True),
        (None, 12040, True),
        (700, 10020, False),
    ],
)
def test_ptx_needs_a_driver_that_knows_its_version(
    ptx_version: int | None, driver_version: int | None, accepted: bool
) -> None:
    """C38. A driver newer than the table is tried."""
    assert choice.accepts_ptx(ptx_version, driver_version) is accepted


def test_the_table_of_ptx_versions_is_that_of_cuda_bindings() -> None:
    module = pytest.importorskip("cuda.bindings.utils._ptx_utils", reason="this cuda-bindings has no table")
    theirs = {
        major * 1000 + minor * 10: int(text.replace(".", "0"))
        for text, (major, minor) in module._ptx_to_cuda.items()
        if major >= 11
    }

    assert theirs.items() <= choice._NEWEST_PTX.items()


def test_this_nvrtc_writes_the_ptx_version_of_its_release(ptx: Artifact) -> None:
    major, minor = nvrtc.version()

    assert choice.newest_ptx(major * 1000 + minor * 10) == ptx.ptx_version


# -- the order --------------------------------------------------------------------------------------------------------


def info(kind: str, number: str, toolchain: str | None = "nvrtc 13.0.88", **changes: Any) -> ArtifactInfo:
    fields: dict[str, Any] = {
        "driver_version": None, "ptx_version": None if kind == "cubin" else 900, "origin": "nvrtc",
        "relocatable": False, "size_bytes": 1, "stored_size_bytes": 1, "payload_sha256": bytes(32), "compile_ms": 1.0,
        "created_at_ns": 1, "last_access_ns": 1, "usage_count": 0, "pinned": False, "program_key": None,
        "program_name": None,
    }  # fmt: skip
    return ArtifactInfo(Key(bytes(32)), kind, str(arch(number, kind)), toolchain, **(fields | changes))


def told(infos: list[ArtifactInfo]) -> list[str]:
    return [f"{info.kind} {info.arch.partition('_')[2]}" for info in infos]


def test_the_order_is_exact_then_compatible_then_ptx() -> None:
    numbers = ["80", "90", "90a", "100", "100a", "100f", "103", "103a", "103f", "110", "120"]
    stored = [info(kind, number) for number in numbers for kind in ("ptx", "cubin")]

    assert told(choice.candidates(stored, (10, 3))) == [
        "cubin 103a", "cubin 103f", "cubin 103", "cubin 100f", "cubin 100",
        "ptx 103a", "ptx 103f", "ptx 100f", "ptx 103", "ptx 100", "ptx 90", "ptx 80",
    ]  # fmt: skip


def test_the_newest_toolchain_that_the_driver_can_load_comes_first() -> None:
    stored = [
        info("cubin", "90", toolchain)
        for toolchain in ("nvrtc 12.9.86", "nvrtc 13.0.9", "nvrtc 13.0.88 with cudart 13.0", None, "nvrtc 12.10.1")
    ]

    assert [found.toolchain for found in choice.candidates(stored, (9, 0), driver_version=13000)] == [
        "nvrtc 13.0.88 with cudart 13.0", "nvrtc 13.0.9", "nvrtc 12.10.1", "nvrtc 12.9.86", None
    ]  # fmt: skip
    assert [found.toolchain for found in choice.candidates(stored, (9, 0), driver_version=12090)] == [
        "nvrtc 12.10.1", "nvrtc 12.9.86", None
    ]  # fmt: skip


def test_a_compiled_cubin_goes_before_one_linked_of_ptx() -> None:
    stored = [
        info("cubin", "90", "nvjitlink 13.5.37", origin="nvjitlink"),
        info("cubin", "90", "nvrtc 13.0.88"),
    ]

    assert [found.origin for found in choice.candidates(stored, (9, 0))] == ["nvrtc", "nvjitlink"]


def test_what_needs_a_link_or_belongs_to_one_driver_is_left_out() -> None:
    stored = [info("cubin", "90", relocatable=True), info("cubin", "90a", origin="driver-jit"), info("ltoir", "90")]

    assert choice.candidates(stored, (9, 0)) == []


def test_a_chosen_arch_has_no_substitutes() -> None:
    stored = [info("cubin", "90"), info("cubin", "90a"), info("ptx", "90a"), info("ptx", "90")]

    assert told(choice.candidates(stored, (9, 0), only="90a")) == ["cubin 90a", "ptx 90a"]


# -- a store, without a GPU -------------------------------------------------------------------------------------------


def test_the_best_of_a_program_is_found_by_key_and_by_name(compiler: Compiler, store: Store) -> None:
    kept = []
    for number in ("80", "90", "90a"):
        compiler.compile(K, arch=f"sm_{number}", name="k.cu", name_expressions=("k",))
    kept = list(store.search())
    program = kept[0].program_key
    assert program is not None

    for asked in (program, bytes(program), str(program), "k.cu"):
        best = store.best_for(asked, (9, 0))
        assert best is not None
        assert (best.kind, best.arch, best.program_name) == ("cubin", "sm_90a", "k.cu")
        assert [symbol.name for symbol in best.symbols] == ["k"]
        assert best.symbols[0].registers
    assert [best and (best.kind, best.arch) for best in (store.best_for("k.cu", cc) for cc in [(8, 6), (12, 0), (7, 5)])] == [
        ("cubin", "sm_80"), ("ptx", "compute_90"), None
    ]  # fmt: skip
    assert next(found for found in kept if found.key == best.key) == best


def test_the_driver_counts_in_the_choice(compiler: Compiler, store: Store) -> None:
    compiler.compile(K, arch="sm_90", name="k.cu")
    major = nvrtc.version()[0]

    assert store.best_for("k.cu", (9, 0), major * 1000) is not None
    assert store.best_for("k.cu", (9, 0), (major - 1) * 1000) is None
    assert store.best_for("k.cu", (10, 0), major * 1000 + 10 * nvrtc.version()[1]) is not None
    assert store.best_for("k.cu", (10, 0), 12040) is None


def test_the_newest_program_of_a_name_is_meant(compiler: Compiler, store: Store) -> None:
    compiler.compile(K, arch="sm_90", name="k.cu")
    compiler.compile(K + "\n", arch="sm_80", name="k.cu")

    best = store.best_for("k.cu", (9, 0))

    assert best is not None
    assert best.arch == "compute_80"


def test_an_unknown_program_has_no_best(store: Store) -> None:
    assert store.best_for("k.cu", (9, 0)) is None
    assert store.best_for(bytes(32), (9, 0)) is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None, (9, 0)), InvalidType),
        ((b"short", (9, 0)), InvalidArgument),
        ((bytes(32), "9.0"), InvalidArgument),
        ((bytes(32), (9, 0, 0)), InvalidArgument),
        ((bytes(32), (9.0, 0)), InvalidArgument),
        ((bytes(32), (9, 0), "13.0"), InvalidArgument),
        ((bytes(32), (9, 0), 0), InvalidArgument),
    ],
)
def test_a_wrong_question_is_refused(store: Store, arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        store.best_for(*arguments)


def test_the_choice_imports_no_sqlalchemy(path: Path, compiler: Compiler, run_python: Callable[..., str]) -> None:
    compiler.compile(K, arch="sm_90", name="k.cu")

    printed = run_python(
        "import sys; from kernelstore import Store\n"
        "print(Store(sys.argv[1]).best_for('k.cu', (9, 0)).arch)\n"
        "print(sorted({'sqlalchemy', 'cuda.bindings', 'kernelstore.cuda'} & set(sys.modules)))",
        path,
    )

    assert printed.split() == ["sm_90", "[]"]


# -- a compiler on a device -------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    fake.kernels = {"k": [8]}
    return fake.install(monkeypatch)


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Take NVRTC away."""

    def broken(*_: object, **__: object) -> None:
        raise ToolchainError("NVRTC cannot be loaded", library=None, log="")

    def take_away() -> None:
        monkeypatch.setattr("kernelstore.cuda.toolkit.find_nvrtc", lambda: None)
        monkeypatch.setattr(nvrtc, "build", broken)

    return take_away


@pytest.fixture
def program(compiler: Compiler, store: Store) -> Program:
    """A program of which the store knows nothing but itself."""
    artifact = compiler.compile(K, "ptx", arch="compute_75")
    (found,) = store.search()
    assert found.program_key is not None
    program = store.program(found.program_key)
    assert program is not None
    store.delete(artifact.key)
    return program


def cubin(program: Program, toolchain: str, number: int) -> Artifact:
    """A cubin for sm_90 of another toolchain."""
    return Artifact(
        Key(bytes([number]) * 32), "cubin", "sm_90", IMAGE, toolchain=toolchain, program=program
    )  # fmt: skip


def test_without_nvrtc_the_newest_toolchain_that_the_driver_loads_serves(
    compiler: Compiler, store: Store, fake: FakeDriver, program: Program, no_nvrtc: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "kernelstore")
    store.put(cubin(program, "nvrtc 14.0.1", 1), cubin(program, "nvrtc 12.9.86", 2), cubin(program, "nvrtc 13.0.88", 3))
    no_nvrtc()

    assert compiler.module(K).artifact.toolchain == "nvrtc 13.0.88"
    assert compiler.compile(K, arch="sm_90").toolchain == "nvrtc 13.0.88"
    assert compiler.rebuild(program.key, "sm_90").toolchain == "nvrtc 13.0.88"
    assert "nvrtc 13.0.88" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [{"arch": ["sm_90"]}, {"name": []}, {"options": None}, {"options": [["-DX"]]}, {"include_dirs": None},
     {"include_dirs": [5]}, {"extra": bytearray(b"x")}, {"headers": []}, {"name_expressions": 5}],
)  # fmt: skip
def test_a_module_of_wrong_parameters_is_refused_in_words(
    compiler: Compiler, fake: FakeDriver, wrong: dict[str, Any]
) -> None:
    """They met the dictionary of modules first, and were a bare TypeError."""
    with pytest.raises(InvalidType):
        compiler.module(K, **wrong)


def test_without_nvrtc_and_without_artifacts_the_missing_compiler_is_told(
    compiler: Compiler, fake: FakeDriver, no_nvrtc: Callable[[], None]
) -> None:
    no_nvrtc()

    for ask in (lambda: compiler.module(K), lambda: compiler.compile(K, arch="sm_90")):
        with pytest.raises(ToolchainError, match="NVRTC cannot be loaded"):
            ask()


def test_a_refused_cubin_makes_way_for_the_next_and_stays(
    compiler: Compiler, store: Store, fake: FakeDriver, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C39."""
    store.put(cubin(program, "nvrtc 12.0.1", 1))
    load, refusals = fake.cuLibraryLoadData, [CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU]

    def refuse_once(code: bytes, *options: Any) -> tuple[Any, ...]:
        return (refusals.pop(), None) if refusals else load(code, *options)

    monkeypatch.setattr(fake, "cuLibraryLoadData", refuse_once)

    module = compiler.module(K)

    assert module.artifact.toolchain == "nvrtc 12.0.1"
    assert len(store) == 3


def test_when_nothing_runs_the_archs_that_there_are_are_listed(
    compiler: Compiler, store: Store, fake: FakeDriver, no_nvrtc: Callable[[], None]
) -> None:
    """C39: an sm_86 cubin, and a device of 7.5."""
    compiler.compile(K, arch="sm_86")
    fake.device_attributes["CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"] = 7
    fake.device_attributes["CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"] = 5
    no_nvrtc()

    with pytest.raises(NoBinary, match=r"compute capability 7\.5 .*cubin sm_86, ptx compute_86") as caught:
        compiler.module(K)

    assert sorted(caught.value.archs) == ["cubin sm_86", "ptx compute_86"]
    assert len(store) == 2


@pytest.mark.parametrize(("number", "error"), [(221, NoJitCompiler), (222, UnsupportedPTX)])
def test_ptx_that_the_driver_refuses_is_told_and_stays(
    compiler: Compiler, store: Store, fake: FakeDriver, no_nvrtc: Callable[[], None], number: int,
    error: type[Exception], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """C38, C45."""
    compiler.compile(K, "ptx", arch="compute_80")
    no_nvrtc()
    monkeypatch.setattr("kernelstore.linker._by_nvjitlink", lambda *_: None)
    fake.fail = {"cuLibraryLoadData": number, "cuLinkAddData": number}

    with pytest.raises(error) as caught:
        compiler.module(K)

    assert caught.value.arch == "compute_80"
    assert len(store) == 1


def test_a_chosen_arch_is_not_replaced(compiler: Compiler, fake: FakeDriver, no_nvrtc: Callable[[], None]) -> None:
    compiler.compile(K, arch="sm_90")
    no_nvrtc()

    with pytest.raises(ToolchainError):
        compiler.module(K, arch="sm_90a")


def test_a_device_that_nvrtc_does_not_know_takes_a_compatible_cubin_first(
    compiler: Compiler, store: Store, fake: FakeDriver, program: Program
) -> None:
    fake.device_attributes["CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"] = 9
    store.put(cubin(program, "nvrtc 13.0.88", 1))

    assert compiler.module(K).artifact.arch == "sm_90"
    with pytest.raises(UnsupportedArch):
        compiler.compile(K, arch="sm_99")
