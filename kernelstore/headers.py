"""Headers: which files a compile could read, found without compiling, by NVRTC's own search rules.

NVRTC tells no dependencies, so each text is searched for includes, in all branches of conditionals, and each include
is resolved afresh: what is found, and what is not found in each place before it, decides the key. What cannot be
proven makes the program uncacheable, with a reason. ``docs/headers.md`` has the rules and how they were seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kernelstore import scans
from kernelstore.directives import Directive, Directives
from kernelstore.header_memo import (
    HeaderFile,
    Memo,
    Signature,
    Trace,
    directory_signature,
    is_settled,
    read_headers,
    signature_of,
)
from kernelstore.scans import Scan

__all__ = ["scan"]

# More than any program has; a bound for what generated includes could do to a scan.
_MAX_FILES = 20_000

# What a macro of `#include NAME(x)` may be called with and stand for: no operators, no white space.
_CALL = re.compile(r"(\w+)\s*(?:\(([\w./+, -]*)\))?", re.ASCII)
_NAMED = re.compile(r'(\([\w\s,]*\))?(?:<([^<>"\s#]+)>|"([^"\\]+)")', re.ASCII)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLACE = re.compile(r"@\w+")


def scan(
    source: str,
    *,
    name: str,
    headers: Mapping[str, str],
    include_dirs: Sequence[str],
    toolkit_dirs: Iterable[str] = (),
    pre_includes: Iterable[str] = (),
    defines: Iterable[str] = (),
    name_expressions: Iterable[str] = (),
    source_include: bool = True,
    old_standard: bool = False,
    memo: Memo | None = None,
) -> Scan:
    """Find all that a program can read.

    Parameters
    ----------
    source, name, headers
        As NVRTC gets them.
    include_dirs : sequence of str
        In the order of the search, those of a toolkit among them.
    toolkit_dirs : iterable of str
        Those of `include_dirs` that are a toolkit's: what they hold is external.
    pre_includes : iterable of str
        Files of ``--pre-include``.
    defines, name_expressions : iterable of str
        Values of ``-D``, which NVRTC puts before the program, and what it compiles behind it.
    source_include : bool
        Whether quoted includes look beside the including file.
    old_standard : bool
        Whether the program is read as C++03 or C++11.
    memo : Memo, optional
        What earlier scans found in files, by their stamps.

    Notes
    -----
    Cost: one stat for each header and for each place searched before it; where no earlier scan is known, also the
    resolution of each include, and one read for each header whose stamp the memo does not know.
    """
    toolkits = frozenset(toolkit_dirs)
    roots = _roots(source, name, headers, pre_includes, defines, name_expressions)
    asked = _asked(roots, headers, include_dirs, toolkits, source_include, old_standard)
    found = scans.recall(asked, memo)
    if found is None:
        found = _Search(headers, include_dirs, toolkits, source_include, memo).scan(roots, old_standard)
        scans.remember(asked, found, memo)
    return found


def _roots(
    source: str,
    name: str,
    headers: Mapping[str, str],
    pre_includes: Iterable[str],
    defines: Iterable[str],
    name_expressions: Iterable[str],
) -> list[_Node]:
    # Each by itself: a backslash or a quote at the end of one reaches no other.
    given = [*(f"#define {define.replace('=', ' ', 1)}" for define in defines), *name_expressions]
    texts = [
        (source, os.path.dirname(name)),
        *((text, os.path.dirname(path)) for path, text in sorted(headers.items())),
        *((text, "") for text in given),
    ]
    roots = [_Node("", base, Directives.read(text)) for text, base in texts]
    pre = tuple(Directive(spelling, quoted=True) for spelling in pre_includes)
    return [*roots, _Node("", "", Directives(pre), beside=True)]


def _asked(
    roots: Sequence[_Node],
    headers: Iterable[str],
    include_dirs: Sequence[str],
    toolkit_dirs: frozenset[str],
    source_include: bool,
    old_standard: bool,
) -> bytes:
    """Return a digest of all that decides which files are looked for; the texts are in it by their includes alone."""
    parts = [
        os.getcwd(),  # noqa: PTH109 - relative paths start there
        sorted(headers),
        include_dirs,
        sorted(toolkit_dirs),
        [source_include, old_standard],
        [[node.base, node.beside, node.read.to_json()] for node in roots],
    ]
    return hashlib.sha256(json.dumps(parts).encode(), usedforsecurity=False).digest()


@dataclass(slots=True)
class _Node:
    """One text: the program, a header by content, or a file at the path by which it is reached."""

    path: str
    base: str
    read: Directives
    digest: bytes = b""
    identity: tuple[int, int] = (0, 0)
    spelling: str = ""
    beside: bool = False
    found: list[str] = field(default_factory=list)

    def uncacheable(self, old_standard: bool) -> str | None:
        reason = self.read.uncacheable
        if reason is None and old_standard and self.read.new_tokens:
            reason = "raw strings or separated digits in old C++"
        if reason is None or not self.spelling:
            return reason
        return f"{reason}{' in' if ':' in reason else ': in'} {self.spelling}"


class _Search:
    """NVRTC's search for headers, breadth first."""

    def __init__(
        self,
        headers: Mapping[str, str],
        include_dirs: Sequence[str],
        toolkit_dirs: frozenset[str],
        source_include: bool,
        memo: Memo | None,
    ) -> None:
        self.headers = headers
        self.include_dirs = include_dirs
        self.toolkit_dirs = toolkit_dirs
        self.source_include = source_include
        self.memo = memo
        self.uncacheable: str | None = None
        # What each macro of a computed include can stand for; a run with others finds other files.
        self.computed: Mapping[str, Sequence[Directive]] = {}
        self.settled = True
        self.stamps: dict[str, Signature | None] = {}
        self._directories: dict[tuple[int, int], str] = {}
        self._bases: dict[str, str] = {}
        self._start([])

    def _start(self, roots: list[_Node]) -> None:
        self.nodes = list(roots)
        self.numbers: dict[str, int] = {}
        self.external: set[str] = set()
        self._outcomes: dict[tuple[str | None, Directive], str] = {}
        self._waiting: dict[str, str] = {}

    def scan(self, roots: list[_Node], old_standard: bool) -> Scan:
        """Find all that the roots can read."""
        nodes = self.run(roots)
        macros: set[str] = set()
        while self.uncacheable is None and any(entry.computed for node in nodes for entry in node.read.includes):
            computed = _Computed(nodes)
            if computed.unknown is not None:
                self.uncacheable = f"computed include: {computed.unknown}"
            elif computed.targets == self.computed:
                macros = computed.macros
                break
            else:
                self.computed = computed.targets
                nodes = self.run(roots)
        reasons = [self.uncacheable, *(node.uncacheable(old_standard) for node in nodes)]
        if any(node.read.pastes for node in nodes) and any(node.read.has_piece for node in nodes):
            reasons.append("token pasting")
        return Scan(
            external=tuple(sorted(self.external)),
            uncacheable=next((reason for reason in reasons if reason), None),
            shows_paths=any(node.read.shows_paths for node in nodes),
            macros=tuple(sorted(macros)),
            files=self.files(nodes),
            digests=self.digests(nodes),
            trace=self.trace(),
        )

    def run(self, roots: list[_Node]) -> list[_Node]:
        """Return the roots and every file that can be read, in the order in which they were found."""
        self._start(roots)
        level = roots
        while level and self.uncacheable is None:
            for node in level:
                beside = self.source_include or node.beside
                node.found = [self._outcome(node.base if beside else None, entry) for entry in node.read.includes]
            level = self._read_waiting()
        return self.nodes

    def files(self, nodes: list[_Node]) -> bytes:
        """Digest the graph of the user headers: contents, which of them are one file, and what each include found."""
        if not self.numbers:
            return b""
        files: dict[tuple[int, int], int] = {}
        lines = [
            f"{node.digest.hex()} {files.setdefault(node.identity, len(files))} {' '.join(node.found)}"
            for node in nodes
        ]
        text = "\n".join(lines)
        # Where a file was found decides only from where `#include_next` goes on.
        if not any(entry.next for node in nodes for entry in node.read.includes):
            text = _PLACE.sub("", text)
        return hashlib.sha256(text.encode(), usedforsecurity=False).digest()

    def digests(self, nodes: list[_Node]) -> dict[str, str]:
        digests: dict[str, str] = {}
        for node in nodes:
            digest = node.digest.hex()[:16]
            label, number = node.spelling, 1
            while label and digests.setdefault(label, digest) != digest:
                number += 1
                label = f"{node.spelling} ({number})"
        digests.pop("", None)
        return digests

    def trace(self) -> Trace:
        directories: dict[str, Signature | None] = {}
        if self.external:
            user_dirs = (path for path in self.include_dirs if path not in self.toolkit_dirs)
            directories = {path: directory_signature(path) for path in user_dirs}
        settled = self.settled and all(map(is_settled, directories.values()))
        return Trace(dict(self.stamps), settled, directories)

    def _outcome(self, base: str | None, entry: Directive) -> str:
        """Return what an include finds: numbers of files, ``m`` by content, ``-`` nothing."""
        if entry.computed:
            targets = self.computed.get(entry.spelling)
            if targets is None:
                return "?"
            return ",".join(self._outcome(base, target) for target in targets)
        asked = (base if entry.quoted else None, entry)
        outcome = self._outcomes.get(asked)
        if outcome is None:
            outcome = self._outcomes[asked] = self._found(*asked)
        return outcome

    def _found(self, base: str | None, entry: Directive) -> str:
        if entry.spelling in self.headers:
            return "m"
        outcomes = []
        for place, directory in self._places(base, entry):
            path = os.path.join(directory, entry.spelling)
            outcome = "-"
            if self._stamp(path) is not None:
                if directory in self.toolkit_dirs:
                    self.external.add(entry.spelling)
                else:
                    outcome = f"{self._number(path, entry.spelling)}@{place}"
                    if not entry.next:
                        return outcome
            outcomes.append(outcome)
        self.external.add(entry.spelling)
        # From where `#include_next` goes on depends on how the file was reached; what lies in each place covers it.
        return "+".join(outcomes) if entry.next else "-"

    def _places(self, base: str | None, entry: Directive) -> Iterator[tuple[str, str]]:
        if entry.spelling.startswith("/"):
            yield "a", ""
            return
        if base is not None:
            yield "b", base
        for number, directory in enumerate(self.include_dirs):
            yield str(number), directory

    def _number(self, path: str, spelling: str) -> int:
        """Return the number of the file at the path; a new one is read with the next level."""
        directory, basename = os.path.split(path)
        canonical = os.path.join(self._base(directory), basename)
        number = self.numbers.get(canonical)
        if number is None:
            number = self.numbers[canonical] = len(self.nodes) + len(self._waiting)
            self._waiting[canonical] = spelling
            self._stamp(canonical)
        return number

    def _base(self, directory: str) -> str:
        # Headers that include each other by `../a/b.h` would have endless paths: one spelling for each directory.
        base = self._bases.get(directory)
        if base is None:
            try:
                found = os.stat(directory or ".")  # noqa: PTH116
            except OSError:
                return directory
            base = self._bases[directory] = self._directories.setdefault((found.st_dev, found.st_ino), directory)
        return base

    def _stamp(self, path: str) -> Signature | None:
        if path not in self.stamps:
            self.stamps[path] = signature_of(path)
        return self.stamps[path]

    def _read_waiting(self) -> list[_Node]:
        waiting, self._waiting = self._waiting, {}
        if len(self.nodes) + len(waiting) > _MAX_FILES:
            self.uncacheable = f"more than {_MAX_FILES} headers"
            return []
        level = []
        for path, file in read_headers({path: self.stamps[path] for path in waiting}, self.memo):
            if isinstance(file, str):
                self.uncacheable = self.uncacheable or file
                continue
            level.append(self._node(path, waiting[path], file))
        self.nodes += level
        return level

    def _node(self, path: str, spelling: str, file: HeaderFile) -> _Node:
        self.stamps[path] = file.signature
        self.settled = self.settled and file.settled
        identity = file.signature[:2]
        return _Node(path, os.path.dirname(path), file.directives, file.digest, identity, spelling)


