"""Headers: NVRTC's search rules, one test each, with NVRTC as the oracle; what changes a key and what does not."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelstore import Artifact, Compiler, Store, header_memo, headers, scans
from kernelstore.errors import CompileError, InvalidArgument, UncacheableWarning

SOURCE = '\nextern "C" __global__ void k(int* a) { a[0] = Q; }'
Rows = Callable[..., list[tuple[Any, ...]]]
Tree = dict[str, Any]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test."""
    directory = tmp_path / "tree"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture(autouse=True)
def _no_memo_of_other_tests() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """What a new process knows."""
    header_memo._kept.clear()
    scans._kept.clear()


def write(tree: Path, files: Tree) -> None:
    """Write files; an int is the value of Q, ``None`` removes."""
    for name, content in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(f"#define Q {content}\n" if isinstance(content, int) else content)


def ptx(compiler: Compiler, source: str, **arguments: Any) -> Artifact | str:
    """Compile; a failure is its text."""
    try:
        return compiler.compile(source + SOURCE, "ptx", arch="compute_90", **arguments)
    except CompileError as error:
        return f"fails: {error.log.splitlines()[0]}"


def value(artifact: Artifact | str) -> object:
    return artifact if isinstance(artifact, str) else artifact.payload


def check(compiler: Compiler, tree: Path, source: str, before: Tree, after: Tree, **arguments: Any) -> None:
    """An edit changes what NVRTC makes; the store must follow, there and back."""
    arguments.setdefault("options", ("-Ia", "-Ib", "-Ic"))
    write(tree, before)
    first = ptx(compiler, source, **arguments)
    again = ptx(compiler, source, **arguments)
    assert isinstance(first, str) or (isinstance(again, Artifact) and again.from_cache)
    kept = {name: (tree / name).read_bytes() if (tree / name).is_file() else None for name in after}
    write(tree, after)
    second = ptx(compiler, source, **arguments)
    fresh = ptx(compiler, source, **arguments, cache=False)

    assert value(second) == value(fresh)
    assert value(second) != value(first), "the edit does not reach the output: the test shows nothing"

    write(tree, kept)
    assert value(ptx(compiler, source, **arguments)) == value(first)


GUARD = "#pragma once\n#ifdef Z\n#undef Q\n#define Q 2\n#else\n#define Z\n#define Q 1\n#endif\n"
HAS = "#if __has_include({})\n#define Q 1\n#else\n#define Q 0\n#endif"

