"""Random header trees and random edits, with NVRTC as the oracle: when its PTX changes, the key changes."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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
values = numbers.map(lambda number: f"a[i++] = {number};")


def when(name: str, text: str) -> str:
    return f"#if __has_include({name})\n{text}\n#endif"


lines = st.one_of(
    values,
    names.map(lambda name: when(name, f"#include {name}")),
    names.map(lambda name: when(name, f"/* x */ # /* y */ include /* z */ {name}")),
    names.map(lambda name: when(name, f"#if 0\nit's /* {name}\n#endif\n#inc\\\nlude {name} // */")),
    st.tuples(names, numbers).map(lambda pair: when(pair[0], f"a[i++] = {pair[1]}0;")),
    st.sampled_from(("<p.h>", "<q.h>", '"q.h"')).map(lambda name: when(name, f"#include_next {name}")),
    names.map(lambda name: f"// #include {name}\n/*\n#include {name}\n*/"),
)
# Rarely: with anything external, or a name that is nowhere, a computed include is uncacheable.
computed = st.sampled_from(("", "", "", "", "", '\n#define H "q.h"\n#include H\n'))
guards = st.sampled_from(
    ("#pragma once\n{}", "#ifndef G1\n#define G1\n{}\n#endif", "#ifndef G2\n#define G2\n{}\n#endif")
)
texts = st.tuples(guards, st.lists(lines, min_size=1, max_size=4)).map(lambda pair: pair[0].format("\n".join(pair[1])))
trees = st.dictionaries(st.sampled_from(FILES), texts, min_size=3, max_size=9)
edits = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(FILES), texts),
    st.tuples(st.just("remove"), st.sampled_from(FILES), st.none()),
    st.tuples(st.just("link"), st.sampled_from(FILES), st.sampled_from(FILES)),
    st.tuples(st.just("directory"), st.sampled_from(FILES), st.none()),
)
programs = st.fixed_dictionaries(
    {
        "source": st.tuples(st.lists(lines, min_size=2, max_size=4).map("\n".join), computed).map("".join),
        "name": st.sampled_from(("", "", "k.cu", "s/k.cu", "a/k.cu")),
        "options": st.sampled_from(
            (
                ("-Ia", "-Ib"),
                ("-Ib", "-Ia"),
                ("-Ia", "-Ib", "--no-source-include"),
                ("-Ib", "-include=p.h"),
                ("-I.", "-Ia"),
            )
        ),
        "headers": st.sampled_from(({}, {}, {"q.h": "a[i++] = 77;"}, {"s/p.h": '#include "q.h"\na[i++] = 78;'})),
    }
)

# Distinct stamps, so that the memo may trust each: the tick of the clock is another test's.
_stamps = itertools.count(10**18)
_hour_ns = 3600 * 10**9


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(name)
    path.write_text(text)
    stamp = next(_stamps)
    os.utime(path, ns=(stamp, stamp))


def remove(name: str) -> None:
    path = Path(name)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def apply(edit: tuple[str, str, Any]) -> None:
    what, name, content = edit
    if what == "write":
        write(name, content)
        return
    remove(name)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    if what == "link":
        Path(name).symlink_to(Path(content).absolute())
    elif what == "directory":
        Path(name).mkdir()


@contextlib.contextmanager
def working_directory() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)


def request(program: dict[str, Any]) -> Request:
    source = 'extern "C" __global__ void k(volatile int* a) {\nint i = 0;\n' + program["source"] + "\n}"
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
    )


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


def run(program: dict[str, Any], tree: dict[str, str], changes: list[tuple[str, str, Any]], seen: Counter[str]) -> None:
    header_memo._kept.clear()
    with working_directory():
        for name, text in tree.items():
            with contextlib.suppress(OSError):
                write(name, text)
        states = []
        for change in (None, *changes):
            if change is not None:
                with contextlib.suppress(OSError):
                    apply(change)
            asked = request(program)
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
    @given(programs, trees, st.lists(edits, min_size=1, max_size=4))
    def holds(program: dict[str, Any], tree: dict[str, str], changes: list[tuple[str, str, Any]]) -> None:
        run(program, tree, changes, seen)

    holds()
    share = seen["needless misses"] / max(1, seen["same output"])
    print(f"{dict(seen)}: {share:.1%} of edits that change no output are misses")
    assert seen["other output"] > 0, "no edit reaches the output: nothing was shown"


def test_no_edit_of_a_random_tree_leaves_a_stale_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    checked(60, monkeypatch)


@pytest.mark.long
def test_no_edit_of_many_random_trees_leaves_a_stale_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    checked(4000, monkeypatch)
