"""Published results: complete, with sources, and compared with a run only if they measure the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trainer.monitor.history import read_history
from trainer.monitor.references import fitting, load_references
from trainer.monitor.summary import draw
from trainer.report import main

LARGE, BASE = {"layers": 24, "hidden": 1024}, {"layers": 12, "hidden": 768}


def run(folder: Path, model: dict[str, int], *lengths: int) -> Path:
    """A run's folder: two steps and an evaluation of them."""
    step = {"event": "step", "phase": 0, "restarts": 0, "samples": 8, "applied": True, "tokens": 300, "seconds": 0.5}
    metrics = {"mlm_loss": 1.5, "nsp_loss": 0.25, "mlm_accuracy": 0.7, "nsp_accuracy": 0.9}
    lines = [{**step, "step": number, "learning_rate": 1e-3, "gradient_norm": 2.0, **metrics} for number in (1, 2)]
    heldout = {"event": "heldout", "step": 2, **metrics, "mlm_accuracy": 0.71}
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, heldout]))
    config = {"model": model, "phases": [{"sequence_length": length} for length in lengths]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_each_is_whole_and_has_a_source() -> None:
    for each in load_references():
        assert each.low <= each.high and each.setting and each.source
        assert each.figure in ("loss", "mlm_loss", "mlm_accuracy")
    references = {each.name: (each.value, each.where) for each in load_references()}
    assert references["MLPerf's mark"] == ("72.0%", "held out, length 512")
    assert references["NVIDIA's BERT-Large"] == ("1.242 to 1.304", "training, length 512, batch 32,768")


@pytest.mark.parametrize(
    ("model", "lengths", "names"),
    [
        (LARGE, (128, 512), ["MLPerf's mark", "MLPerf's start", "NVIDIA's BERT-Large"]),
        (LARGE, (128,), []),
        (BASE, (128,), ["Google's BERT-Base"]),
        ({"layers": 24, "hidden": 512}, (512,), []),
    ],
)
def test_those_of_the_same_model_and_length_fit(
    model: dict[str, int], lengths: tuple[int, ...], names: list[str], tmp_path: Path
) -> None:
    assert [each.name for each in fitting(run(tmp_path / "run", model, *lengths))] == names


def test_a_run_that_left_no_configuration_has_none(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", LARGE, 512)
    for text in ("[1, 2", "model: {}", "- 1", ""):
        (folder / "config.yaml").write_text(text)
        assert fitting(folder) == []
    (folder / "config.yaml").unlink()
    assert fitting(folder) == []


def test_they_are_drawn_and_reported_next_to_the_runs_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", LARGE, 512)
    figure = draw(read_history(folder), "title", fitting(folder))
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    drawn = {
        name: [float(line.get_ydata()[0]) for line in axes.get_lines() if line.get_label() == "_published"]  # type: ignore[index, arg-type]
        for name, axes in panels.items()
    }
    assert {name: lines for name, lines in drawn.items() if lines} == {"MLM accuracy": [0.72, 0.34085]}
    assert [text.get_text() for text in panels["MLM accuracy"].texts] == [
        "MLPerf's mark: 72.0% (held out, length 512)",
        "MLPerf's start: 34.1% (held out, length 512)",
    ]
    assert main([str(folder)]) == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("published")]
    assert len(said) == 3 and "MLPerf's mark: MLM accuracy 72.0%; here 71.0% (held out, length 512; 10,000" in said[0]
    assert "NVIDIA's BERT-Large: MLM loss + NSP loss 1.242 to 1.304; here 1.750 (training, length 512, batch" in said[2]
    assert main([str(folder), "--no-references"]) == 0
    assert "published" not in capsys.readouterr().out
