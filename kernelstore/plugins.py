"""Plug-ins by name: ``"least-recently-used"`` is the object ``PLUGIN`` of ``least_recently_used.py``.

The folders `kernelstore.codecs`, `kernelstore.kinds` and `kernelstore.eviction` are asked first, then the entry
points ``kernelstore.codecs`` and so on of other distributions (reading those takes some 30 ms). Nothing is
imported before it is named.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Any

from kernelstore.errors import InvalidType, UnknownPlugin

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

__all__ = ["load", "names"]


def load(group: str, name: str) -> Any:
    """Return the plug-in of that name.

    Parameters
    ----------
    group : str
        ``"codecs"``, ``"kinds"`` or ``"eviction"``.
    name : str
        Name as a user writes it.

    Raises
    ------
    UnknownPlugin
        There is none; the message lists those that there are.
    """
    if not isinstance(name, str):
        raise InvalidType(f"{group} are chosen by name, not by {name!r:.200}")
    return _load(group, name)


@cache
def _load(group: str, name: str) -> Any:
    if name in _own_names(group):
        return importlib.import_module(f"kernelstore.{group}.{name.replace('-', '_')}").PLUGIN
    for entry_point in _entry_points(group):
        if entry_point.name == name:
            return entry_point.load()
    known = names(group)
    raise UnknownPlugin(
        f"{group} has no {name[:80]!r}; there are {', '.join(known)}", group=group, name=name, known=known
    )


def names(group: str) -> list[str]:
    """List the names of a group, own ones first."""
    own = _own_names(group)
    foreign = {entry_point.name for entry_point in _entry_points(group)}
    return [*own, *sorted(foreign - set(own))]


def _entry_points(group: str) -> EntryPoints:
    from importlib.metadata import entry_points  # 20 ms, for those who name what is not ours

    return entry_points(group=f"kernelstore.{group}")


@cache
def _own_names(group: str) -> tuple[str, ...]:
    package = importlib.import_module(f"kernelstore.{group}")
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(name.replace("_", "-") for name in modules if not name.startswith("_"))
