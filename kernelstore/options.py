"""NVRTC options: one spelling for each, and what they mean for a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernelstore.arch import Arch
from kernelstore.errors import InvalidArgument, InvalidOption, InvalidType

__all__ = ["Options", "checked_options", "checked_text"]

# Spellings of one option, from NVRTC's documentation ("Supported Compile Options"), to the one that is kept.
_FLAGS = {
    "-dc": "--relocatable-device-code=true",
    "--device-c": "--relocatable-device-code=true",
    "-dw": "--relocatable-device-code=false",
    "--device-w": "--relocatable-device-code=false",
    "-ewp": "--extensible-whole-program",
    "-G": "--device-debug",
    "-lineinfo": "--generate-line-info",
    "-use_fast_math": "--use_fast_math",
    "-extra-device-vectorization": "--extra-device-vectorization",
    "-dlto": "--dlink-time-opt",
    "-gen-opt-lto": "--gen-opt-lto",
    "-w": "--disable-warnings",
    "-restrict": "--restrict",
    "-default-device": "--device-as-default-execution-space",
    "-device-int128": "--device-int128",
    "-no-source-include": "--no-source-include",
    "-pch": "--pch",
    "-minimal": "--minimal",
}

# Options whose value follows "=" or stands in the next element; NVRTC joins -D, -U and -I without either, too.
_VALUED = {
    "-arch": "--gpu-architecture",
    "-rdc": "--relocatable-device-code",
    "-maxrregcount": "--maxrregcount",
    "-Xptxas": "--ptxas-options",
    "-ftz": "--ftz",
    "-prec-sqrt": "--prec-sqrt",
    "-prec-div": "--prec-div",
    "-fmad": "--fmad",
    "-dopt": "--dopt",
    "-Ofc": "--Ofast-compile",
    "-include": "--pre-include",
    "-D": "--define-macro",
    "-U": "--undefine-macro",
    "-I": "--include-path",
}
_LONG = frozenset(_VALUED.values())
_JOINED = ("-D", "-U", "-I")
_SHORT = {"--define-macro": "-D", "--undefine-macro": "-U"}

# Of these NVRTC takes the value after "=" only.
_EQUALS_ONLY = {"-std": "--std", "-time": "--time"}

# Outputs that are no artifact of kernelstore.
_OTHER_OUTPUTS = frozenset({"--optix-ir", "--device-syntax-only", "--fdevice-syntax-only"})
_SPACE = " \t\n\v\f\r"
# They write or read files that a hit would neither make nor check.
_SIDE_EFFECTS = frozenset({"--pch", "--create-pch", "--use-pch", "--pch-dir", "--time", "--fdevice-time-trace"})


# The same of ptxas, which takes options from a file.
_PTXAS_SIDE_EFFECTS = ("--options-file", "-optf", "--fdevice-time-trace", "-fdevice-time-trace")


@dataclass(frozen=True, slots=True)
class Options:
    """A caller's options, read once.

    Parameters
    ----------
    command : tuple of str
        What NVRTC gets, in order, without the arch and without include directories.
    arch : Arch or None
        From ``--gpu-architecture``.
    include_dirs, pre_includes, defines : tuple of str
        From ``-I``, ``--pre-include`` and ``-D``, in order.
    lto, relocatable, source_include : bool
        ``-dlto``; ``-rdc=true``; not ``--no-source-include``.
    shows_paths : bool
        ``-lineinfo`` or ``-G``: file names reach the output.
    debug : bool
        ``-G``.
    verbose : bool
        The caller asked ptxas for ``-v``.
    side_effect : str or None
        The option that makes the compile uncacheable.
    """

    command: tuple[str, ...]
    arch: Arch | None
    include_dirs: tuple[str, ...]
    pre_includes: tuple[str, ...]
    defines: tuple[str, ...]
    lto: bool
    relocatable: bool
    source_include: bool
    shows_paths: bool
    debug: bool
    verbose: bool
    side_effect: str | None

    @classmethod
    def read(cls, options: Sequence[str]) -> Options:
        """Read options in any spelling that NVRTC takes.

        Raises
        ------
        InvalidType
            `options` is a str, or no sequence: order decides the output, so a set or dict will not do.
        InvalidArgument
            An element is empty or holds a NUL.
        InvalidOption
            Two archs were given.
        """
        pairs = list(_read(checked_options(options)))
        for name, _ in pairs:
            if name in _OTHER_OUTPUTS:
                raise InvalidOption(f"{name} makes no artifact that kernelstore keeps", options=options)
        archs = [value for name, value in pairs if name == "--gpu-architecture"]
        if len(archs) > 1:
            raise InvalidOption(f"several archs among the options: {', '.join(archs)}; give one", options=options)
        kept = [(name, value) for name, value in pairs if name not in {"--gpu-architecture", "--include-path"}]
        names = dict(pairs)
        ptxas = [value for name, value in pairs if name == "--ptxas-options"]
        return cls(
            command=tuple(_spelled(name, value) for name, value in kept),
            arch=Arch.parse(archs[0]) if archs else None,
            include_dirs=tuple(value for name, value in pairs if name == "--include-path"),
            pre_includes=tuple(value for name, value in pairs if name == "--pre-include"),
            defines=tuple(value for name, value in pairs if name == "--define-macro"),
            lto="--dlink-time-opt" in names,
            relocatable=names.get("--relocatable-device-code") == "true",
            source_include="--no-source-include" not in names,
            debug="--device-debug" in names,
            shows_paths="--device-debug" in names or "--generate-line-info" in names,
            verbose=any({"-v", "--verbose"} & set(value.replace(",", " ").split()) for value in ptxas),
            side_effect=next((name for name, _ in pairs if name in _SIDE_EFFECTS), _side_effect_of_ptxas(ptxas)),
        )


def checked_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options as a tuple of usable texts, or raise."""
    if isinstance(options, (str, bytes)) or not isinstance(options, Sequence):
        raise InvalidType(
            f"options are a sequence of str, each one option, such as ('-std=c++17', '-DN=8'), not {options!r}"
        )
    for option in options:
        checked_text(option, "an option")
        if not option:
            raise InvalidArgument("an option is empty; leave it out")
        if option != option.strip(_SPACE):
            raise InvalidArgument(
                f"option {option!r} has white space around it, which NVRTC takes away; write it without"
            )
    return tuple(options)


