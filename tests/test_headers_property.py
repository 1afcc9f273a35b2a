"""Random header trees and random edits, with NVRTC as the oracle: when its PTX changes, the key changes."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelstore import header_memo
from kernelstore.arch import Arch
from kernelstore.cuda import nvrtc
from kernelstore.errors import CompileError
from kernelstore.options import Options
from kernelstore.request import Request

ARCH = Arch.parse("compute_90")
FILES = ("p.h", "q.h", "r.h", "a/p.h", "a/q.h", "a/s/p.h", "a/s/r.h", "b/p.h", "b/q.h", "b/s/q.h", "s/p.h", "s/q.h")
SPELLINGS = ("p.h", "q.h", "r.h", "s/p.h", "s/q.h", "../q.h", "../s/p.h", "s/../r.h", "./p.h")

numbers = st.integers(1, 9)
names = st.sampled_from(SPELLINGS).flatmap(lambda name: st.sampled_from((f"<{name}>", f'"{name}"')))


def stores(number: int) -> str:
    # A pre-include is read outside the function.
    return f"#ifdef INSIDE\na[i++] = {number};\n#endif"


values = numbers.map(stores)


def when(name: str, text: str) -> str:
    return f"#if __has_include({name})\n{text}\n#endif"


includes = names.map(lambda name: when(name, f"#include {name}"))
lines = st.one_of(
    values,
    values,
    includes,
    includes,
    includes,
    names.map(lambda name: when(name, f"/* x */ # /* y */ include /* z */ {name}")),
    names.map(lambda name: when(name, f"#if 0\nit's /* {name}\n#endif\n#inc\\\nlude {name} // */")),
    st.tuples(names, numbers).map(lambda pair: when(pair[0], stores(pair[1] * 10))),
    st.sampled_from((*["<p.h>", "<q.h>"] * 3, '"q.h"')).map(lambda name: when(name, f"#include_next {name}")),
    names.map(lambda name: f"// #include {name}\n/*\n#include {name}\n*/"),
    st.sampled_from((f"#ifdef M\n{stores(600)}\n#endif", "#undef M", "#define M")),
)
# Rarely: with anything external, or a name that is nowhere, a computed include is uncacheable.
computed = st.sampled_from(
    (*[""] * 8, '\n#define H "q.h"\n#include H\n', "\n#define IN(x) <x>\n#include IN(p.h)\n", "\n#include D\n")
)
# `GUARD` becomes the file's own name; the others are shared, as after a copy.
guards = st.sampled_from(
    ("#pragma once\n{}", *["#ifndef GUARD\n#define GUARD\n{}\n#endif"] * 3, "#ifndef G1\n#define G1\n{}\n#endif")
)
texts = st.tuples(guards, st.lists(lines, min_size=1, max_size=4)).map(lambda pair: pair[0].format("\n".join(pair[1])))
trees = st.dictionaries(st.sampled_from(FILES), texts, min_size=6, max_size=len(FILES))
# A place is a file by name, or by its number among all places that the program's scan looked at.
places = st.one_of(st.sampled_from(FILES), *[st.integers(0, 60)] * 3)
edits = st.tuples(
    st.one_of(
        *[st.tuples(st.just("number"), places, numbers)] * 2,
        st.tuples(st.just("write"), places, texts),
        st.tuples(st.just("remove"), places, st.none()),
        st.tuples(st.just("link"), places, st.sampled_from(FILES)),
        st.tuples(st.just("directory"), places, st.none()),
    ),
    st.booleans(),  # whether a new process looks at it
)
programs = st.fixed_dictionaries(
    {
        "source": st.tuples(st.lists(lines, min_size=3, max_size=5).map("\n".join), computed).map("".join),
        "name": st.sampled_from(("", "", "k.cu", "s/k.cu", "a/k.cu")),
        "options": st.sampled_from(
            (
                ("-Ia", "-Ib"),
                ("-Ib", "-Ia"),
                ("-Ia", "-Ib", "--no-source-include"),
                ("-Ib", "-include=p.h"),
                ("-I.", "-Ia"),
                ("-Ia", '-DD="q.h"'),
                ("-Ib", "-Ia", "-DD=<p.h>", "-DM"),
            )
        ),
        "headers": st.sampled_from(({}, {}, {}, {"q.h": "a[i++] = 77;"}, {"s/p.h": '#include "q.h"\na[i++] = 78;'})),
    }
)

Edit = tuple[tuple[str, str | int, Any], bool]

# Distinct stamps, so that the memo may trust each: the tick of the clock is another test's.
_stamps = itertools.count(10**18)
_hour_ns = 3600 * 10**9


class KeptRows:
    """The memo that outlives processes, without a store."""

    def __init__(self) -> None:
        self.headers: dict[str, header_memo.HeaderRow] = {}
        self.scans: dict[bytes, str] = {}

    def recall_headers(self, paths: Sequence[str]) -> Mapping[str, header_memo.HeaderRow]:
        return {path: self.headers[path] for path in paths if path in self.headers}

    def remember_headers(self, rows: Mapping[str, header_memo.HeaderRow]) -> None:
        self.headers |= rows

    def recall_scan(self, asked: bytes) -> str | None:
        return self.scans.get(asked)

    def remember_scan(self, asked: bytes, text: str) -> None:
        self.scans[asked] = text


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(name)
    path.write_text(text.replace("GUARD", "G_" + "".join(c if c.isalnum() else "_" for c in name)))
    stamp = next(_stamps)
    os.utime(path, ns=(stamp, stamp))


def remove(name: str) -> None:
    path = Path(name)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def apply(what: str, name: str, content: Any) -> None:
    if what == "number":
        # Of the same size: only the stamp tells.
        write(name, re.sub(r"= \d", f"= {content}", Path(name).read_text(), count=1))
        return
    if what == "write":
        write(name, content)
        return
    remove(name)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    if what == "link":
        Path(name).symlink_to(Path(content).absolute())
    elif what == "directory":
        Path(name).mkdir()


def chosen(place: str | int, asked: Request, root: Path) -> str:
    """The place of an edit; a number counts those that the scan looked at, but none outside the test's directory."""
    inside = [path for path in sorted(asked.trace.places) if root in Path(os.path.realpath(path)).parents]
    if isinstance(place, str):
        return place
    return inside[place % len(inside)] if inside else FILES[place % len(FILES)]


