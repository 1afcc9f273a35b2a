"""Directives: what one text asks the preprocessor to read, in all branches of its conditionals.

A superset is safe, a missed include is a wrong hit. The rules are in ``docs/headers.md``, each with what NVRTC did.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["Directive", "Directives", "code_of"]

# NVRTC takes these for white space within a line; only \n ends one.
_WS = r"[ \t\v\f\r]"

# Comments, raw and ordinary strings, character literals and the file names of includes, whichever comes first: a
# comment mark inside a string, or a quote inside a comment, is not one. A quote inside a number separates digits.
_NOISE = re.compile(
    r"""
    //[^\n]*
    | /\*.*?(?:\*/|\Z)
    | (?P<raw>(?<![0-9A-Za-z_$])(?:u8|[uUL])?R"(?P<delimiter>[^()\\\n"]{0,16})\(.*?(?:\)(?P=delimiter)"|\Z))
    | (?P<angled>(?P<before>(?:(?:\#|%:)(?:[ \t\v\f\r]|/\*(?:[^*]|\*(?!/))*\*/)*include(?:_next)?
            |(?<![0-9A-Za-z_$])__has_include(?:_next)?)
        (?:[ \t\v\f\r(]|/\*(?:[^*]|\*(?!/))*\*/)*)<[^>\n]*>)
    | (?P<number>(?<![0-9A-Za-z_$])[0-9](?:[eEpP][+-]|[0-9A-Za-z_.])*(?:'[0-9A-Za-z_](?:[eEpP][+-]|[0-9A-Za-z_.])*)+)
    | (?P<string>"(?:\\[^\n]|[^"\\\n])*"?)
    | '(?:\\[^\n]|[^'\\\n])*'?
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:\\[^\n]|[^"\\\n])*"?')
_RAW = re.compile(r'R"([^()\\\n"]{0,16})\(.*?\)\1"', re.DOTALL)
_SPLIT_DELIMITER = re.compile(r'R"[^()"]{0,16}\\\r?\n')
# A blank between backslash and newline makes it no continuation.
_CONTINUATION = re.compile(r"\\\r?\n")
_DIRECTIVE = re.compile(
    rf"(?:^|\r){_WS}*(?:\#|%:){_WS}*(include_next|include|import|embed)\b{_WS}*([^\n]*)", re.MULTILINE | re.ASCII
)
_SPELLED = re.compile(r'<([^>\n]+)>|"([^"\n]+)"')
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
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
_TIME = re.compile(r"\b__(?:TIME|DATE|TIMESTAMP)__\b", re.ASCII)
_FILE = re.compile(r"\b(?:__FILE__|__BASE_FILE__|__builtin_FILE|source_location)\b|\bassert[ \t]*\(", re.ASCII)
# What `##` could make one of these names of: a beginning of it, all but its underscores, or the end of one.
_PASTED = ("__TIME__", "__DATE__", "__TIMESTAMP__", "__has_include", "__has_include_next")
_PIECES = (
    {name[:at] for name in _PASTED for at in range(3, len(name))}
    | {name[at:] for name in _PASTED for at in (1, 2)}
    | {name[at:end] for name in _PASTED[:3] for at in range(3) for end in (-2, -1)}
    | {name[at:] for name in _PASTED[:3] for at in range(3, len(name) - 2)}
)
_PIECE = re.compile(rf"\b(?:{'|'.join(sorted(_PIECES.difference(_PASTED)))})\b", re.ASCII)
_TRIGRAPH = re.compile(r"\?\?[=/]")


@dataclass(frozen=True, slots=True)
class Directive:
    """One include.

    Parameters
    ----------
    spelling : str
        As written; of a computed include the macro's name.
    quoted : bool
        ``"q.h"``, not ``<q.h>``.
    next : bool
        ``#include_next`` or ``__has_include_next``.
    computed : bool
        ``#include NAME``.
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
    """

    includes: tuple[Directive, ...]
    uncacheable: str | None
    shows_paths: bool
    new_tokens: bool
    pastes: bool = False
    has_piece: bool = False

    @classmethod
    def read(cls, text: str) -> Directives:
        """Search a text. Linear in its length."""
        joined = _joined(text)
        kept = _Kept()
        code = _NOISE.sub(kept, joined)
        reasons = [
            "trigraphs" if "??" in text and _TRIGRAPH.search(text) else None,
            # Within a raw string a continuation is none, and joining could have moved its end.
            "line continuation in a raw string" if joined is not text and _has_split_raw(text) else None,
        ]
        shows_paths = has_piece = False
        if "__" in code or "source_location" in code or "assert" in code or "##" in code:
            tokens = _STRING.sub(" ", code)
            shows_paths = _FILE.search(tokens) is not None
            has_piece = _PIECE.search(tokens) is not None
            time = _TIME.search(tokens)
            reasons.append(time and time[0])
        includes: dict[Directive, None] = {}
        reasons.append(_read_directives(code, includes))
        reasons.append(_read_has_include(code, includes))
        if not all(entry.spelling.isascii() or _is_text(entry.spelling) for entry in includes):
            reasons.append("include whose name is no UTF-8")
        reason = next((reason for reason in reasons if reason), None)
        return cls(tuple(includes), reason, shows_paths, kept.new_tokens, "##" in code or "%:%:" in code, has_piece)

    def to_json(self) -> str:
        """Return a text that `from_json` reads."""
        includes = [[entry.spelling, 1 * entry.quoted + 2 * entry.next + 4 * entry.computed] for entry in self.includes]
        rest = [self.uncacheable, self.shows_paths, self.new_tokens, self.pastes, self.has_piece]
        return json.dumps([includes, *rest], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Directives:
        """Read what `to_json` wrote."""
        includes, *rest = json.loads(text)
        entries = tuple(
            Directive(spelling, bool(flags & 1), bool(flags & 2), bool(flags & 4)) for spelling, flags in includes
        )
        return cls(entries, *rest)


def code_of(text: str) -> str:
    """Return a text with its lines joined, without comments and without what is in raw strings."""
    return _NOISE.sub(_Kept(), _joined(text))


def _joined(text: str) -> str:
    return _CONTINUATION.sub("", text) if "\\" in text else text


class _Kept:
    """What stands for a piece of noise; it notes tokens that older C++ does not have."""

    def __init__(self) -> None:
        self.new_tokens = False

    def __call__(self, match: re.Match[str]) -> str:
        kind = match.lastgroup
        if kind == "string":
            return match[0]
        if kind == "angled":
            # Behind the < nothing is a comment.
            return _COMMENT.sub(" ", match["before"]) + match[0][match.end("before") - match.start() :]
        if kind is None:
            return " "
        self.new_tokens = True
        return match[0] if kind == "number" else '""'


def _is_text(spelling: str) -> bool:
    # Bytes that are no UTF-8 came as lone surrogates.
    return not any("\ud800" <= character <= "\udfff" for character in spelling)


def _has_split_raw(text: str) -> bool:
    # From each beginning on its own, as some of them begin nothing; also where the delimiter itself is split.
    for start in re.finditer('R"', text):
        match = _RAW.match(text, start.start()) or _SPLIT_DELIMITER.match(text, start.start())
        if match is not None and _CONTINUATION.search(match[0]):
            return True
    return False


def _read_directives(code: str, includes: dict[Directive, None]) -> str | None:
    reason = None
    for directive, rest in _DIRECTIVE.findall(code):
        spelled = _SPELLED.match(rest)
        is_next = directive == "include_next"
        if directive in {"embed", "import"}:
            reason = reason or f"#{directive}"
        elif spelled is not None:
            includes[Directive(spelled[1] or spelled[2], spelled[1] is None, is_next)] = None
        elif _NAME.fullmatch(rest.strip()) and not is_next:
            includes[Directive(rest.strip(), computed=True)] = None
        else:
            reason = reason or f"computed include: {rest.strip()[:80]}"
    return reason


def _read_has_include(code: str, includes: dict[Directive, None]) -> str | None:
    if "__has_" not in code:
        return None
    reason = "__has_embed" if re.search(r"\b__has_embed\b", code) else None
    for match in _HAS_INCLUDE.finditer(code):
        before = code[code.rfind("\n", 0, match.start()) + 1 : match.start()]
        operand = _OPERAND.match(code, match.end())
        if operand is not None and (operand[2] is not None or _is_verbatim(before)):
            includes[Directive(operand[1] or operand[2], operand[1] is None, match[1] is not None)] = None
        elif _NO_OPERAND.search(before) is None and not (
            _STAND_IN.search(before) and _STAND_IN_VALUE.match(code, match.end())
        ):
            reason = reason or "computed __has_include"
    return reason


def _is_verbatim(before: str) -> bool:
    condition = _IF.match(before)
    if condition is None:
        return False
    opened = before[condition.end() :]
    closed = 1
    while closed:
        opened, closed = _CLOSED.subn(" ", opened)
    return _CALL.search(opened) is None
