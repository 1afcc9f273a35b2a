"""Errors: one root, the builtin a caller expects, fields, and pickling."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import pytest

from kernelstore import errors

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, BaseException) and not issubclass(cls, Warning) and cls.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_public_documented_and_under_the_root(cls: type[errors.KernelStoreError]) -> None:
    assert issubclass(cls, errors.KernelStoreError)
    assert cls.__name__ in errors.__all__
    assert cls.__doc__
    assert cls.__name__ in (errors.__doc__ or "")
    assert cls.__name__ in (Path(__file__).parents[1] / "docs" / "errors.md").read_text()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_survives_pickling_with_its_fields(cls: type[errors.KernelStoreError]) -> None:
    error = pickle.loads(pickle.dumps(cls("what happened; what to do", path="/x", log="a log")))

    assert type(error) is cls
    assert str(error) == "what happened; what to do"
    assert (error.path, error.log) == ("/x", "a log")


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.KeyNotFound, KeyError),
        (errors.StoreLocked, TimeoutError),
        (errors.StoreReadOnly, PermissionError),
        (errors.StoreUnavailable, OSError),
        (errors.InvalidArgument, ValueError),
        (errors.InvalidType, TypeError),
        (errors.CompileError, RuntimeError),
        (errors.LoadError, RuntimeError),
        (errors.KernelNotFound, LookupError),
    ],
)
def test_an_error_is_also_the_builtin_that_callers_expect(cls: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)


def test_a_field_that_an_error_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        errors.StoreError("x").nothing  # noqa: B018
