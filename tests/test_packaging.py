"""Packaging: what a wheel and an sdist hold, and that a store opens from each of them, from any directory."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kernelstore.db.statements import REVISION

ROOT = Path(__file__).parents[1]
NEEDED = {
    "kernelstore/py.typed",
    "kernelstore/cli/demo/saxpy.cu",
    "kernelstore/migrations/env.py",
    "kernelstore/migrations/script.py.mako",
    "kernelstore/migrations/versions/0001_first.py",
    "kernelstore/migrations/versions/0002_scan.py",
}


def build(source: Path, target: Path, kind: str) -> Path:
    """Build a wheel or an sdist of a tree."""
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)],
        cwd=source, check=True, capture_output=True, text=True,
    )  # fmt: skip
    (made,) = target.iterdir()
    return made


def use(place: Path, path: Path) -> str:
    """Make a store with the package that lies in `place`, from another directory; return where it came from."""
    script = (
        "import sys, kernelstore; from kernelstore.db.migrate import scripts_directory\n"
        "with kernelstore.Store(sys.argv[1]) as store: assert len(store) == 0\n"
        "print(kernelstore.__file__, scripts_directory())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        cwd="/", env=os.environ | {"PYTHONPATH": str(place)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an sdist unpacks to: a bare checkout."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("the tests do not lie in a checkout")
    place = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(ROOT, place / "made", "sdist")) as archive:
        archive.extractall(place, filter="data")
    (unpacked,) = (path for path in place.iterdir() if path.name.startswith("kernelstore-"))
    return unpacked


def test_a_wheel_of_an_sdist_holds_all_that_is_needed_and_works(tree: Path, tmp_path: Path) -> None:
    """C82: the migrations are in it."""
    wheel = build(tree, tmp_path / "made", "wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")

    assert names >= NEEDED
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/", "migrations/"))}
    printed = use(tmp_path / "site", tmp_path / "cache.db")
    assert printed.count(str(tmp_path / "site")) == 2


def test_a_bare_checkout_works(tree: Path, tmp_path: Path) -> None:
    printed = use(tree, tmp_path / "cache.db")

    assert printed.split() == [str(tree / "kernelstore" / "__init__.py"), str(tree / "migrations")]
    assert {path.name for path in tree.iterdir()} >= {"README.md", "LICENSE", "docs", "tests", "benchmarks"}


def test_alembic_is_configured_without_an_ini_file(tree: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from alembic.config import main; main()", "heads"],
        cwd=tree, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.stdout.split() == [f"{REVISION:04}", "(head)"]
