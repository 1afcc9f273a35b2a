"""Settings from the environment, and where the default store lies."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kernelstore.errors import InvalidArgument

__all__ = ["configure_logging", "default_path", "environment", "flag", "is_off"]

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
