"""Explaining a miss: which part of the key differs from the nearest stored program, in words."""

from __future__ import annotations

import dataclasses
import logging
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelstore import Artifact, Compiler, Difference, Key, Program, Store, errors, explanation
from kernelstore.db import programs, statements
from kernelstore.toolchain import Toolchain

ADDN = "template<int N> __global__ void addn(int* p) {\n    p[0] += N;\n    p[1] += N;\n}\n"
EXTERNAL = "#if 0\n#include <{0}>\n#endif\n"
STORED: dict[str, Any] = {
    "source": ADDN,
    "arch": "sm_90",
    "name": "addn.cu",
    "options": ("-DV=4", "-std=c++17"),
    "name_expressions": ("addn<1>", "addn<2>"),
    "headers": {"a.h": "#define A 1", "b.h": ""},
    "extra": b"1",
}

# What is asked for instead, and what is said of it.
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "source": ({"source": ADDN.replace("p[1] += N", "p[2] += N")}, ["source: 1 line differs, first at line 3"]),
    "two lines": ({"source": ADDN.replace("+=", "-=")}, ["source: 2 lines differ, first at line 2"]),
    "order of lines": (
        {"source": ADDN.replace("    p[0] += N;\n    p[1] += N;", "    p[1] += N;\n    p[0] += N;")},
        ["source: the order of lines differs, first at line 2"],
    ),
    "name": ({"name": "other.cu"}, ["name: 'other.cu', the other has 'addn.cu'"]),
    "option is new": ({"options": ("-DV=4", "-std=c++17", "-DW=8")}, ["options: -DW=8 is new"]),
    "option is gone": ({"options": ("-DV=4",)}, ["options: --std=c++17 is gone"]),
    "option is another": ({"options": ("-DV=8", "-std=c++17")}, ["options: -DV=8 is new, -DV=4 is gone"]),
    "option twice": ({"options": ("-DV=4", "-DV=4", "-std=c++17")}, ["options: -DV=4 is there more often"]),
    "order of options": ({"options": ("-std=c++17", "-DV=4")}, ["options: order differs"]),
    "name expression is new": (
        {"name_expressions": ("addn<1>", "addn<2>", "addn<4>")},
        ["name expressions: addn<4> is not among them"],
    ),
    "name expression is gone": (
        {"name_expressions": ("addn<1>",)},
        ["name expressions: addn<2> is among them and was not asked for"],
    ),
    "header changed": ({"headers": {"a.h": "#define A 2", "b.h": ""}}, ["headers: a.h changed"]),
    "headers new and gone": (
        {"headers": {"a.h": "#define A 1", "c.h": ""}},
        ["headers: c.h is new, b.h is gone"],
    ),
    "external includes": (
        {"source": EXTERNAL.format("cuda_fp16.h") + ADDN},
        ["source: 3 lines differ, first at line 1", "external includes: cuda_fp16.h is new", "toolchain: "],
    ),
    "extra": ({"extra": b"2"}, ["extra: b'2', the other has b'1'"]),
    "arch": ({"arch": "sm_80"}, ["arch: sm_80, stored for sm_90"]),
    "arch with a suffix": ({"arch": "sm_90a"}, ["arch: sm_90a, stored for sm_90"]),
    "kind": ({"kind": "ltoir"}, ["kind: ltoir, stored as cubin, ptx"]),
    "several": (
        {"options": ("-DV=4",), "extra": b"", "arch": "sm_100"},
        ["options: --std=c++17 is gone", "extra: b'', the other has b'1'", "arch: sm_100, stored for sm_90"],
    ),
}


@pytest.fixture
def stored(compiler: Compiler) -> Artifact:
    return compiler.compile(**STORED)


