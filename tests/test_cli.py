"""The command line: each command on real input, exit statuses, JSON, and errors without a traceback."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kernelstore import Artifact, Compiler, Store
from kernelstore.cli import _COMMANDS, main
from kernelstore.db.statements import REVISION

SAXPY = """
template<class T> __global__ void saxpy(T a, const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""


@dataclass
class Done:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run the command line as its console script does, but for the new process."""

    def call(command: str, *arguments: object, db: Path | None = path) -> Done:
        where = [] if db is None else ["--db", str(db)]
        monkeypatch.setattr(sys, "argv", ["kernelstore", command, *where, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsysbinary.readouterr()
        return Done(int(ended.value.code or 0), printed.out.decode(), printed.err.decode())

    monkeypatch.chdir(tmp_path)
    return call


@pytest.fixture
def filled(store: Store, cubin: Artifact, ptx: Artifact) -> Artifact:
    store.put(cubin, ptx)
    store.get(cubin.key)
    store.flush()
    return cubin


@pytest.fixture
def source_file(tmp_path: Path) -> Path:
    path = tmp_path / "saxpy.cu"
    path.write_text(SAXPY)
    return path


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_has_help_with_an_example(run: Run, command: str) -> None:
    done = run(command, "--help", db=None)

    assert done.status == 0
    assert "Example" in done.out
    assert "--db" in done.out
    assert "--json" in done.out or command == "cat"


def test_help_lists_every_command(run: Run) -> None:
    done = run("--help", db=None)

    assert done.status == 0
    assert all(command in done.out for command in _COMMANDS)


def test_a_misspelt_command_is_wrong_usage_and_the_nearest_is_named(run: Run) -> None:
    done = run("lss", db=None)

    assert done.status == 2
    assert "did you mean 'ls'?" in done.err


def test_compile_stores_and_the_second_time_hits(run: Run, source_file: Path) -> None:
    arguments = (
        "compile",
        source_file,
        "--arch",
        "sm_80",
        "--arch",
        "sm_90",
        "--name-expression",
        "saxpy<float>",
        "--json",
    )

    first = run(*arguments, "--", "-std=c++17").json
    second = run(*arguments, "--", "-std=c++17").json

    assert [made["arch"] for made in first] == ["sm_80", "sm_90"]
    assert [made["from_cache"] for made in (*first, *second)] == [False, False, True, True]
    assert [made["key"] for made in first] == [made["key"] for made in second]
    assert first[0]["symbols"][0]["name_expression"] == "saxpy<float>"


def test_a_compile_error_is_shown_without_a_traceback(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text("__global__ void k() { nonsense; }")

    done = run("compile", "bad.cu", "--arch", "sm_90")

    assert done.status == 1
    assert "nonsense" in done.err
    assert done.out == ""


def test_explain_tells_a_hit_and_what_differs_in_a_miss(run: Run, source_file: Path) -> None:
    same = (source_file, "--arch", "sm_90", "--name-expression", "saxpy<float>")
    key = run("compile", *same, "--json").json[0]["key"]

    hit = run("explain", *same)
    miss = run("explain", *same, "--arch", "sm_80", "--json", "--", "-DN=8")

    assert (hit.status, hit.out) == (0, f"a hit: {key}\n")
    assert miss.status == 1
    assert [told["nearest"] for told in miss.json] == [key, key]
    assert miss.json[1]["differences"] == [
        {"part": "options", "text": "-DN=8 is new"},
        {"part": "arch", "text": "sm_80, stored for sm_90"},
    ]
    assert "options: -DN=8 is new" in run("explain", *same, "--", "-DN=8").out


def test_explain_spells_a_file_as_compile_does(run: Run, source_file: Path) -> None:
    run("compile", "./saxpy.cu", "--arch", "sm_90")

    assert run("explain", "./saxpy.cu", "--arch", "sm_90").status == 0


def test_explain_compares_two_keys(run: Run, filled: Artifact, ptx: Artifact, store: Store) -> None:
    cubin_digits, ptx_digits = str(filled.key)[:10], str(ptx.key)[:10]
    program = store.info(ptx.key).program_key

    differs = run("explain", cubin_digits, ptx_digits)
    assert differs.status == 1
    assert differs.out.splitlines() == [
        "kind: cubin, the other has ptx",
        "arch: sm_90, the other has compute_90",
    ]
    assert [told["part"] for told in run("explain", cubin_digits, ptx_digits, "--json").json] == ["kind", "arch"]
    assert (run("explain", filled.key, program).out, run("explain", filled.key, filled.key).status) == (
        "no difference\n",
        0,
    )


def test_explain_neither_makes_nor_changes_a_store(run: Run, source_file: Path, tmp_path: Path) -> None:
    done = run("explain", source_file, "--arch", "sm_90", db=tmp_path / "new.db")

    assert done.status == 1
    assert "no store at" in done.err
    assert not (tmp_path / "new.db").exists()


def test_rebuild_stores_what_a_compile_would_then_find(run: Run, source_file: Path) -> None:
    run("compile", source_file, "--arch", "sm_90", "--name-expression", "saxpy<float>")
    key = run("ls", "--kind", "cubin", "--json").json[0]["key"]

    by_name = run("rebuild", source_file, "--arch", "sm_80", "--arch", "sm_100", "--json").json
    by_key = run("rebuild", key[:10], "--arch", "sm_80")

    assert [(made["arch"], made["from_cache"]) for made in by_name] == [("sm_80", False), ("sm_100", False)]
    assert by_key.status == 0
    assert "sm_80" in by_key.out
    assert " hit in " in by_key.out
    found = run("compile", source_file, "--arch", "sm_80", "--name-expression", "saxpy<float>", "--json").json[0]
    assert (found["key"], found["from_cache"]) == (by_name[0]["key"], True)


def test_a_refused_rebuild_says_what_changed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text('#if 0\n#include "later.h"\n#endif\n__global__ void k() {}')
    run("compile", "k.cu", "--arch", "sm_90")
    (tmp_path / "later.h").touch()

    done = run("rebuild", "k.cu", "--arch", "sm_80")

    assert (done.status, done.out) == (1, "")
    assert "later.h" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("compile", "missing.cu"), 2, "missing.cu"),
        (("put", "missing.cubin"), 2, "missing.cubin"),
        (("show", "zz"), 2, "begins no key"),
        (("explain", "missing.cu"), 2, "two keys"),
        (("explain", "abcd", "abcd"), 1, "no program"),
        (("rebuild", "missing.cu", "--arch", "sm_80"), 1, "no program missing.cu"),
        (("rebuild", "missing.cu"), 2, "--arch"),
        (("show", "abcd"), 1, "no artifact"),
        (("cat", "abcd"), 1, "no artifact"),
        (("ls", "--arch", "90"), 2, "sm_90"),
        (("ls", "--kind", "cubins"), 2, "cubin"),
        (("ls", "--limit", "-1"), 2, "limit"),
        (("sql", "DELETE FROM artifact"), 1, "reads"),
        (("sql", "SELECT 1; SELECT 2"), 1, "one statement"),
        (("sql", "SELECT * FROM artefact"), 1, "did you mean 'artifact'?"),
        (("sql", "SELECT archs FROM artifact"), 1, "did you mean 'arch'?"),
        (("sql", "PRAGMA user_version = 3"), 1, ""),
        (("sql", "ATTACH 'x.db' AS x"), 1, ""),
        (("sql", "SELECT 1", "--timeout", "0"), 2, "timeout"),
    ],
)
def test_wrong_input_is_said_on_stderr(run: Run, arguments: tuple[str, ...], status: int, said: str) -> None:
    done = run(*arguments)

    assert done.status == status, done.err
    assert said in done.err
    assert done.out == ""


def test_put_takes_files_and_tells_what_they_are(run: Run, tmp_path: Path, cubin: Artifact, ptx: Artifact) -> None:
    (tmp_path / "k.cubin").write_bytes(cubin.payload)
    (tmp_path / "k.ptx").write_bytes(ptx.payload.rstrip(b"\0"))

    done = run("put", "k.cubin", "k.ptx", "--json")

    assert [(info["kind"], info["arch"], info["origin"]) for info in done.json] == [
        ("cubin", "sm_90", "import"),
        ("ptx", "compute_90", "import"),
    ]
    assert run("put", "k.cubin").status == 0


def test_an_error_has_no_traceback_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernelstore", "show", "abcd", "--db", str(tmp_path / "x.db")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (1, "")
    assert "no store at" in done.stderr
    assert done.stderr.count("\n") == 1


def test_put_of_a_file_that_is_no_kernel_stores_nothing(run: Run, tmp_path: Path, cubin: Artifact) -> None:
    (tmp_path / "k.cubin").write_bytes(cubin.payload)
    (tmp_path / "hello").write_bytes(b"hello")

    done = run("put", "k.cubin", "hello")

    assert done.status == 2
    assert run("ls", "--json").json == []


def test_ls_lists_newest_use_first(run: Run, filled: Artifact) -> None:
    done = run("ls")
    lines = done.out.splitlines()

    assert lines[0].split()[:3] == ["KEY", "KIND", "ARCH"]
    assert lines[1].startswith(str(filled.key)[:12])
    assert "saxpy<float>" in lines[1]
    assert [info["kind"] for info in run("ls", "--json").json] == ["cubin", "ptx"]
    assert [info["kind"] for info in run("ls", "--kind", "ptx", "--json").json] == ["ptx"]
    assert len(run("ls", "--arch", "sm_90", "--symbol", "saxpy*", "--json").json) == 1
    assert run("ls", "--symbol", "SAXPY*", "--json").json == []
    assert len(run("ls", "--limit", "1", "--json").json) == 1


def test_show_tells_everything_about_one_artifact(run: Run, filled: Artifact) -> None:
    done = run("show", str(filled.key)[:8], "--source", "--log")

    assert done.status == 0
    assert str(filled.key) in done.out
    assert "kernel saxpy<float>(f32, u64, u64, u32)" in done.out
    assert "registers" in done.out
    assert "template<class T>" in done.out
    told = run("show", str(filled.key), "--json").json
    assert told["artifact"]["usage_count"] == 1
    assert told["program"]["name_expressions"] == ["saxpy<float>"]


def test_looking_around_is_no_use(run: Run, filled: Artifact, rows: Callable[..., list[tuple[Any, ...]]]) -> None:
    run("show", filled.key, "--log")
    run("cat", filled.key, "-o", "k.cubin")

    assert rows("SELECT usage_count FROM artifact WHERE key = ?", filled.key) == [(1,)]


def test_cat_writes_payload_ptx_and_source(run: Run, filled: Artifact, ptx: Artifact, tmp_path: Path) -> None:
    assert run("cat", filled.key, "-o", "k.cubin").status == 0
    assert (tmp_path / "k.cubin").read_bytes() == filled.payload
    assert run("cat", ptx.key).out.encode() == ptx.payload.rstrip(b"\0")
    assert run("cat", ptx.key, "--source").out == SAXPY


def test_sql_prints_rows_in_four_forms(run: Run, filled: Artifact) -> None:
    statement = "SELECT kind, arch, key, driver_version FROM artifact WHERE kind = ?"
    key = filled.key.hex()

    assert run("sql", statement, "cubin").out.splitlines()[1].split() == ["cubin", "sm_90", key, "-"]
    assert run("sql", statement, "cubin", "--json").json == [
        {"kind": "cubin", "arch": "sm_90", "key": key, "driver_version": None}
    ]
    assert list(csv.reader(io.StringIO(run("sql", statement, "cubin", "--format", "csv").out))) == [
        ["kind", "arch", "key", "driver_version"],
        ["cubin", "sm_90", key, ""],
    ]
    assert json.loads(run("sql", statement, "cubin", "--format", "jsonl").out)["arch"] == "sm_90"


def test_sql_that_runs_for_ever_is_stopped(run: Run) -> None:
    forever = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"

    done = run("sql", forever, "--timeout", "0.2")

    assert done.status == 1
    assert "0.2 s" in done.err


def test_stats_tell_hits_first(run: Run, filled: Artifact) -> None:
    lines = run("stats").out.splitlines()

    assert lines[1].startswith("hits ")
    told = run("stats", "--json").json
    assert (told["hits"], told["artifacts"], told["programs"]) == (1, 2, 1)
    assert told["saved_ms"] == pytest.approx(filled.compile_ms, abs=0.001)


def test_upgrade_makes_the_file(run: Run, tmp_path: Path) -> None:
    done = run("upgrade", "--json", db=tmp_path / "new.db")

    assert done.json["revision"] == REVISION
    assert (tmp_path / "new.db").exists()


def test_doctor_tells_what_is_wrong_by_its_exit_status(run: Run, path: Path) -> None:
    well = run("doctor", "--json")
    topics = {finding["topic"]: finding for finding in well.json}
    assert well.status == 0, [finding for finding in well.json if finding["problem"]]
    assert {"kernelstore", "SQLite", "store", "NVRTC", "CUDA driver"} <= set(topics)

    path.parent.chmod(0o777)
    ill = run("doctor")

    assert ill.status == 1
    assert f"chmod o-w {path.parent}" in ill.out


def test_doctor_goes_on_where_the_store_cannot_be_opened(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 100)

    done = run("doctor", db=tmp_path / "text")

    assert done.status == 1
    assert "NVRTC" in done.out


def test_the_environment_names_the_store(
    run: Run, path: Path, filled: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELSTORE_PATH", str(path))

    assert len(run("ls", "--json", db=None).json) == 2


def test_a_closed_pipe_is_no_error(path: Path, filled: Artifact) -> None:
    done = subprocess.run(
        f"{sys.executable} -m kernelstore ls --db {path} | head -n 1",
        shell=True, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.stderr == ""
    assert done.stdout.startswith("KEY")


def test_a_foreign_file_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 100)

    done = run("ls", db=tmp_path / "text")

    assert done.status == 1
    assert done.err.count("\n") == 1
    assert "not a database" in done.err


def test_lines_are_not_cut_when_piped(run: Run, compiler: Compiler) -> None:
    names = [f"addn<{number}>" for number in range(3)]
    compiler.compile("template<int N> __global__ void addn(int*p){p[0]+=N;}", arch="sm_90", name_expressions=names)

    assert "addn<0>, addn<1>, addn<2>" in run("ls").out
