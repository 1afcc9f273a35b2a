"""Headers: which files a compile could read, found without compiling, by NVRTC's own search rules.

NVRTC tells no dependencies, so each text is searched for includes, in all branches of conditionals, and each include
is resolved afresh: what is found, and what is not found in each place before it, decides the key. What cannot be
proven makes the program uncacheable, with a reason. ``docs/headers.md`` has the rules and how they were seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kernelstore.directives import Directive, Directives, code_of
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

__all__ = ["Scan", "scan"]

# More than any program has; a bound for what generated includes could do to a scan.
_MAX_FILES = 20_000

_DEFINE = r"^[ \t\v\f\r]*(?:\#|%:)[ \t\v\f\r]*define[ \t\v\f\r]+{}\b([^\n]*)"
_LITERAL = re.compile(r'[ \t]*(?:<([^<>"\s]+)>|"([^"\\\n]+)")[ \t\r]*')
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLACE = re.compile(r"@\w+")


@dataclass(frozen=True, slots=True)
class Scan:
    """What a program's text can read.

    Parameters
    ----------
    external : tuple of str
        Sorted spellings that a toolkit has to provide.
    uncacheable : str or None
        Why the compile cannot be keyed: a reason to count, and after a colon the place.
    shows_paths : bool
        Whether ``__FILE__`` puts file names into the output.
    files : bytes
        What the user headers are for the key: for each its content's digest, and what each of its includes found.
        No path is in it.
    digests : dict of str to str
        Spellings of user headers to the first 16 hex digits of their SHA-256, for people.
    trace : Trace
        What was looked at.
    """

    external: tuple[str, ...]
    uncacheable: str | None
    shows_paths: bool
    files: bytes = b""
    digests: Mapping[str, str] = field(default_factory=dict)
    trace: Trace = field(default_factory=lambda: Trace({}, settled=True))


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
    Cost: one stat for each header and for each place searched before it; one read for each header whose stamp the
    memo does not know.
    """
    search = _Search(headers, include_dirs, frozenset(toolkit_dirs), source_include, memo)
    # Each by itself: a backslash or a quote at the end of one reaches no other.
    given = [*(f"#define {define.replace('=', ' ', 1)}" for define in defines), *name_expressions]
    texts = [
        (source, os.path.dirname(name)),
        *((text, os.path.dirname(path)) for path, text in sorted(headers.items())),
    ]
    roots = [_Node("", base, Directives.read(text)) for text, base in [*texts, *((text, "") for text in given)]]
    pre = tuple(Directive(spelling, quoted=True) for spelling in pre_includes)
    roots.append(_Node("", "", Directives(pre, None, False, False), beside=True))
    nodes = search.run(roots)
    if search.uncacheable is None and any(entry.computed for node in nodes for entry in node.read.includes):
        nodes = _Computed(search, roots, [text for text, _ in texts] + given).run(nodes)
    reasons = [search.uncacheable, *(node.uncacheable(old_standard) for node in nodes)]
    if any(node.read.pastes for node in nodes) and any(node.read.has_piece for node in nodes):
        reasons.append("token pasting")
    return Scan(
        external=tuple(sorted(search.external)),
        uncacheable=next((reason for reason in reasons if reason), None),
        shows_paths=any(node.read.shows_paths for node in nodes),
        files=search.files(nodes),
        digests=search.digests(nodes),
        trace=search.trace(),
    )


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
        self.external: set[str] = set()
        self.uncacheable: str | None = None
        self.computed: dict[str, list[Directive]] = {}
        self.nodes: list[_Node] = []
        self.numbers: dict[str, int] = {}
        self.settled = True
        self.stamps: dict[str, Signature | None] = {}
        self._directories: dict[tuple[int, int], str] = {}
        self._bases: dict[str, str] = {}
        self._outcomes: dict[tuple[str | None, Directive], str] = {}
        self._waiting: dict[str, str] = {}

    def run(self, roots: list[_Node]) -> list[_Node]:
        """Return the roots and every file that can be read, in the order in which they were found."""
        self.nodes = list(roots)
        level = roots
        while level and self.uncacheable is None:
            for node in level:
                beside = self.source_include or node.beside
                node.found = [self._outcome(node.base if beside else None, entry) for entry in node.read.includes]
            level = self._read_waiting()
        return self.nodes

    def files(self, nodes: list[_Node]) -> bytes:
        """Return the graph of the user headers: contents, which of them are one file, and what each include found."""
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
        return text.encode()

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
    """Includes of macros, where every definition that the program can see is a file's name."""

    def __init__(self, search: _Search, roots: list[_Node], texts: list[str]) -> None:
        self._search = search
        self._roots = roots
        self._texts = texts

    def run(self, nodes: list[_Node]) -> list[_Node]:
        search = self._search
        while search.uncacheable is None:
            names = {entry.spelling for node in nodes for entry in node.read.includes if entry.computed}
            texts = [code_of(text) for text in (*self._texts, *(_text_of(node.path) for node in nodes if node.path))]
            computed = {name: self._targets(name, texts) for name in sorted(names)}
            unknown = next((name for name, targets in computed.items() if not targets), None)
            # A toolkit's header could define the name once more.
            if unknown is not None or search.external:
                search.uncacheable = f"computed include: {unknown or ', '.join(computed)}"
            elif computed == search.computed:
                return nodes
            else:
                nodes = self._again(computed)
        return nodes

    def _again(self, computed: dict[str, list[Directive]]) -> list[_Node]:
        old = self._search
        search = _Search(old.headers, old.include_dirs, old.toolkit_dirs, old.source_include, old.memo)
        search.computed = computed
        nodes = search.run(self._roots)
        for name in ("external", "uncacheable", "computed", "nodes", "numbers", "settled", "stamps"):
            setattr(old, name, getattr(search, name))
        return nodes

    def _targets(self, name: str, texts: list[str]) -> list[Directive]:
        """Return what the name can stand for; nothing where that is not known."""
        if name.startswith("__"):
            return []
        targets: dict[Directive, None] = {}
        for text in texts:
            for value in re.findall(_DEFINE.format(name), text, re.MULTILINE | re.ASCII):
                literal = _LITERAL.fullmatch(value)
                if literal is None or (literal[1] and _has_macro(literal[1], texts)):
                    return []
                targets[Directive(literal[1] or literal[2], quoted=literal[1] is None)] = None
        return list(targets)


def _has_macro(spelling: str, texts: list[str]) -> bool:
    # `#include NAME` expands the words between `<` and `>` once more; those that no text defines stay.
    return any(
        word.startswith("_") or word in {"linux", "unix"} or re.search(_DEFINE.format(word), text, re.MULTILINE)
        for word in _WORD.findall(spelling)
        for text in texts
    )


def _text_of(path: str) -> str:
    try:
        with open(path, "rb") as stream:  # noqa: PTH123
            return stream.read().decode("utf-8", "surrogateescape")
    except OSError:
        return ""
