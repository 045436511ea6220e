"""The script from text to fine-tuned scores: killed and continued, and what it repeats when its inputs change."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data_prep.vocab import train_tokenizer
from deploy import commands
from deploy.reference import __main__ as reference
from deploy.reference.done import Done
from deploy.reference.scores import aligned, score
from tests.helpers import ranks
from tests.helpers.finetune_inputs import write_numbers
from tests.helpers.ranks import ROOT
from tests.helpers.runs import wait_for
from trainer.console import silent
from trainer.errors import TrainerError
from trainer.exits import DONE, FAILED, INTERRUPTED, REFUSED
from trainer.run.config import load
from trainer.run.lock import hold

# ---- parts -----------------------------------------------------------------------------------------------------


def test_a_stage_is_printed_as_a_shell_reads_it_and_its_exit_code_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    code = 'import sys; print(sys.argv[1:]); sys.exit("$HOME" in sys.argv)'
    words = [sys.executable, "-c", code, "a b", "it's", "*"]
    said = commands.command(*words, script="x", quiet=True)
    line = capfd.readouterr().out.removeprefix("$ ")
    assert subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout == said
    for ending, expected in (("sys.exit(2)", REFUSED), ("os.kill(os.getpid(), 9)", FAILED)):
        with pytest.raises(SystemExit) as ended:
            commands.command(sys.executable, "-c", f"import os, sys; {ending}", script="x")
        assert ended.value.code == expected
        assert capfd.readouterr().err.startswith("x: error: import os, sys; ")


def test_a_score_is_the_mean_and_its_standard_error() -> None:
    assert str(score([0.5, 0.7, 0.9])) == "0.7000 ± 0.1155" and str(score([0.5])) == "0.5000"
    assert score([]) is None
    assert aligned(["a", "bc"], [["def", 1]]).splitlines() == ["| a   | bc |", "| --- | --- |", "| def | 1  |"]


def test_a_stage_is_done_only_with_the_same_inputs_and_its_product(tmp_path: Path) -> None:
    product = tmp_path / "out/product"
    done = Done.open(tmp_path / "out")
    assert not done.changed("stage", {"a": "1"}) and not done.is_done("stage", product, {"a": "1"})
    product.touch()
    assert not Done.open(tmp_path / "out").is_done("stage", product, {"a": "1"})  # begun, but not finished
    done.finish("stage")
    again = Done.open(tmp_path / "out")
    assert again.is_done("stage", product, {"a": "1"}) and again.changed("stage", {"a": "2"})
    product.unlink()
    assert not again.is_done("stage", product, {"a": "1"})


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(TrainerError, match="was not made by this script: name a new folder"):
        Done.open(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"export": true}', '{"export": {}}'])
def test_a_damaged_record_costs_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "stages.json").write_text(content)
    with pytest.raises(TrainerError, match=r"^.*/stages.json is damaged.*: name a new --out$"):
        Done.open(tmp_path)


@pytest.mark.parametrize(("code", "ended"), [(0, '{"how": "stopped"}'), (0, None), (0, '{"ho'), (3, '{"how": "done"}')])
def test_pre_training_that_did_not_end_by_itself_is_not_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, ended: str | None
) -> None:
    """DeepSpeed's launcher returns 0 if its own process on the node is killed."""
    given = argparse.Namespace(out=tmp_path / "out", config=tmp_path / "tiny.yaml", ranks=1)
    given.config.write_text(yaml.safe_dump(RECIPE))
    shards = {"train-32": tmp_path}
    (tmp_path / "manifest.json").touch()
    done = Done.open(given.out)
    (given.out / "run").mkdir()
    if ended is not None:
        (given.out / "run/ended.json").write_text(ended)
    monkeypatch.setattr(reference, "vocabulary", lambda shards: 600)
    monkeypatch.setattr(commands, "launch", lambda *words, **more: argparse.Namespace(finish=lambda: code))
    with pytest.raises(SystemExit) as error:
        reference.pretrain(given, load(given.config), shards, done)
    assert error.value.code == (code or FAILED) and not done.stages["pretrain"]["finished"]


