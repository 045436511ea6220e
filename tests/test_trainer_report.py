"""The report: a run that was killed and repeated steps is drawn as what counted, each step once."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import TrainerError
from trainer.report import draw, main, read_history, smooth


def step(number: int, restarts: int = 0, loss: float | None = 5.0, **more: Any) -> dict[str, Any]:
    """A step's line as trainer/metrics.py writes it."""
    return {
        **{"event": "step", "step": number, "phase": 0, "restarts": restarts, "samples": 8 * number, "applied": True},
        **{"tokens": 300, "seconds": 0.5, "mlm_loss": loss, "nsp_loss": 0.7, "mlm_accuracy": 0.1, "nsp_accuracy": 0.5},
        **{"learning_rate": 1e-3, "gradient_norm": 2.0, "trust_min": 0.1, "trust_mean": 1.0, "trust_max": 4.0},
        **more,
    }


def write(folder: Path, records: list[dict[str, Any]], cut: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + cut)
    return folder


def killed_and_resumed(folder: Path) -> Path:
    """Steps 1 … 9, killed while 10 was written, on from 6, again from 8, to 12; step 4's first try overflowed."""
    first = [step(n, loss=5.0) for n in range(1, 10)]
    first.insert(3, step(3, loss=None, applied=False, gradient_norm=None))
    second = [{"event": "start", "time": 0.0}, *(step(n, 1, loss=6.0) for n in range(7, 10))]
    third = [{"event": "start", "time": 0.0}, *(step(n, 2, loss=7.0) for n in range(9, 13))]
    heldout = {"event": "heldout", "step": 8, "mlm_loss": 5.5, "mlm_accuracy": 0.2}
    records = [*first, {**heldout, "mlm_loss": 9.9}, *second, heldout, {"event": "checkpoint", "step": 8}, *third]
    path = write(folder, records) / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"event": "start"', '{"event": "step", "st{"event": "start"', 1))
    return folder


def test_each_step_counts_once_as_it_was_repeated(tmp_path: Path) -> None:
    history = read_history(killed_and_resumed(tmp_path / "run"))
    assert [record["step"] for record in history.steps] == list(range(1, 13))
    assert [record["mlm_loss"] for record in history.steps] == [5.0] * 6 + [6.0] * 2 + [7.0] * 4
    assert history.restarts == [6, 8]
    assert [(record["step"], record["mlm_loss"]) for record in history.heldout] == [(8, 5.5)]


def test_a_last_line_that_a_kill_cut_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [step(1), step(2)], cut=json.dumps(step(3))[:40])
    assert [record["step"] for record in read_history(folder).steps] == [1, 2]


def test_a_folder_without_steps_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainerError, match="no metrics.jsonl in .*: name the folder of a run"):
        read_history(tmp_path)
    with pytest.raises(TrainerError, match="holds no step yet"):
        read_history(write(tmp_path / "run", [{"event": "start", "time": 0.0}]))
    assert main([str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer.report: error: no metrics.jsonl")


def test_it_draws_a_picture_and_sums_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = killed_and_resumed(tmp_path / "run")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.png")
    data = (folder / "report.png").read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (1900, 800)


def test_a_diverged_run_is_drawn_too(tmp_path: Path) -> None:
    records = [step(1), step(2), step(3, loss=None, gradient_norm=None)]
    without_lamb = [{k: v for k, v in record.items() if not k.startswith("trust")} for record in records]
    for number, lines in enumerate((records, without_lamb)):
        draw(read_history(write(tmp_path / str(number), lines)), "title", tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 1000


def test_smoothing_has_no_bias_at_its_start() -> None:
    assert smooth([4.0] * 300) == pytest.approx([4.0] * 300)
    assert smooth([1.0, 9.0, 5.0]) == [1.0, 9.0, 5.0]  # few values are shown as they are
    ramp = smooth([float(n) for n in range(500)])
    assert ramp[0] == 0 and ramp == sorted(ramp)
    assert 485 < ramp[-1] < 495  # it lags by about its window, a fiftieth
