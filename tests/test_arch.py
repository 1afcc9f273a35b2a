"""Archs: text, order, and what is refused."""

from __future__ import annotations

import pytest

from kernelstore.arch import Arch
from kernelstore.errors import InvalidArch, InvalidType


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sm_75", (7, 5, "", False)),
        ("sm_90a", (9, 0, "a", False)),
        ("sm_100", (10, 0, "", False)),
        ("sm_103f", (10, 3, "f", False)),
        ("sm_121a", (12, 1, "a", False)),
        ("compute_90", (9, 0, "", True)),
        ("compute_100f", (10, 0, "f", True)),
    ],
)
def test_an_arch_is_read_and_written(text: str, expected: tuple[int, int, str, bool]) -> None:
    arch = Arch.parse(text)

    assert (arch.major, arch.minor, arch.suffix, arch.virtual) == expected
    assert str(arch) == text


def test_archs_are_ordered_as_numbers() -> None:
    """C14: sm_100 sorts before sm_90 as text."""
    texts = ["sm_75", "sm_90", "sm_90a", "sm_100", "sm_103f", "sm_120"]

    assert [str(arch) for arch in sorted(map(Arch.parse, reversed(texts)))] == texts


@pytest.mark.parametrize(
    "text",
    ["", "90", "9.0", "sm_9", "sm_1000", "sm_090", "SM_90", "sm_90b", "sm_90 ", " sm_90", "sm90", "native", "all",
     "compute_80,sm_80", "sm_٩٠", "sm_90\n", "lto_90"],
)  # fmt: skip
def test_other_texts_are_no_arch(text: str) -> None:
    with pytest.raises(InvalidArch) as caught:
        Arch.parse(text)

    assert caught.value.arch == text


@pytest.mark.parametrize("value", [90, 9.0, None, b"sm_90", (9, 0)])
def test_an_arch_is_text(value: object) -> None:
    with pytest.raises(InvalidType):
        Arch.parse(value)  # type: ignore[arg-type]


def test_real_and_virtual_archs_lead_to_each_other() -> None:
    assert str(Arch.parse("sm_90a").as_virtual()) == "compute_90a"
    assert str(Arch.parse("compute_100f").as_real()) == "sm_100f"
