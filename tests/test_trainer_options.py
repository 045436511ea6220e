"""The commands that take a model: each mistake costs one line, and what they skip is reported."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import trainer.__main__ as program
import trainer.evaluate
from data_prep.manifest import file_sha256, load_manifest, manifest_hash
from data_prep.tokenizer import load_tokenizer
from kernels import backend
from tests.helpers.runs import write_config
from trainer import export, fill_mask, weights
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint.reading import part_name, tree_sha256
from trainer.checkpoint.train_state import TrainState
from trainer.console import print_result
from trainer.convert import weights as plain_weights
from trainer.encode import __main__ as encode
from trainer.errors import TrainerError
from trainer.model.bert import Bert, ModelConfig
from trainer.run.config import load, to_tree

Main = Callable[[list[str]], int]
COMMANDS: dict[str, tuple[Main, str]] = {  # and its arguments: the run, a new file or folder, the shards
    "encode": (encode.main, "--model RUN --out OUT.npy bade"),
    "fill_mask": (fill_mask.main, "--model RUN [MASK]"),
    "evaluate": (trainer.evaluate.main, "--checkpoint RUN --heldout SHARDS --train SHARDS"),
    "export": (export.main, "--checkpoint RUN --out OUT"),
    "weights": (weights.main, "RUN OUT.safetensors"),
}
COMPUTING = ("encode", "fill_mask", "evaluate")


@pytest.fixture(scope="module")
def run(tiny_shards: Path, tiny_model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saved at step 1; read only."""
    home = tmp_path_factory.mktemp("commands")
    folder = home / "run" / "step-00000001"
    folder.mkdir(parents=True)
    shutil.copytree(tiny_shards / "tokenizer", home / "run" / "tokenizer")
    tree = to_tree(load(write_config(home, tiny_shards, 10), []))
    identity = {"phases": [{"shards": manifest_hash(tiny_shards), "global_batch": 30}]}
    state = asdict(TrainState(step=1, phase_step=1))
    record: dict[str, object] = {"config": tree, "state": state, "identity": identity, "precision": "fp32"}
    save(folder, Bert(tiny_model).state_dict(), record)
    return home / "run"


