"""Templates are filled, and templates without fields are left alone."""

from __future__ import annotations

import pytest

from legroom.words import say


def test_fills_named_fields() -> None:
    assert say("{share:.0%} of {size}", share=0.5, size="64 MB") == "50% of 64 MB"


def test_braces_survive_without_values() -> None:
    assert say("volumes: [{name: shm}]") == "volumes: [{name: shm}]"


def test_a_missing_value_is_an_error_not_a_hole() -> None:
    with pytest.raises(KeyError):
        say("{free} left", size="1 MB")
