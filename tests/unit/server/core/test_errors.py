"""Errors say everything in one sentence."""

import pytest

from kvkeep_server.core import errors
from kvkeep_server.core.errors import (
    InvalidArgumentError,
    KVKeepError,
    PoolExhaustedError,
    ResourceExhaustedError,
)


def test_an_invalid_argument_names_field_value_allowed_and_fix():
    error = InvalidArgumentError("spec.key_nbytes", 8, "16 to 64", "use a longer hash")
    assert str(error) == "spec.key_nbytes is 8; allowed: 16 to 64; fix: use a longer hash"
    assert error.field == "spec.key_nbytes"


def test_a_long_value_is_cut():
    error = InvalidArgumentError("model", "x" * 5000, "at most 1024 bytes", "give a digest")
    assert len(str(error)) < 200
    assert "..." in str(error)
    long = InvalidArgumentError("rank", 9, f"one of {list(range(4096))}", "open it")
    assert len(str(long)) < 400
    assert str(long).endswith("...; fix: open it")


@pytest.mark.parametrize("value", ["\n\x1b[31m", "\u202eevil", "a\0b"])
def test_a_value_cannot_break_the_line_of_a_log(value):
    shown = str(InvalidArgumentError("model", value, "plain", "rename it"))
    assert "\n" not in shown
    assert "\0" not in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_every_error_is_ours():
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and kind is not KVKeepError
    ]
    assert len(kinds) >= 8
    assert all(issubclass(kind, KVKeepError) for kind in kinds)


def test_a_limit_says_when_to_try_again():
    assert ResourceExhaustedError("full").retry_after_s > 0
    assert ResourceExhaustedError("full", retry_after_s=3.0).retry_after_s == 3.0
    assert isinstance(PoolExhaustedError("no room"), ResourceExhaustedError)
