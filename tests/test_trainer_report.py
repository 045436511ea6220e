"""The report: a run that was killed and repeated steps is shown with each step once, as it counted."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle

from trainer.errors import TrainerError
from trainer.monitor.curves import smooth, smooth_logarithm, strided, thinned
from trainer.monitor.history import History, read_history
from trainer.monitor.metrics_log import STEP_PARTS as EXPORTED_PARTS
from trainer.monitor.metrics_log import TIME_STATES
from trainer.monitor.panels import PART_COLORS
from trainer.monitor.quantities import duration, short
from trainer.monitor.summary import draw, summary
from trainer.report import main

pytestmark = pytest.mark.slow

LEARNING = ["MLM loss", "NSP loss", "MLM accuracy", "NSP accuracy"]
OLD = [*LEARNING, "learning rate", "gradient norm", "trust ratio of LAMB", "throughput"]


def step(number: int, restarts: int = 0, loss: float | None = 5.0, **more: Any) -> dict[str, Any]:
    """A step's line as trainer/monitor/metrics.py wrote it at first."""
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
    saved = {"event": "checkpoint", "step": 8, "seconds": 1.0, "stall_seconds": 0.5, "bytes": 1000}
    records = [*first, {**heldout, "mlm_loss": 9.9}, *second, heldout, saved, *third]
    path = write(folder, records) / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"event": "start"', '{"event": "step", "st{"event": "start"', 1))
    return folder


SPENDS = {"productive": 16.0, "rework": 0.0, "skipped": 0.5, "data": 0.2, "checkpoint": 1.0, "evaluation": 2.0}
PARTED = {"data": 0.02, "forward": 0.1, "backward": 0.2, "reduce": 0.04, "optimizer": 0.04}


def whole(folder: Path) -> History:
    """Everything a run reports: 40 steps in fp16 and two phases, killed after the 33rd, on from 30, with 4 ranks."""
    records: list[dict[str, Any]] = []
    for attempt, numbers in enumerate((range(1, 34), range(31, 41))):
        begun = {"time": 1000.0 + 50 * attempt, "step": 30 * attempt, "rolled_back": 3 * attempt}
        records.append({"event": "attempt", "time": begun["time"], "restarts": attempt})
        records.append({"event": "start", **begun, "run": "whole", "ranks": "4"})
        for number in numbers:
            more = {"phase": int(number > 20), "clipped": number % 2 == 0, "loss_scale": 1024.0, "flops": 4e12}
            records.append(step(number, attempt, **more))
            if number == 12:
                records.append(step(number, attempt, loss=None, applied=False, gradient_norm=None, loss_scale=2048.0))
            if number % 10 == 0:
                at = {"time": 1000.0 + number + 40 * attempt, "step": number}
                ranks = {"compute": [0.3, 0.4, 0.6], "slowest": 3, "memory_peak_bytes": 2e9, "parts": PARTED}
                records.append({"event": "ranks", **at, **ranks})
                records.append({"event": "time", **at, "spent": {**SPENDS, "start": 5.0}})
                records.append({"event": "heldout", **at, "mlm_loss": 0.5, "mlm_accuracy": 0.5})
                records.append({"event": "checkpoint", **at, "seconds": 2.0, "stall_seconds": 0.5, "bytes": 3_000_000})
    records.append({"event": "checkpoint_failed", "time": 1081.0, "step": 40, "stall_seconds": 0.1, "reason": "full"})
    spent = {**SPENDS, "start": 4.0, "rework": 1.5}
    records.append({"event": "end", "time": 1095.0, "spent": spent, "how": "failed", "reason": "no room\nfor more"})
    return read_history(write(folder, records))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> History:
    return whole(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def shown(run: History) -> dict[str, Axes]:
    return panels(run)


def panels(history: History) -> dict[str, Axes]:
    """Name to axes of what the picture shows."""
    return {axes.get_title(loc="left"): axes for axes in draw(history, "title").axes if axes.get_title(loc="left")}


def drawn(axes: Axes, label: str) -> list[tuple[float, float]]:
    """The points of the line with this label."""
    [line] = [line for line in axes.get_lines() if line.get_label() == label]
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


# ---- what counts ---------------------------------------------------------------------------------------------


def test_each_step_counts_once_as_it_was_repeated(tmp_path: Path) -> None:
    history = read_history(killed_and_resumed(tmp_path / "run"))
    assert history.steps["step"].tolist() == list(range(1, 13))
    assert history.steps["mlm_loss"].tolist() == [5.0] * 6 + [6.0] * 2 + [7.0] * 4
    assert (history.restarts, history.skipped) == ([6, 8], [3])
    assert [history.heldout[key].tolist() for key in ("step", "mlm_loss")] == [[8.0], [5.5]]


def test_what_was_rolled_back_and_not_repeated_does_not_count(tmp_path: Path) -> None:
    skipped = [step(n, loss=None, applied=False, gradient_norm=None) for n in (2, 5)]
    ranks = {"event": "ranks", "compute": [1.0, 1.0, 1.0], "parts": {}}
    lost = [
        step(3),
        step(4),
        step(5),
        skipped[1],
        {"event": "heldout", "step": 5, "mlm_loss": 1.0},
        {**ranks, "step": 4},
    ]
    history = read_history(write(tmp_path / "run", [step(1), step(2), skipped[0], *lost, step(3, 1)]))
    assert history.steps["step"].tolist() == [1, 2, 3]
    assert history.skipped == []  # the first after step 2 as well: the checkpoint of step 2 is older
    assert not len(history.heldout["step"]) + len(history.ranks["step"])


def test_a_run_that_began_again_without_a_checkpoint_is_the_second_one(tmp_path: Path) -> None:
    records = [*(step(n, loss=5.0) for n in range(1, 6)), *(step(n, loss=6.0) for n in range(1, 4))]
    history = read_history(write(tmp_path / "run", records))
    assert history.steps["mlm_loss"].tolist() == [6.0] * 3
    assert history.restarts == [0]


def test_a_last_line_that_a_kill_cut_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [step(1), step(2)], cut=json.dumps(step(3))[:40])
    assert read_history(folder).steps["step"].tolist() == [1, 2]


def test_the_whole_time_is_accounted_for(run: History, shown: dict[str, Axes]) -> None:
    assert run.spent == {
        **{"start": 9.0, "productive": 32.0, "rework": 1.5, "skipped": 1.0},
        **{"data": 0.4, "checkpoint": 2.0, "evaluation": 4.0},
    }
    assert run.wall == 100.0  # from 5 seconds before the first line, in which it started, to the last
    assert run.down == pytest.approx(100.0 - 49.9)
    assert run.goodput == pytest.approx(0.32)
    bars = shown["where 1 min 40 s went"].containers
    widths = {str(bar.get_label()).split()[0]: bar[0].get_width() for bar in bars if isinstance(bar, BarContainer)}
    assert widths == pytest.approx({**{k: v / 100 for k, v in run.spent.items()}, "down": 0.501})
    assert widths.keys() == {*TIME_STATES, "down"}
    assert sum(widths.values()) == pytest.approx(1.0)


# ---- bad input -----------------------------------------------------------------------------------------------


def test_a_folder_without_steps_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainerError, match="no metrics.jsonl in .*: name the folder of a run"):
        read_history(tmp_path)
    with pytest.raises(TrainerError, match="contains no step yet"):
        read_history(write(tmp_path / "run", [{"event": "start", "time": 0.0}]))
    assert main([str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer.report: error: no metrics.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        {"event": "step", "step": 1},
        {"event": "step", "step": "x", "applied": True},
        {"event": "checkpoint", "step": 10**30},
        {"event": "checkpoint", "step": -1},
        {"event": "checkpoint", "step": 1, "seconds": 10**400},
        {"event": "end", "spent": [1]},
    ],
)
def test_another_programs_file_is_one_line(tmp_path: Path, line: dict[str, Any]) -> None:
    with pytest.raises(TrainerError, match=r"metrics.jsonl contains an invalid record \(.*\): name the folder"):
        read_history(write(tmp_path / "run", [line]))


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", [step(1)])
    (folder / "report.png").mkdir()
    assert main([str(folder)]) == 2
    assert capsys.readouterr().err == f"trainer.report: error: {folder}/report.png cannot be written: Is a directory\n"


