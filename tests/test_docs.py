"""Documentation: what it claims is there, and what is there stands in it."""

from __future__ import annotations

import re
import sqlite3
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from fake_driver import FakeDriver

import kernelstore
from kernelstore import Artifact, Compiler, Store, cli, errors
from kernelstore.db import blob, statements
from kernelstore.db.file import APPLICATION_ID
from kernelstore.db.schema import METADATA

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SCHEMA = (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for folder in ("kernelstore", "migrations")
    for path in (ROOT / folder).rglob("*.py")
}


def sections(page: str) -> dict[str, str]:
    """Split a page by its second-level headings."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def tables(section: str) -> dict[str, list[list[str]]]:
    """Return the rows of a section's tables, as cells, by the heading of their first column."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        heading, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        found.setdefault(heading[0], []).extend(rows)
    return found


def code(text: str) -> list[str]:
    """Return what stands between back-ticks."""
    return re.findall(r"`([^`]+)`", text)


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


# -- the schema -------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    yield connection
    connection.close()


def test_every_table_and_view_has_its_section_and_no_other_has_columns(file: sqlite3.Connection) -> None:
    present = {
        name
        for (name,) in file.execute(
            "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
        )
    }
    documented = {name for name, section in sections(SCHEMA).items() if "column" in tables(section)}

    assert present == documented | {"alembic_version"}
    assert set(METADATA.tables) == documented - {"kernel_usage"}
    assert "alembic_version" in sections(SCHEMA)


@pytest.mark.parametrize("name", [*METADATA.tables, "kernel_usage"])
def test_every_column_is_documented_with_its_type_in_its_order(file: sqlite3.Connection, name: str) -> None:
    documented = [(code(row[0])[0], row[1]) for row in tables(sections(SCHEMA)[name])["column"]]
    present = [(row[1], row[2]) for row in file.execute(f"SELECT * FROM pragma_table_info('{name}')")]

    assert [column for column, _ in documented] == [column for column, _ in present]
    if name in METADATA.tables:
        assert documented == present
        assert [column for column, _ in documented] == [column.name for column in METADATA.tables[name].columns]


@pytest.mark.parametrize("name", METADATA.tables)
def test_every_index_is_documented_with_its_columns(file: sqlite3.Connection, name: str) -> None:
    present = {}
    for _, index, _, origin, _ in file.execute(f"SELECT * FROM pragma_index_list('{name}')").fetchall():
        if origin != "pk":
            columns = [row[2] for row in file.execute(f"SELECT * FROM pragma_index_info('{index}')")]
            present[f"uq_{name}_{columns[0]}" if origin == "u" else index] = columns
    documented = {
        code(index)[0]: code(re.split(r" where |, unique", columns)[0])
        for index, columns in tables(sections(SCHEMA)[name]).get("index", [])
    }

    assert documented == present


def test_the_view_gives_the_types_that_the_page_says(store: Store, cubin: Artifact) -> None:
    store.put(cubin)
    documented = {code(row[0])[0]: row[1] for row in tables(sections(SCHEMA)["kernel_usage"])["column"]}

    found = store.sql(f"SELECT {', '.join(f'typeof({column})' for column in documented)} FROM kernel_usage").rows[0]

    for (column, type_), present in zip(documented.items(), found, strict=True):
        assert present in {type_.lower(), "null"}, column


def test_every_counter_is_documented() -> None:
    counted = set()
    for text in SOURCES.values():
        counted |= set(re.findall(r'\.count\(\s*"(\w+)"', text))
        counted |= set(re.findall(r'counters\[day, "(\w+)"', text))

    assert counted == {code(row[0])[0] for row in tables(sections(SCHEMA)["counter"])["counter"]}


def test_every_row_of_meta_is_documented(file: sqlite3.Connection) -> None:
    present = {key for (key,) in file.execute("SELECT key FROM meta")}

    assert present == {code(row[0])[0] for row in tables(sections(SCHEMA)["meta"])["row"]}


def test_the_fields_of_a_blobs_header_are_documented(cubin: Artifact) -> None:
    described = next(row[3] for row in tables(sections(SCHEMA)["blob"])["column"] if row[0] == "`header`")

    assert set(code(described)) - {"symbol", "lowered_name"} == {*blob._HEADER_FIELDS, "symbols"}


def test_the_revision_and_application_id_are_the_files() -> None:
    assert f"schema revision {statements.REVISION:04}" in SCHEMA
    assert f"`PRAGMA user_version` is {statements.REVISION}" in SCHEMA
    assert f"`PRAGMA application_id` is {APPLICATION_ID}" in SCHEMA


@pytest.mark.parametrize("statement", fenced(SCHEMA, "sql"))
def test_every_query_of_the_schema_page_runs(
    store: Store, cubin: Artifact, ptx: Artifact, path: Path, statement: str
) -> None:
    store.put(cubin, ptx)
    store.get(cubin.key)
    store.flush()

    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        plain = connection.execute(statement).fetchall()
    connection.close()

    assert store.sql(statement).rows == plain


