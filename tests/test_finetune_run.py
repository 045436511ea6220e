"""A fine-tuning run: its identity and seed, the weights it keeps, and the state it restores after a stop."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kernels import dropout
from tests.helpers.finetune_command import MINUS_KILL, Inputs, finetune, logged, make_inputs, result, run_folder
from tests.helpers.finetune_inputs import TINY, write_classes
from tests.test_trainer_run import change_record
from trainer.checkpoint import reading as checkpoint
from trainer.data.order import Order
from trainer.errors import TrainerError
from trainer.exits import DONE, REFUSED, STOPPED
from trainer.finetune.__main__ import make_job
from trainer.finetune.data import Cut, read_training, take
from trainer.finetune.options import Options, parse
from trainer.finetune.pretrained import needed_weights, read_pretrained
from trainer.finetune.task import TaskModel
from trainer.finetune.tasks import Wish, known
from trainer.run.lock import hold

pytestmark = pytest.mark.slow

STILL = ("--rates", "1e-9")  # where nothing moves, and the first evaluation stays the best
SHORT = (*STILL, "--epochs", "1", "--seeds", "1,2")  # two runs of six steps


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("run"))


def options(inputs: Inputs, *more: str) -> Options:
    return parse(["--task", "sst2", "--data", str(inputs.data), "--model", str(inputs.model), "--out", "out", *more])


# ---- its data and its folder -----------------------------------------------------------------------------------


def test_other_rows_of_the_same_file_are_another_run(inputs: Inputs, tmp_path: Path) -> None:
    """The run's identity includes which rows of a file are used, as well as the file."""
    header, *rows = (inputs.data / "train.tsv").read_text().splitlines()
    parted = tmp_path / "parted.tsv"
    parted.write_text("\n".join([f"{header}\tpart", *(f"{row}\t{'ab'[n % 2]}" for n, row in enumerate(rows))]) + "\n")
    for name in ("train", "dev"):
        made = (options(inputs, "--max-length", "24", f"--{name}", f"{parted}#part={part}") for part in "ab")
        first, second = (make_job(one, lambda text: None)[0].identity for one in made)
        assert [key for key in first if first[key] != second[key]] == [name]


def test_settings_that_would_share_a_folder_are_refused(inputs: Inputs) -> None:
    """The folder's name has six digits of a rate; the second run would be taken for the first, as ended."""
    with pytest.raises(TrainerError) as caught:
        options(inputs, "--rates", "1e-5,2e-5,1.0000001e-5", "--epochs", "2,3")
    said = str(caught.value).split("; ")
    assert len(said) == 2 and all("rate=1e-05," in one and "rate=1.0000001e-05," in one for one in said)
    assert "agree to 6 digits and would share a folder: drop one" in said[0]


# ---- short runs, one after the other ---------------------------------------------------------------------------


class Short(NamedTuple):
    """Two short runs, stopped in the first one and resumed: their folder, and the results of both commands."""

    out: Path
    stopped: tuple[int, str]
    ended: tuple[int, str]