# ---- in words ------------------------------------------------------------------------------------------------


def test_it_draws_a_picture_and_sums_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = killed_and_resumed(tmp_path / "run")
    assert main([str(folder)]) == 0
    path, *said = capsys.readouterr().out.splitlines()
    assert path == str(folder / "report.png")
    assert [" ".join(line.split()) for line in said] == [
        "steps 12, 1 skipped, 2 restarts",
        "samples 96",
        "tokens 3,600",
        "speed 600 tokens/s (median)",
        "held out MLM loss 5.500, accuracy 20.0% (step 8)",
        "checkpoints 1, the last of step 8: 0.0 MB in 1.00 s, training stalled for 0.50 s",
    ]
    data = (folder / "report.png").read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24])[0] == 2000


def test_it_sums_up_all_that_a_run_tells(run: History) -> None:
    assert summary(run) == {
        "steps": "40, 1 skipped, 1 restart",
        "samples": "320",
        "tokens": "12,000",
        "wall time": "1 min 40 s",
        "goodput": "32.0% of the wall time went into steps that count",
        "speed": "600 tokens/s (median), 2 TFLOP/s on each of 4 ranks",
        "memory": "2.0 GB, the highest of any rank",
        "held out": "MLM loss 0.500, accuracy 50.0% (step 40)",
        "checkpoints": "4 and 1 failed, the last of step 40: 3.0 MB in 2.00 s, training stalled for 0.50 s",
        "ended": "failed: no room",
    }