def test_the_queries_of_the_readme_run(store: Store, cubin: Artifact) -> None:
    store.put(cubin)
    statements_shown = re.findall(r'^\$ (?:sqlite3 -readonly \S+|kernelstore sql) "(.+)"$', README, re.MULTILINE)

    assert statements_shown
    for statement in statements_shown:
        assert store.sql(statement).rows


# -- names ------------------------------------------------------------------------------------------------------------


NAMES = tables(sections(README)["Public names"])["name"]
# What the compiler asks of a store is no contract.
NOT_PUBLIC = {
    "count",
    "toolchain_build",
    "remember_toolchain",
    "recall_headers",
    "remember_headers",
    "recall_scan",
    "claim",
    "look_at_claim",
    "beat",
    "end_claim",
    "put_compiled",
    "remember_scan",
    "explain_request",
    "artifacts_of",
    "stored_program",
}


def test_the_readme_lists_the_public_names_and_no_other() -> None:
    assert sorted(name for row in NAMES for name in code(row[0])) == sorted(kernelstore.__all__)


@pytest.mark.parametrize("name", ["Store", "Compiler", "Linker", "Module", "Kernel"])
def test_the_readme_lists_the_methods_of_a_public_name_and_no_other(name: str) -> None:
    present = {attribute for attribute in dir(getattr(kernelstore, name)) if not attribute.startswith("_")}
    listed = next(code(row[1]) for row in NAMES if code(row[0]) == [name])

    assert set(listed) - set(kernelstore.__all__) == present - NOT_PUBLIC


ERROR_NAMES = [name for name in errors.__all__ if not name.endswith("Warning")]
ERROR_ROWS = {
    code(row[0])[0]: (row, block.startswith("| error | also |"))
    for section in sections(ERRORS).values()
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    for row in tables(block).get("error", [])
}


def test_the_errors_page_has_every_error_and_no_other() -> None:
    assert sorted(ERROR_ROWS) == sorted(ERROR_NAMES)


@pytest.mark.parametrize("name", ERROR_NAMES)
def test_the_errors_page_has_the_bases_and_the_fields_of_an_error(name: str) -> None:
    cls = getattr(errors, name)
    row, has_bases = ERROR_ROWS[name]
    fields = re.search(r"Fields?: (.*)", cls.__doc__, re.DOTALL)

    if has_bases:
        assert set(code(row[1])) <= {base.__name__ for base in cls.__mro__}
    # Fields of all load errors stand above their table.
    if fields is not None and name != "LoadError":
        assert set(re.findall(r"``(\w+)``", fields[1])) - {"None"} <= set(code(" ".join(row)))


def test_the_warnings_are_on_the_errors_page() -> None:
    documented = {code(row[0])[0] for row in tables(sections(ERRORS)["Warnings"])["warning"]}

    assert documented == set(errors.__all__) - set(ERROR_NAMES)


# -- the command line and the environment -----------------------------------------------------------------------------

GROUP = cli._group
COMMANDS = GROUP.list_commands(click.Context(GROUP))
README_COMMANDS = tables(sections(README)["Command line"])["command"]


def test_the_readme_lists_every_command_in_order_and_no_other() -> None:
    assert [code(row[0]) for row in README_COMMANDS] == [[f"kernelstore {name}"] for name in COMMANDS]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_of_itself(name: str) -> None:
    result = CliRunner().invoke(GROUP, [name, "--help"])

    assert result.exit_code == 0
    assert re.search(rf"^  Examples?:\n    kernelstore {name}\b", result.output, re.MULTILINE)
    assert "--db PATH" in result.output
    assert ("--json" in result.output) == (name != "cat")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    command = GROUP.get_command(click.Context(GROUP), name)

    assert command is not None
    assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_every_option_that_the_readme_names_exists() -> None:
    for name, row in zip(COMMANDS, README_COMMANDS, strict=True):
        command = GROUP.get_command(click.Context(GROUP), name)
        assert command is not None
        known = {spelling for parameter in command.params for spelling in parameter.opts}
        assert {text for text in code(row[1]) if text.startswith("-")} <= known


def test_every_environment_variable_is_in_the_readme_and_no_other() -> None:
    read = set()
    for text in SOURCES.values():
        read |= set(re.findall(r"\bKERNELSTORE_[A-Z_]*[A-Z]\b", text))
        read |= {f"KERNELSTORE_{name}" for name in re.findall(r'\b(?:environment|flag)\("([A-Z_]+)"\)', text)}

    assert read == {code(row[0])[0] for row in tables(sections(README)["Environment"])["variable"]}


# -- examples ---------------------------------------------------------------------------------------------------------


def test_the_first_python_example_runs_without_a_gpu_and_hits_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    snippet = fenced(README, "python")[0]
    shown = re.findall(r"# (cubin .+?); the next time: (\w+)", snippet)[0]

    for printed in (shown[0], f"{shown[0].rsplit(' ', 1)[0]} {shown[1]}"):
        names: dict[str, object] = {}
        exec(compile(snippet, "README.md", "exec"), names)
        names["compiler"].close()  # type: ignore[attr-defined]
        names["store"].close()  # type: ignore[attr-defined]
        assert capsys.readouterr().out == f"{printed}\n"