@pytest.fixture(scope="module")
def short(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Short:
    out = tmp_path_factory.mktemp("short") / "out"
    [stopped] = finetune(inputs, out, *SHORT, aim=f"{signal.SIGTERM}:3")
    [ended] = finetune(inputs, out, *SHORT)
    return Short(out, stopped, ended)


def test_a_sweep_stops_between_runs_that_are_too_short_to_stop_themselves(short: Short) -> None:
    code, said = short.stopped
    assert code == STOPPED and "run 1 of 2" in said and "run 2 of 2" not in said, said
    assert "stopped and saved: run the same command to continue" in said
    code, said = short.ended
    assert code == DONE and said.count("already finished: ") == 1, said


def test_a_result_of_another_rate_is_not_taken_for_this_ones(short: Short, inputs: Inputs) -> None:
    [(code, said)] = finetune(inputs, short.out, *SHORT, "--rates", "1.0000001e-9")
    assert code == REFUSED and "has the result of another setting, {'rate': 1e-09," in said and "step" not in said, said


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_decides_the_head_the_order_and_the_dropout(seed: int, short: Short, inputs: Inputs) -> None:
    """The first two losses are those of a model, batches and dropout that are made of the seed here."""
    losses = logged(short.out, "loss", seed, rate=1e-9, epochs=1.0)
    task = known("sst2").make(Wish(inputs.data / "train.tsv"), lambda text: None)
    given = read_pretrained(inputs.model, None, lambda text: None)
    model = TaskModel(TINY, task, seed)
    model.load_state_dict(needed_weights(given, task, lambda text: None), strict=False)
    table = read_training(inputs.data / "train.tsv", task, given.tokenizer.encoder, 24)
    for step in range(2):
        [batch], counts = take(table, Order((96,), seed, 1), 16 * step, 16, Cut(1, 0, 1))
        keys = dropout.token_keys(seed, step, batch.samples, batch.positions, batch.cu_seqlens)
        with torch.no_grad():
            assert losses[step + 1] == pytest.approx(float(model(batch, keys).mean(counts)), rel=1e-5)


# ---- what it keeps ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at a high rate, of 90 records in batches of 16, whose best weights are scored on dev once more."""
    out = tmp_path_factory.mktemp("uneven")
    train = write_classes(out / "train.tsv", 90)
    more = ("--rates", "3e-2", "--train", str(train), "--also", str(inputs.data / "dev.tsv"))
    [(code, said)] = finetune(inputs, out, *more)
    assert code == DONE, said
    return out


def test_an_epoch_that_ends_inside_a_step_is_evaluated_after_it(uneven: Path) -> None:
    """Five of 90 are 29 steps of 16, of which the last has what is left: two."""
    found = [(one["step"], one["epoch"] * 90) for one in result(uneven, rate=0.03)["evaluations"]]
    assert found == [(step, pytest.approx(min(16 * step, 450))) for step in (6, 12, 17, 23, 29)]


def test_the_weights_that_are_kept_are_those_of_the_best_evaluation(uneven: Path) -> None:
    """The newest weights are worse here, and are not kept."""
    found = result(uneven, rate=0.03)
    assert found["figures"]["accuracy"] > found["evaluations"][-1]["figures"]["accuracy"]
    tree = json.loads((uneven / "results.json").read_text())
    assert list(tree["also"].values()) == [tree["chosen"]["dev"]] == [found["figures"]]


# ---- what it remembers -----------------------------------------------------------------------------------------


def test_a_run_that_is_stopped_twice_keeps_its_best_its_patience_and_its_first_loss(
    inputs: Inputs, tmp_path: Path
) -> None:
    """This holds even if a kill comes between saving the best evaluation and adding the second name that keeps it."""
    more = (*STILL, "--eval-every", "10", "--patience", "5")
    [(code, said)] = finetune(inputs, tmp_path, *more, aim=f"{signal.SIGTERM}:9")
    assert code == STOPPED, said
    folder = run_folder(tmp_path, rate=1e-9)
    assert [path.name for path in (folder / "best").iterdir()] == ["step-00000006"]
    shutil.rmtree(folder / "best")
    [(code, said)] = finetune(inputs, tmp_path, *more, aim=f"{signal.SIGTERM}:1")
    assert code == STOPPED and "resumed at step 10" in said, said
    first = checkpoint.read(folder / "step-00000020").record["state"]["first_loss"]  # what divergence is measured by
    assert first == logged(tmp_path, "loss", rate=1e-9)[1]
    [(code, said)] = finetune(inputs, tmp_path, *more)
    assert code == DONE and "resumed at step 20" in said, said
    found = result(tmp_path, rate=1e-9)
    assert [one["step"] for one in found["evaluations"]] == [6, 10, 12, 18, 20, 24] and found["step"] == 6


def test_a_run_saves_and_warms_up_as_it_is_told_and_says_which_checkpoints_it_passes_over(
    inputs: Inputs, tmp_path: Path
) -> None:
    """The run is killed before its first evaluation. Its newest checkpoint is unreadable, and later all are."""
    more = ("--save-every", "1", "--warmup", "0.5")
    [(code, said)] = finetune(inputs, tmp_path, *more, aim=f"{signal.SIGKILL}:6")
    assert code == MINUS_KILL, said
    assert logged(tmp_path, "rate")[3] == pytest.approx(1e-2 * 3 / 15)  # of 30 steps
    folder = run_folder(tmp_path)
    newest = max(checkpoint.named(folder))
    (newest / "checkpoint.json").write_text("{")
    [(code, said)] = finetune(inputs, tmp_path, *more, aim=f"{signal.SIGTERM}:1")
    passed = f"skipped: {newest} is not a whole checkpoint"
    assert code == STOPPED and said.count(passed) == 1 and "resumed at step " in said, said
    for one in checkpoint.named(folder):
        (one / "checkpoint.json").write_text("{")
    [(code, said)] = finetune(inputs, tmp_path, *more)
    assert code == REFUSED and "loss" not in said, said
    assert f"no whole checkpoint in {folder}: remove the folder to start this run again" in said


def test_a_best_evaluation_whose_checkpoint_is_unreadable_is_kept_again(inputs: Inputs, tmp_path: Path) -> None:
    """Its second name is damaged too: both name the same files."""
    more, folder = ("--eval-every", "10", "--save-every", "9"), run_folder(tmp_path)
    [(code, said)] = finetune(inputs, tmp_path, *more, aim=f"{signal.SIGTERM}:6")
    assert code == STOPPED and (folder / "best" / "step-00000010").is_dir(), said
    (folder / "step-00000010" / "checkpoint.json").write_text("{")
    [(code, said)] = finetune(inputs, tmp_path, *more, aim=f"{signal.SIGTERM}:1")
    assert code == STOPPED and "resumed at step 9" in said, said
    assert checkpoint.find(folder / "best").record["state"]["best_at"] == 10


def test_a_checkpoint_whose_record_is_malformed_is_skipped(inputs: Inputs, tmp_path: Path) -> None:
    more, newest = ("--save-every", "9"), run_folder(tmp_path) / "step-00000010"
    [(code, said)] = finetune(inputs, tmp_path, *more, aim=f"{signal.SIGTERM}:6")
    assert code == STOPPED, said
    change_record(newest, {"state": {"best": None, "evaluations": None}})
    [(code, said)] = finetune(inputs, tmp_path, *more, aim=f"{signal.SIGTERM}:1")
    assert code == STOPPED and "resumed at step 9" in said, said
    assert said.count(f"checkpoint {newest} is damaged: its record is malformed") == 1, said


def test_a_folder_that_another_command_writes_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    held = hold(tmp_path, 0, lambda text: None)
    assert held is not None
    with held:
        [(code, said)] = finetune(inputs, tmp_path, *SHORT, "--timeout", "2")
    assert code == REFUSED and f"{tmp_path} is being written by process" in said, said
