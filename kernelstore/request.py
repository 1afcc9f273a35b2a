"""Requests: a caller's parameters checked and read, and the program they make, with its key."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelstore import headers as user_headers
from kernelstore import plugins
from kernelstore.arch import Arch
from kernelstore.artifact import Program
from kernelstore.cuda import toolkit
from kernelstore.cuda.toolkit_names import TOOLKIT_NAMES
from kernelstore.errors import ArchRequired, InvalidArch, InvalidArgument, InvalidType, NoDriver
from kernelstore.header_memo import Memo, Trace
from kernelstore.key import Key, key_of
from kernelstore.options import Options, checked_text
from kernelstore.scans import Scan

__all__ = ["Request", "arch_of", "check_kind", "checked_dirs", "checked_headers", "checked_names", "target"]

# What NVRTC makes; other kinds are imported or linked.
_COMPILED_KINDS = ("cubin", "ptx", "ltoir")

# Before C++14 digits had no separators, before C++11 there were no raw strings.
_OLD_STANDARDS = frozenset({"--std=c++03", "--std=c++11"})


@dataclass(slots=True)
class Request:
    """What was asked for, checked, with what its text tells."""

    source: str
    name: str
    kind: str
    arch: Arch
    options: Options
    name_expressions: tuple[str, ...]
    include_dirs: tuple[str, ...]
    headers: Mapping[str, str]
    extra: bytes
    memo: Memo | None = dataclasses.field(default=None, repr=False, compare=False)
    toolkit_dirs: tuple[str, ...] = ()
    external: tuple[str, ...] = ()
    macros: tuple[str, ...] = ()
    shows_paths: bool = False
    uncacheable: str | None = None
    trace: Trace = dataclasses.field(init=False, repr=False, compare=False)
    program: Program = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.toolkit_dirs = tuple(path for path in self.include_dirs if toolkit.is_toolkit_dir(path))
        user_dirs = [path for path in self.include_dirs if path not in self.toolkit_dirs]
        scan = self._scan()
        self.external = scan.external
        self.macros = scan.macros if scan.external else ()
        side_effect = self.options.side_effect and f"option with side effects: {self.options.side_effect}"
        self.uncacheable = (
            side_effect
            or scan.uncacheable
            or _shadowing(scan.external, user_dirs)
            or _own_among_toolkits(scan.external, self.toolkit_dirs)
        )
        self.shows_paths = scan.shows_paths or self.options.shows_paths
        self.trace = scan.trace
        if self.shows_paths:
            self.trace.working_dir = str(Path.cwd())
        self.program = self._program(scan, self._paths(user_dirs) if self.shows_paths else b"")

    def unchanged(self) -> bool:
        """Return whether the compile, which is over, read what the key says.

        Notes
        -----
        Cost: a stat for each user header, and a second scan where one was written in the last seconds.
        """
        if self.trace.holds():
            return True
        if not self.trace.same_files():
            return False
        again = dataclasses.replace(self)
        return again.program.key == self.program.key and again.uncacheable == self.uncacheable

    def command(self, toolkit_dirs: Sequence[str]) -> tuple[str, ...]:
        """Return the options for NVRTC, but for the arch; a toolkit's directories come last on the path."""
        directories = (*self.include_dirs, *toolkit_dirs)
        options = [*self.options.command, *(f"-I{path}" for path in directories)]
        if self.kind == "ltoir" and not self.options.lto:
            options.append("--dlink-time-opt")
        return tuple(options)

    def artifact_key(self, kind: str, arch: Arch, toolchain: str) -> Key:
        """Return the key of one of the program's artifacts."""
        return key_of(
            [
                ("program", self.program.key),
                ("kind", kind.encode()),
                ("arch", str(arch).encode()),
                ("toolchain", toolchain.encode()),
            ]
        )

    def _scan(self) -> Scan:
        command = self.options.command
        return user_headers.scan(
            self.source,
            name=self.name,
            headers=self.headers,
            include_dirs=self.include_dirs,
            toolkit_dirs=self.toolkit_dirs,
            pre_includes=self.options.pre_includes,
            defines=self.options.defines,
            name_expressions=self.name_expressions,
            source_include=self.options.source_include,
            old_standard=not _OLD_STANDARDS.isdisjoint(command),
            memo=self.memo,
        )

    def _program(self, scan: Scan, paths: bytes) -> Program:
        # `-dlto` says the kind, which has a part of its own.
        options = tuple(option for option in self.options.command if option != "--dlink-time-opt")
        headers = sorted(self.headers.items())
        parts = {
            "source": self.source.encode(),
            "name": self.name.encode(),
            "options": _joined(options),
            "name expressions": _joined(self.name_expressions),
            "headers": _joined([text for pair in headers for text in pair]),
            "user headers": scan.files,
            "external includes": _joined(self.external),
            "paths": paths,
            "extra": self.extra,
        }
        return Program(
            key=key_of(parts.items()),
            name=self.name,
            source=self.source,
            options=options,
            name_expressions=self.name_expressions,
            headers=dict(headers),
            external_includes=self.external,
            user_headers=scan.digests,
            part_digests={label: hashlib.sha256(part).hexdigest()[:16] for label, part in parts.items()},
            include_dirs=self.include_dirs,
            extra=self.extra,
        )

    def _paths(self, user_dirs: Sequence[str]) -> bytes:
        beside = Path(self.name).parent
        return _joined([str(path) for path in (Path.cwd(), beside.resolve(), *map(Path, user_dirs))])