@contextlib.contextmanager
def working_directory() -> Iterator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        # Deep enough for some "..", which then find what the test wrote or nothing.
        deep = Path(directory).resolve() / "1" / "2" / "3"
        deep.mkdir(parents=True)
        os.chdir(deep)
        try:
            yield Path(directory).resolve()
        finally:
            os.chdir(before)


def request(program: dict[str, Any], memo: KeptRows | None) -> Request:
    source = 'extern "C" __global__ void k(volatile int* a) {\nint i = 0;\n#define INSIDE\n' + program["source"] + "\n}"
    options = Options.read(program["options"])
    return Request(
        source=source,
        name=program["name"],
        kind="ptx",
        arch=ARCH,
        options=options,
        name_expressions=(),
        include_dirs=options.include_dirs,
        headers=program["headers"],
        extra=b"",
        memo=memo,
    )


def request_from_scratch(program: dict[str, Any]) -> Request:
    kept = header_memo._kept.copy()
    header_memo._kept.clear()
    try:
        return request(program, None)
    finally:
        header_memo._kept.clear()
        header_memo._kept.update(kept)


def output(asked: Request) -> bytes | None:
    """What NVRTC makes of it; ``None`` where it does not compile, and nothing would be stored."""
    try:
        return nvrtc.compile_program(
            asked.source,
            name=asked.name,
            options=asked.command(()),
            name_expressions=(),
            headers=asked.headers,
            arch=ARCH,
        ).ptx
    except CompileError:
        return None


def run(program: dict[str, Any], tree: dict[str, str], changes: list[Edit], seen: Counter[str]) -> None:
    header_memo._kept.clear()
    memo = KeptRows()
    with working_directory() as root:
        for name, text in tree.items():
            with contextlib.suppress(OSError):
                write(name, text)
        states: list[tuple[Request, bytes]] = []
        asked = request(program, memo)
        for change in (None, *changes):
            if change is not None:
                (what, place, content), new_process = change
                with contextlib.suppress(OSError):
                    apply(what, chosen(place, asked, root), content)
                if new_process:
                    header_memo._kept.clear()
                asked = request(program, memo)
            fresh = request_from_scratch(program)
            assert fresh.program.key == asked.program.key, "a memo made another key"
            assert fresh.uncacheable == asked.uncacheable
            for earlier, _ in states:
                if earlier.trace.holds():
                    assert earlier.program.key == asked.program.key, "a trace that holds has another key"
            made = output(asked)
            assert asked.unchanged()
            seen["compiles" if made else "fails"] += 1
            if made is None:
                continue
            if asked.uncacheable is not None:
                seen["uncacheable"] += 1
                continue
            for earlier, earlier_made in states:
                same_key = earlier.program.key == asked.program.key
                if same_key:
                    assert earlier_made == made, "a stale hit"
                seen["same output" if earlier_made == made else "other output"] += 1
                seen["needless misses"] += earlier_made == made and not same_key
            states.append((asked, made))


def checked(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    now = time.time_ns
    monkeypatch.setattr(header_memo.time, "time_ns", lambda: now() + _hour_ns)

    # The short run takes the same examples each time, so that it fails for what was changed only.
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 1000,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs, trees, st.lists(edits, min_size=1, max_size=5))
    def holds(program: dict[str, Any], tree: dict[str, str], changes: list[Edit]) -> None:
        run(program, tree, changes, seen)

    holds()
    share = seen["needless misses"] / max(1, seen["same output"])
    print(f"{dict(seen)}: {share:.1%} of edits that change no output are misses")
    assert seen["other output"] > seen["compiles"] // 10, "few edits reach the output: little was shown"


def test_no_edit_of_a_random_tree_leaves_a_stale_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    checked(60, monkeypatch)


@pytest.mark.long
def test_no_edit_of_many_random_trees_leaves_a_stale_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    checked(4000, monkeypatch)
