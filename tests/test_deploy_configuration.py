"""The page of configuration keys is generated from the code, and every key has a meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from deploy.configuration import PAGE, keys, page
from trainer.bounds import outside
from trainer.run.config import Config


@dataclass(frozen=True)
class Section:
    """A section for the tests."""

    alone: int  # beside its field
    # above its field,
    # in two lines
    choice: Literal["a", "b"] = "a"
    ratio: float | None = None
    silent: bool = True

    def problems(self) -> list[str]:
        return outside(self, alone=(1, 2**10), ratio=(0, 1))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m deploy.configuration"


@pytest.mark.parametrize("name", [*get_type_hints(Config)])
def test_every_key_has_a_meaning(name: str) -> None:
    hint = get_type_hints(Config)[name]
    section = get_args(hint)[0] if get_origin(hint) is tuple else hint
    assert not [key.name for key in keys(section) if not key.meaning]


def test_comments_defaults_and_ranges_are_read() -> None:
    assert [tuple(key) for key in keys(Section)] == [
        ("alone", "whole number", "required", "1 to 1,024", "beside its field"),
        ("choice", "`a`, `b`", "`a`", "", "above its field, in two lines"),
        ("ratio", "number or `null`", "`null`", "0 to 1", ""),
        ("silent", "true or false", "`true`", "", ""),
    ]
