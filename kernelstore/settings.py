"""Settings from the environment, and where a store lies."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kernelstore.errors import InvalidArgument, InvalidType

__all__ = ["configure_logging", "default_path", "environment", "flag", "is_off", "store_path"]

_HANDLER = "KERNELSTORE_LOG"
_OFF = frozenset({"0", "off", "none", "false", "no"})


def environment(name: str) -> str | None:
    """Return ``$KERNELSTORE_<name>``; an empty value means unset."""
    return os.environ.get(f"KERNELSTORE_{name}") or None


def is_off(value: str | None) -> bool:
    """Whether a value disables: ``0``, ``off`` or ``none``."""
    return value is not None and value.strip().lower() in _OFF


def flag(name: str) -> bool:
    """Whether ``$KERNELSTORE_<name>`` is set to something that is not off."""
    value = environment(name)
    return value is not None and not is_off(value)


def default_path() -> Path:
    """Return the path of the default store: ``$KERNELSTORE_PATH``, else ``cache.db`` in the user's cache directory.

    Raises
    ------
    InvalidArgument
        ``$KERNELSTORE_PATH`` is ``off``: there is no default store.
    """
    value = environment("PATH")
    if is_off(value):
        raise InvalidArgument(f"KERNELSTORE_PATH={value} disables the default store; give a path, or unset it")
    return Path(value) if value is not None else cache_directory() / "cache.db"


def store_path(path: str | os.PathLike[str] | None) -> Path:
    """Return the absolute path of a store, links resolved; ``None`` means the default store's.

    Raises
    ------
    InvalidType, InvalidArgument
        It is no path of a file.
    """
    given = default_path() if path is None else path
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidType(f"a path is text or a path object, not {given!r:.200}")
    text = os.fspath(given)
    if not isinstance(text, str):
        raise InvalidType(f"a path is text, not {text!r:.200}")
    if not text or "\0" in text:
        raise InvalidArgument(f"{text!r:.200} is no path of a store; leave it out for the default store")
    try:
        os.fsencode(text)
        resolved = Path(text).expanduser().resolve()
    except (OSError, RuntimeError, UnicodeError) as error:
        # A loop of links, a user that is not known, a lone surrogate.
        raise InvalidArgument(f"{text!r:.200} is no path of a store: {error}") from error
    # os.path answers False where pathlib raises: whether the file can be reached shows when it is opened.
    if os.path.isdir(resolved):
        raise InvalidArgument(f"{resolved} is a directory; give a file in it, such as {resolved / 'cache.db'}")
    return resolved


def cache_directory() -> Path:
    """Return the user's cache directory for kernelstore, which may not exist yet."""
    import platformdirs  # 2-5 ms; only where no path was given

    return platformdirs.user_cache_path("kernelstore", appauthor=False)


def configure_logging() -> None:
    """Let ``KERNELSTORE_LOG=debug`` print the log on stderr; without it, logging is the application's affair."""
    value = environment("LOG")
    logger = logging.getLogger("kernelstore")
    if value is None or is_off(value) or any(handler.name == _HANDLER for handler in logger.handlers):
        return
    level = logging.getLevelNamesMapping().get(value.upper())
    if level is None:
        # A slip in the environment does not stop the program.
        logger.warning("KERNELSTORE_LOG=%r is no level; use debug, info, warning or error", value)
        level = logging.INFO
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    handler.name = _HANDLER
    logger.addHandler(handler)
    logger.setLevel(level)
