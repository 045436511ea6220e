"""Fine-tuning in fp16: steps that overflow are skipped, and a stop forgets neither them nor the loss scale."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

from tests.helpers.finetune_command import finetune, logged, make_inputs, result, weights
from trainer.engine.schedule import Phase, learning_rate
from trainer.exits import DONE, STOPPED

pytestmark = pytest.mark.slow


def test_stopped_in_fp16_equals_never_stopped(tmp_path: Path) -> None:
    """Two ranks give the same scales, rates, losses and weights."""
    inputs, scales = make_inputs(tmp_path), list[list[str]]()

    def train(name: str, aim: str = "-") -> list[int]:
        more = ("--precision", "fp16", "--head", "mlp")
        ended = finetune(
            inputs, tmp_path / name, *more, size=2, aim=aim, script="tests/helpers/finetune_fp16_on_ranks.py"
        )
        scales.append(re.findall(r"^scale (\d+ \d+)$", ended[0][1], re.MULTILINE))
        return [code for code, _ in ended]

    assert train("straight") == [DONE] * 2
    assert train("out", f"{signal.SIGTERM}:8") == [STOPPED] * 2  # after ten tries, half of the way to a higher scale
    assert train("out") == [DONE] * 2
    straight, first, second = scales
    # From 2^10 on: halved by each of four overflows, doubled by each four good steps in a row.
    powers = [10] * 3 + [9] * 3 + [8] * 2 + [7] * 4 + [8] * 4 + [9] * 2 + [8] * 4 + [9] * 4 + [10] * 4
    assert straight == [f"{number} {2**power}" for number, power in enumerate(powers)]
    assert len(first) == 10 and first + second == straight
    ours, theirs = result(tmp_path / "out"), result(tmp_path / "straight")
    assert theirs["steps"] == 30 - 4  # what the schedule counts
    phase = Phase("sst2", "", 24, 30, 1e-2, warmup_steps=3)
    assert logged(tmp_path / "straight", "rate")[30] == pytest.approx(learning_rate(phase, 26))
    assert all(ours[name] == theirs[name] for name in ("evaluations", "step", "steps"))
    for what in ("rate", "loss"):
        later = {step: value for step, value in logged(tmp_path / "out", what).items() if step > 12}  # whole windows
        assert later.items() <= logged(tmp_path / "straight", what).items()
    kept = weights(tmp_path / "straight")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in weights(tmp_path / "out").items())
