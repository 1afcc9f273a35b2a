"""Targets of a compile: parsing, order and text of archs such as ``sm_90a`` and ``compute_90``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernelstore.errors import InvalidArch, InvalidType

__all__ = ["Arch"]

# Two or three digits: the last one is the minor. sm_1000 is nothing; sm_100 is 10.0.
_ARCH = re.compile(r"(sm|compute)_([1-9][0-9]{1,2})([af]?)", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Arch:
    """One target, ordered by compute capability as numbers: ``sm_90 < sm_90a < sm_100 < sm_120``.

    Parameters
    ----------
    major, minor : int
        Compute capability, as in ``(9, 0)``; minor is one digit.
    suffix : str
        ``""``, ``"a"`` (this compute capability only) or ``"f"`` (its family).
    virtual : bool
        ``True`` for ``compute_*`` (PTX, LTO-IR), ``False`` for ``sm_*`` (cubin).
    """

    major: int
    minor: int
    suffix: str = ""
    virtual: bool = False

    @classmethod
    def parse(cls, text: str) -> Arch:
        """Read ``"sm_90a"`` or ``"compute_90"``.

        Raises
        ------
        InvalidType
            `text` is no str.
        InvalidArch
            `text` has another form; ``"90"``, ``"9.0"`` and ``"native"`` are among those refused, as NVRTC
            refuses them.
        """
        if not isinstance(text, str):
            raise InvalidType(f"an arch is text such as 'sm_90', not {text!r}")
        match = _ARCH.fullmatch(text)
        if match is None:
            raise InvalidArch(f"{text!r} is no arch; write sm_90, sm_90a, sm_100f or compute_90", arch=text)
        number = int(match[2])
        return cls(number // 10, number % 10, match[3], match[1] == "compute")

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor, as a device reports them."""
        return self.major, self.minor

    @property
    def number(self) -> str:
        """The digits and suffix, such as ``"90a"``."""
        return f"{self.major}{self.minor}{self.suffix}"

    def as_real(self) -> Arch:
        """The ``sm_*`` of the same number."""
        return Arch(self.major, self.minor, self.suffix, virtual=False)

    def as_virtual(self) -> Arch:
        """The ``compute_*`` of the same number."""
        return Arch(self.major, self.minor, self.suffix, virtual=True)

    def __str__(self) -> str:
        return f"{'compute' if self.virtual else 'sm'}_{self.number}"