def check_kind(kind: str) -> None:
    """Raise `UnknownPlugin` or `InvalidArgument` for what NVRTC does not make."""
    if not isinstance(kind, str) or kind not in _COMPILED_KINDS:
        plugins.load("kinds", kind)
        raise InvalidArgument(f"NVRTC makes {', '.join(_COMPILED_KINDS)}, not {kind!r}")


def arch_of(given: str | None, among_options: Arch | None) -> Arch:
    """Return the arch to compile for: the one given, else the one among the options, else the current device's.

    Raises
    ------
    InvalidArch, InvalidArgument
        It is of no use, or there are two.
    ArchRequired
        There is none, and no device.
    """
    if given is not None:
        if among_options is not None:
            raise InvalidArgument(f"arch={given!r} was given, and {among_options} among the options; give one")
        return Arch.parse(given)
    if among_options is not None:
        return among_options
    from kernelstore.cuda import driver  # 5 ms, where no arch was given

    try:
        return Arch(*driver.compute_capability(driver.current_device()))
    except NoDriver as error:
        raise ArchRequired("no arch was given, and there is no device to take it from; give arch='sm_90'") from error


def target(kind: str, arch: Arch) -> Arch:
    """Return the arch that an artifact of the kind has: ``compute_90`` for PTX of ``sm_90``.

    Raises
    ------
    InvalidArch
        A cubin was asked for a virtual arch.
    """
    if kind != "cubin":
        return arch.as_virtual()
    if arch.virtual:
        raise InvalidArch(f"a cubin is made for a real arch such as {arch.as_real()}, not {arch}", arch=str(arch))
    return arch


def _shadowing(external: Sequence[str], user_dirs: Iterable[str]) -> str | None:
    # Toolkit headers are not scanned. A user directory comes first on the path, so a file there that has the name
    # of one of theirs would be read by them, unseen.
    if not external:
        return None
    for path in user_dirs:
        names = toolkit.shadowed_names(path)
        if names:
            return f"shadowed toolkit header: {os.path.join(path, names[0])}"
    return None


def _own_among_toolkits(external: Iterable[str], toolkit_dirs: Sequence[str]) -> str | None:
    # A directory such as /usr/include holds a toolkit's headers and others. Only the former have a version.
    for spelling in external:
        if spelling.split("/")[0] not in TOOLKIT_NAMES and any(
            os.path.exists(os.path.join(path, spelling)) for path in toolkit_dirs
        ):
            return f"user header in a toolkit's directory: {spelling}"
    return None


def _joined(texts: Iterable[str]) -> bytes:
    # Lengths first, so that no list of texts reads as another.
    encoded = [text.encode(errors="surrogateescape") for text in texts]
    return b"".join(len(text).to_bytes(8, "little") + text for text in encoded)


def checked_names(name_expressions: Iterable[str]) -> tuple[str, ...]:
    """Return the expressions sorted, each once: their order does not reach the output."""
    if isinstance(name_expressions, (str, bytes)) or not isinstance(name_expressions, Iterable):
        raise InvalidType(f"name_expressions are several str, such as ('saxpy<float>',), not {name_expressions!r}")
    names = [checked_text(name, "a name expression") for name in name_expressions]
    if not all(name.strip() for name in names):
        raise InvalidArgument("a name expression is empty; leave it out")
    return tuple(sorted(set(names)))


def checked_headers(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return headers by content, or raise."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise InvalidType(f"headers map spellings to contents, such as {{'a.h': '...'}}, not {headers!r:.200}")
    for name, content in headers.items():
        checked_text(name, "a header's name")
        checked_text(content, f"header {name!r}")
    return headers


def checked_dirs(include_dirs: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return directories as text, or raise."""
    if isinstance(include_dirs, (str, bytes)) or not isinstance(include_dirs, Sequence):
        raise InvalidType(f"include_dirs are a sequence of paths, such as ('include',), not {include_dirs!r:.200}")
    return tuple(map(_checked_dir, include_dirs))


def _checked_dir(path: object) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(f"an include directory is a path, not {path!r:.200}")
    text = checked_text(os.fspath(path), "an include directory")
    # NVRTC takes white space around a directory away, and one equals sign before it.
    if not text or text != text.strip() or text.startswith("="):
        raise InvalidArgument(
            f"{text!r} is no directory that NVRTC can be given; write it from ./ or / on, with no space at its ends"
        )
    return text
