"""Keys: what makes two compiles differ, and what does not. Every new compile input adds a row to one of the tables."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelstore import Compiler, Key
from kernelstore.errors import InvalidArgument, InvalidType
from kernelstore.key import key_of

SOURCE = 'extern "C" __global__ void k(int* a) { a[0] = 1; }'
SPLIT_SOURCE = 'extern "C" __global__ void k(int* a) { a[0] = X; }'

Parameters = dict[str, Any]


def key(parameters: Parameters, *, toolchain: str = "nvrtc 13.5.37") -> Key:
    """The artifact key of a compile, without compiling."""
    defaults: Parameters = {
        "arch": "sm_90",
        "name": "",
        "options": (),
        "name_expressions": (),
        "include_dirs": (),
        "headers": None,
        "extra": b"",
    }
    given = defaults | parameters
    source = given.pop("source", SOURCE)
    kind = given.pop("kind", "cubin")
    request = Compiler()._request(source, kind, **given)
    return request.artifact_key(request.kind, request.arch, toolchain)


DIFFERS = {
    "source": ({}, {"source": SOURCE + " "}),
    "name": ({}, {"name": "k.cu"}),
    "kind": ({"kind": "ptx"}, {"kind": "ltoir"}),
    "arch": ({"arch": "sm_90"}, {"arch": "sm_100"}),
    "arch suffix (C15)": ({"arch": "sm_90"}, {"arch": "sm_90a"}),
    "family suffix": ({"arch": "sm_100a"}, {"arch": "sm_100f"}),
    "macro": ({}, {"options": ("-DX",)}),
    "macro value": ({"options": ("-DX=1",)}, {"options": ("-DX=2",)}),
    "order of macros (C09)": ({"options": ("-DX=1", "-DX=2")}, {"options": ("-DX=2", "-DX=1")}),
    "order of -D and -U (C09)": ({"options": ("-DX=1", "-UX")}, {"options": ("-UX", "-DX=1")}),
    "one option or two (C08)": ({"options": ("-DA=1 -DB=2",)}, {"options": ("-DA=1", "-DB=2")}),
    "newline in an option (C08)": ({"options": ("-DA=1\n-DB=2",)}, {"options": ("-DA=1", "-DB=2")}),
    "one name or two (C08)": ({"name_expressions": ("a,b",)}, {"name_expressions": ("a", "b")}),
    "set of names (C02)": ({"name_expressions": ("f<3>",)}, {"name_expressions": ("f<4>",)}),
    "more names (C02)": ({"name_expressions": ("f<3>",)}, {"name_expressions": ("f<3>", "f<4>")}),
    "standard": ({"options": ("-std=c++17",)}, {"options": ("-std=c++20",)}),
    "fast math": ({}, {"options": ("-use_fast_math",)}),
    "relocatable": ({}, {"options": ("-rdc=true",)}),
    "registers": ({"options": ("--maxrregcount=32",)}, {"options": ("--maxrregcount=64",)}),
    "content of an in-memory header": ({"headers": {"a.h": "1"}}, {"headers": {"a.h": "2"}}),
    "name of an in-memory header": ({"headers": {"a.h": "1"}}, {"headers": {"b.h": "1"}}),
    "header or two": ({"headers": {"a": "1b2"}}, {"headers": {"a": "1", "b": "2"}}),
    "external include": ({}, {"source": "#include <cuda_fp16.h>\n" + SOURCE}),
    "extra": ({}, {"extra": b"v2"}),
    "extra or macro": ({"extra": b"-DX"}, {"options": ("-DX",)}),
    "line info": ({}, {"options": ("-lineinfo",)}),
}

SAME = {
    "order of names (C02)": ({"name_expressions": ("f<3>", "f<4>")}, {"name_expressions": ("f<4>", "f<3>")}),
    "a name twice": ({"name_expressions": ("f<3>",)}, {"name_expressions": ("f<3>", "f<3>")}),
    "names as a list": ({"name_expressions": ("f<3>",)}, {"name_expressions": ["f<3>"]}),
    "options as a list": ({"options": ("-DX",)}, {"options": ["-DX"]}),
    "order of in-memory headers": ({"headers": {"a": "1", "b": "2"}}, {"headers": {"b": "2", "a": "1"}}),
    "no headers": ({"headers": None}, {"headers": {}}),
    "arch among the options": ({"arch": "sm_90"}, {"arch": None, "options": ("--gpu-architecture=sm_90",)}),
    "arch in two elements": ({"arch": "sm_90"}, {"arch": None, "options": ("-arch", "sm_90")}),
    "place of the arch": (
        {"arch": None, "options": ("-DX", "-arch=sm_90")},
        {"arch": None, "options": ("-arch=sm_90", "-DX")},
    ),
    "PTX of sm_90 and compute_90": ({"kind": "ptx", "arch": "sm_90"}, {"kind": "ptx", "arch": "compute_90"}),
    "-D and --define-macro": ({"options": ("-DX=1",)}, {"options": ("--define-macro=X=1",)}),
    "-D in two elements": ({"options": ("-DX=1",)}, {"options": ("-D", "X=1")}),
    "-std and --std": ({"options": ("-std=c++17",)}, {"options": ("--std=c++17",)}),
    "-rdc and -dc (C32)": ({"options": ("-rdc=true",)}, {"options": ("-dc",)}),
    "-rdc and its long form (C32)": ({"options": ("-rdc=true",)}, {"options": ("--relocatable-device-code=true",)}),
    "-G and --device-debug": ({"options": ("-G",)}, {"options": ("--device-debug",)}),
    "registers in two elements": ({"options": ("--maxrregcount=32",)}, {"options": ("-maxrregcount", "32")}),
    "-dlto of LTO-IR": ({"kind": "ltoir"}, {"kind": "ltoir", "options": ("-dlto",)}),
    "a user directory that holds nothing": ({}, {"include_dirs": ("/nonexistent",)}),
}


@pytest.mark.parametrize(("one", "other"), DIFFERS.values(), ids=DIFFERS)
def test_the_key_differs_on(one: Parameters, other: Parameters) -> None:
    assert key(one) != key(other)


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_the_key_is_the_same_for(one: Parameters, other: Parameters) -> None:
    assert key(one) == key(other)


def test_the_key_differs_on_the_toolchains_build() -> None:
    """C07: two toolkits never share an entry."""
    assert key({}, toolchain="nvrtc 13.5.37") != key({}, toolchain="nvrtc 13.5.38")


def test_the_working_directory_reaches_the_key_only_with_debug_information(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, debug = key({"name": "k.cu"}), key({"name": "k.cu", "options": ("-lineinfo",)})

    monkeypatch.chdir(tmp_path)

    assert key({"name": "k.cu"}) == plain
    assert key({"name": "k.cu", "options": ("-lineinfo",)}) != debug


def test_the_working_directory_reaches_the_key_with_a_file_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = 'extern "C" __global__ void k(const char** a) { a[0] = __FILE__; }'
    before = key({"source": source, "name": "k.cu"})

    monkeypatch.chdir(tmp_path)

    assert key({"source": source, "name": "k.cu"}) != before


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"options": "-dlto"}, InvalidType),
        ({"options": {"-DX"}}, InvalidType),
        ({"options": {"-DX": 1}}, InvalidType),
        ({"options": (b"-DX",)}, InvalidType),
        ({"options": (object(),)}, InvalidType),
        ({"options": ("",)}, InvalidArgument),
        ({"options": ("-DX\0",)}, InvalidArgument),
        ({"name_expressions": "f<3>"}, InvalidType),
        ({"name_expressions": (3,)}, InvalidType),
        ({"name_expressions": ("",)}, InvalidArgument),
        ({"name_expressions": ("f\0",)}, InvalidArgument),
        ({"source": b"bytes"}, InvalidType),
        ({"source": "nul \0 inside"}, InvalidArgument),
        ({"source": "lone \udc80 surrogate"}, InvalidArgument),
        ({"name": None}, InvalidType),
        ({"headers": ["a.h"]}, InvalidType),
        ({"headers": {"a.h": b"bytes"}}, InvalidType),
        ({"headers": {3: "text"}}, InvalidType),
        ({"include_dirs": "/usr/include"}, InvalidType),
        ({"extra": "text"}, InvalidType),
        ({"extra": 0}, InvalidType),
        ({"arch": 90}, InvalidType),
        ({"kind": "cubins"}, InvalidArgument),
        ({"kind": "fatbin"}, InvalidArgument),
    ],
)
def test_inputs_of_no_use_are_refused_before_anything_is_compiled(
    parameters: Parameters, error: type[Exception]
) -> None:
    """C12, C23, numba-cuda's extra_digest=0, and NVRTC's reading of sources as C strings."""
    with pytest.raises(error):
        key(parameters)


def test_keys_are_the_same_in_every_process() -> None:
    """C09, C12: neither hash() nor repr() has a part in it."""
    script = (
        "from test_key import key; "
        "print(key({'name_expressions': {'f<3>', 'f<4>', 'g'}, 'headers': {'a': '1', 'b': '2'}}))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert len(printed) == 1


def test_parts_cannot_run_into_each_other() -> None:
    """C08: lengths come first."""
    lists = [
        [("a", b"b")],
        [("ab", b"")],
        [("a", b""), ("b", b"")],
        [("a", b"b"), ("", b"")],
        [("", b"ab")],
        [],
    ]

    assert len({key_of(parts) for parts in lists}) == len(lists)


def test_a_key_reads_bytes_and_hex_and_shows_hex() -> None:
    value = bytes(range(32))

    assert Key(value) == Key(value.hex()) == Key(value.hex().upper()) == value
    assert str(Key(value)) == value.hex()
    assert repr(Key(value)) == f"Key('{value.hex()}')"
    assert pickle.loads(pickle.dumps(Key(value))) == value


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"short", InvalidArgument),
        ("ab", InvalidArgument),
        ("zz" * 32, InvalidArgument),
        (" " * 64, InvalidArgument),
        (3, InvalidType),
        (None, InvalidType),
    ],
)
def test_what_is_no_key_is_refused(value: object, error: type[Exception]) -> None:
    make: Callable[[Any], Key] = Key
    with pytest.raises(error):
        make(value)