def test_fine_tuning_keeps_its_runs_unless_the_model_or_the_data_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, task = tmp_path / "out", tmp_path / "rte"
    folder, calls = out / "finetune/rte", list[tuple[Any, ...]]()

    def run(*words: Any, **more: Any) -> str:
        calls.append(words)
        (folder / f"run-{len(calls)}").mkdir(parents=True)
        (folder / "results.json").write_text("{}")
        return ""

    def finetune(seeds: str) -> list[str]:
        reference.finetune(task, argparse.Namespace(out=out, seeds=seeds), 128, done)
        return sorted(path.name for path in folder.glob("run-*"))

    monkeypatch.setattr(reference, "command", run)
    done = Done.open(out)
    (out / "bert").mkdir()
    task.mkdir()
    (out / "bert/model.safetensors").write_bytes(b"1")
    assert finetune("1") == finetune("1") == ["run-1"]  # the second call has nothing to do
    assert finetune("1,2") == ["run-1", "run-2"]
    (out / "bert/model.safetensors").write_bytes(b"2")
    assert finetune("1,2") == ["run-3"]
    (task / "train.tsv").touch()
    assert finetune("1,2") == ["run-4"]


def test_a_task_without_a_score_stays_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that diverged have no score."""
    runs: dict[str, list[dict[str, float]]] = {"rte": [{"accuracy": 0.5}, {}], "cola": [{}, {}]}
    reference.report(
        {
            task: {"measure": "accuracy", "runs": [{"seed": n, "figures": one} for n, one in enumerate(each, 1)]}
            for task, each in runs.items()
        },
        tmp_path,
    )
    rte, cola = ([cell.strip() for cell in row.split("|")[3:5]] for row in capsys.readouterr().out.splitlines()[-2:])
    assert rte == ["0.5000", "1 of 2"] and cola == ["none: no run has one", "0 of 2"]
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["cola"]["mean"] is None and scores["cola"]["by_seed"] == {"1": None, "2": None}


# ---- the whole script ------------------------------------------------------------------------------------------

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
RECIPE = {
    "run": {"name": "tiny", "folder": "elsewhere"},
    "model": {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 32},
    "optimizer": {"name": "adam"},
    "phases": [
        {"name": "only", "train": "elsewhere", "sequence_length": 32, "global_batch": 8, "micro_batch": 8, "steps": 3}
        | {"learning_rate": 1e-3}
    ],
    "metrics": {"port": None, "log_every_steps": 1},
}


def words_of(folder: Path) -> list[str]:
    """The script's words, for the demo's corpus."""
    words = {"text": ROOT / "deploy/demo/corpus", "held-out-share": 0.05, "seeds": "1,2"}
    words |= {name: folder / name for name in ("tokenizer", "tasks", "out")} | {"config": folder / "tiny.yaml"}
    return ["deploy.reference", *(f"--{name}={word}" for name, word in words.items())]


def fork(folder: Path) -> ranks.Forked:
    """The script, in its own process group."""
    helper = "tests/helpers/forked_commands.py"
    return ranks.fork_one(0, 1, 0, helper, str(ROOT), *words_of(folder), PATH=PATH)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A tokenizer, a recipe and one task."""
    corpus = (ROOT / "deploy/demo/corpus/demo_corpus.jsonl").read_text("utf-8").splitlines()
    train_tokenizer([json.loads(line)["text"] for line in corpus[:8]], 600, cased=False).save(tmp_path / "tokenizer")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE), "utf-8")
    (tmp_path / "tasks/stsb").mkdir(parents=True)
    for part, first in (("train", 0), ("dev", 10_000)):
        write_numbers(tmp_path / f"tasks/stsb/{part}.tsv", 40, first)
    return tmp_path