class _Array:
    """What a launch needs of an array of CuPy."""

    size = 1_000_000

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"data": (0x5000, False), "shape": (self.size,), "typestr": "<f4", "version": 3}


def test_the_second_python_example_launches_on_a_fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver().install(monkeypatch)
    fake.kernels = {"_Z5saxpyIfEvT_PKS0_PS0_i": [4, 8, 8, 4]}
    cupy = types.ModuleType("cupy")
    cupy.ones = cupy.zeros_like = lambda *_: _Array()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}

    exec(compile("\n".join(fenced(README, "python")[:2]), "README.md", "exec"), names)
    names["compiler"].close()  # type: ignore[attr-defined]
    names["store"].close()  # type: ignore[attr-defined]

    assert [(launch.grid, launch.block) for launch in fake.launches] == [((3907, 1, 1), (256, 1, 1))]
    assert fake.launches[0].arguments == [
        struct.pack("<f", 2.0),
        struct.pack("<Q", 0x5000),
        struct.pack("<Q", 0x5000),
        struct.pack("<i", 1_000_000),
    ]


@pytest.mark.gpu
def test_the_second_python_example_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}

    exec(compile("\n".join(fenced(README, "python")[:2]), "README.md", "exec"), names)

    assert names["y"].get().tolist() == [2.0] * 1_000_000  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_example_is_python(page: Path) -> None:
    for snippet in fenced(page.read_text(encoding="utf-8"), "python"):
        compile(snippet, page.name, "exec")


def test_what_a_readme_says_of_headers_is_so(compiler: Compiler, tmp_path: Path) -> None:
    """The reader's own headers are keyed by content, found by themselves: the table of the README."""
    assert "by content, found by themselves" in README
    source = '#include "a.h"\nextern "C" __global__ void k(int* p) { *p = A; }'
    hits = []
    for value in (1, 1, 2):
        (tmp_path / "a.h").write_text(f"#define A {value}")
        hits.append(compiler.compile(source, arch="sm_90", include_dirs=[tmp_path]).from_cache)

    assert hits == [False, True, False]


# Reason to a program that has it; {} is a directory with a header `a.h` and a directory `cub`.
UNCACHEABLE: dict[str, dict[str, object]] = {
    "computed include": {"source": "#include A(a.h)"},
    "computed __has_include": {"source": "#define A <a.h>\n#if __has_include(A)\n#endif"},
    "#embed": {"source": '#embed "data"'},
    "#import": {"source": '#import "a.h"'},
    "__has_embed": {"source": '#if __has_embed("data")\n#endif'},
    "__TIME__": {"source": "const char* t = __TIME__;"},
    "__DATE__": {"source": "const char* t = __DATE__;"},
    "__TIMESTAMP__": {"source": "const char* t = __TIMESTAMP__;"},
    "trigraphs": {"source": "??=define A"},
    "token pasting": {"source": "#define C(a, b) a##b\nC(__TI, ME__)"},
    "line continuation in a raw string": {"source": 'auto a = R"(\\\n)";'},
    "raw strings or separated digits in old C++": {"source": "1'000", "options": ("-std=c++11",)},
    "include whose name is no UTF-8": {"source": '#include "latin.h"', "include_dirs": ["{}"]},
    "large header": {"source": '#include "large.h"', "include_dirs": ["{}"]},
    "header that is no regular file": {"source": '#include "/dev/null"'},
    "shadowed toolkit header": {"source": "#include <cuda_fp16.h>", "include_dirs": ["{}"]},
    "option with side effects": {"source": "", "options": ("--time=times.csv",)},
}


def test_the_reasons_for_what_cannot_be_keyed_are_those_of_the_code(compiler: Compiler, tmp_path: Path) -> None:
    page = sections((ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8"))["What cannot be keyed"]
    (tmp_path / "latin.h").write_bytes(b"#include <\xff.h>")
    with (tmp_path / "large.h").open("wb") as stream:
        stream.truncate(2**26)
    (tmp_path / "cub").mkdir()
    given = {"arch": "sm_90", "name": "", "options": (), "name_expressions": (), "headers": None, "extra": b""}

    # Those that need another user or time have tests in test_headers.py.
    rare = {
        "unreadable header",
        "more than 20000 headers",
        "header that changes while it is read",
        "user header in a toolkit's directory",
    }
    assert {reason for row in tables(page)["reason"] for reason in code(row[0])} == set(UNCACHEABLE) | rare
    for reason, program in UNCACHEABLE.items():
        dirs = [str(path).replace("{}", str(tmp_path)) for path in program.get("include_dirs", ())]
        request = compiler._request(kind="cubin", **given | program | {"include_dirs": dirs})
        assert str(request.uncacheable).partition(":")[0] == reason


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_decision_has_its_three_parts(page: Path) -> None:
    if page.parent.name == "decisions":
        assert list(sections(page.read_text(encoding="utf-8"))) == ["Context", "Choice", "What would change it"]


def test_the_changelog_has_an_entry_for_this_release() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert re.search(rf"^## \[{re.escape(kernelstore.__version__)}\]", changelog, re.MULTILINE)
