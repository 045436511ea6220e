"""Pieces that only fill a vocabulary up to a multiple: they change no loss, and nothing gives them a probability."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertForMaskedLM, pipeline

from data_prep.build import build
from data_prep.settings import make_settings
from data_prep.tokenizer import load_tokenizer
from data_prep.vocab import train_tokenizer
from tests.helpers import ranks
from tests.helpers.runs import lines, write_config
from trainer.checkpoint.reading import find, load_model, load_weights
from trainer.convert import folder as hf_folder
from trainer.convert import onnx
from trainer.convert.hugging_face import SILENT
from trainer.convert.weights import fitting, load_bert
from trainer.errors import TrainerError
from trainer.evaluate import main as evaluate
from trainer.export import main as export_command
from trainer.fill_mask import fill_masks
from trainer.model.bert import Bert, ModelConfig
from trainer.run.config import load

pytestmark = pytest.mark.slow

MULTIPLES = (1, 8, 64, 128)
SIZE, FILLED = 61, {1: 61, 8: 64, 64: 64, 128: 128}
TEXT = "bade [MASK] gola."


@pytest.fixture(scope="module")
def home(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run for each of MULTIPLES, of the same text, in the folder of its name; LAMB, dropout, new masks."""
    folder = tmp_path_factory.mktemp("fillers")
    text = tiny_shards.parent / "corpus.txt"
    for multiple in MULTIPLES:
        own = folder / str(multiple)
        train_tokenizer(text.read_text().split("\n\n"), SIZE, False, multiple).save(own / "tokenizer")
        build([text], own / "tokenizer", own / "shards", make_settings(32), processes=1)
        config = write_config(own, own / "shards", 12, metrics={"log_every_steps": 1})
        masks = ["--set", "phases.0.masks=dynamic", "--set", f"phases.0.heldout={own / 'shards'}"]
        [(code, said)] = ranks.finish(ranks.fork(1, "trainer/__main__.py", "--config", str(config), *masks))
        assert code == 0, said
    return folder


@pytest.fixture(params=[8, 128])
def filled(request: pytest.FixtureRequest, home: Path) -> Path:
    """The folder of one of the runs that has fillers."""
    return home / str(request.param)


def test_losses_are_those_of_the_vocabulary_that_was_not_filled(home: Path) -> None:
    for multiple in MULTIPLES:
        tokenizer = load_tokenizer(home / str(multiple) / "run" / "tokenizer")
        assert (tokenizer.vocab_size, tokenizer.fillers) == (FILLED[multiple], FILLED[multiple] - SIZE)
    results = [lines(home / str(multiple) / "run", "step") for multiple in MULTIPLES]
    for a, b in pairwise(results):
        assert a[0]["mlm_loss"] == b[0]["mlm_loss"]
        assert [line["mlm_loss"] for line in a] == pytest.approx([line["mlm_loss"] for line in b], rel=1e-4)
    heldout = [lines(home / str(multiple) / "run", "heldout")[-1]["mlm_loss"] for multiple in MULTIPLES]
    assert heldout == pytest.approx([heldout[0]] * len(MULTIPLES), rel=1e-4)


