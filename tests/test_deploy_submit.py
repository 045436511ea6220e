"""A submission: what is checked first, what a dry run prints, and what is left when a program fails.

test_deploy_submit_slurm.py submits to a real Slurm, test_deploy_submit_kubernetes.py with a real Helm.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deploy.submit import slurm as queue
from deploy.submit.__main__ import main
from tests.helpers.ranks import ROOT
from tests.helpers.runs import write_config
from tests.helpers.submissions import CARD, error
from trainer.run.config import load

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder on a machine without Slurm and Helm; programs of a test's own go into bin."""
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("PYTHON", raising=False)
    return tmp_path


@pytest.fixture
def config(tiny_shards: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path, tiny_shards, 40)


def slurm(config: Path, *words: str, nodes: int = 2, gpus: int = 1, card: list[str] = CARD) -> int:
    own = ["--config", str(config), "--nodes", str(nodes), "--gpus", str(gpus), *card]
    return main(["slurm", *own, *words])


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


# ---- Slurm ---------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_what_would_be_submitted(
    config: Path, login_node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "phases.0.steps=60", "--price", "2", "--dry-run", "--", "--time=12:00:00", "--partition=gpu"]
    assert slurm(config, *words) == 0
    output = capsys.readouterr()
    plan, checked = output.err.splitlines()
    form = r"deploy\.submit: test fits: \d\.\d of 80\.0 GiB of each GPU of 400 TFLOP/s; 60 steps take about [\d.]+ s, "
    form += r"[\d.]+ GPU-hours, cost [\d.]+$"
    assert re.match(form, plan) and checked.startswith("deploy.submit: checked: ")
    first, rest = output.out.split("END_OF_CONFIGURATION'\n")
    copy, rest = rest.split("END_OF_CONFIGURATION\n")
    path = first.split("cat > ")[1].split(" ")[0]
    given = yaml.safe_load(config.read_text())
    given["phases"][0]["steps"] = 60
    assert yaml.safe_load(copy) == given
    command, *script = rest.splitlines()
    python, paths, *words = shlex.split(command)
    assert python == f"PYTHON={sys.executable}" and paths.startswith(f"PYTHONPATH={ROOT}")
    own = ["sbatch", "--parsable", "--export=ALL", "--job-name=test", "--nodes=2", "--gpus-per-node=1"]
    more = ["--output=%x-%j.log", "--time=12:00:00", "--partition=gpu"]
    batch = ROOT / "deploy/slurm/train.sbatch"
    assert words == [*own, *more, str(batch), "--config", path]
    assert [line.removeprefix("# ").rstrip() for line in script[2:]] == batch.read_text().splitlines()
    assert not (login_node / "submitted").exists() and not (login_node / "run").exists()