# Name: source, files, edit that changes the output, more arguments.
RULES: dict[str, tuple[str, Tree, Tree, dict[str, Any]]] = {
    "angled: include directories": ("#include <q.h>", {"a/q.h": 1}, {"a/q.h": 2}, {}),
    "angled: not the working directory": ("#include <q.h>", {"q.h": 9, "c/q.h": 1}, {"c/q.h": 2}, {}),
    "quoted: the working directory first": ('#include "q.h"', {"a/q.h": 1}, {"q.h": 2}, {}),
    "quoted: the program's directory": ('#include "q.h"', {"s/q.h": 1}, {"s/q.h": 2}, {"name": "s/k.cu"}),
    "quoted: no fall-back to the working directory": (
        '#include "q.h"',
        {"s/x": "", "q.h": 9, "a/q.h": 1},
        {"a/q.h": 2},
        {"name": "s/k.cu"},
    ),
    "quoted: then the include directories": ('#include "q.h"', {"b/q.h": 1}, {"a/q.h": 2}, {}),
    "order of -I (C05)": ("#include <q.h>", {"a/x": "", "b/q.h": 2}, {"a/q.h": 1}, {}),
    "--include-path is -I": (
        "#include <q.h>",
        {"a/q.h": 1, "b/q.h": 2},
        {"a/q.h": 3},
        {"options": ("--include-path=a", "-I", "b")},
    ),
    "a missing include directory comes to be": ("#include <q.h>", {"b/q.h": 2}, {"a/q.h": 1}, {}),
    "--no-source-include: not beside": (
        '#include "q.h"',
        {"q.h": 9, "a/q.h": 1},
        {"a/q.h": 2},
        {"options": ("-Ia", "--no-source-include")},
    ),
    "nested: beside the header": (
        '#include "s/p.h"',
        {"s/p.h": '#include "q.h"', "q.h": 9, "s/q.h": 1},
        {"s/q.h": 2},
        {},
    ),
    "nested: a new file beside the header": (
        "#include <s/p.h>",
        {"a/s/p.h": '#include "q.h"', "a/q.h": 1},
        {"a/s/q.h": 2},
        {},
    ),
    "nested: not the directories of includers": (
        "#include <s/p.h>",
        {"a/s/p.h": '#include "../t/o.h"', "a/t/o.h": '#include "q.h"', "a/s/q.h": 9, "b/q.h": 1},
        {"b/q.h": 2},
        {},
    ),
    "nested: transitive": (
        "#include <o.h>",
        {"a/o.h": "#include <p.h>", "b/p.h": "#include <q.h>", "c/q.h": 1},
        {"b/q.h": 2},
        {},
    ),
    "nested: angled is not beside": (
        "#include <s/p.h>",
        {"a/s/p.h": "#include <q.h>", "a/s/q.h": 9, "b/q.h": 1},
        {"b/q.h": 2},
        {},
    ),
    "pre-include: the working directory first": (
        "",
        {"q.h": 1},
        {"q.h": 2},
        {"options": ("-include=q.h", "-Ia"), "name": "s/k.cu"},
    ),
    "pre-include: then the include directories": (
        "",
        {"a/q.h": 1},
        {"q.h": 2},
        {"options": ("--pre-include=q.h", "-Ia")},
    ),
    "pre-include: also with --no-source-include": (
        "",
        {"a/q.h": 1},
        {"q.h": 2},
        {"options": ("-include=q.h", "-Ia", "--no-source-include")},
    ),
    "include_next: the directories behind": (
        "#include <q.h>",
        {"a/q.h": "#include_next <q.h>", "c/q.h": 1},
        {"b/q.h": 2},
        {},
    ),
    "include_next: from where the file was found": (
        "#include <p.h>",
        {"a/p.h": "#include_next <q.h>", "b/p.h": "#include_next <q.h>", "b/q.h": 1, "c/q.h": 2},
        {"a/p.h": None},
        {},
    ),
    "include_next: anew from a file found beside": (
        '#include "p.h"',
        {"p.h": "#include_next <q.h>", "b/q.h": 1},
        {"a/q.h": 2},
        {},
    ),
    "has_include: comes true (C05)": (HAS.format("<q.h>"), {"a/x": ""}, {"a/q.h": 1}, {}),
    "has_include: quoted": (HAS.format('"q.h"'), {"a/x": ""}, {"q.h": 1}, {}),
    "has_include: in a header, beside it": ("#include <s/p.h>", {"a/s/p.h": HAS.format('"q.h"')}, {"a/s/q.h": ""}, {}),
    "has_include: under another name": (
        HAS.format("<q.h>") + "\n#undef Q\n#include <q.h>",
        {"a/q.h": 1},
        {"a/q.h": 2},
        {},
    ),
    "-D names the file": ("#include H", {"a/q.h": 1}, {"a/q.h": 2}, {"options": ('-DH="q.h"', "-Ia")}),
    "a macro with a parameter": ("#define F(x) <s/x.h>\n#include F(q)", {"a/s/q.h": 1}, {"a/s/q.h": 2}, {}),
    "a macro with parameters, called with blanks": (
        "#define F(x, y) <x/y>\n#include F ( s , /* */ q-1.h )",
        {"a/s/q-1.h": 1},
        {"a/s/q-1.h": 2},
        {},
    ),
    "a macro with a parameter, quoted": ('#define F(x) "s/q.h"\n#include F(p)', {"s/q.h": 1}, {"s/q.h": 2}, {}),
    "a macro with a parameter, of -D": (
        "#include F(q)",
        {"a/q.h": 1},
        {"a/q.h": 2},
        {"options": ("-DF(x)=<x.h>", "-Ia")},
    ),
    "a macro with a parameter, one definition of two": (
        "#include <p.h>\n#include F(q)",
        {"a/p.h": "#ifdef P\n#define F(x) <s/x.h>\n#else\n#define F(x) <x.h>\n#endif", "a/q.h": 1, "a/s/q.h": 3},
        {"a/q.h": 2},
        {},
    ),
    "marks within the brackets": (
        "#include <a/*b*/it's//q.h>",
        {"a/*b*/it's/q.h": 1},
        {"a/*b*/it's/q.h": 2},
        {"options": ("-I.",)},
    ),
    "-D names the file, angled": ("#include H", {"a/q.h": 1}, {"a/q.h": 2}, {"options": ("-DH=<q.h>", "-Ia")}),
    "a header names the file": (
        "#include <p.h>\n#include H",
        {"a/p.h": "#define H <q.h>", "a/q.h": 1},
        {"a/q.h": 2},
        {},
    ),
    "an include guard hides nothing": (
        "#include <q.h>\n#include <q.h>",
        {"a/q.h": "#ifndef G\n#define G\n#include <p.h>\n#endif", "b/p.h": 1},
        {"a/p.h": 2},
        {},
    ),
    "absolute": ('#include "{tree}/s/q.h"', {"s/q.h": 1}, {"s/q.h": 2}, {}),
    "with ..": ('#include "s/../q.h"', {"s/x": "", "q.h": 1}, {"q.h": 2}, {}),
    "headers that include each other by ..": (
        "#include <s/p.h>",
        {"a/s/p.h": '#pragma once\n#include "../t/q.h"', "a/t/q.h": '#pragma once\n#include "../s/p.h"\n#define Q 1'},
        {"a/t/q.h": '#pragma once\n#include "../s/p.h"\n#define Q 2'},
        {},
    ),
    "comment before": ("/* a\n */ #include <q.h>", {"a/q.h": 1}, {"a/q.h": 2}, {}),
    "comments within": ("#/* a\n*/include/* b */<q.h>", {"a/q.h": 1}, {"a/q.h": 2}, {}),
    "continuation": ("#inc\\\nlude <q\\\n.h>", {"a/q.h": 1}, {"a/q.h": 2}, {}),
    "a blank behind the backslash joins nothing": ("// \\ \n#include <q.h>", {"a/q.h": 1}, {"a/q.h": 2}, {}),
    "digraph": ("%:include <q.h>", {"a/q.h": 1}, {"a/q.h": 2}, {}),
    "white space of all kinds": ("\f#\vinclude\t<q.h>", {"a/q.h": 1}, {"a/q.h": 2}, {}),
    "carriage returns": ("\r#include <q.h>\r\n", {"a/q.h": 1}, {"a/q.h": 2}, {}),
    "a comment mark in a file's name": (
        "#include <q/*.h>\n#include <q.h> // */",
        {"a/q/*.h": "", "a/q.h": 1},
        {"a/q.h": 2},
        {},
    ),
    "an apostrophe in text that is skipped": (
        "#if 0\ndon't /* x\n#endif\n#include <q.h>\n// */",
        {"a/q.h": 1},
        {"a/q.h": 2},
        {},
    ),
    "digits with separators": ("#define N 1'000'000\n#include <q.h>\n// '", {"a/q.h": 1}, {"a/q.h": 2}, {}),
    "a raw string that looks like a comment": (
        'template<class> struct S { static constexpr auto text = R"(/*)"; };\n#include <q.h>\n// */',
        {"a/q.h": 1},
        {"a/q.h": 2},
        {},
    ),
    "#line moves nothing": ('#line 5 "s/x.cu"\n#include "q.h"', {"s/q.h": 9, "q.h": 1}, {"q.h": 2}, {}),
    "a directory is passed over": ("#include <q.h>", {"a/q.h/x": "", "b/q.h": 1}, {"b/q.h": 2}, {}),
    "by content: exact spelling only": (
        '#include "./q.h"',
        {"q.h": 1},
        {"q.h": 2},
        {"headers": {"q.h": "#define Q 9"}},
    ),
    "by content: includes beside its name": (
        '#include "s/p.h"',
        {"s/q.h": 1},
        {"s/q.h": 2},
        {"headers": {"s/p.h": '#include "q.h"'}, "name": "t/k.cu"},
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_an_edit_that_nvrtc_sees_is_a_miss(compiler: Compiler, tree: Path, rule: str) -> None:
    source, before, after, arguments = RULES[rule]

    check(compiler, tree, source.replace("{tree}", str(tree)), before, after, **arguments)


def test_headers_by_content_beat_files(compiler: Compiler, tree: Path) -> None:
    write(tree, {"q.h": 1, "a/q.h": 2, "a/p.h": '#include "q.h"'})

    for source in ('#include "q.h"', "#include <q.h>", "#include <p.h>", "#include_next <q.h>"):
        artifact = ptx(compiler, source, options=("-Ia",), headers={"q.h": "#define Q 77"})
        assert isinstance(artifact, Artifact)
        assert b", 77;" in artifact.payload


SAME: dict[str, tuple[str, Tree, Tree]] = {
    "a file that nobody includes": ("#include <q.h>", {"a/q.h": 1}, {"a/other.h": 2}),
    "a file behind the one found": ("#include <q.h>", {"a/q.h": 1}, {"b/q.h": 2}),
    "the same header in another directory": ("#include <q.h>", {"a/q.h": 1}, {"a/q.h": None, "b/q.h": 1}),
}


@pytest.mark.parametrize("case", SAME)
def test_an_edit_that_reaches_nothing_is_a_hit(compiler: Compiler, tree: Path, case: str) -> None:
    source, before, after = SAME[case]
    write(tree, before)
    ptx(compiler, source, options=("-Ia", "-Ib"))
    write(tree, after)

    artifact = ptx(compiler, source, options=("-Ia", "-Ib"))

    assert isinstance(artifact, Artifact)
    assert artifact.from_cache


def test_a_touched_header_is_a_hit_and_an_edit_with_the_same_stamp_a_miss(compiler: Compiler, tree: Path) -> None:
    """C04."""
    write(tree, {"a/q.h": 1})
    header = tree / "a" / "q.h"
    old = time.time_ns() - 10**12
    os.utime(header, ns=(old, old))
    ptx(compiler, "#include <q.h>", options=("-Ia",))
    os.utime(header, ns=(old + 10**9, old + 10**9))
    touched = ptx(compiler, "#include <q.h>", options=("-Ia",))
    write(tree, {"a/q.h": 2})
    os.utime(header, ns=(old + 10**9, old + 10**9))
    edited = ptx(compiler, "#include <q.h>", options=("-Ia",))

    assert isinstance(touched, Artifact)
    assert isinstance(edited, Artifact)
    assert touched.from_cache
    assert b", 2;" in edited.payload


def test_many_edits_within_one_tick_of_the_clock_are_all_seen(compiler: Compiler, tree: Path) -> None:
    """C04: a stamp that is too fresh proves nothing."""
    write(tree, {"a/q.h": 1})
    for number in range(10, 90):
        write(tree, {"a/q.h": number})
        request = compiler._request(
            "#include <q.h>" + SOURCE, "ptx", arch="compute_90", name="", options=("-Ia",), name_expressions=(),
            include_dirs=(), headers=None, extra=b"",
        )  # fmt: skip
        digest = request.program.user_headers["q.h"]
        (tree / "a" / "q.h").write_text(f"#define Q {number + 5}\n")
        assert not request.trace.settled
        assert not request.unchanged()
        assert digest not in _again(request).program.user_headers.values()


def _again(request: Any) -> Any:
    return dataclasses.replace(request)


def test_a_checkout_that_was_moved_hits(compiler: Compiler, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = '#include "s/p.h"\n#include <q.h>'
    keys = []
    for name in ("one", "two"):
        write(tree / name, {"s/p.h": '#include "../t/o.h"', "t/o.h": "", "a/q.h": 1})
        monkeypatch.chdir(tree / name)
        artifact = ptx(compiler, source, include_dirs=[tree / name / "a"])
        assert isinstance(artifact, Artifact)
        keys.append(artifact.key)

    assert artifact.from_cache
    assert keys[0] == keys[1]


@pytest.mark.parametrize("shown", ["-lineinfo", "__FILE__"])
def test_a_checkout_that_was_moved_misses_where_paths_are_shown(compiler: Compiler, tree: Path, shown: str) -> None:
    options = ("-lineinfo",) if shown == "-lineinfo" else ()
    payloads = []
    for name in ("one", "two"):
        write(tree / name, {"a/q.h": "#define Q f[2]\n__device__ const char f[] = __FILE__;" if not options else 1})
        artifact = ptx(compiler, "#include <q.h>", include_dirs=[tree / name / "a"], options=options)
        assert isinstance(artifact, Artifact)
        assert not artifact.from_cache
        payloads.append(artifact.payload)

    assert payloads[0] != payloads[1] or options


UNCACHEABLE: dict[str, tuple[str, Tree]] = {
    "computed include": ("#define F(x) #x\n#include F(q.h)", {"a/q.h": 1}),
    "computed include of a macro that is defined otherwise too": (
        "#define F(x) <x.h>\n#include F(q)\n#undef F\n#define F(x) G(x)\n#define G(x) <x.h>", {"a/q.h": 1},
    ),
    "computed include whose argument is a macro": ("#define z q\n#define F(x) <x.h>\n#include F(z)", {"a/q.h": 1}),
    "computed include of what a header defines otherwise": (
        "#include <p.h>\n#include H",
        {"a/p.h": "#define H NAME\n#define NAME <q.h>", "a/q.h": 1},
    ),
    "computed include whose words are macros": ("#define q z\n#define H <q.h>\n#include H", {"a/z.h": 1, "a/q.h": 2}),
    "computed __has_include": ("#define H __has_include\n#if H(<q.h>)\n#define Q 1\n#else\n#define Q 0\n#endif", {"a/q.h": 1}),
    "__has_include in a macro, whose words are expanded": (
        "#define q z\n#define H __has_include(<q.h>)\n#if H\n#define Q 1\n#else\n#define Q 0\n#endif",
        {"a/x": ""},
    ),
    "__has_include given to a macro": (
        "#define q z\n#define F(x) x\n#if F(__has_include(<q.h>))\n#define Q 1\n#else\n#define Q 0\n#endif",
        {"a/x": ""},
    ),
    "__TIME__ in a header": ("#include <q.h>", {"a/q.h": "#define Q __TIME__[0]"}),
    "__TIME__ in an option": ("", {"a/x": ""}),
    "large header": ("#include <q.h>", {"a/q.h": b"#define Q 1\n" + b" " * (33 * 2**20)}),
    "include whose name is no UTF-8": ("#include <q.h>", {"a/q.h": b"#define Q 1\n#if 0\n#include <\xff.h>\n#endif\n"}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCACHEABLE)
def test_what_the_scan_cannot_prove_is_not_stored(compiler: Compiler, store: Store, tree: Path, case: str) -> None:
    source, files = UNCACHEABLE[case]
    write(tree, files)
    options = ("-Ia", "-DQ=__TIME__[0]") if case == "__TIME__ in an option" else ("-Ia",)

    with pytest.warns(UncacheableWarning):
        artifact = ptx(compiler, source, options=options)

    assert isinstance(artifact, Artifact), artifact
    assert len(store) == 0
    assert sum(store.stats().uncacheable.values()) == 1


@pytest.mark.parametrize(
    "content", [b"\x00\xff\xfe", os.urandom(4096), "#define Q 1\n".encode("utf-16"), b"// \xe9\n#define Q 1\n"]
)
def test_a_binary_header_is_an_error_of_nvrtc_or_a_compile(compiler: Compiler, tree: Path, content: bytes) -> None:
    write(tree, {"a/q.h": content})

    assert value(ptx(compiler, "#include <q.h>", options=("-Ia",))) == value(
        ptx(compiler, "#include <q.h>", options=("-Ia",), cache=False)
    )


def test_a_named_pipe_as_a_header_is_told_and_not_waited_for(compiler: Compiler, store: Store, tree: Path) -> None:
    os.mkfifo(tree / "q.h")

    with pytest.raises(InvalidArgument, match=r"q\.h is a named pipe"):
        ptx(compiler, '#include "q.h"')

    assert len(store) == 0


@pytest.mark.parametrize("before", ["-DX=\\", '-DX=R"('])
def test_what_stands_at_the_end_of_a_macro_hides_no_other(compiler: Compiler, tree: Path, before: str) -> None:
    source = '#ifndef H\n#define H "p.h"\n#endif\n#include H'
    write(tree, {"p.h": 9, "q.h": 1})

    check(compiler, tree, source, {}, {"q.h": 2}, options=(before, '-DH="q.h"'))


def test_headers_that_include_each_other_without_end_are_an_error_of_nvrtc(compiler: Compiler, tree: Path) -> None:
    write(tree, {"a/q.h": "#include <p.h>", "a/p.h": "#include <q.h>"})

    with pytest.raises(CompileError, match="includes itself"):
        compiler.compile("#include <q.h>" + SOURCE, "ptx", arch="compute_90", options=("-Ia",))


@pytest.mark.parametrize("target", ["q.h", "nowhere"])
def test_links_that_lead_nowhere_are_passed_over(compiler: Compiler, tree: Path, target: str) -> None:
    write(tree, {"a/x": "", "b/q.h": 1})
    (tree / "a" / "q.h").symlink_to(target)

    check(compiler, tree, "#include <q.h>", {}, {"b/q.h": 2})


def test_a_linked_header_includes_beside_the_link(compiler: Compiler, tree: Path) -> None:
    write(tree, {"t/p.h": '#include "q.h"', "t/q.h": 9, "a/q.h": 1})
    (tree / "a" / "p.h").symlink_to(tree / "t" / "p.h")

    check(compiler, tree, "#include <p.h>", {}, {"a/q.h": 2})


def test_once_holds_for_the_file_not_for_its_content(compiler: Compiler, tree: Path) -> None:
    source = "#include <p.h>\n#include <q.h>"
    write(tree, {"a/p.h": GUARD, "a/q.h": GUARD})
    copies = ptx(compiler, source, options=("-Ia",))
    (tree / "a" / "q.h").unlink()
    (tree / "a" / "q.h").symlink_to("p.h")
    one = ptx(compiler, source, options=("-Ia",))

    assert value(one) == value(ptx(compiler, source, options=("-Ia",), cache=False))
    assert value(one) != value(copies)


def test_an_unreadable_header_is_not_stored(tree: Path, as_nobody: Callable[..., object]) -> None:
    write(tree, {"a/q.h": 1, "b/q.h": 2})
    (tree / "a" / "q.h").chmod(0)
    tree.chmod(0o755)

    def reason() -> object:
        return headers.scan("#include <q.h>", name="", headers={}, include_dirs=["a", "b"]).uncacheable

    assert as_nobody(reason) == "unreadable header: a/q.h: Permission denied"


def test_a_program_too_wide_to_scan_is_not_stored(
    compiler: Compiler, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelstore.headers._MAX_FILES", 10)
    write(tree, {f"a/q{number}.h": "" for number in range(12)} | {"a/q.h": 1})
    source = "\n".join(f"#include <q{number}.h>" for number in range(12)) + "\n#include <q.h>"

    with pytest.warns(UncacheableWarning, match="more than 10 headers"):
        ptx(compiler, source, options=("-Ia",))


def test_a_header_that_changes_during_the_compile_is_not_stored(
    compiler: Compiler, store: Store, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelstore.cuda import nvrtc

    write(tree, {"a/q.h": 1})
    compile_program = nvrtc.compile_program

    def edited(source: str, **arguments: Any) -> Any:
        if "q.h" in source:
            write(tree, {"a/q.h": 2})
        return compile_program(source, **arguments)

    monkeypatch.setattr(nvrtc, "compile_program", edited)
    ptx(compiler, "#include <q.h>", options=("-Ia",))

    assert len(store) == 0
    assert store.stats().not_stored == 1


# -- the memo -----------------------------------------------------------------------------------------------------


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memo's clock is an hour ahead, so that what is written now is old enough to be trusted."""
    now = time.time_ns
    monkeypatch.setattr(header_memo.time, "time_ns", lambda: now() + 3600 * 10**9)


@pytest.mark.usefixtures("later")
def test_a_hit_in_a_new_process_reads_no_header(
    path: Path, tree: Path, rows: Rows, run_python: Callable[..., str]
) -> None:
    write(tree, {"a/q.h": "#include <p.h>", "a/p.h": 1})
    with Store(path) as store:
        ptx(Compiler(store), "#include <q.h>", options=("-Ia",))
    assert sorted(Path(name).name for (name,) in rows("SELECT path FROM header")) == ["p.h", "q.h"]

    printed = run_python(
        "import os, sys; os.chdir(sys.argv[3])\n"
        "from kernelstore import Compiler, Store, header_memo\n"
        "header_memo._read = None\n"
        "artifact = Compiler(Store(sys.argv[1])).compile(sys.argv[2], 'ptx', arch='compute_90', options=('-Ia',))\n"
        "print(artifact.from_cache)",
        path,
        "#include <q.h>" + SOURCE,
        tree,
    )

    assert printed == "True\n"


@pytest.mark.usefixtures("later")
def test_the_memo_is_for_one_stamp(path: Path, tree: Path) -> None:
    write(tree, {"a/q.h": 1})
    with Store(path) as store:
        ptx(Compiler(store), "#include <q.h>", options=("-Ia",))
    forget()
    write(tree, {"a/q.h": 2})
    with Store(path) as store:
        artifact = ptx(Compiler(store), "#include <q.h>", options=("-Ia",))

    assert isinstance(artifact, Artifact)
    assert b", 2;" in artifact.payload


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("damage", ["substr(includes, 1, 40)", "replace(includes, 'p.h', 'x.h')", "'{}'", "'nonsense'"])
def test_a_damaged_memo_is_no_memo(path: Path, tree: Path, damage: str) -> None:
    """Promise 1: a row that hides an include would be a wrong hit."""
    write(tree, {"a/q.h": "#include <p.h>", "a/p.h": 1})
    with Store(path) as store:
        ptx(Compiler(store), "#include <q.h>", options=("-Ia",))
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE header SET includes = {damage}")
        connection.execute("DELETE FROM scan")
    connection.close()
    forget()
    write(tree, {"a/p.h": 2})
    with Store(path) as store:
        artifact = ptx(Compiler(store), "#include <q.h>", options=("-Ia",))

    assert isinstance(artifact, Artifact)
    assert b", 2;" in artifact.payload


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("damage", ["substr(found, 1, 40)", "x'00'", "(SELECT max(found) FROM scan)"])
def test_a_damaged_memo_of_a_scan_is_no_memo(path: Path, tree: Path, damage: str) -> None:
    """Promise 1: also where one scan's row holds what another found."""
    write(tree, {"a/q.h": 1, "a/r.h": "#define Q 3"})
    with Store(path) as store:
        for name in ("q.h", "r.h"):
            ptx(Compiler(store), f"#include <{name}>", options=("-Ia",))
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE scan SET found = {damage}")
    connection.close()
    forget()
    with Store(path) as store:
        artifacts = [ptx(Compiler(store), f"#include <{name}>", options=("-Ia",)) for name in ("q.h", "r.h")]

    assert [b", 1;" in value(artifacts[0]), b", 3;" in value(artifacts[1])] == [True, True]
    assert all(isinstance(artifact, Artifact) and artifact.from_cache for artifact in artifacts)


@pytest.mark.usefixtures("later")
def test_programs_that_include_the_same_share_a_scan(path: Path, tree: Path, rows: Rows) -> None:
    write(tree, {"a/q.h": 1})
    with Store(path) as store:
        for number in range(3):
            ptx(Compiler(store), f"// {number}\n#include <q.h>", options=("-Ia",))
        ptx(Compiler(store), "#include <q.h>", options=("-Ia", "-Ib"))

    assert rows("SELECT count(*) FROM scan") == [(2,)]
    assert rows("SELECT count(*) FROM program") == [(4,)]


@pytest.mark.usefixtures("later")
def test_a_hit_in_a_new_process_resolves_no_include(path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tree, {"a/q.h": "#include <p.h>", "a/p.h": 1})
    with Store(path) as store:
        ptx(Compiler(store), "#include <q.h>", options=("-Ia",))
    forget()
    monkeypatch.setattr(headers, "_Search", None)
    with Store(path) as store:
        artifact = ptx(Compiler(store), "#include <q.h>", options=("-Ia",))
        again = ptx(Compiler(store), "#include <q.h>", options=("-Ia",))

    assert isinstance(artifact, Artifact)
    assert isinstance(again, Artifact)
    assert artifact.from_cache
    assert again.from_cache


def test_the_memo_of_scans_is_capped_and_the_oldest_go(path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelstore.db.tally._MAX_SCANS", 3)
    with Store(path) as store:
        for number in range(5):
            store.remember_scan(bytes([number]) * 32, "text")
            store.flush()

    assert rows("SELECT lower(hex(substr(key, 1, 1))) FROM scan ORDER BY key") == [("02",), ("03",), ("04",)]


@pytest.mark.usefixtures("later")
def test_the_memo_is_json_that_people_can_read(path: Path, tree: Path, rows: Rows) -> None:
    write(tree, {"a/q.h": "#include <p.h>", "a/p.h": 1})
    with Store(path) as store:
        ptx(Compiler(store), "#include <q.h>", options=("-Ia",))

    ((includes,),) = rows("SELECT includes FROM header WHERE path LIKE '%q.h'")

    assert json.loads(includes)["read"] == [[["p.h", 0]], None, False, False, False, False, "", {}]


def test_too_fresh_a_stamp_is_not_remembered(path: Path, tree: Path, rows: Rows) -> None:
    write(tree, {"a/q.h": 1})
    with Store(path) as store:
        ptx(Compiler(store), "#include <q.h>", options=("-Ia",))

    assert rows("SELECT count(*) FROM header") == [(0,)]


def test_a_stamp_of_the_future_is_not_remembered(path: Path, tree: Path, rows: Rows) -> None:
    write(tree, {"a/q.h": 1})
    ahead = time.time_ns() + 10**12
    os.utime(tree / "a" / "q.h", ns=(ahead, ahead))
    with Store(path) as store:
        ptx(Compiler(store), "#include <q.h>", options=("-Ia",))

    assert rows("SELECT count(*) FROM header") == [(0,)]


def test_the_memo_is_capped_and_the_oldest_go(path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelstore.db.tally._MAX_HEADERS", 3)
    with Store(path) as store:
        for number in range(5):
            store.remember_headers({f"/h{number}": (1, 2, 3, 4, 5, b"digest", "[]")})
            store.flush()

    assert rows("SELECT path FROM header ORDER BY path") == [("/h2",), ("/h3",), ("/h4",)]


def test_what_sqlite_cannot_hold_is_not_remembered(store: Store) -> None:
    store.remember_headers({"/a": (2**64 - 1, 2, 3, 4, 5, b"", ""), "/\udcff": (1, 2, 3, 4, 5, b"", "")})
    store.flush()

    assert store.recall_headers(["/a"]) == {}


def test_a_store_that_fails_costs_a_read_of_the_headers(compiler: Compiler, store: Store, tree: Path) -> None:
    write(tree, {"a/q.h": 1})
    store.close()

    with pytest.warns(Warning, match="closed"):
        artifact = ptx(compiler, "#include <q.h>", options=("-Ia",))

    assert isinstance(artifact, Artifact)