def test_evaluate_leaves_them_out(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for folder in (filled, filled.parent / "1"):
        shards = str(folder / "shards")
        assert evaluate(["--checkpoint", str(folder / "run"), "--heldout", shards, "--train", shards]) == 0
        results.append(json.loads(capsys.readouterr().out))
    ours, plain = results
    assert ours == pytest.approx(plain, rel=1e-4)
    assert ours["mask_unigram_entropy"] == plain["mask_unigram_entropy"]
    assert ours["mlm_loss"] == pytest.approx(lines(filled / "run", "heldout")[-1]["mlm_loss"], rel=1e-5)


def exported(filled: Path, *options: str) -> Path:
    """The run's export, proven."""
    out = filled / "-".join(["export", *options])
    if not out.exists():
        assert export_command(["--checkpoint", str(filled / "run"), "--out", str(out), *options]) == 0
    return out


@pytest.mark.parametrize("source", ["run", "export"])
def test_fill_mask_shows_none_of_them(source: str, filled: Path) -> None:
    model, own, _ = load_bert(exported(filled) if source == "export" else filled / "run")
    [[best]] = fill_masks(model, load_tokenizer(own), [TEXT], top=1000)
    assert len(best) == SIZE and not any("unused" in token for token, _ in best)
    assert sum(share for _, share in best) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_transformers_gives_them_no_probability_in_any_dtype(dtype: torch.dtype, filled: Path) -> None:
    folder = exported(filled)
    reader: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    theirs = BertForMaskedLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    with torch.no_grad():
        logits = theirs(**reader(TEXT, return_tensors="pt")).logits
    assert logits.shape[-1] == len(reader) > SIZE and logits.isfinite().all()
    shares = logits.softmax(-1)
    assert not shares[..., SIZE:].any() and shares[..., :SIZE].all()
    found = pipeline("fill-mask", model=str(folder), top_k=SIZE)(TEXT)
    assert not any("unused" in each["token_str"] for each in found)


def test_onnx_gives_them_no_probability(filled: Path) -> None:
    pytest.importorskip("onnxruntime")
    folder, model = exported(filled, "--onnx"), load(str(filled / "run.yaml"), []).model
    batch, bert = hf_folder.random_batch(model, 3), load_model(find(filled / "run"), model.vocab_size - SIZE)
    assert onnx.check(folder / "model.onnx", bert, "fill-mask", batch) <= onnx.TOLERANCE
    with pytest.raises(TrainerError, match="outputs differ from Lambert's by inf"):
        onnx.check(folder / "model.onnx", Bert(model, fillers=model.vocab_size - SIZE - 1), "fill-mask", batch)


def changes() -> Iterator[tuple[str, int, float]]:
    """A row of the decoder's bias and what is added to it."""
    yield "an ordinary piece by little", 7, 0.01
    yield "a filler, so that it is heard", SIZE, -SILENT


@pytest.mark.parametrize(("row", "by"), [pair for _, *pair in changes()], ids=[name for name, *_ in changes()])
def test_the_proof_holds_although_fillers_are_far_below(row: int, by: float, filled: Path) -> None:
    """Were the difference a share of the fillers' logits, the proof would notice nothing."""
    folder, model, weights = (
        exported(filled),
        load(str(filled / "run.yaml"), []).model,
        load_weights(find(filled / "run")),
    )
    tokenizer = load_tokenizer(folder)
    assert hf_folder.check(folder, weights, model, tokenizer).mlm <= hf_folder.LOGIT_TOLERANCE
    theirs = hf_folder.load_transformers(folder)
    with torch.no_grad():
        theirs.cls.predictions.bias[row] += by
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainerError, match="logits differ"):
        patch.setattr(hf_folder, "load_transformers", lambda *_: theirs)
        hf_folder.check(folder, weights, model, tokenizer)


def test_training_goes_on_from_an_export_without_its_silent_biases(filled: Path) -> None:
    model, folder = load(str(filled / "run.yaml"), []).model, exported(filled)
    shapes = {name: tensor.shape for name, tensor in Bert(model).state_dict().items()}
    given = fitting(folder, model, shapes, pytest.fail, filled / "shards" / "tokenizer")
    assert given["decoder_bias"].abs().max() < 10


def test_a_checkpoint_of_the_time_when_they_took_part_is_read(filled: Path) -> None:
    """Its fillers have learnt weights; these are there, and not looked at."""
    found = find(filled / "run")
    model = load_model(found, found.record["config"]["model"]["vocab_size"] - SIZE)
    old = model.state_dict() | {"decoder_bias": torch.full_like(model.decoder_bias, 5.0)}
    model.load_state_dict(old)
    logits, _ = model.logits(hf_folder.random_batch(model.model, 1))
    assert logits.shape[1] == SIZE
    out = filled / "old"
    if not out.exists():
        hf_folder.write_folder(old, model.model, filled / "tokenizer", out, proven=True)
    weights, _, _ = hf_folder.read_folder(out)
    assert set(weights["decoder_bias"][SIZE : model.model.vocab_size].tolist()) == {SILENT}


def test_the_prior_of_word_frequencies_counts_none_of_them() -> None:
    counts = torch.arange(128).where(torch.arange(128) < SIZE, 0)
    shape = ModelConfig(layers=1, hidden=16, heads=2, intermediate=32, max_positions=32)
    plain, filled = (Bert(replace(shape, vocab_size=size), fillers=size - SIZE) for size in (SIZE, 128))
    plain.set_decoder_prior(counts[:SIZE])
    filled.set_decoder_prior(counts)
    assert torch.equal(plain.decoder_bias[:SIZE], filled.decoder_bias[:SIZE]) and plain.decoder_bias[:SIZE].all()
    assert not filled.decoder_bias[SIZE:].any()
