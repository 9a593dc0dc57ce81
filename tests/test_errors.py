"""Errors: one base, readable text, all problems kept."""

from __future__ import annotations

import pickle

import pytest

from deepinfer import errors


def test_all_share_a_base() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.DeepInferError)


def test_text_and_problems() -> None:
    error = errors.ConfigError("two things are wrong", ["this", "that"])
    assert str(error) == "two things are wrong\n  - this\n  - that"
    assert error.problems == ("this", "that")
    assert str(errors.CacheError("alone")) == "alone"


@pytest.mark.parametrize("problems", [(), ("a", "b")])
def test_errors_travel_between_processes(problems: tuple[str, ...]) -> None:
    error = pickle.loads(pickle.dumps(errors.RequestError("no", problems)))
    assert type(error) is errors.RequestError
    assert (error.message, error.problems) == ("no", problems)


def test_missing_extra_names_what_to_install() -> None:
    error = errors.UnsupportedError.missing_extra("ray", "ray", "a cluster")
    assert "pip install 'deepinfer[ray]'" in str(error)
