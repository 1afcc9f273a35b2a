"""Explanations: in which parts of the key two programs, or a request and what is stored, differ, in words."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernelstore.arch import Arch
from kernelstore.artifact import ArtifactInfo, Program
from kernelstore.errors import InvalidArch
from kernelstore.key import Key

__all__ = [
    "OTHER_PLACES",
    "Asked",
    "Difference",
    "Explanation",
    "against",
    "between",
    "equal_parts",
    "likeness",
]

# Facts told of one part; a change of compilers may touch hundreds of headers.
_MAX_FACTS = 8

_MAX_SHOWN = 80

# Two sources that share fewer of their lines are not alike.
_ALIKE = 0.5


@dataclass(frozen=True, slots=True)
class Difference:
    """One part of a key that differs.

    Parameters
    ----------
    part : str
        Label of the part: ``"options"``, ``"source"``, ``"arch"``, ...
    text : str
        What differs, in words: ``"-DN=8 is new"``.
    """

    part: str
    text: str

    def __str__(self) -> str:
        return f"{self.part}: {self.text}"


# The directories of toolkit headers are in the key where paths reach the output, and never in the text.
OTHER_PLACES = Difference("toolchain", "its headers lie in other directories")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request hits or misses.

    Parameters
    ----------
    hit : Key or None
        The artifact that answers the request; ``None`` for a miss.
    nearest : Key or None
        The stored artifact that comes nearest, the hit's own for a hit; ``None`` where nothing like it is stored.
    differences : tuple of Difference
        What the request has that the nearest has not, and the other way round; empty for a hit.
    """

    hit: Key | None
    nearest: Key | None
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        if self.hit is not None:
            return f"a hit: {self.hit}"
        told = "".join(f"\n  {difference}" for difference in self.differences)
        if self.nearest is not None:
            return f"a miss; the nearest that is stored is {self.nearest}{told}"
        return f"a miss{told}" if told else "a miss; nothing like it is stored"


@dataclass(frozen=True, slots=True)
class Asked:
    """A program, and what decides an artifact's key besides; ``None`` where only programs are compared."""

    program: Program
    key: Key | None = None
    kind: str | None = None
    arch: str | None = None
    toolchain: str | None = None


def between(first: Program, second: Program) -> tuple[Difference, ...]:
    """Tell the parts of `first` that differ from those of `second`, in the order of the key.

    Any label in `Program.part_digests` is a part. Its content is looked for in the program under the same name
    (``"name expressions"`` in ``name_expressions``), so that a new part gets words by what it holds.
    """
    labels = dict.fromkeys((*first.part_digests, *second.part_digests))
    found = []
    for label in labels:
        mine, other = first.part_digests.get(label), second.part_digests.get(label)
        if mine == other:
            continue
        if mine is None or other is None:
            found.append(Difference(label, "only one of the two has this part: their releases make other keys"))
        else:
            found.append(Difference(label, _in_words(label, first, second)))
    return tuple(found)


def against(asked: Asked, program: Program, stored: Sequence[ArtifactInfo]) -> Explanation:
    """Tell how `asked` differs from the nearest of one program's artifacts.

    Parameters
    ----------
    program : Program
        A stored one.
    stored : sequence of ArtifactInfo
        Its artifacts, newest first; at least one.
    """
    nearest = max(stored, key=lambda artifact: _equal(asked, artifact))
    found = [*between(asked.program, program), *_of_artifacts(asked, nearest, stored)]
    if not found:
        found.append(OTHER_PLACES)
    return Explanation(None, nearest.key, tuple(found))


def likeness(first: Program, second: Program) -> tuple[int, bool, float] | None:
    """Return how near two programs are: equal parts, equal names, share of equal lines; ``None`` if not at all."""
    same_name = first.name == second.name
    share = 1.0 if first.source == second.source else _share(first.source, second.source)
    if share < _ALIKE and not (same_name and first.name):
        return None
    return equal_parts(first.part_digests, second.part_digests), same_name, share


def equal_parts(first: Mapping[str, str], second: Mapping[str, str]) -> int:
    """Return the number of parts whose digests are equal."""
    return len(first.items() & second.items())


# -- beside the program -----------------------------------------------------------------------------------------------


def _equal(asked: Asked, artifact: ArtifactInfo) -> tuple[int, bool, bool]:
    same_kind, same_arch = artifact.kind == asked.kind, artifact.arch == asked.arch
    return same_kind + same_arch + (artifact.toolchain == asked.toolchain), same_kind, same_arch