def checked_text(value: object, what: str) -> str:
    """Return `value` if it is text that NVRTC can be given, or raise.

    Raises
    ------
    InvalidType
        It is no str.
    InvalidArgument
        It holds a NUL, where NVRTC would stop reading, or a lone surrogate.
    """
    if not isinstance(value, str):
        raise InvalidType(f"{what} is a str, not {value!r:.200}")
    if "\0" in value:
        raise InvalidArgument(f"{what} holds a NUL at {value.index(chr(0))}, where NVRTC would stop reading")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} holds a lone surrogate at {error.start}, which is no text") from None
    return value


def _side_effect_of_ptxas(values: Sequence[str]) -> str | None:
    return next((name for name in _PTXAS_SIDE_EFFECTS for value in values if name in value), None)


def _spelled(name: str, value: str) -> str:
    # Short where people know the short form.
    if name in _SHORT:
        return _SHORT[name] + value
    return f"{name}={value}" if value else name


def _read(options: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) in one spelling; the value of a flag is ``""``."""
    rest = iter(options)
    for option in rest:
        name, equals, value = option.partition("=")
        if option in _FLAGS:
            name, _, value = _FLAGS[option].partition("=")
        elif name in _VALUED or name in _LONG:
            name = _VALUED.get(name, name)
            value = _checked_value(option, value if equals else next(rest, ""))
        elif name in _EQUALS_ONLY and equals:
            name = _EQUALS_ONLY[name]
        elif option.startswith(_JOINED) and not option.startswith("--"):
            name, value = _VALUED[option[:2]], _checked_value(option, option[2:].removeprefix("="))
        elif f"-{name}" in _SIDE_EFFECTS | _OTHER_OUTPUTS:
            name = f"-{name}"
        yield name, value


def _checked_value(option: str, value: str) -> str:
    # NVRTC would take the next option for the value, or strip what stands around it.
    if not value or value != value.strip(_SPACE):
        raise InvalidArgument(f"option {option!r} has no value, or white space around it")
    return value
