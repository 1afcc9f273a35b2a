"""Artifacts of kernels that were compiled elsewhere."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import kinds_samples
import pytest

from kernelstore.artifact import Artifact, Symbol
from kernelstore.errors import InvalidArch, InvalidArgument, InvalidType, PayloadRejected, UnknownPlugin


@pytest.mark.parametrize(
    ("name", "kind", "arch", "toolchain"),
    [
        ("sm_90a.cubin", "cubin", "sm_90a", "ptxas 13.0.88"),
        ("old_abi_sm_75.cubin", "cubin", "sm_75", None),
        ("compute_90.ptx", "ptx", "compute_90", "nvvm 13.0.88"),
        ("sm_90a.fatbin", "fatbin", "sm_90a", None),
    ],
)
def test_a_file_is_recognised_by_its_bytes(tmp_path: Path, name: str, kind: str, arch: str, toolchain: str) -> None:
    path = tmp_path / "no_suffix"
    path.write_bytes(kinds_samples.asset(name))

    for given in (path, str(path)):
        artifact = Artifact.from_file(given)
        assert (artifact.kind, artifact.arch, artifact.toolchain) == (kind, arch, toolchain)
        assert artifact.origin == "import"
        assert artifact.driver_version is None
        assert artifact.program is None
        assert not artifact.from_cache
        assert artifact.size_bytes == len(artifact.payload)


def test_symbols_and_ptx_version_are_read_from_the_payload() -> None:
    artifact = Artifact.from_bytes(kinds_samples.asset("compute_90.ptx"))

    assert artifact.ptx_version == 900
    assert artifact.symbols[0] == Symbol("scale", parameters=("f32", "u64", "u64", "b8[16] align 4", "u8"))


def test_relocatable_code_is_marked() -> None:
    assert Artifact.from_bytes(kinds_samples.asset("relocatable_sm_90.cubin")).relocatable
    assert not Artifact.from_bytes(kinds_samples.asset("linked_sm_90a.cubin")).relocatable


def test_ptx_is_stored_in_one_form() -> None:
    text = kinds_samples.asset("compute_90.ptx")

    bare, terminated = Artifact.from_bytes(text), Artifact.from_bytes(text + b"\0\0")

    assert bare == terminated
    assert bare.payload == text + b"\0"


def test_an_equal_payload_has_an_equal_key() -> None:
    payload = kinds_samples.asset("sm_90a.cubin")

    assert Artifact.from_bytes(payload).key == Artifact.from_bytes(bytearray(payload), kind="cubin", arch="sm_90a").key
    assert Artifact.from_bytes(payload).key != Artifact.from_bytes(payload + b"\0").key


def test_one_fatbin_has_a_key_for_each_arch() -> None:
    payload = kinds_samples.asset("two_archs.fatbin")

    first, second = (Artifact.from_bytes(payload, arch=arch) for arch in ("sm_80", "compute_100f"))

    assert (first.arch, second.arch) == ("sm_80", "sm_100f")
    assert first.key != second.key


def test_a_payload_that_tells_no_arch_needs_one() -> None:
    with pytest.raises(InvalidArgument, match="give one"):
        Artifact.from_bytes(kinds_samples.asset("two_archs.fatbin"))
    with pytest.raises(InvalidArgument, match="give one"):
        Artifact.from_bytes(kinds_samples.asset("compute_90.ltoir"))

    assert Artifact.from_bytes(kinds_samples.asset("compute_90.ltoir"), arch="sm_90").arch == "compute_90"


def test_an_arch_may_be_given_in_either_form() -> None:
    assert Artifact.from_bytes(kinds_samples.asset("compute_90.ptx"), arch="sm_90").arch == "compute_90"
    assert Artifact.from_bytes(kinds_samples.asset("sm_90a.cubin"), arch="compute_90a").arch == "sm_90a"


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_100a"])
def test_an_arch_that_the_payload_contradicts_is_refused(arch: str) -> None:
    with pytest.raises(InvalidArgument, match="sm_90a"):
        Artifact.from_bytes(kinds_samples.asset("sm_90a.cubin"), arch=arch)


@pytest.mark.parametrize(
    ("payload", "arguments", "error"),
    [
        (b"hello", {}, PayloadRejected),
        (b"", {}, PayloadRejected),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\0\x3e\0" + bytes(200), {}, PayloadRejected),
        (b"/home/me/kernel.cubin", {}, PayloadRejected),
        (gzip.compress(b".version 9.0\n.target sm_90\n"), {}, PayloadRejected),
        (b"hello", {"kind": "cubin"}, PayloadRejected),
        (b"hello", {"kind": "ptx", "arch": "sm_90"}, PayloadRejected),
        (b"hello", {"kind": "object"}, UnknownPlugin),
        ("kernel.cubin", {}, InvalidType),
        (Path("kernel.cubin"), {}, InvalidType),
        (None, {}, InvalidType),
    ],
)
def test_bytes_that_are_no_kernel_are_refused(
    payload: bytes, arguments: dict[str, str], error: type[Exception]
) -> None:
    """C42."""
    with pytest.raises(error):
        Artifact.from_bytes(payload, **arguments)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_75"])
def test_a_fatbin_is_refused_for_an_arch_that_it_lacks(arch: str) -> None:
    """At once, not when it is put; sm_100f is no sm_100 (C15)."""
    with pytest.raises(PayloadRejected, match="holds sm_80, sm_100f"):
        Artifact.from_bytes(kinds_samples.asset("two_archs.fatbin"), arch=arch)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sm_90a.cubin", {}),
        ("sm_90a.fatbin", {}),
        ("two_archs.fatbin", {"arch": "sm_80"}),
    ],
)
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, name: str, arguments: dict[str, str]) -> None:
    path = tmp_path / name
    payload = kinds_samples.asset(name)

    for end in (len(payload) // 2, len(payload) - 1):
        path.write_bytes(payload[:end])
        with pytest.raises(PayloadRejected):
            Artifact.from_file(path, **arguments)


def test_lto_ir_of_which_the_head_alone_is_left_is_refused() -> None:
    with pytest.raises(PayloadRejected, match="cut off"):
        Artifact.from_bytes(kinds_samples.asset("compute_90.ltoir")[:24], arch="sm_90")


def test_an_arch_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArch):
        Artifact.from_bytes(kinds_samples.asset("compute_90.ltoir"), arch="90")


def test_a_payload_put_as_another_kind_is_refused() -> None:
    with pytest.raises(PayloadRejected, match="PTX"):
        Artifact.from_bytes(kinds_samples.asset("sm_90a.cubin"), kind="ptx")


def test_a_file_that_is_not_there_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Artifact.from_file(tmp_path / "absent.cubin")


def test_an_artifact_survives_pickling() -> None:
    artifact = Artifact.from_bytes(kinds_samples.asset("sm_90a.cubin"))

    assert pickle.loads(pickle.dumps(artifact)) == artifact


def test_a_repr_shows_no_payload() -> None:
    assert len(repr(Artifact.from_bytes(kinds_samples.asset("old_abi_sm_75.cubin")))) < 2000


def test_a_symbol_is_what_its_json_was() -> None:
    symbol = Symbol("_Z1kv", "k", parameters=("f32", "u64"), registers=32, shared_bytes=1024)

    assert Symbol.from_json(symbol.to_json()) == symbol
    assert symbol.name == "k"
    assert Symbol("_Z1kv").name == "_Z1kv"