def _of_artifacts(asked: Asked, nearest: ArtifactInfo, stored: Sequence[ArtifactInfo]) -> list[Difference]:
    found = []
    if asked.kind is not None and asked.kind != nearest.kind:
        kinds = sorted({artifact.kind for artifact in stored})
        found.append(Difference("kind", f"{asked.kind}, stored as {', '.join(kinds)}"))
    if asked.arch is not None and not _same_arch(asked.arch, nearest.arch):
        archs = {
            artifact.arch: None
            for artifact in stored
            if (artifact.kind, artifact.toolchain) == (nearest.kind, nearest.toolchain)
        }
        found.append(Difference("arch", f"{asked.arch}, stored for {', '.join(sorted(archs, key=_arch_order))}"))
    if asked.toolchain is not None and asked.toolchain != nearest.toolchain:
        toolchains = {
            artifact.toolchain or "an unknown one": None
            for artifact in stored
            if (artifact.kind, artifact.arch) == (nearest.kind, nearest.arch)
        }
        found.append(Difference("toolchain", f"{asked.toolchain}, stored {', '.join(toolchains)}"))
    return found


def _same_arch(first: str, second: str) -> bool:
    # sm_90 and compute_90 differ as the kinds do, which has been told.
    return first.partition("_")[2] == second.partition("_")[2]


def _arch_order(text: str) -> tuple[object, ...]:
    try:
        arch = Arch.parse(text)
    except InvalidArch:
        return (1, 0, text)
    return (0, *arch.compute_capability, arch.suffix)


# -- words for one part -----------------------------------------------------------------------------------------------


def _in_words(label: str, first: Program, second: Program) -> str:
    name = label.replace(" ", "_")
    mine, other = getattr(first, name, None), getattr(second, name, None)
    if label in _WORDS and mine is not None and other is not None:
        return _WORDS[label](mine, other)
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        return _mappings(mine, other)
    if isinstance(mine, (tuple, list)) and isinstance(other, (tuple, list)):
        return _sequences(mine, other)
    if isinstance(mine, (str, bytes)) and isinstance(other, (str, bytes)):
        return f"{_shown(mine)}, the other has {_shown(other)}"
    return _ONLY_DIGESTS.get(label, "differs")


def _mappings(first: Mapping[str, object], second: Mapping[str, object]) -> str:
    facts = [f"{name} changed" for name in first if name in second and first[name] != second[name]]
    facts += [f"{name} is new" for name in first if name not in second]
    facts += [f"{name} is gone" for name in second if name not in first]
    return _told(facts)


def _sequences(first: Iterable[object], second: Iterable[object]) -> str:
    mine, other = Counter(map(str, first)), Counter(map(str, second))
    facts = [f"{text} is {'there more often' if text in other else 'new'}" for text in mine - other]
    facts += [f"{text} is {'there less often' if text in mine else 'gone'}" for text in other - mine]
    return _told(facts) if facts else "order differs"


def _name_expressions(first: Iterable[str], second: Iterable[str]) -> str:
    mine, other = dict.fromkeys(first), dict.fromkeys(second)
    facts = [f"{name} is not among them" for name in mine if name not in other]
    facts += [f"{name} is among them and was not asked for" for name in other if name not in mine]
    return _told(facts)


def _source(first: str, second: str) -> str:
    mine, other = first.split("\n"), second.split("\n")
    start = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, other, strict=False)))
    ours, theirs = Counter(mine[start:]), Counter(other[start:])
    count = max((ours - theirs).total(), (theirs - ours).total())
    if count == 0:
        return f"the order of lines differs, first at line {start + 1}"
    return f"{count} line{'s differ' if count > 1 else ' differs'}, first at line {start + 1}"


def _told(facts: Sequence[str]) -> str:
    told = list(facts[:_MAX_FACTS])
    if len(facts) > _MAX_FACTS:
        told.append(f"and {len(facts) - _MAX_FACTS} more")
    return ", ".join(told) or "differs"


def _shown(value: str | bytes) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _share(first: str, second: str) -> float:
    # Linear in the lines, where difflib is quadratic in the worst case.
    mine, other = Counter(first.split("\n")), Counter(second.split("\n"))
    longer = max(mine.total(), other.total())
    return (mine & other).total() / longer


_WORDS: dict[str, Callable[..., str]] = {"source": _source, "name expressions": _name_expressions}

# What is in the key, and not in the file.
_ONLY_DIGESTS = {
    "paths": "the working directory, the program's directory or an include directory is another one",
}