def save(folder: Path, tensors: dict[str, Tensor], record: dict[str, object]) -> None:
    """A checkpoint of one part, without moments."""
    part = folder / part_name(0, 1)
    starts = json.dumps(dict.fromkeys(tensors, 0))
    save_file({f"weight/{name}": tensor for name, tensor in tensors.items()}, part, metadata={"starts": starts})
    tree = {
        **{"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "record": record},
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "parts": [{"name": part.name, "sha256": file_sha256(part), "bytes": part.stat().st_size}],
    }
    (folder / "checkpoint.json").write_text(json.dumps({**tree, "sha256": tree_sha256(tree)}))


def command(name: str, run: Path, shards: Path, *more: str) -> int:
    """Run a command; returns its exit code. Its output is next to the run."""
    main, arguments = COMMANDS[name]
    places = {"RUN": str(run), "SHARDS": str(shards), "OUT": str(run.parent / "out")}
    for word, place in places.items():
        arguments = arguments.replace(word, place)
    return main([*more, *arguments.split()])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_checkpoint_that_is_passed_over_is_reported(
    name: str, run: Path, tiny_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path(shutil.copytree(run, tmp_path / "run"))
    newest = Path(shutil.copytree(own / "step-00000001", own / "step-00000002"))
    (newest / part_name(0, 1)).unlink()
    assert command(name, own, tiny_shards) == 0
    expected = f"trainer.{name}: warning: not used: checkpoint {newest} is damaged: {part_name(0, 1)} is missing; "
    assert capsys.readouterr().err.count(expected + "using step-00000001 instead\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_weights_that_are_no_numbers_are_refused(
    name: str, run: Path, tiny_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path(shutil.copytree(run, tmp_path / "run"))
    found = checkpoint.find(own)
    tensors = checkpoint.load_weights(found)
    tensors["layers.0.mlp_in_bias"][3] = torch.inf
    tensors["mlm_bias"][:] = torch.nan
    save(found.folder, tensors, found.record)
    assert command(name, own, tiny_shards) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trainer.{name}: error: ") and "name an older checkpoint" in line
    assert f"{found.folder}: mlm_bias contains NaN or infinity" in line  # the first of the two
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", COMPUTING)
def test_kernels_are_chosen_and_refused_before_anything_is_loaded(
    name: str,
    run: Path,
    tiny_shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = Path(shutil.copytree(run, tmp_path / "run"))
    assert command(name, own, tiny_shards, "--kernels", "torch") == 0
    expected = [] if name == "fill_mask" else [f"trainer.{name}: kernels: torch (requested)"]
    assert [line for line in capsys.readouterr().err.splitlines() if "kernels:" in line] == expected
    monkeypatch.setattr(backend, "TRITON_MISSING", "ImportError: none\nhere")
    assert command(name, tmp_path / "none", tiny_shards, "--kernels", "triton") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trainer.{name}: error: the kernels need Triton on a GPU (ImportError: none here)")
    assert "set --kernels to torch" in line


@pytest.mark.parametrize("name", ["evaluate", "export"])
def test_another_vocabulary_than_the_runs_is_refused(
    name: str, run: Path, tiny_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary of the same size is refused, too."""
    shards = Path(shutil.copytree(tiny_shards, tmp_path / "shards"))
    own = shards / "tokenizer" / "tokenizer.json"
    tree = json.loads(own.read_text())
    first, last = list(tree["model"]["vocab"])[-2:]
    pieces = tree["model"]["vocab"]
    pieces[first], pieces[last] = pieces[last], pieces[first]
    own.write_text(json.dumps(tree))
    manifest = shards / "manifest.json"
    sha256 = load_manifest(shards).tokenizer.sha256
    manifest.write_text(manifest.read_text().replace(sha256, load_tokenizer(shards / "tokenizer").sha256()))
    more = ["--tokenizer", str(shards / "tokenizer")] if name == "export" else []
    assert command(name, run, shards, *more) == 2
    [line] = capsys.readouterr().err.splitlines()
    what = {
        "evaluate": f"{shards} has a different vocabulary from",
        "export": f"{own.parent} is not the tokenizer that",
    }
    assert what[name] in line


def test_the_trainers_own_mistakes_take_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("--nonsense", "--conf"):
        monkeypatch.setattr("sys.argv", ["trainer", "--config", "a.yaml", wrong, "b.yaml"])
        with pytest.raises(SystemExit) as end:
            program.main()
        [line] = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and line.startswith("trainer: error: ") and wrong in line


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_wrong_takes_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command(name, tmp_path / "run", tmp_path, "--nonsense")
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith(f"trainer.{name}: error: ") and "--nonsense" in line
    assert line.endswith(f"; see python -m trainer.{name} --help")

    def fail(*arguments: object) -> None:
        raise TrainerError("one\n  two")

    selecting = {"evaluate": trainer.evaluate, "export": export, "weights": weights}
    module, reader = (selecting[name], "select") if name in selecting else (plain_weights, "source")
    monkeypatch.setattr(module, reader, fail)
    (tmp_path / "run").mkdir()
    assert command(name, tmp_path / "run", tmp_path) == 2
    assert capsys.readouterr().err == f"trainer.{name}: error: one two\n"


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("fill_mask", ["--top", "0"], "--top is 0: must be 1 or more"),
        ("evaluate", ["--micro-batch", "0"], "--micro-batch is 0: must be 1 or more"),
        ("encode", ["--pool", "sum"], "argument --pool: invalid choice: 'sum' (choose from "),
        ("encode", ["--marked", "--tokens"], "argument --tokens: not allowed with argument --marked"),
        ("export", ["--onnx", "graph"], "argument --onnx: invalid choice: 'graph' (choose from "),
    ],
)
def test_a_wrong_value_takes_one_line(
    name: str, wrong: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command(name, tmp_path, tmp_path, *wrong)
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith(f"trainer.{name}: error: {said}")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_result_that_cannot_be_printed_takes_one_line(
    name: str,
    run: Path,
    tiny_shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = Path(shutil.copytree(run, tmp_path / "run"))
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert command(name, own, tiny_shards) == 1
    said = f"trainer.{name}: error: standard output cannot be written: No space left on device"
    said += " (the disk is full: make room)"
    assert capsys.readouterr().err.splitlines()[-1] == said  # and nothing when the file was closed


def test_a_reader_that_leaves_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The reader of ``python -m trainer.plan … | head`` leaves early."""
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w") as gone, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", gone)
        for text in ("a plan", "its end"):
            print_result(text)
    assert not capsys.readouterr().err