@pytest.mark.parametrize("row", ROWS)
def test_a_difference_is_told_in_words(compiler: Compiler, store: Store, stored: Artifact, row: str) -> None:
    changed, said = ROWS[row]

    told = compiler.explain(**STORED | changed)

    assert told.hit is None
    assert told.nearest is not None
    assert store.get(told.nearest).arch in {"sm_90", "compute_90"}  # type: ignore[union-attr]
    assert len(told.differences) == len(said)
    for difference, text in zip(told.differences, said, strict=True):
        assert str(difference).startswith(text)
    assert all(text in str(told) for text in said)


def test_every_part_of_a_key_has_its_row(stored: Artifact, store: Store) -> None:
    """`paths` has a test of its own, below."""
    program = store.program(store.info(stored.key).program_key or b"")
    assert program is not None

    told = {text.partition(":")[0] for _, said in ROWS.values() for text in said}

    assert set(program.part_digests) - told == {"paths", "user headers"}


def test_a_hit_is_told_with_its_key_and_counts_nothing(compiler: Compiler, store: Store, stored: Artifact) -> None:
    before = store.stats()

    told = compiler.explain(**STORED)

    assert (told.hit, told.nearest, told.differences) == (stored.key, stored.key, ())
    assert str(told) == f"a hit: {stored.key}"
    assert (store.stats().hits, store.stats().misses) == (before.hits, before.misses)


def test_nothing_is_stored_by_asking(compiler: Compiler, store: Store, count_compiles: Callable[[], int]) -> None:
    told = compiler.explain(**STORED)

    assert (told.hit, told.nearest, told.differences) == (None, None, ())
    assert str(told) == "a miss; nothing like it is stored"
    assert (len(store), count_compiles()) == (0, 0)


def test_an_unlike_program_is_not_near(compiler: Compiler, stored: Artifact) -> None:
    told = compiler.explain('extern "C" __global__ void k() {}', arch="sm_90", name="k.cu")

    assert told.nearest is None


def test_the_program_with_most_equal_parts_is_the_nearest(compiler: Compiler, store: Store) -> None:
    """Of the other two one has another option too, the other another source."""
    compiler.compile(**STORED | {"options": ("-DV=5",), "extra": b"5"})
    near = compiler.compile(**STORED | {"options": ("-DV=6",)})
    compiler.compile(**STORED | {"source": ADDN + "// more\n", "name": "", "options": ("-DV=7",)})

    told = compiler.explain(**STORED)

    assert told.nearest == near.key
    assert [difference.part for difference in told.differences] == ["options"]


def test_the_likest_source_wins_among_equals(compiler: Compiler) -> None:
    compiler.compile(**STORED | {"source": ADDN + "// 1\n// 2\n"})
    near = compiler.compile(**STORED | {"source": ADDN + "// 1\n"})
    compiler.compile(**STORED | {"source": ADDN + "// 1\n// 2\n// 3\n"})

    assert compiler.explain(**STORED).nearest == near.key


