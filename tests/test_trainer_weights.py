"""Plain weights: written and read back, they have the same bits; a run starts from them only once."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.manifest import load_manifest
from data_prep.tokenizer import load_tokenizer
from tests.helpers import ranks
from tests.helpers.corpora import write_tokenizer
from tests.helpers.runs import lines, write_config
from trainer import weights
from trainer.checkpoint import reading as checkpoint
from trainer.convert import weights as plain_weights
from trainer.convert.folder import write_folder
from trainer.convert.weights import read
from trainer.engine.optimizer import LambertOptimizer, OptimizerConfig, make_optimizer
from trainer.engine.partition import Buffer, Partition, Slice
from trainer.errors import TrainerError
from trainer.model.bert import Bert, ModelConfig

pytestmark = pytest.mark.slow

TINY = ModelConfig(layers=1, hidden=16, heads=2, intermediate=40, max_positions=24, vocab_size=70)


def ignore(text: str) -> None:
    raise AssertionError(text)


def trained(model: ModelConfig = TINY) -> dict[str, Tensor]:
    return Bert(model, seed=2).state_dict()


def sharded(model: ModelConfig, low: float, high: float) -> LambertOptimizer:
    """An optimizer that owns the elements from ``low`` to ``high`` (shares of each parameter), as under ZeRO."""
    shapes = {name: tensor.shape for name, tensor in Bert(model, seed=9).state_dict().items()}
    slices, offset = [], 0
    for name, shape in shapes.items():
        start, end = int(shape.numel() * low), int(shape.numel() * high)
        slices.append(Slice(name, start, offset, end - start))
        offset += end - start
    master = torch.full((offset + 3,), torch.nan)
    optimizer = make_optimizer(iter([master]), OptimizerConfig())
    optimizer.bind(Partition((Buffer(master, tuple(slices)),), shapes, True, master.device))
    return optimizer


def filled(path: Path, model: ModelConfig = TINY) -> dict[str, Tensor]:
    """The starting weights of two ranks, put together; NaN if nothing was filled in."""
    pieces: dict[str, list[Tensor]] = {}
    shapes = {name: tensor.shape for name, tensor in Bert(model).state_dict().items()}
    for low, high in ((0, 0.4), (0.4, 1)):
        optimizer = sharded(model, low, high)
        plain_weights.start_from(path, model, optimizer, lambda text: None)
        assert optimizer.partition is not None
        [buffer] = optimizer.partition.buffers
        for part in buffer.slices:
            pieces.setdefault(part.name, []).append(buffer.master[part.offset : part.offset + part.length])
        assert all(not moment.any() for moment in optimizer.moments(buffer).values())
        assert buffer.master[-3:].isnan().all()
    return {name: torch.cat(both).view(shapes[name]) for name, both in pieces.items()}


def run_on_two(*arguments: str) -> None:
    ended = ranks.finish(ranks.fork(2, "tests/helpers/checkpoint_on_ranks.py", *arguments))
    assert all(code == 0 for code, _ in ended), ended


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    plain_weights.write(trained(), TINY, tmp_path / "plain.safetensors")
    return tmp_path / "plain.safetensors"


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """A tokenizer of as many pieces as the model has."""
    folder = write_tokenizer(tmp_path / "tokenizer", [f"w{number}" for number in range(TINY.vocab_size - 5)])
    load_tokenizer(folder).save(folder)
    return folder


def test_a_file_comes_back_with_equal_bits(file: Path) -> None:
    assert_same(filled(file), trained())
    assert all(tensor.dtype == torch.float32 for tensor in load_file(file).values())


def test_a_file_is_whole_or_not_there_and_replaces_none(file: Path) -> None:
    with pytest.raises(TrainerError, match="already exists"):
        plain_weights.write(trained(), TINY, file)
    with pytest.raises(TrainerError, match=f"{file}, the folder of below, does not exist: create it"):
        plain_weights.write(trained(), TINY, file / "below")
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize("model", [TINY, replace(TINY, layer_norm="before")], ids=["post-LN", "pre-LN"])
def test_a_hugging_face_folder_comes_in(model: ModelConfig, tmp_path: Path, vocabulary: Path) -> None:
    weights = {name: tensor + torch.randn(tensor.shape) for name, tensor in trained(model).items()}
    write_folder(weights, model, vocabulary, tmp_path / "bert")
    ours, theirs = filled(tmp_path / "bert", model), weights
    for name in ("token_table", "decoder_bias"):  # rows that pad the vocabulary are no words, and are not exported
        theirs[name][TINY.vocab_size :] = 0
    assert_same(ours, theirs)


def test_heads_that_a_hugging_face_folder_lacks_stay_as_they_are(tmp_path: Path, vocabulary: Path) -> None:
    write_folder(trained(), TINY, vocabulary, tmp_path / "bert")
    tensors = load_file(tmp_path / "bert" / "model.safetensors")
    encoder = {name: tensor for name, tensor in tensors.items() if name.startswith("bert.encoder")}
    rest = {name: tensor for name, tensor in tensors.items() if name.startswith("bert.emb")}
    save_file(encoder | rest, tmp_path / "bert" / "model.safetensors")
    reported: list[str] = []
    plain_weights.start_from(tmp_path / "bert", TINY, sharded(TINY, 0, 1), reported.append)
    assert reported == [
        f"{tmp_path / 'bert'} has no pooler, no MLM head, no NSP head; training would start it from random values"
    ]
    ours = filled(tmp_path / "bert")
    assert ours["pooler_weight"].isnan().all() and torch.equal(ours["position_table"], trained()["position_table"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"heads": 4}, "heads is 2 there, 4 here"),
        ({"layer_norm": "before"}, "layer_norm is after there, before here"),
        ({"gelu": "tanh", "layers": 2}, "layers is 1 there, 2 here; gelu is"),
    ],
)
def test_another_model_is_refused_in_one_line(file: Path, changed: dict[str, object], said: str) -> None:
    other = replace(TINY, **changed)  # type: ignore[arg-type]
    with pytest.raises(TrainerError, match=f"run.weights: .* comes from another model \\({said}") as error:
        plain_weights.start_from(file, other, sharded(other, 0, 1), ignore)
    assert "\n" not in str(error.value)
    free = replace(TINY, dropout=0.3, initializer_range=0.5)
    plain_weights.start_from(file, free, sharded(free, 0, 1), ignore)


def test_a_file_that_does_not_say_its_model_must_have_its_shapes(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file(trained(), path)
    assert_same(filled(path), trained())
    save_file({name: tensor for name, tensor in trained().items() if name != "nsp_bias"}, path)
    with pytest.raises(
        TrainerError, match=r"comes from another model: 1 parameters differ, first nsp_bias \(absent there"
    ):
        filled(path)


@pytest.mark.parametrize("content", [None, b"", b"no safetensors at all"])
def test_what_is_no_weights_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "weights.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        TrainerError, match=f"{path} cannot be read as weights .*: name a file written by trainer.weights"
    ) as error:
        filled(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, vocabulary: Path, value: float) -> None:
    wrong = trained()
    wrong["layers.0.mlp_in_bias"][7] = value
    write_folder(wrong, TINY, vocabulary, tmp_path / "bert")
    plain_weights.write(wrong, TINY, tmp_path / "plain.safetensors")
    for path in (tmp_path / "bert", tmp_path / "plain.safetensors"):
        with pytest.raises(
            TrainerError, match=f"^{path}: layers.0.mlp_in_bias contains NaN or infinity.*export the weig"
        ):
            read(path, ignore)


def test_a_folder_that_holds_no_model_is_told_what_it_lacks(tmp_path: Path, vocabulary: Path) -> None:
    write_folder(trained(), TINY, vocabulary, tmp_path / "bert")
    (tmp_path / "bert" / "config.json").unlink()
    for folder in (tmp_path / "bert", tmp_path):
        with pytest.raises(
            TrainerError, match=f"^{folder} contains neither the config.json of a Hugging Face BERT nor a c"
        ):
            read(folder, ignore)


def test_another_vocabulary_is_refused_by_its_first_token(tiny_shards: Path, tmp_path: Path) -> None:
    """A Hugging Face folder's and a run's, token by token; a file's by its hash."""
    own = tiny_shards / "tokenizer"
    pieces = (own / "vocab.txt").read_text().splitlines()
    model = replace(TINY, vocab_size=len(pieces))

    def start(path: Path) -> list[str]:
        reported: list[str] = []
        plain_weights.start_from(path, model, sharded(model, 0, 1), reported.append, own)
        return reported

    write_folder(trained(model), model, own, tmp_path / "same")
    assert start(tmp_path / "same") == []
    swapped = tmp_path / "swapped"
    shutil.copytree(tmp_path / "same", swapped)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # vocab.txt counts, as for the published models
        (swapped / name).unlink()
    changed = [*pieces[:7], pieces[8], pieces[7], *pieces[9:]]
    (swapped / "vocab.txt").write_text("\n".join(changed) + "\n")
    with pytest.raises(TrainerError, match=f"a different vocabulary from the shards: token 7 is '{pieces[8]}' there, "):
        start(swapped)
    (swapped / "vocab.txt").write_text("\n".join(pieces[:-1]) + "\n")
    with pytest.raises(TrainerError, match=f"token {len(pieces) - 1} is absent there, '{pieces[-1]}' in the shards"):
        start(swapped)
    (swapped / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (swapped / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert "has the shards' vocabulary, but cleans text differently" in start(swapped)[0]
    (swapped / "vocab.txt").unlink()
    assert start(swapped) == [f"{swapped} does not record its vocabulary: assuming that of the shards"]

    sha256 = load_manifest(tiny_shards).tokenizer.sha256
    plain_weights.write(trained(model), model, tmp_path / "same.safetensors", sha256)
    plain_weights.write(trained(model), model, tmp_path / "other.safetensors", "0" * 64)
    assert start(tmp_path / "same.safetensors") == []
    with pytest.raises(TrainerError, match="other.safetensors was trained with a different tokenizer from"):
        start(tmp_path / "other.safetensors")


def test_a_checkpoints_weights_go_out_without_a_launcher_and_into_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights go out of two ranks under ZeRO 1, into two under ZeRO 2: at step 0, the same bits with zero moments."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    run_on_two(str(first), "1", "2")
    out = tmp_path / "plain.safetensors"
    assert weights.main([str(first), str(out)]) == 0
    assert f"{out}: {first / 'step-00000002'}" in capsys.readouterr().out
    run_on_two(str(second), "2", "0", f"weights={out}")
    before, after = checkpoint.find(first), checkpoint.find(second)
    assert_same(checkpoint.load_weights(after), checkpoint.load_weights(before))
    moments = {k: t for part in after.parts for k, t in load_file(after.folder / part).items() if k.startswith("exp_")}
    assert len(moments) >= 2 * len(after.shapes) and not any(tensor.any() for tensor in moments.values())
    assert weights.main([str(tmp_path), str(tmp_path / "none")]) == 2
    assert f"trainer.weights: error: no whole checkpoint in {tmp_path}" in capsys.readouterr().err
    assert weights.main([str(tmp_path), str(tmp_path / "missing" / "w.safetensors")]) == 2  # looked at first
    error = f"trainer.weights: error: {tmp_path / 'missing'}, the folder of w.safetensors, does not exist: "
    assert capsys.readouterr().err == error + "create it, or name another\n"


def test_a_run_starts_from_weights_once_and_never_when_it_resumes(tiny_shards: Path, tmp_path: Path) -> None:
    def run(folder: Path, steps: int, **section: str) -> tuple[int, str]:
        folder.mkdir(exist_ok=True)
        path = write_config(folder, tiny_shards, steps, run={"folder": str(folder / "run"), **section})
        return ranks.finish(ranks.fork(1, "trainer/__main__.py", "--config", str(path)))[0]

    code, output = run(tmp_path / "a", 20)
    assert code == 0, output
    source = str(tmp_path / "a" / "run")
    assert weights.main([source, str(tmp_path / "a.safetensors")]) == 0
    assert read(tmp_path / "a.safetensors", ignore).sha256 == load_manifest(tiny_shards).tokenizer.sha256
    vocabulary = tmp_path / "a" / "run" / "tokenizer" / "tokenizer.json"
    kept = vocabulary.read_text()
    last = (tmp_path / "a" / "run" / "tokenizer" / "vocab.txt").read_text().split()[-1]
    vocabulary.write_text(kept.replace(f'"{last}": ', f'"{last}x": '))
    code, output = run(tmp_path / "b", 10, weights=source)
    assert code == 2 and f"run.weights: {vocabulary.parent} is not the tokenizer that {source} " in output, output
    assert not lines(tmp_path / "b" / "run", "step")
    vocabulary.write_text(kept)
    code, output = run(tmp_path / "b", 10, weights=source)
    assert code == 0 and f"a fresh start from {source}" in output, output
    losses = [lines(tmp_path / name / "run", "step")[0]["loss"] for name in "ab"]
    assert losses[1] < losses[0]  # the same first batch, after 20 steps
    code, output = run(tmp_path / "b", 20, weights=str(tmp_path / "gone"))
    assert code == 0 and "resumed from" in output and "fresh start" not in output, output
