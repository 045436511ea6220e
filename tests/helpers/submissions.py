"""Helpers that the tests of both queues' submissions share."""

from __future__ import annotations

import pytest

CARD = ["--memory", "80GiB", "--tflops", "400"]


def error(capsys: pytest.CaptureFixture[str]) -> str:
    """The last line, which is the only error."""
    output = capsys.readouterr()
    *before, last = output.err.splitlines()
    assert last.startswith("deploy.submit: error: ") and not any("error" in line for line in before), output.err
    assert not output.out
    return last.removeprefix("deploy.submit: error: ")