def test_a_program_of_that_name_is_found_behind_many_newer_ones(
    compiler: Compiler, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_NEWEST_ROWS", 2)
    near = compiler.compile(**STORED)
    for number in range(4):
        compiler.compile(f'extern "C" __global__ void k{number}() {{}}', arch="sm_90", name=f"{number}.cu")

    assert compiler.explain(**STORED | {"extra": b"2"}).nearest == near.key


def test_all_archs_that_are_stored_are_told_in_order(compiler: Compiler, stored: Artifact) -> None:
    compiler.compile(**STORED | {"arch": "sm_100"})
    compiler.compile(**STORED | {"arch": "sm_80"})

    told = compiler.explain(**STORED | {"arch": "sm_120"})

    assert list(map(str, told.differences)) == ["arch: sm_120, stored for sm_80, sm_90, sm_100"]


def test_another_toolchain_is_told(compiler: Compiler, stored: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Toolchain("nvrtc 99.1.7", None, "nvrtc 99.1.7")
    monkeypatch.setattr(Toolchain, "expected", classmethod(lambda cls, request, store: other))

    told = compiler.explain(**STORED)

    assert list(map(str, told.differences)) == [f"toolchain: nvrtc 99.1.7, stored {stored.toolchain}"]
    assert told.nearest == stored.key


def test_paths_are_told_where_they_reach_the_output(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(ADDN, arch="sm_90", options=("-lineinfo",))
    monkeypatch.chdir(tmp_path)

    told = compiler.explain(ADDN, arch="sm_90", options=("-lineinfo",))

    assert [difference.part for difference in told.differences] == ["paths"]
    assert "working directory" in told.differences[0].text


def test_other_directories_of_headers_are_told(
    compiler: Compiler, stored: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `-lineinfo` the directories of toolkit headers are in the key, and not in the toolchain's text."""
    assert stored.toolchain is not None
    other = Toolchain(stored.toolchain, None, f"{stored.toolchain}\0/elsewhere")
    monkeypatch.setattr(Toolchain, "expected", classmethod(lambda cls, request, store: other))

    assert compiler.explain(**STORED).differences == (explanation.OTHER_PLACES,)


def test_what_cannot_be_keyed_is_told_with_its_reason(compiler: Compiler, stored: Artifact) -> None:
    told = compiler.explain(**STORED | {"source": ADDN + "const char* t = __TIME__;"})

    assert str(told) == "a miss\n  uncacheable: __TIME__"


def test_without_a_store_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELSTORE_DISABLE", "1")
    with Compiler() as compiler:
        assert [difference.part for difference in compiler.explain(ADDN, arch="sm_90").differences] == ["store"]


def test_many_facts_are_cut(compiler: Compiler, stored: Artifact) -> None:
    told = compiler.explain(**STORED | {"options": tuple(f"-DM{number}" for number in range(50))})

    assert str(told.differences[0]).endswith("-DM7 is new, and 44 more")


# -- programs of other releases ---------------------------------------------------------------------------------------


def test_a_new_part_needs_no_change_here() -> None:
    """A part is looked for in the program under its own name; where it is not there, it differs."""

    @dataclasses.dataclass(frozen=True)
    class Later(Program):
        user_headers: dict[str, str] = dataclasses.field(default_factory=dict)

    def made(user_headers: dict[str, str], unknown: str) -> Later:
        return Later(
            Key(bytes(32)), "", "",
            part_digests={"user headers": str(user_headers), "something": unknown}, user_headers=user_headers,
        )  # fmt: skip

    assert explanation.between(made({"b.h": "1"}, "x"), made({"b.h": "2", "c.h": "3"}, "y")) == (
        Difference("user headers", "b.h changed, c.h is gone"),
        Difference("something", "differs"),
    )


def test_a_part_that_only_one_release_knows_is_told() -> None:
    older, newer = Program(Key(bytes(32)), "", ""), Program(Key(bytes(32)), "", "", part_digests={"new": "1"})

    assert "their releases" in explanation.between(newer, older)[0].text


def test_damaged_rows_of_programs_are_passed_over(compiler: Compiler, stored: Artifact, path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE program SET dependencies = x'00', part_digests = 'nonsense'")
    connection.close()

    assert compiler.explain(**STORED | {"extra": b"2"}).nearest is None


# -- two keys ---------------------------------------------------------------------------------------------------------


def test_two_artifacts_are_compared(compiler: Compiler, store: Store, stored: Artifact) -> None:
    other = compiler.compile(**STORED | {"options": ("-DV=4",), "arch": "sm_80"})

    assert store.compare(other.key, stored.key) == (
        Difference("options", "--std=c++17 is gone"),
        Difference("arch", "sm_80, the other has sm_90"),
    )
    assert store.compare(stored.key, str(stored.key)) == ()


def test_two_programs_are_compared(compiler: Compiler, store: Store, stored: Artifact) -> None:
    other = compiler.compile(**STORED | {"extra": b"2"})
    keys = [store.info(artifact.key).program_key for artifact in (other, stored)]
    assert keys[0] is not None
    assert keys[1] is not None

    assert store.compare(*keys) == (Difference("extra", "b'2', the other has b'1'"),)
    assert store.compare(keys[0], stored.key) == store.compare(*keys)


def test_an_import_has_no_program_to_compare(store: Store, cubin: Artifact, stored: Artifact) -> None:
    imported = Artifact.from_bytes(cubin.payload)
    store.put(imported)

    told = store.compare(imported.key, stored.key)

    assert told[0].part == "program"
    assert str(imported.key) in told[0].text


def test_keys_that_are_not_there_are_told(store: Store) -> None:
    with pytest.raises(errors.KeyNotFound, match="no artifact and no program"):
        store.compare(bytes(32), bytes(32))
    with pytest.raises(errors.InvalidArgument):
        store.compare("abc", "abc")


# -- the log ----------------------------------------------------------------------------------------------------------


def test_a_miss_is_explained_in_the_debug_log(
    compiler: Compiler, stored: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="kernelstore"):
        compiler.compile(**STORED | {"extra": b"2"})
    assert f"addn.cu: a miss; the nearest that is stored is {stored.key}\n  extra: b'2'" in caplog.text

    caplog.clear()
    with caplog.at_level(logging.INFO, logger="kernelstore"):
        compiler.compile(**STORED | {"extra": b"3"})
    assert "the nearest" not in caplog.text


def test_a_miss_that_cannot_be_explained_still_compiles(
    compiler: Compiler, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(asked: object) -> None:
        raise errors.StoreCorrupt("damaged", path=store.path)

    monkeypatch.setattr(store, "explain_request", broken)
    with caplog.at_level(logging.DEBUG, logger="kernelstore"):
        assert compiler.compile(**STORED).payload

    assert "cannot be explained: damaged" in caplog.text


def test_an_explained_miss_imports_no_sqlalchemy(path: Path, run_python: Callable[..., str]) -> None:
    script = """
import logging, sys
logging.getLogger("kernelstore").setLevel(logging.DEBUG)
from kernelstore import Compiler, Store
with Store(sys.argv[1]) as store, Compiler(store) as compiler:
    compiler.compile("__global__ void k() {}", arch="sm_90")
    print(compiler.explain("__global__ void k() {}", arch="sm_80").differences[0])
assert "sqlalchemy" not in sys.modules
"""
    assert run_python(script, path) == "arch: sm_80, stored for sm_90\n"


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (statements.PROGRAMS_WITH_NAME, "ix_program_name"),
        (statements.PROGRAM_WITH_KEY, "sqlite_autoindex_program_1"),
        (statements.PROGRAMS_WITH_PREFIX, "sqlite_autoindex_artifact_1"),
        (statements.ARTIFACTS_OF_PROGRAM, "ix_artifact_program"),
        (statements.ARTIFACT_WITH_KEY, "sqlite_autoindex_artifact_1"),
        (statements.NEWEST_PROGRAMS, None),
    ],
)
def test_the_search_for_a_program_is_bounded_by_an_index(path: Path, statement: str, index: str | None) -> None:
    """Only the newest programs are scanned, from the end of the table and up to a limit."""
    with sqlite3.connect(path) as connection:
        names = dict.fromkeys(re.findall(r":(\w+)", statement))
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", names)]
    connection.close()

    scans = [step for step in plan if step.startswith("SCAN") and "SUBQUERY" not in step.upper()]
    assert index is None or any(index in step for step in plan), plan
    assert len(scans) <= (index is None), plan
    assert index is not None or ":limit" in statement


def test_a_user_header_that_changed_is_named(compiler: Compiler, tmp_path: Path) -> None:
    header = tmp_path / "q.h"
    source = '#include <q.h>\nextern "C" __global__ void k(int* a) { a[0] = Q; }'
    header.write_text("#define Q 1")
    compiler.compile(source, arch="sm_90", include_dirs=[tmp_path])
    header.write_text("#define Q 2")

    found = compiler.explain(source, arch="sm_90", include_dirs=[tmp_path])

    assert found.hit is None
    assert [difference.part for difference in found.differences] == ["user headers"]
    assert "q.h" in found.differences[0].text
