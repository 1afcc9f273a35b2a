"""Plug-ins are found by name, and only when they are named."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable

import pytest

from kernelstore import plugins
from kernelstore.codecs import Codec
from kernelstore.errors import InvalidType, UnknownPlugin

FOREIGN = Codec(name="foreign", encode=bytes, decode=lambda blob, _: blob)


@pytest.fixture
def foreign_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec of another distribution, under an entry point; it also claims one of our names."""

    def entry_points(*, group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
        points = [
            importlib.metadata.EntryPoint(each, f"{__name__}:FOREIGN", "kernelstore.codecs")
            for each in ("foreign", "lz4")
        ]
        return [point for point in points if point.group == group and name in (None, point.name)]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    plugins.load.cache_clear()
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


@pytest.fixture(autouse=True)
def _forget() -> None:
    plugins.load.cache_clear()


@pytest.mark.parametrize(
    ("group", "name"), [("codecs", "none"), ("codecs", "lz4"), ("kinds", "cubin"), ("kinds", "ltoir")]
)
def test_a_file_is_a_plugin_of_its_name(group: str, name: str) -> None:
    assert plugins.load(group, name).name == name
    assert name in plugins.names(group)


def test_files_with_a_leading_underscore_are_no_plugins() -> None:
    assert not any(name.startswith(("_", "-")) for name in plugins.names("kinds"))
    with pytest.raises(UnknownPlugin):
        plugins.load("kinds", "_elf")


@pytest.mark.parametrize("name", ["", "LZ4", "zip", "../none", "__init__", "none.py", "x" * 10_000])
def test_an_unknown_name_is_told_with_those_that_there_are(name: str) -> None:
    with pytest.raises(UnknownPlugin, match="there are lz4, none") as error:
        plugins.load("codecs", name)

    assert (error.value.group, error.value.name) == ("codecs", name)
    assert error.value.known == plugins.names("codecs")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", [None, 3, b"lz4", FOREIGN])
def test_a_plugin_is_chosen_by_name_only(name: object) -> None:
    with pytest.raises(InvalidType, match="by name"):
        plugins.load("codecs", name)  # type: ignore[arg-type]


@pytest.mark.usefixtures("foreign_codec")
def test_an_entry_point_of_another_distribution_is_a_plugin() -> None:
    assert plugins.load("codecs", "foreign") is FOREIGN
    assert plugins.names("codecs") == ["lz4", "none", "foreign"]


@pytest.mark.usefixtures("foreign_codec")
def test_another_distribution_cannot_replace_a_plugin() -> None:
    assert plugins.load("codecs", "lz4") is not FOREIGN


def test_nothing_is_imported_before_it_is_named(run_python: Callable[..., str]) -> None:
    """Nor are entry points read, which takes some 30 ms."""
    printed = run_python(
        "import sys\n"
        "from kernelstore import plugins\n"
        "plugins.load('codecs', 'none')\n"
        "print([name for name in ('lz4', 'kernelstore.kinds.cubin', 'kernelstore.codecs.lz4') if name in sys.modules])"
    )

    assert printed.strip() == "[]"
