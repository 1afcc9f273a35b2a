"""Directives: what one text asks the preprocessor to read, in all branches of its conditionals.

A superset is safe, a missed include is a wrong hit. The rules are in ``docs/headers.md``, each with what NVRTC did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Directive", "Directives"]

# NVRTC takes these for white space within a line; only \n ends one.
_BLANKS = " \t\v\f\r"
_WS = r"[ \t\v\f\r]"

# Where a comment, a string or a character literal can begin. Literals alone, as `re` then skips all other characters at
# 1 GB/s; one expression for the whole of them took 300 ns for each (CUTLASS has 25 MB).
_NOISE_START = re.compile(r"""//|/\*|"|'""")
_STRING = re.compile(r'"(?:\\[^\n]|[^"\\\n])*"?')
_CHARACTER = re.compile(r"'(?:\\[^\n]|[^'\\\n])*'?")
_RAW_PREFIX = re.compile(r"(?<![0-9A-Za-z_$])(?:u8|[uUL])?R\Z")
_RAW = re.compile(r'"([^()\\\n"]{0,16})\(.*?(?:\)\1"|\Z)', re.DOTALL)
_NUMBER = re.compile(r"(?<![0-9A-Za-z_$])[0-9](?:[eEpP][+-]|'[0-9A-Za-z_]|[0-9A-Za-z_.])*\Z")
_DIGITS = re.compile(r"(?:'[0-9A-Za-z_](?:[eEpP][+-]|[0-9A-Za-z_.])*)+")
_OF_NUMBERS = frozenset("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_.'")
_SIGNED = frozenset(f"{exponent}{sign}" for exponent in "eEpP" for sign in "+-")
_BEFORE_ANGLED = f"{_BLANKS}("
_LAST_WORD = re.compile(r"(?:(?<![0-9A-Za-z_$])__has_include|(?<![0-9A-Za-z_$])include)(?:_next)?\Z")
_ANGLED = re.compile(rf"(?:(?:\#|%:){_WS}*include|(?<![0-9A-Za-z_$])__has_include)(?:_next)?(?:{_WS}|\()*<")
_TO_BRACKET = re.compile(r"[^>\n]*>")
_RAW_START = re.compile(r'R"((?:[^()\\\n"]{0,16}\(|[^()"]{0,16}\\\r?\n))')
# Each is looked for to its end, so that very many of them would take forever.
_MAX_RAW = 1000
# A blank between backslash and newline makes it no continuation.
_CONTINUATION = re.compile(r"\\\r?\n")
_DIRECTIVE = re.compile(rf"(?:\#|%:){_WS}*(include_next|include|import|embed|define)\b{_WS}*([^\n]*)", re.ASCII)
_SPELLED = re.compile(r'<([^>\n]+)>|"([^"\n]+)"')
_COMPUTED = re.compile(rf"[A-Za-z_]\w*(?:{_WS}*\([^()\"'#]*\))?", re.ASCII)
_DEFINITION = re.compile(rf"([A-Za-z_]\w*)((?:\([^()]*\))?){_WS}*([<\"]?)([^\n]*)", re.ASCII)
_HAS_INCLUDE = re.compile(r"\b__has_include(_next)?\b", re.ASCII)
_OPERAND = re.compile(rf'{_WS}*\({_WS}*(?:<([^>\n]+)>|"([^"\n]+)")')
# Asked whether the operator exists, or given a stand-in where it does not: no file is looked for.
_NO_OPERAND = re.compile(
    rf"(?:\bdefined{_WS}*\(?|(?:\#|%:){_WS}*(?:ifdef|ifndef|elifdef|elifndef|undef){_WS}){_WS}*$", re.ASCII
)
_STAND_IN = re.compile(rf"(?:\#|%:){_WS}*define{_WS}+$")
_STAND_IN_VALUE = re.compile(rf"\({_WS}*\w+{_WS}*\){_WS}*[01]?{_WS}*(?:\n|\Z)", re.ASCII)
# Within a macro, or within what is given to one, the words between < and > are expanded.
_IF = re.compile(rf"{_WS}*(?:\#|%:){_WS}*(?:el)?if\b", re.ASCII)
_CALL = re.compile(rf"\b(?!(?:defined|__has_include(?:_next)?|__has_cpp_attribute)\b)[A-Za-z_]\w*{_WS}*\(", re.ASCII)
_CLOSED = re.compile(r"\([^()]*\)")
# Each line is read anew for each operator on it.
_MAX_CONDITION = 2000
_TIME = re.compile(r"\b__(?:TIME|DATE|TIMESTAMP)__\b", re.ASCII)
_FILE = re.compile(r"\b(?:__FILE__|__BASE_FILE__|__builtin_FILE|source_location)\b", re.ASCII)
_ASSERT = re.compile(r"assert(?<!\wassert)[ \t]*\(", re.ASCII)
# What `##` could make one of these names of: a beginning of it, all but its underscores, or the end of one.
_PASTED = ("__TIME__", "__DATE__", "__TIMESTAMP__", "__has_include", "__has_include_next")
_PIECES = (
    {name[:at] for name in _PASTED for at in range(3, len(name))}
    | {name[at:] for name in _PASTED for at in (1, 2)}
    | {name[at:end] for name in _PASTED[:3] for at in range(3) for end in (-2, -1)}
    | {name[at:] for name in _PASTED[:3] for at in range(3, len(name) - 2)}
)
_PIECE = re.compile(rf"\b(?:{'|'.join(sorted(_PIECES.difference(_PASTED)))})\b", re.ASCII)
# A part of each that finding costs nothing, before the expression that takes 30 ns for each character.
_MARKS = {
    _TIME: ("__TIME", "__DATE"),
    _FILE: ("FILE__", "__builtin_FILE", "source_location"),
    _ASSERT: ("assert",),
    _PIECE: ("__T", "__D", "__h", "TIME", "DATE", "E__", "P__", "has_include"),
}
_TRIGRAPH = re.compile(r"\?\?[=/]")