def is_gone(group: int) -> bool:
    """Whether the process group has no process left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_killed_script_continues_to_its_scores(inputs: Path) -> None:
    """It is killed once pre-training has ended, which is then not repeated."""
    killed = fork(inputs)
    wait_for(lambda: "== Held-out evaluation" in killed.log.read_text(), killed)
    os.killpg(killed.pid, signal.SIGKILL)
    [(code, said)] = ranks.finish([killed])
    assert code == -signal.SIGKILL and "lambert: done: 3 steps" in said, said
    wait_for(lambda: is_gone(killed.pid))  # a process that is still dying may hold the lock
    [(code, said)] = ranks.finish([fork(inputs)])
    assert code == DONE, said
    assert "== Pre-training\nalready done\n" in said and said.count(": complete") == 2
    scores = json.loads((inputs / "out/scores.json").read_text())["stsb"]
    first, second = scores["by_seed"].values()
    assert scores["mean"] == pytest.approx((first + second) / 2) and first != second
    assert scores["standard_error"] == pytest.approx(abs(first - second) / 2)
    assert said.rstrip().splitlines()[-1].startswith(f"| stsb | spearman | {scores['mean']:.4f} ± ")
    assert (inputs / "out/scores.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((inputs / "out/evaluation.json").read_text())["mlm_loss"] > 0


@pytest.mark.slow
def test_ctrl_c_ends_it_with_one_line_of_its_own(inputs: Path) -> None:
    env = {**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-m", *words_of(inputs)]
    interrupted = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)
    assert interrupted.stdout is not None
    said = interrupted.stdout.readline() + interrupted.stdout.readline() + interrupted.stdout.readline()
    assert said.startswith("\n== Shards\n$ python")
    interrupted.send_signal(signal.SIGINT)
    said, _ = interrupted.communicate(timeout=60)
    assert interrupted.returncode == INTERRUPTED and "reference: SIGINT: stopping; the same command continues\n" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("ranks", "0", "--ranks 0: wanted 1 or more"),
        ("ranks", "16777216", "phases.0.accumulation: it gives 16,777,216 micro-batches per step"),
        ("tasks", "tiny.yaml", "tiny.yaml is a file: name a folder"),
        ("tokenizer", "tiny.yaml", "tiny.yaml is a file: name a folder"),
        ("out", "tiny.yaml", "tiny.yaml was not made by this script: name a new folder"),
        ("out", "tiny.yaml/out", "tiny.yaml/out cannot be created (Not a directory): name another folder"),
    ],
)
def test_a_wrong_option_costs_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    inputs: Path,
    option: str,
    value: str,
    said: str,
) -> None:
    options: dict[str, object] = {"text": inputs, "config": inputs / "tiny.yaml"}
    options |= {name: inputs / name for name in ("tokenizer", "tasks", "out")}
    options[option] = value if option == "ranks" else inputs / value
    refused(monkeypatch, capsys, [f"--{name}={value}" for name, value in options.items()], said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tasks/stsb/dev.tsv", "--tasks, stsb: --dev is not given, and "),
        ("tasks/stsb", " has no folder in it: make one for each task"),
        ("tokenizer", "tokenizer does not exist: name a folder"),
        ("tiny.yaml", "no configuration at "),
    ],
)
def test_what_is_missing_is_found_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inputs: Path, change: str, said: str
) -> None:
    (inputs / change).rename(inputs / "gone")
    words = ["--text", str(inputs), "--config", str(inputs / "tiny.yaml")]
    words += [word for name in ("tokenizer", "tasks", "out") for word in (f"--{name}", str(inputs / name))]
    refused(monkeypatch, capsys, words, said)
    assert not (inputs / "out").exists()


def test_more_ranks_than_gpus_are_refused_before_the_work(monkeypatch: pytest.MonkeyPatch, inputs: Path) -> None:
    config = load(inputs / "tiny.yaml")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(TrainerError, match=r"^--ranks 3, but PyTorch sees 2 GPU\(s\): lower it$"):
        reference.require_ranks(config, 3)
    with pytest.raises(TrainerError, match="^2 rank.s. were started but run.ranks is 1: "):
        reference.require_ranks(replace(config, run=replace(config.run, ranks=1)), 2)


def test_a_second_script_is_kept_out_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inputs: Path
) -> None:
    Done.open(inputs / "out")
    words = [f"--{name}={inputs / name}" for name in ("tokenizer", "tasks", "out")]
    words += [f"--text={inputs}", f"--config={inputs / 'tiny.yaml'}"]
    monkeypatch.setattr(reference, "run", lambda *given: print("all stages"))
    with hold(inputs / "out", 0, silent) or pytest.skip("the file system has no locks"):
        refused(monkeypatch, capsys, words, "/out is being written by process ")
    assert reference.main(words) == DONE and capsys.readouterr().out == "all stages\n"


@pytest.mark.parametrize("ignored", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_closed_terminal_stops_it_unless_it_runs_under_nohup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inputs: Path, ignored: signal.Handlers
) -> None:
    """Else the ranks, which have their own process group, would go on without it and keep the run's lock."""
    handled = set[int]()
    words = [f"--{name}={inputs}" for name in ("text", "tokenizer", "tasks", "out")]
    monkeypatch.setattr(signal, "getsignal", lambda number: ignored if number == signal.SIGHUP else signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.add(number))
    assert reference.main(words) == REFUSED
    assert handled == {signal.SIGTERM, signal.SIGINT} | ({signal.SIGHUP} if ignored == signal.SIG_DFL else set())


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """Check that the script refuses these options with one line."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    assert reference.main(words) == REFUSED
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("reference: error: ") and said in line
