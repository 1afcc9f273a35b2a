"""Plug-ins are found by name, and only when they are named."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kernelstore.codecs
from kernelstore import plugins
from kernelstore.codecs import Codec
from kernelstore.errors import InvalidType, UnknownPlugin

CODEC_FILE = """
from kernelstore.codecs import Codec

PLUGIN = Codec(name="run-length", encode=bytes, decode=lambda blob, _: blob)
"""
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
    plugins._load.cache_clear()
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    for cached in (plugins._load, plugins._own_names):
        cached.cache_clear()
    yield
    for cached in (plugins._load, plugins._own_names):
        cached.cache_clear()


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


def test_a_file_dropped_in_the_folder_is_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name has dashes where the file's has underscores."""
    (tmp_path / "run_length.py").write_text(CODEC_FILE)
    (tmp_path / "_tables.py").write_text("raise AssertionError\n")
    monkeypatch.setattr(kernelstore.codecs, "__path__", [*kernelstore.codecs.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "kernelstore.codecs.run_length", raising=False)

    assert plugins.names("codecs") == ["lz4", "none", "run-length"]
    assert plugins.load("codecs", "run-length").name == "run-length"
    with pytest.raises(UnknownPlugin, match="there are lz4, none, run-length"):
        plugins.load("codecs", "run_length")


def test_a_distribution_that_is_installed_adds_its_plugins(tmp_path: Path, run_python: Callable[..., str]) -> None:
    """The real thing: a module and its metadata on the path, and a Python that starts afterwards."""
    site = tmp_path / "site"
    metadata = site / "run_length-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: run-length\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kernelstore.codecs]\nrun-length = run_length:PLUGIN\n")
    (site / "run_length.py").write_text(CODEC_FILE)

    printed = run_python(
        "from kernelstore import plugins\n"
        "print(plugins.names('codecs'), plugins.names('kinds'))\n"
        "print(plugins.load('codecs', 'run-length').decode(b'x', 1))\n",
        PYTHONPATH=str(site),
    )

    assert printed == "['lz4', 'none', 'run-length'] ['cubin', 'fatbin', 'ltoir', 'ptx']\nb'x'\n"


def test_nothing_is_imported_before_it_is_named(run_python: Callable[..., str]) -> None:
    """Nor are entry points read, which takes some 30 ms."""
    printed = run_python(
        "import sys\n"
        "from kernelstore import plugins\n"
        "plugins.load('codecs', 'none')\n"
        "print([name for name in ('lz4', 'kernelstore.kinds.cubin', 'kernelstore.codecs.lz4') if name in sys.modules])"
    )

    assert printed.strip() == "[]"