class _Computed:
    """What the macros of computed includes can stand for, if every definition in the texts is a header's name.

    Parameters
    ----------
    nodes : list of _Node
        All texts.
    """

    def __init__(self, nodes: list[_Node]) -> None:
        self.targets: dict[str, list[Directive]] = {}
        self.macros: set[str] = set()
        self.unknown: str | None = None
        self._defined = {name for node in nodes for name in node.read.defined}
        self._named: dict[str, dict[str, None]] = {}
        for node in nodes:
            for name, values in node.read.header_macros.items():
                self._named.setdefault(name, {}).update(dict.fromkeys(values))
        for call in dict.fromkeys(entry.spelling for node in nodes for entry in node.read.includes if entry.computed):
            targets = self._targets(call)
            if not targets:
                self.unknown = self.unknown or call
            self.targets[call] = targets

    def _targets(self, call: str) -> list[Directive]:
        """Return the headers that the macro can stand for; nothing where that is not known."""
        called = _CALL.fullmatch(call)
        if called is None or called[1].startswith("__") or called[1] in self._defined:
            return []
        arguments = None if called[2] is None else [text.strip() for text in called[2].split(",")]
        targets: dict[Directive, None] = {}
        for value in self._named.get(called[1], ()):
            spelling, quoted = self._expanded(value, arguments)
            if spelling is None:
                return []
            targets[Directive(spelling, quoted)] = None
        self.macros.add(called[1])
        return list(targets)

    def _expanded(self, value: str, arguments: list[str] | None) -> tuple[str | None, bool]:
        named = _NAMED.fullmatch(value)
        if named is None:
            return None, False
        parameters = None if named[1] is None else [text.strip() for text in named[1][1:-1].split(",")]
        if (parameters is None) != (arguments is None) or len(parameters or ()) != len(arguments or ()):
            return None, False
        if named[3] is not None:
            return named[3], True
        given = dict(zip(parameters or (), arguments or (), strict=True))
        spelling = _WORD.sub(lambda word: given.get(word[0], word[0]), named[2])
        # NVRTC expands each word once more, and between those that stand apart it keeps the blank.
        words = set(_WORD.findall(spelling))
        if " " in spelling or any(self._is_macro(word) for word in words):
            return None, False
        self.macros |= words
        return spelling, False

    def _is_macro(self, word: str) -> bool:
        return word.startswith("_") or word in {"linux", "unix"} or word in self._defined or word in self._named
