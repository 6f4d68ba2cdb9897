"""Compares error messages word for word."""

import pytest


def assert_error(error, message, call):
    """The call raises this error with this message, all of it."""
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