@dataclass(frozen=True, slots=True)
class Directive:
    """One include.

    Parameters
    ----------
    spelling : str
        As written; of a computed include the macro, ``NAME`` or ``NAME(x)``.
    quoted : bool
        ``"q.h"``, not ``<q.h>``.
    next : bool
        ``#include_next`` or ``__has_include_next``.
    computed : bool
        ``#include NAME`` or ``#include NAME(x)``.
    """

    spelling: str
    quoted: bool = False
    next: bool = False
    computed: bool = False


@dataclass(frozen=True, slots=True)
class Directives:
    """What one text can read, and what else of it decides whether a compile can be keyed.

    Parameters
    ----------
    includes : tuple of Directive
        In order, each once.
    uncacheable : str or None
        Why a compile that reads the text cannot be keyed: a reason to count, and after a colon the place.
    shows_paths : bool
        Whether ``__FILE__`` can put file names into the output.
    new_tokens : bool
        Whether raw strings or separated digits are in it, which older C++ reads differently.
    pastes, has_piece : bool
        Whether ``##`` is in it, and whether a word that it could make ``__TIME__`` or its like of.
    defined : tuple of str
        Macros that it defines as anything else than the name of a header, each once.
    header_macros : mapping of str to tuple of str
        Those that it defines as the name of a header: ``{"H": ('"q.h"',), "STD": ("(x)<std/x>",)}``.
    """

    includes: tuple[Directive, ...]
    uncacheable: str | None = None
    shows_paths: bool = False
    new_tokens: bool = False
    pastes: bool = False
    has_piece: bool = False
    defined: tuple[str, ...] = ()
    header_macros: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Directives:
        """Search a text. Linear in its length."""
        joined = _CONTINUATION.sub("", text) if "\\" in text else text
        code, new_tokens = _code(joined)
        found = _Found()
        found.read_directives(code)
        found.read_has_include(code)
        time = _tokens(code, _TIME)
        reasons = [
            "trigraphs" if "??" in text and _TRIGRAPH.search(text) else None,
            # Within a raw string a continuation is none, and joining could have moved its end.
            "line continuation in a raw string" if joined is not text and _has_split_raw(text) else None,
            time and time[0],
            *found.reasons,
        ]
        return cls(
            tuple(found.includes),
            next((reason for reason in reasons if reason), None),
            shows_paths=(_tokens(code, _FILE) or _tokens(code, _ASSERT)) is not None,
            new_tokens=new_tokens,
            pastes="##" in code or "%:%:" in code,
            has_piece=_tokens(code, _PIECE) is not None,
            defined=tuple(found.defined),
            header_macros={name: tuple(values) for name, values in found.header_macros.items()},
        )

    def to_json(self) -> str:
        """Return a text that `from_json` reads."""
        includes = [[entry.spelling, 1 * entry.quoted + 2 * entry.next + 4 * entry.computed] for entry in self.includes]
        rest = [self.uncacheable, self.shows_paths, self.new_tokens, self.pastes, self.has_piece]
        macros = [" ".join(self.defined), self.header_macros]
        return json.dumps([includes, *rest, *macros], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Directives:
        """Read what `to_json` wrote."""
        includes, uncacheable, shows_paths, new_tokens, pastes, has_piece, defined, header_macros = json.loads(text)
        entries = tuple(
            Directive(spelling, bool(flags & 1), bool(flags & 2), bool(flags & 4)) for spelling, flags in includes
        )
        macros = {name: tuple(values) for name, values in header_macros.items()}
        return cls(entries, uncacheable, shows_paths, new_tokens, pastes, has_piece, tuple(defined.split()), macros)


class _Found:
    """What the directives of one text ask for, as it is found."""

    def __init__(self) -> None:
        self.includes: dict[Directive, None] = {}
        self.defined: dict[str, None] = {}
        self.header_macros: dict[str, dict[str, None]] = {}
        self.reasons: list[str] = []

    def read_directives(self, code: str) -> None:
        at = 0
        while match := _DIRECTIVE.search(code, at):
            # What stands before it on its line is white space, or it is no directive.
            if not _begins_line(code, match.start()):
                at = match.start() + 1
                continue
            at = match.end()
            directive, rest = match[1], match[2]
            if directive == "define":
                self._define(rest)
            elif directive in {"embed", "import"}:
                self.reasons.append(f"#{directive}")
            else:
                self._include(rest, is_next=directive == "include_next")

    def _include(self, rest: str, *, is_next: bool) -> None:
        spelled = _SPELLED.match(rest)
        if spelled is not None:
            self._add(Directive(spelled[1] or spelled[2], spelled[1] is None, is_next))
        elif _COMPUTED.fullmatch(rest.strip()) and not is_next:
            self._add(Directive(rest.strip(), computed=True))
        else:
            self.reasons.append(f"computed include: {rest.strip()[:80]}")

    def _define(self, rest: str) -> None:
        definition = _DEFINITION.match(rest)
        if definition is None:
            return
        name, parameters, bracket, value = definition.groups()
        if bracket:
            self.header_macros.setdefault(name, {})[f"{parameters}{bracket}{value.strip()}"] = None
        else:
            self.defined[name] = None

    def read_has_include(self, code: str) -> None:
        if "__has_" not in code:
            return
        if re.search(r"\b__has_embed\b", code):
            self.reasons.append("__has_embed")
        for match in _HAS_INCLUDE.finditer(code):
            operand = _OPERAND.match(code, match.end())
            before = code[code.rfind("\n", 0, match.start()) + 1 : match.start()]
            if len(before) > _MAX_CONDITION:
                self.reasons.append("computed __has_include")
                return
            if operand is not None and (operand[2] is not None or _is_verbatim(before)):
                self._add(Directive(operand[1] or operand[2], operand[1] is None, match[1] is not None))
                continue
            is_stand_in = _STAND_IN.search(before) and _STAND_IN_VALUE.match(code, match.end())
            if not is_stand_in and _NO_OPERAND.search(before) is None:
                self.reasons.append("computed __has_include")

    def _add(self, directive: Directive) -> None:
        self.includes[directive] = None
        # Bytes that are no UTF-8 came as lone surrogates.
        spelling = directive.spelling
        if not spelling.isascii() and any("\ud800" <= character <= "\udfff" for character in spelling):
            self.reasons.append("include whose name is no UTF-8")


def _code(text: str) -> tuple[str, bool]:
    """Return a text without comments, characters and raw strings, and whether tokens that old C++ lacks are in it."""
    pieces: list[str] = []
    new_tokens = False
    # Copied up to `copied`; the last comment, string or number ended at `since`.
    copied = since = position = 0
    while match := _NOISE_START.search(text, position):
        start, mark = match.start(), match[0]
        if text.rfind("<", since, start) >= 0 and (bracket := _bracket_after(text, pieces, copied, since, start)):
            since = position = bracket
            continue
        is_new, stands_for = False, " "
        if mark == "//":
            end = text.find("\n", start)
        elif mark == "/*":
            closed = text.find("*/", start + 2)
            end = closed + 2 if closed >= 0 else -1
        elif mark == '"':
            end, is_new = _string(text, since, start)
            stands_for = '""' if is_new else ""
        else:
            end, is_new = _character(text, since, start)
            stands_for = "" if is_new else "' '"
        end = len(text) if end < 0 else end
        new_tokens = new_tokens or is_new
        if stands_for:
            pieces += (text[copied:start], stands_for)
            copied = end
        since = position = end
    pieces.append(text[copied:])
    return "".join(pieces), new_tokens


def _string(text: str, since: int, start: int) -> tuple[int, bool]:
    """Return where a string ends, and whether it is a raw one."""
    raw = None
    if text[start - 1 : start] == "R" and _RAW_PREFIX.search(text, max(since, start - 3), start):
        raw = _RAW.match(text, start)
    string = raw or _STRING.match(text, start)
    assert string is not None
    return string.end(), raw is not None


def _character(text: str, since: int, start: int) -> tuple[int, bool]:
    """Return where a character ends, or a number whose digits the quote separates, and whether it is one."""
    first = start
    while first > since and (text[first - 1] in _OF_NUMBERS or text[max(0, first - 2) : first] in _SIGNED):
        first -= 1
    digits = _DIGITS.match(text, start) if _NUMBER.search(text, first, start) else None
    character = digits or _CHARACTER.match(text, start)
    assert character is not None
    return character.end(), digits is not None


def _bracket_after(text: str, pieces: list[str], copied: int, since: int, start: int) -> int:
    """Return where an include's ``<...>`` ends that began before `start`, in which no mark means anything, or 0."""
    begin = max(since, text.rfind("\n", since, start) + 1, text.rfind(">", since, start) + 1)
    line = text[begin:start]
    if "<" not in line:
        return 0
    if not _ANGLED.search(line):
        # Comments may stand between the parts of the directive.
        earlier = pieces if begin == since == copied else []
        if not _is_before_angled(line.partition("<")[0], reversed(earlier)):
            return 0
    closed = _TO_BRACKET.match(text, start)
    return 0 if closed is None else closed.end()


def _is_before_angled(before: str, earlier: Iterator[str]) -> bool:
    """Whether a text ends in ``# include`` or ``__has_include``; a blank one is passed over, as are comments."""
    before = before.rstrip(_BEFORE_ANGLED)
    while not before:
        piece = next(earlier, None)
        if piece is None:
            return False
        before = piece.rstrip(_BEFORE_ANGLED)
    word = _LAST_WORD.search(before, max(0, len(before) - len("__has_include_next")))
    if word is None or word[0].startswith("__"):
        return word is not None
    before = before[: word.start()].rstrip(_BLANKS)
    while not before:
        piece = next(earlier, None)
        if piece is None:
            return False
        before = piece.rstrip(_BLANKS)
    return before.endswith(("#", "%:"))


def _is_verbatim(before: str) -> bool:
    """Whether the words between < and > are not expanded: in a condition itself, not within what a macro is given."""
    condition = _IF.match(before)
    if condition is None:
        return False
    opened = before[condition.end() :]
    closed = 1
    while closed:
        opened, closed = _CLOSED.subn(" ", opened)
    return _CALL.search(opened) is None


def _begins_line(code: str, start: int) -> bool:
    while start and code[start - 1] in _BLANKS:
        start -= 1
        if code[start] == "\r":
            return True
    return start == 0 or code[start - 1] == "\n"


def _tokens(code: str, expression: re.Pattern[str]) -> re.Match[str] | None:
    """Search outside strings."""
    if not any(mark in code for mark in _MARKS[expression]) or not expression.search(code):
        return None
    return expression.search(_STRING.sub(" ", code))


def _has_split_raw(text: str) -> bool:
    # From each beginning on its own, as some of them begin nothing; also where the delimiter itself is split.
    for number, start in enumerate(_RAW_START.finditer(text)):
        delimiter = start[1]
        if number == _MAX_RAW or _CONTINUATION.search(delimiter):
            return True
        end = text.find(f'){delimiter[:-1]}"', start.end()) if delimiter.endswith("(") else -1
        if end >= 0 and _CONTINUATION.search(text, start.end(), end):
            return True
    return False