def test_a_plateau_is_summed_up_and_drawn(tmp_path: Path) -> None:
    """Though the steps up to its end were rolled back: the event itself stays true."""
    figures = {"mlm_loss": 7.06, "unigram_loss": 7.1, "token_variance": 0.087}
    steps = [step(n, unigram_loss=7.1, token_variance=n / 100) for n in range(1, 31)]
    begun = {"event": "plateau", "time": 1.0, "step": 20, "on": True, "sign": "collapsed", **figures}
    losses = "MLM loss 7.06, word frequencies alone 7.10, variance over tokens 8.7%"
    history = read_history(write(tmp_path / "on", [*steps, begun, step(20, 1)]))
    assert summary(history)["plateau"] == f"found on the unigram plateau at step 20 ({losses})"
    shown = panels(history)
    expected = np.array([[n, n / 100] for n in range(1, 20)])
    assert np.array(drawn(shown["variance over tokens"], "_child0")) == pytest.approx(expected)
    assert drawn(shown["MLM loss"], "word frequencies")[-1] == (19, 7.1)
    assert "word frequencies" not in [line.get_label() for line in shown["NSP loss"].get_lines()]
    left = {**begun, "step": 29, "on": False}
    history = read_history(write(tmp_path / "off", [*steps, begun, left]))
    assert summary(history)["plateau"] == f"left the unigram plateau before step 29 ({losses})"