def test_a_job_gets_a_copy_of_the_configuration(
    config: Path, login_node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(login_node, "sbatch", 'echo "$PYTHON $*" > called; echo 4711')
    assert slurm(config, "--", "--time=60") == 0
    called = (login_node / "called").read_text().split()
    (copy,) = (login_node / "submitted").iterdir()
    assert called[0] == sys.executable and called[-1] == f"submitted/{copy.name}"
    assert yaml.safe_load(copy.read_text()) == yaml.safe_load(config.read_text())
    assert copy.stat().st_mode & 0o777 == 0o600, "an address may contain a password"
    said = capsys.readouterr().out
    assert said.startswith("submitted test as job 4711: 2 nodes, 2 ranks\n")
    for part in ("squeue --jobs 4711", "tail -F test-4711.log", "Requeue=0 && scancel --signal=TERM 4711"):
        assert part in said
    assert f"python -m trainer.runs {login_node / 'run'}" in said


def test_what_sbatch_prints_is_passed_on(config: Path, login_node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = 'echo "Welcome to West: \\344 2"; echo "sbatch: warning: over budget" >&2; echo "4711;west"; echo Good luck'
    stand_in(login_node, "sbatch", said)
    assert slurm(config, "--", "--clusters=west", "--output=logs of %x/%j.out") == 0
    output = capsys.readouterr()
    assert output.err.splitlines()[-1] == "deploy.submit: sbatch: warning: over budget"
    stop = "scontrol --clusters=west update JobId=4711 Requeue=0 && scancel --clusters=west --signal=TERM 4711\n"
    for part in ("squeue --clusters=west --jobs 4711\n", "tail -F 'logs of test/4711.out'\n", stop):
        assert part in output.out


def test_a_job_whose_number_is_unknown_keeps_its_copy(
    config: Path, login_node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(login_node, "sbatch", "echo Submitted")
    assert slurm(config) == 1
    said = "sbatch printed 'Submitted\\n' and no job's number: look for the job with squeue --me"
    assert error(capsys) == said and len([*(login_node / "submitted").iterdir()]) == 1


def test_after_ctrl_c_the_job_may_exist_and_keeps_its_copy(
    config: Path, login_node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(login_node, "sbatch", "kill -INT $PPID; echo 4711")
    assert slurm(config) == 130
    assert capsys.readouterr().err.endswith("if the checks had finished, the run may have been submitted\n")
    assert len([*(login_node / "submitted").iterdir()]) == 1


def test_the_configuration_may_come_from_a_pipe(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe, as in --config <(envsubst < run.yaml), can be read only once."""
    reader, writer = os.pipe()
    os.write(writer, config.read_bytes())
    os.close(writer)
    try:
        assert slurm(Path(f"/dev/fd/{reader}"), "--dry-run") == 0
    finally:
        os.close(reader)
    assert "global_batch: 30" in capsys.readouterr().out


def test_an_error_of_sbatch_passes_through_and_nothing_is_left(
    config: Path, login_node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ("WARNING: the file is group-readable", "sbatch: error: no account", "sbatch: error: refused")
    stand_in(login_node, "sbatch", "".join(f"echo '{line}' >&2; " for line in said) + "exit 7")
    assert slurm(config) == 7
    assert error(capsys) == "sbatch: no account; refused"
    assert sorted(path.name for path in login_node.iterdir()) == ["bin", "run.yaml"]
    (login_node / "submitted").mkdir()
    stand_in(login_node, "sbatch", "echo 1")
    assert slurm(config) == 0
    stand_in(login_node, "sbatch", "kill -9 $$")
    assert slurm(config) == 1
    assert "sbatch: ended with code -9" in capsys.readouterr().err
    assert len([*(login_node / "submitted").iterdir()]) == 1, "the first job's copy"


REFUSED: dict[str, tuple[list[str], list[str], str]] = {  # options, words after --, and the error
    "no sbatch": ([], [], "there is no sbatch on the PATH: run this on a login node of the cluster, or with --dry-run"),
    "too large": (["--memory", "1GiB"], [], "phases.0: a micro-batch of 8 sequences needs 1.* GiB under ZeRO 1, and"),
    "no card": (["--memory", "80GiB"], [], "name a card with --card, or give both --memory and --tflops"),
    "a typo": (["--set", "run.nam=x"], [], ".*run.yaml: 1 problem - run.nam: unknown key; did you mean name?"),
    "no shards": (["--set", "phases.0.train=nowhere"], [], "phases.0.train: .*nowhere"),
    "a bad name": (["--set", "run.name=a b"], [], "run.name is 'a b': a job's name takes letters, digits, ., _ and -"),
    "ranks": (["--no-plan", "--set", "run.ranks=3"], [], "run.ranks is 3, but --nodes and --gpus make 2"),
    "a file": (["--set", "run.folder=run.yaml/x"], [], "run.folder run.yaml/x: .*run.yaml is not a folder"),
    "a data set": (["--set", "run.folder=SHARDS"], [], "run.folder .* contains manifest.json, which no run wrote"),
    "resume": (["--set", "run.resume=required"], [], "no whole checkpoint in .*run: check run.folder"),
    "nodes": ([], ["--nodes=3"], "--nodes=3 after --: the run is planned for --nodes: give it before --"),
    "nodes, short": ([], ["-N3"], "-N3 after --: the run is planned for --nodes"),
    "GPUs": ([], ["--gpus-per-node=h100:8"], "--gpus-per-node=h100:8 after --: the run is planned for --gpus"),
    "GPUs, short": ([], ["--gpus-per-nod=8"], "--gpus-per-nod=8 after --: the run is planned for --gpus"),
    "no variables": ([], ["--export=NONE"], "--export=NONE after --: the script needs PYTHON and PYTHONPATH: use --ex"),
    "to wait": ([], ["--wait"], "--wait after --: this command submits and does not wait: leave it out"),
    "a test": ([], ["--test-only"], "--test-only after --: this command submits and does not wait: leave it out"),
    "a log": ([], ["-ox.log"], "-ox.log after --: write it as --output=FILE"),
    "tasks": ([], ["--ntasks-per-node=4"], "--ntasks-per-node=4 after --: the script starts one rank per GPU"),
    "a name": ([], ["--job-name=x"], "--job-name=x after --: the job has the run's name: use --set run.name=NAME"),
    "a script": ([], ["other.sbatch"], "other.sbatch after --: only options for one job go here, as words such as"),
    "standard input": ([], ["-"], "- after --: only options for one job go here"),
    "an array": ([], ["--array=0-3"], "--array=0-3 after --: only options for one job go here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_in_one_line(
    name: str, config: Path, tiny_shards: Path, login_node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, words, said = REFUSED[name]
    if name != "no sbatch":
        stand_in(login_node, "sbatch", "touch called")
    card = [] if "--memory" in options else CARD
    card = ["--tflops", "400"] if name == "too large" else card
    options = [word.replace("SHARDS", str(tiny_shards)) for word in options]
    assert slurm(config, *options, "--", *words, card=card) == 2
    assert re.match(said, error(capsys))
    assert not (login_node / "called").exists() and not (login_node / "submitted").exists()


def test_options_that_agree_with_the_plan_may_be_given(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm(config, "--dry-run", "--", "--gpus-per-node=h100:1", "--export=ALL,A=1", "--wait-all-nodes=1") == 0
    said = "--gpus-per-node=1 --output=%x-%j.log --gpus-per-node=h100:1 --export=ALL,A=1 --wait-all-nodes=1"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("options", "said"), [(["--set", "run.device=cpu"], "run.device is cpu"), (["--no-plan"], "")])
def test_a_run_may_have_no_plan(
    options: list[str], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slurm(config, *options, "--dry-run", card=[]) == 0
    output = capsys.readouterr()
    assert output.err.startswith(f"deploy.submit: no plan: {said or '--no-plan'}\n")
    on_cpus = "--gpus-per-node=0 --ntasks-per-node=1"
    assert (on_cpus in output.out) == bool(said)


def test_an_automatic_micro_batch_is_that_of_the_checkpoint_or_the_plan(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = load(config, ["phases.0.micro_batch=auto"])
    assert slurm(config, "--set", "phases.0.micro_batch=auto", "--dry-run") == 0
    assert "micro_batch: auto" in capsys.readouterr().out
    each: Any = SimpleNamespace(name="only", micro_batch=SimpleNamespace(sequences=15))
    plan: Any = SimpleNamespace(phases=[each])
    assert queue.numbered(auto, plan).phases[0].micro_batch == 15
    assert queue.numbered(auto, None).phases[0].micro_batch == "auto"
    monkeypatch.setattr(queue, "stored", lambda folder: {"only": 7, "earlier": None})
    assert queue.numbered(auto, plan).phases[0].micro_batch == 7
    assert queue.numbered(load(config), plan).phases[0].micro_batch == 8


def test_both_queues_take_the_planners_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("slurm", "kubernetes"):
        with pytest.raises(SystemExit) as end:
            main([name, "--config", "run.yaml", "--gpus", "8", "--crad", "h100"])
        assert end.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("deploy.submit: error: unrecognized arguments: --crad h100; see python -m deploy.submit")


def test_variables_are_the_users_own(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("PYTHON", "/opt/python")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/opt/more", str(ROOT)]))
    assert slurm(config, "--dry-run") == 0
    assert f"PYTHON=/opt/python PYTHONPATH={ROOT}:/opt/more:{ROOT} sbatch" in capsys.readouterr().out
