"""Foreign JSON: its depth and size are limited before it is parsed, and so is what an error line shows of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from data_prep.json_text import DEEPEST_JSON, parse_json, read_json, shown


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[{" * 40 + "}]" * 40, "[" * (DEEPEST_JSON + 1) + "]" * (DEEPEST_JSON + 1)]
    + ['"x' + "[" * 100_000, "[" * 100 + '"' + '\\"' * 1_000_000, "9" * 5000, "", "[1] [2]"],
    ids=lambda text: text[:10],
)
def test_what_is_no_json_or_too_deep_is_refused_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError):
        parse_json(text)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "value",
    [
        ["[" * 1000, "{" * 1000, '"[' * 1000, "\\[" * 1000],
        {"[" * 100: {"{": 1}} | {str(i): [] for i in range(1000)},
        [[1] for _ in range(1000)],
        json.loads("[" * DEEPEST_JSON + "]" * DEEPEST_JSON),
    ],
)
def test_brackets_in_texts_and_beside_one_another_are_no_depth(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')  # an editor's byte order mark
    assert read_json(path, 11) == {"a": 1}
    with pytest.raises(ValueError, match="^more than 10 bytes$"):
        read_json(path, 10)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        read_json(Path("/dev/zero"), 1000)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="utf-8"):
        read_json(path)


def test_a_value_is_shown_in_some_words() -> None:
    assert [shown(value) for value in (1, -2.5, True, None, "a\n", [1, "b"])] == [
        *("1", "-2.5", "True", "None", "'a\\n'", "[1, 'b']")
    ]
    for value in ("x" * 10**6, [[["x" * 10**6] * 1000] * 1000] * 1000, {"k" * 5000: 1}, 10**5000, [10**5000]):
        assert len(shown(value)) < 250
    assert shown(-(2**300)) == "about -2^300"