def test_a_rollback_is_no_restart_and_the_guard_is_summed_up(tmp_path: Path) -> None:
    """The steps after the one it went back to are shown as they were taken again."""
    found = {"event": "guard", "time": 1.0, "step": 12, "sign": "spike", "action": "rollback", "what": "high"}
    back = {"event": "rollback", "time": 2.0, "step": 8, "rolled_back": 4}
    again = [step(9, left_out=16), *(step(n, left_out=0) for n in range(10, 15))]
    warned = {**found, "step": 14, "sign": "loss_scale", "action": "warn"}
    records = [*(step(n, loss=9.0) for n in range(1, 13)), found, back, *again, warned, warned]
    history = read_history(write(tmp_path / "run", records))
    assert history.steps["step"].tolist() == list(range(1, 15)) and history.restarts == []
    assert history.steps["mlm_loss"].tolist() == [9.0] * 8 + [5.0] * 6
    said = "spike: rollback; loss scale: warn (2 times), the last at step 14; 16 samples skipped"
    assert summary(history)["guard"] == said
    assert "guard" not in summary(read_history(write(tmp_path / "old", [step(1)])))


def test_numbers_are_short() -> None:
    durations = [duration(seconds) for seconds in (0.25, 59.9, 60, 3599, 3600, 86399, 90000)]
    assert durations == ["0.2 s", "59.9 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "23 h 59 min", "1 d 1 h"]
    assert [short(value) for value in (7, 999, 1234, 5.64e10)] == ["7", "999", "1.23 k", "56.4 G"]
    assert [short(value) for value in (0.5, 99.96, 999.7, 2e15)] == ["0.5", "100", "1,000", "2 P"]


# ---- in pictures ---------------------------------------------------------------------------------------------


def test_the_panels_show_the_numbers(shown: dict[str, Axes]) -> None:
    speed = ["throughput", "a step's time", "rank skew", "checkpoints"]
    expected = [*LEARNING, "learning rate", "gradient norm", "loss scale", "trust ratio of LAMB", *speed]
    assert list(shown) == [*expected, "where 1 min 40 s went"]
    assert drawn(shown["MLM loss"], "training") == [(n, 5.0) for n in range(1, 41)]
    assert drawn(shown["MLM loss"], "held out") == [(n, 0.5) for n in (10, 20, 30, 40)]
    assert [x for x, _ in drawn(shown["gradient norm"], "clipped: 20 steps (50%)")] == list(range(2, 41, 2))
    for name in ("gradient norm", "loss scale"):
        assert [x for x, _ in drawn(shown[name], "skipped: 1")] == [12]
    assert shown["gradient norm"].get_yscale() == shown["trust ratio of LAMB"].get_yscale() == "log"
    assert np.array(drawn(shown["rank skew"], "slowest")) == pytest.approx(
        np.array([[n, 1.5] for n in (10, 20, 30, 40)])
    )
    assert shown["rank skew"].get_title(loc="right") == "now 1.50   rank 3 most often (100%)"
    assert drawn(shown["checkpoints"], "until complete") == [(n, 2.0) for n in (10, 20, 30, 40)]
    assert drawn(shown["checkpoints"], "training stalled") == [(n, 0.5) for n in (10, 20, 30, 40)]
    assert drawn(shown["checkpoints"], "failed") == [(40, 0.1)]


def test_the_time_split_is_stacked_to_the_whole(shown: dict[str, Axes]) -> None:
    axes = shown["a step's time"]
    legend = axes.get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["data 5%", "reduce 10%", "optimizer 10%", "backward 50%", "forward 25%"]
    layers = [layer.get_paths()[0].get_extents() for layer in axes.collections if isinstance(layer, PolyCollection)]
    assert [layer.y1 for layer in layers] == pytest.approx([0.25, 0.75, 0.85, 0.95, 1.0])
    assert {(layer.x0, layer.x1) for layer in layers} == {(0.0, 40.0)}
    assert {*PART_COLORS} == {*EXPORTED_PARTS}


def test_restarts_are_dotted_and_later_phases_shaded(shown: dict[str, Axes]) -> None:
    for name, axes in shown.items():
        dotted = [line.get_xdata()[0] for line in axes.get_lines() if line.get_linestyle() == ":"]  # type: ignore[index]
        shades = [
            (p.get_x(), p.get_width()) for p in axes.patches if isinstance(p, Rectangle) and p.get_alpha() == 0.06
        ]
        assert (dotted, shades) == (([30], [(20, 20)]) if not name.startswith("where") else ([], []))


def test_what_an_older_run_did_not_tell_is_left_out(tmp_path: Path) -> None:
    records = [step(n) for n in range(1, 30)]
    assert list(panels(read_history(write(tmp_path / "old", records)))) == OLD
    for name, keys, missing in (
        ("alone", ("nsp",), ["NSP loss", "NSP accuracy"]),
        ("adam", ("trust",), ["trust ratio of LAMB"]),
    ):
        less = [{k: v for k, v in record.items() if not k.startswith(keys)} for record in records]
        assert list(panels(read_history(write(tmp_path / name, less)))) == [n for n in OLD if n not in missing]
    unscaled = [step(n, loss_scale=1.0) for n in range(1, 30)]  # not fp16
    assert list(panels(read_history(write(tmp_path / "fp32", unscaled)))) == OLD


def test_a_diverged_run_is_drawn_too(tmp_path: Path) -> None:
    records = [step(1), step(2), step(3, loss=None, gradient_norm=None), step(4, gradient_norm=1e30)]
    diverged = panels(read_history(write(tmp_path / "run", records)))
    assert drawn(diverged["MLM loss"], "training") == [(1, 5.0), (2, 5.0), (4, 5.0)]
    first = panels(read_history(write(tmp_path / "first", [step(1, loss=None, gradient_norm=None)])))
    assert "gradient norm" not in first and "MLM loss" not in first


def test_smoothing_neither_lags_nor_spreads_a_spike() -> None:
    assert smooth(np.full(300, 4.0)) == pytest.approx(np.full(300, 4.0))
    assert smooth(np.array([1.0, 9.0, 5.0])).tolist() == [1.0, 9.0, 5.0]  # few values are shown as they are
    ramp = np.arange(500.0)
    assert smooth(ramp)[5:-5] == pytest.approx(ramp[5:-5])
    assert (smooth(ramp)[0], smooth(ramp)[-1]) == (2.5, 496.5)  # of the six that there are
    spike = np.ones(500)
    spike[250] = 1e30
    assert np.flatnonzero(smooth_logarithm(spike) > 1.001).tolist() == list(range(245, 256))
    assert smooth_logarithm(np.array([0.0, 1.0])).tolist() == [0.0, 1.0]


def test_a_million_steps_are_thinned_to_what_shows() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x)
    y[[12_345, 67_890]] = (50.0, -50.0)
    few, values = thinned(x, y)
    assert len(few) <= 4000 and (np.diff(few) > 0).all()
    assert (values == y[few.astype(int)]).all() and {12_345.0, 67_890.0} <= set(few.tolist())
    rows = strided(x, y)
    assert [len(column) for column in rows] == [2000, 2000] and (rows[0][0], rows[0][-1]) == (0, 99_999)


def test_an_attempt_that_came_to_nothing_takes_no_other_ones_time(tmp_path: Path) -> None:
    spent, none = {"start": 10.0, "productive": 3590.0}, {"start": 0.0, "productive": 0.0}
    records = [{"event": "attempt", "time": 0.0}, {"event": "start", "time": 10.0}, step(1)]
    records += [{"event": "time", "time": 3600.0, "spent": spent}]
    records += [{"event": "attempt", "time": 3700.0}, {"event": "end", "time": 3720.0, "how": "failed", "spent": none}]
    history = read_history(write(tmp_path / "run", records))
    assert history.spent == spent and history.end == "failed"


def test_an_attempt_that_only_skipped_steps_before_it_was_killed_is_a_restart_and_counts_no_skip_twice(
    tmp_path: Path,
) -> None:
    skip = step(2, 1, loss=None, applied=False, gradient_norm=None)
    begun: dict[str, Any] = {"event": "attempt", "time": 0.0}
    history = read_history(write(tmp_path / "run", [begun, step(1), step(2), begun, skip, begun, skip, step(3, 1)]))
    assert (history.restarts, history.skipped) == ([2, 2], [2])
