"""CUresults: the numbers that the package acts on, and the error that each stands for."""

from __future__ import annotations

from typing import Any

from kernelstore.artifact import Artifact
from kernelstore.errors import (
    DriverError,
    ForkedContext,
    InvalidImage,
    InvalidPTX,
    LaunchError,
    LoadError,
    NoBinary,
    NoJitCompiler,
    UnsupportedPTX,
)

__all__ = ["error_of", "forked", "launch_error_of", "unknown"]

# CUresult by number. Source: CUDA Driver API, cudaError_enum.
NOT_INITIALIZED = 3
STUB_LIBRARY = 34
NO_DEVICE = 100
INVALID_CONTEXT = 201
NO_BINARY_FOR_GPU = 209
INVALID_PTX = 218
NOT_FOUND = 500
CONTEXT_IS_DESTROYED = 709
NOT_SUPPORTED = 801

# Of launches that the driver refuses for their arguments or configuration, before anything runs.
_REFUSED_LAUNCHES: dict[int, str] = {
    1: "grid, block or dynamic shared memory is beyond the device's limits",
    701: "a block needs more registers or threads than the device has for it",
    720: "a cooperative grid has to fit on the device at once; launch fewer blocks",
    912: "the device cannot place clusters of this size with these blocks",
}
_REMEDIES: dict[int, tuple[type[LoadError], str]] = {
    200: (InvalidImage, "the driver does not recognise the payload; it is damaged, or of another kind"),
    NO_BINARY_FOR_GPU: (NoBinary, "nothing in it runs on this device; compile for the device's own arch"),
    INVALID_PTX: (InvalidPTX, "the driver's JIT rejects the PTX"),
    221: (
        NoJitCompiler,
        "the driver's PTX JIT (libnvidia-ptxjitcompiler.so) is absent; cubins still load: compile to 'cubin'",
    ),
    222: (
        UnsupportedPTX,
        "the PTX is newer than this driver; compile to 'cubin', use an older NVRTC, or update the driver",
    ),
}


def error_of(status: Any, call: str, *, artifact: Artifact | None, version: int | None, detail: str = "") -> LoadError:
    """Make the error that a CUresult stands for.

    Parameters
    ----------
    status : CUresult
        Other than success.
    call : str
        Name of the function that gave it.
    artifact : Artifact or None
        What was being loaded, if anything.
    version : int or None
        The driver version.
    detail : str
        More to tell: the JIT's log for `InvalidPTX`.
    """
    number = int(status)
    error_class, remedy = _REMEDIES.get(number, (DriverError, ""))
    fields = _fields(number, status.name, artifact, version)
    what = f"{call} gave {status.name} ({number})"
    if artifact is not None:
        what += f" for the {artifact.kind} of {artifact.arch}, key {artifact.key}"
        if error_class is UnsupportedPTX:
            fields["ptx_version"] = artifact.ptx_version
            if artifact.ptx_version is not None:
                what += f", .version {artifact.ptx_version // 100}.{artifact.ptx_version % 100}"
    what += f"; driver version {version}"
    if error_class is InvalidPTX:
        fields["log"] = detail
    return error_class("".join([what, f": {remedy}" if remedy else "", f"\n{detail}" if detail else ""]), **fields)


def unknown(reason: str, call: str, *, artifact: Artifact | None, version: int | None) -> DriverError:
    """Make the error of a CUresult that this release of cuda-python has no name for."""
    return DriverError(
        f"{call} failed: {reason}; driver version {version}: update cuda-python",
        **_fields(None, None, artifact, version),
    )


def launch_error_of(status: Any, what: str, *, artifact: Artifact, version: int | None) -> LoadError:
    """Make the error of a launch; `what` tells kernel and configuration."""
    reason = _REFUSED_LAUNCHES.get(int(status))
    if reason is None:
        error = error_of(status, "the launch", artifact=artifact, version=version)
        error.add_note(what)
        return error
    return LaunchError(
        f"{what} was refused with {status.name} ({int(status)}): {reason}",
        **_fields(int(status), status.name, artifact, version),
    )


def forked() -> ForkedContext:
    """Make the error of a child whose parent had initialised CUDA."""
    return ForkedContext(
        "this process was forked from one that had initialised CUDA (as NVRTC does too when it compiles), and CUDA "
        "cannot be used in such a child; start workers with multiprocessing's 'spawn' or 'forkserver', or fork before "
        "the first load",
        result=NOT_INITIALIZED,
        name="CUDA_ERROR_NOT_INITIALIZED",
        driver_version=None,
    )


def _fields(number: int | None, name: str | None, artifact: Artifact | None, version: int | None) -> dict[str, object]:
    return {
        "result": number,
        "name": name,
        "kind": None if artifact is None else artifact.kind,
        "arch": None if artifact is None else artifact.arch,
        "key": None if artifact is None else artifact.key,
        "driver_version": version,
    }
