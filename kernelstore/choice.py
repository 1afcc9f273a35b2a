"""Choice: which stored artifacts serve a device, in order of preference; and which PTX a driver takes.

How far an arch reaches:

| arch | cubin runs on, PTX is compiled for |
|---|---|
| with suffix ``a`` | exactly its compute capability |
| with suffix ``f`` | its own and the later members of its family |
| cubin without a suffix | the same major, from its minor on, not between desktop and Tegra parts |
| PTX without a suffix | any device from its compute capability on |
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kernelstore.arch import Arch
from kernelstore.artifact import ArtifactInfo

__all__ = [
    "DRIVER_JIT",
    "accepts_ptx",
    "build_of",
    "candidates",
    "links",
    "newest_first",
    "newest_ptx",
    "serves",
]

# The origin of cubins that were made for one driver build.
DRIVER_JIT = "driver-jit"

# Drivers of the CUDA version, as cuDriverGetVersion tells it, to the newest `.version` that they accept. Source: PTX
# ISA, "Release Notes", "PTX Release History"; cuda.bindings.utils has the same table, and a test compares them. 13.6
# has no row yet, so its drivers are newer than the table. CUDA 12.6 still had 8.5.
_NEWEST_PTX = {
    11000: 700, 11010: 701, 11020: 702, 11030: 703, 11040: 704, 11050: 705, 11060: 706, 11070: 707, 11080: 708,
    12000: 800, 12010: 801, 12020: 802, 12030: 803, 12040: 804, 12050: 805, 12070: 806, 12080: 807, 12090: 808,
    13000: 900, 13010: 901, 13020: 902, 13030: 903, 13040: 904, 13050: 905,
}  # fmt: skip

# Xavier, Orin and its relatives, Thor (10.1 was renamed 11.0). Source: CUDA C++ Programming Guide, "Binary
# Compatibility": not between desktop and Tegra. No document tells of 8.8, so it is kept apart, which is safe.
_TEGRA = frozenset(((5, 3), (6, 2), (7, 2), (8, 7), (8, 8), (10, 1), (11, 0)))

_BUILD = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def serves(kind: str, arch: Arch, compute_capability: tuple[int, int]) -> bool:
    """Whether an artifact of that kind and arch can run on a device, drivers left aside.

    Parameters
    ----------
    kind : str
        ``"cubin"`` or ``"ptx"``; others serve no device as they are.
    arch : Arch
        The artifact's.
    compute_capability : tuple[int, int]
        The device's, such as ``(9, 0)``.
    """
    if kind not in ("cubin", "ptx"):
        return False
    if arch.suffix == "a":
        return arch.compute_capability == compute_capability
    if arch.suffix == "f" or kind == "cubin":
        # A family is the members of one major, Tegra parts apart: 100f serves 10.3, and 11.0 is a family of its own.
        return _binary_compatible(arch.compute_capability, compute_capability)
    return arch.compute_capability <= compute_capability


def links(kind: str, arch: Arch, target: Arch) -> bool:
    """Whether a linker that makes a cubin for `target` may take an input of that kind and arch.

    LTO-IR goes to any target at or above its arch, PTX too where it has no suffix. PTX with ``a`` goes to that very
    target, with ``f`` to its family; relocatable cubins to the very target.
    """
    if kind == "ltoir":
        return arch.compute_capability <= target.compute_capability
    if kind == "cubin" or arch.suffix == "a":
        return arch.number == target.number
    return serves(kind, arch, target.compute_capability)


def newest_ptx(driver_version: int) -> int | None:
    """Return the newest ``.version`` that a driver or linker of that CUDA version takes, such as 905 for 9.5.

    ``None`` where it is newer than the table: nobody knows, so try.
    """
    if driver_version >= max(_NEWEST_PTX) + 10:
        return None
    return max((ptx for version, ptx in _NEWEST_PTX.items() if version <= driver_version), default=0)


def accepts_ptx(ptx_version: int | None, driver_version: int | None) -> bool:
    """Whether a driver knows a ``.version``; what is not known of either is tried."""
    newest = None if driver_version is None else newest_ptx(driver_version)
    return ptx_version is None or newest is None or ptx_version <= newest


def candidates(
    infos: Iterable[ArtifactInfo],
    compute_capability: tuple[int, int],
    *,
    driver_version: int | None = None,
    only: str | None = None,
    newer_ptx: bool = False,
) -> list[ArtifactInfo]:
    """Return those that serve a device, the best first.

    Cubins for the very device; cubins for an older member of its family, then of its major; PTX. Within each ``a``
    goes before ``f`` before no suffix, near before far, and a newer toolchain before an older one.

    Parameters
    ----------
    infos : iterable of ArtifactInfo
        What is stored of one program.
    compute_capability : tuple[int, int]
        The device's.
    driver_version : int, optional
        A cubin of CUDA 13 needs a driver of CUDA 13; PTX needs one that knows its ``.version``. ``None`` asks
        neither.
    only : str, optional
        Number and suffix such as ``"90a"``: where the caller has chosen an arch, no other will do.
    newer_ptx : bool
        Keep PTX that the driver does not know, for a linker that does.

    Notes
    -----
    Cubins that a driver made of PTX are left out: they belong to their PTX and that driver's build.
    """
    found = []
    for info in infos:
        arch = Arch.parse(info.arch)
        if info.relocatable or info.origin == DRIVER_JIT or not serves(info.kind, arch, compute_capability):
            continue
        if only is not None and arch.number != only:
            continue
        if info.kind == "cubin" and not _loads_cubins_of(driver_version, info.toolchain):
            continue
        if info.kind == "ptx" and not newer_ptx and not accepts_ptx(info.ptx_version, driver_version):
            continue
        found.append((_preference(info, arch, compute_capability), info))
    return [info for _, info in sorted(found, key=lambda pair: pair[0])]


def newest_first(infos: Iterable[ArtifactInfo], driver_version: int | None) -> list[ArtifactInfo]:
    """Return those that a compiler made and the driver can load, the newest toolchain first; ``None`` takes any."""
    found = [
        info
        for info in infos
        if info.origin != DRIVER_JIT and (info.kind != "cubin" or _loads_cubins_of(driver_version, info.toolchain))
    ]
    return sorted(found, key=_newest)


def build_of(toolchain: str | None) -> tuple[int, int, int] | None:
    """Return ``(13, 5, 37)`` of ``"nvrtc 13.5.37"``; ``None`` where there is no build in the text."""
    match = _BUILD.search(toolchain or "")
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))


def _binary_compatible(made_for: tuple[int, int], device: tuple[int, int]) -> bool:
    if made_for[0] != device[0] or made_for[1] > device[1]:
        return False
    return made_for == device or (made_for not in _TEGRA and device not in _TEGRA)


def _loads_cubins_of(driver_version: int | None, toolchain: str | None) -> bool:
    # Source: CUDA Compatibility, "Minor Version Compatibility".
    build = build_of(toolchain)
    return driver_version is None or build is None or build[0] <= driver_version // 1000


def _preference(info: ArtifactInfo, arch: Arch, device: tuple[int, int]) -> tuple[object, ...]:
    suffix = ("a", "f", "").index(arch.suffix)
    is_exact = arch.compute_capability == device
    return (
        0 if info.kind == "cubin" and is_exact else 1 if info.kind == "cubin" else 2,
        suffix,
        (-arch.major, -arch.minor),
        # Linked of PTX it is relocatable code, which can be worse: docs/decisions/0008-driver-jit-kept.md.
        info.origin == "nvjitlink",
        _newest(info),
    )


def _newest(info: ArtifactInfo) -> tuple[int, ...]:
    return *(-part for part in build_of(info.toolchain) or (0, 0, 0)), -info.created_at_ns
