"""Arrays in device memory, checked calls of the driver, and PTX of an older version, for the tests on a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelstore import Artifact


def checked(answer: tuple[Any, ...]) -> Any:
    """Return the value of a call of cuda.bindings; fail the test where the call failed."""
    status, *values = answer
    assert int(status) == 0, status
    return values[0] if values else None


class DeviceArray:
    """A copy of a numpy array in device memory."""

    def __init__(self, content: np.ndarray[Any, Any]) -> None:
        from cuda.bindings import driver as api

        self._api = api
        self.content = np.ascontiguousarray(content)
        self.pointer = checked(api.cuMemAlloc(max(self.content.nbytes, 1)))
        self.set(self.content)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (int(self.pointer), False),
            "shape": self.content.shape,
            "typestr": self.content.dtype.str,
            "version": 3,
        }

    def set(self, content: np.ndarray[Any, Any]) -> None:
        content = np.ascontiguousarray(content, self.content.dtype)
        checked(self._api.cuMemcpyHtoD(self.pointer, content.ctypes.data, content.nbytes))

    def get(self) -> np.ndarray[Any, Any]:
        """Wait for the device, and copy back."""
        checked(self._api.cuCtxSynchronize())
        content = np.empty_like(self.content)
        checked(self._api.cuMemcpyDtoH(content.ctypes.data, self.pointer, content.nbytes))
        return content

    def free(self) -> None:
        checked(self._api.cuMemFree(self.pointer))


def with_ptx_version(artifact: Artifact, newest: int) -> bytes:
    """Return the PTX with `newest` for its ``.version``, such as 807, where it has a newer one."""
    assert artifact.ptx_version is not None
    major, minor = divmod(min(artifact.ptx_version, newest), 100)
    version = b".version %d.%d" % divmod(artifact.ptx_version, 100)
    assert artifact.payload.count(version) == 1
    return artifact.payload.replace(version, b".version %d.%d" % (major, minor))
