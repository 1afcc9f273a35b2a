"""Headers: which files a compile could read, found without compiling.

NVRTC tells no dependencies, so the text is searched for include directives, in all branches of conditionals: a
superset is safe. What cannot be proven makes the program uncacheable, with a reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Scan", "scan"]

# Comments, raw and ordinary strings and character literals, whichever comes first: a comment mark inside a string,
# or a quote inside a comment, is not one.
_NOISE = re.compile(
    r"""
    //[^\n]*
    | /\*.*?(?:\*/|\Z)
    | (?P<raw>\b(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)")
    | (?P<string>"(?:\\.|[^"\\\n])*"?)
    | (?P<char>(?<![0-9A-Za-z_])(?:u8|[uUL])?'(?:\\.|[^'\\\n])*'?)
    """,
    re.VERBOSE | re.DOTALL,
)
_CONTINUATION = re.compile(r"\\[ \t]*\r?\n")
# A carriage return alone may end a line or stand for a space: both are taken.
_DIRECTIVE = re.compile(
    r"(?:^|\r)[ \t\f\v\r]*(?:\#|%:)[ \t\f\v\r]*(include|include_next|import|embed)\b[ \t\f\v\r]*([^\n]*)", re.MULTILINE
)
_SPELLED = re.compile(r'<([^>\n]+)>|"([^"\n]+)"')
_HAS_INCLUDE = re.compile(r"\b__has_include(?:_next)?\b[ \t]*(\([ \t]*)?(<[^>\n]+>|\"[^\"\n]+\")?")
# `#ifdef __has_include` and `defined(__has_include)` ask whether the operator exists.
_ASKED = re.compile(r"(?:\bdefined[ \t]*\(?|(?:\#|%:)[ \t]*(?:el)?ifn?def)[ \t]*\Z")
_RAW = re.compile(r"\b(?:u8|[uUL])?R\"")
_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*")
_TIME = re.compile(r"\b__(?:TIME|DATE|TIMESTAMP)__\b")
_FILE = re.compile(r"\b__FILE__\b|\b__builtin_FILE\b|\bsource_location\b")
_TRIGRAPH = re.compile(r"\?\?[=/]")
_HAS_EMBED = re.compile(r"\b__has_embed\b")
# What `##` could make one of these names of: their beginnings and ends.
_NAMES = ("__TIME__", "__DATE__", "__TIMESTAMP__", "__FILE__", "__has_include", "__has_include_next", "__has_embed")
_PIECES = frozenset(piece for name in _NAMES for at in range(3, len(name) - 1) for piece in (name[:at], name[at:]))


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
    """

    external: tuple[str, ...]
    uncacheable: str | None
    shows_paths: bool


def scan(
    source: str,
    *,
    name: str,
    headers: Mapping[str, str],
    include_dirs: Iterable[str],
    pre_includes: Iterable[str],
    source_include: bool,
    beside: Iterable[str] = (),
    has_raw_strings: bool = True,
) -> Scan:
    """Search a program and its in-memory headers for what they include.

    Parameters
    ----------
    source, name, headers
        As NVRTC gets them.
    include_dirs : iterable of str
        User directories, without those of a toolkit.
    pre_includes : iterable of str
        Files of ``--pre-include``.
    source_include : bool
        Whether quoted includes look beside the program.
    beside : iterable of str
        More text that is compiled: macros of the command line, name expressions.
    has_raw_strings : bool
        Whether ``R"`` begins one: not in C++03.

    Notes
    -----
    Cost: linear in the text, and one stat for each include and directory.
    """
    external: set[str] = set()
    shows_paths = False
    places = list(include_dirs)
    if source_include:
        places.append(os.path.dirname(name))
    # A quoted include of a header in a directory looks in that directory first, also where it was passed by content.
    places += [os.path.dirname(spelling) for spelling in headers]
    for text in (source, *headers.values(), *beside):
        found = _Text(text, is_whole=text not in beside, has_raw_strings=has_raw_strings)
        shows_paths = shows_paths or found.shows_paths
        reason = found.uncacheable
        for spelling in (*found.includes, *pre_includes):
            if spelling in headers:
                continue
            if _is_file(spelling, places):
                reason = reason or f"user header: {spelling}"
            external.add(spelling)
        if reason is not None:
            return Scan((), reason, shows_paths)
    return Scan(tuple(sorted(external)), None, shows_paths)


class _Text:
    """The include directives of one text."""

    def __init__(self, text: str, *, is_whole: bool, has_raw_strings: bool) -> None:
        self.includes: list[str] = []
        self.uncacheable: str | None = None
        if _TRIGRAPH.search(text):
            self.uncacheable = "trigraphs"
        if _RAW.search(text) and (not has_raw_strings or _CONTINUATION.search(text)):
            # Where such a string ends depends on more than its text.
            self.uncacheable = self.uncacheable or "raw string"
        joined = _CONTINUATION.sub("", text)
        # For directives strings stay, since they spell the file; for tokens they go.
        code = _NOISE.sub(_keep_strings, joined)
        tokens = _NOISE.sub(" ", joined)
        self.shows_paths = _FILE.search(tokens) is not None
        if "##" in tokens and not _PIECES.isdisjoint(_IDENTIFIER.findall(tokens)):
            self.uncacheable = self.uncacheable or "token pasting"
        time = _TIME.search(tokens)
        if time is not None:
            self.uncacheable = self.uncacheable or time[0]
        self._read_directives(code)
        self._read_has_include(code, is_whole=is_whole)

    def _read_directives(self, code: str) -> None:
        for directive, rest in _DIRECTIVE.findall(code):
            spelled = _SPELLED.match(rest)
            if directive in {"embed", "import"}:
                self.uncacheable = self.uncacheable or f"#{directive}"
            elif spelled is None:
                self.uncacheable = self.uncacheable or f"computed include: {rest.strip()[:80]}"
            else:
                self.includes.append(spelled[1] or spelled[2])

    def _read_has_include(self, code: str, *, is_whole: bool) -> None:
        if _HAS_EMBED.search(code):
            self.uncacheable = self.uncacheable or "__has_embed"
        for match in _HAS_INCLUDE.finditer(code):
            if match[1] and match[2]:
                self.includes.append(match[2][1:-1])
            elif match[1] or not is_whole or _ASKED.search(code, 0, match.start()) is None:
                self.uncacheable = self.uncacheable or "computed __has_include"


def _keep_strings(match: re.Match[str]) -> str:
    if match["raw"] is not None:
        return '""'
    if match["string"] is not None:
        return match["string"]
    return " "


def _is_file(spelling: str, places: Iterable[str]) -> bool:
    # Any place, for quoted and angled alike: that asks too much, never too little. The working directory is asked
    # although NVRTC does so for names without a directory only.
    return any(os.path.exists(os.path.join(place, spelling)) for place in (*places, ""))
