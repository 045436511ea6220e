"""Evaluation: by hand, and the same for any number of ranks."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import asdict, astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import trainer.evaluate
from data_prep.manifest import load_manifest
from tests.helpers import ranks
from tests.helpers.runs import lines, write_config
from trainer.checkpoint.reading import Checkpoint
from trainer.data.cache import CacheConfig
from trainer.data.loader import Loader
from trainer.errors import TrainerError
from trainer.evaluate import main
from trainer.model.batch import IGNORED, MicroBatch
from trainer.model.bert import Bert, ModelConfig, Output
from trainer.monitor.history import read_history
from trainer.ranks.world import World
from trainer.run.evaluation import (
    StopTarget,
    evaluate,
    evaluate_context,
    only_mask_token,
    shuffled_context,
    unigram_entropy,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def shares(folder: Path, ranks: int, size: int = 16) -> list[list[MicroBatch]]:
    """The batches of each rank."""
    manifest = load_manifest(folder)
    return [list(Loader(folder, manifest, rank, ranks).sweep(size)) for rank in range(ranks)]


def sequences(batches: list[list[MicroBatch]]) -> dict[int, tuple[list[int], list[int]]]:
    """Sample number: (tokens, labels or IGNORED at its masked places), over all ranks."""
    out = {}
    for batch in (batch for share in batches for batch in share):
        bounds = batch.cu_seqlens.tolist()
        for number, start, end in zip(batch.samples.tolist(), bounds, bounds[1:], strict=False):
            inside = (batch.masked >= start) & (batch.masked < end)
            out[number] = batch.tokens[start:end].tolist(), batch.labels[inside].tolist()
    return out


def by_hand(model: Bert, batches: list[MicroBatch]) -> dict[str, float]:
    """Means from the logits of each batch and PyTorch's own cross entropy."""
    logits = [model.logits(batch) for batch in batches]
    mlm, nsp = (torch.cat(parts) for parts in zip(*logits, strict=True))
    labels = torch.cat([batch.labels for batch in batches])
    classes = 1 - torch.cat([batch.is_next for batch in batches])
    mlm, labels = mlm[labels != IGNORED], labels[labels != IGNORED]
    return {
        "mlm_loss": float(torch.nn.functional.cross_entropy(mlm.double(), labels)),
        "mlm_accuracy": float((mlm.argmax(-1) == labels).double().mean()),
        "nsp_loss": float(torch.nn.functional.cross_entropy(nsp.double(), classes)),
        "nsp_accuracy": float((nsp.argmax(-1) == classes).double().mean()),
    }


@torch.no_grad()
def test_metrics_are_means_over_targets_and_pairs(tiny_shards: Path, tiny_model: ModelConfig) -> None:
    model = Bert(tiny_model, seed=3).train()
    [batches] = shares(tiny_shards, 1)
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(1))  # as DeepSpeed's, which gather a model's parameters
    hidden = [only_mask_token(batch, 4) for batch in batches]  # some labels are IGNORED
    only = by_hand(model, hidden)
    assert evaluate(model, iter(hidden), CPU) == pytest.approx(only, rel=1e-5)
    metrics = evaluate(model, iter(batches), CPU, mask_id=4)
    assert len(forwards) == 2 * len(batches)  # one for all the metrics
    apart = {"mask_loss": only["mlm_loss"], "mask_accuracy": only["mlm_accuracy"]}
    assert metrics == pytest.approx(by_hand(model, batches) | apart, rel=1e-5)
    assert abs(metrics["mlm_loss"] - metrics["mask_loss"]) > 1e-4
    assert model.training  # as it was
    evaluate(model.eval(), iter(batches[:1]), CPU)
    assert not model.training
    output = model(batches[0], None)
    assert output._fields == Output._fields  # its own forward again


def test_without_mask_there_is_no_metric_of_it(tiny_shards: Path, tiny_model: ModelConfig) -> None:
    [batches] = shares(tiny_shards, 1)
    shown = [replace(batch, tokens=batch.tokens.clamp(min=5)) for batch in batches]
    metrics = evaluate(Bert(tiny_model), iter(shown), CPU, mask_id=4)
    assert metrics.keys() == {"mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"}


def test_without_pairs_there_is_no_metric_of_the_second_task(tiny_shards: Path, tiny_model: ModelConfig) -> None:
    model = Bert(tiny_model, seed=3)
    [batches] = shares(tiny_shards, 1)
    single = [replace(batch, is_next=torch.full_like(batch.is_next, IGNORED)) for batch in batches]
    metrics = evaluate(model, iter(batches), CPU)
    assert evaluate(model, iter(single), CPU) == {name: metrics[name] for name in ("mlm_loss", "mlm_accuracy")}
    assert evaluate(model, iter(batches[:1] + single), CPU)["nsp_loss"] == pytest.approx(
        evaluate(model, iter(batches[:1]), CPU)["nsp_loss"], rel=1e-6
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_number_of_ranks_does_not_matter(
    tiny_shards: Path, tiny_model: ModelConfig, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collective is simulated: each rank is given the sum of what all ranks send."""
    model = Bert(tiny_model, seed=3)
    alone = evaluate(model, iter(shares(tiny_shards, 1)[0]), CPU)
    summed: list[Tensor] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda sums: summed.append(sums.clone()))
    parts = [evaluate(model, iter(share), CPU) for share in shares(tiny_shards, ranks, size=7)]
    assert len(summed) == ranks and all(part != pytest.approx(alone, rel=1e-4) for part in parts)
    monkeypatch.setattr(dist, "all_reduce", lambda sums: sums.copy_(torch.stack(summed).sum(0)))
    for share in shares(tiny_shards, ranks, size=7):
        assert evaluate(model, iter(share), CPU) == pytest.approx(alone, rel=1e-6)


def test_a_rank_without_samples_takes_part(tiny_model: ModelConfig) -> None:
    metrics = evaluate(Bert(tiny_model), iter([]), CPU)
    assert set(metrics.values()) == {0.0}


def test_ranks_that_have_fewer_batches_keep_in_step(
    tiny_shards: Path, tiny_model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward may be a collective. The other rank, which is simulated, has two batches more than this one."""
    model, theirs = Bert(tiny_model, seed=3), iter([1, 1, 1, 0])
    [batches] = shares(tiny_shards, 1)
    forwards: list[int] = []

    def all_reduce(value: Tensor, op: object = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.MAX:
            value.clamp_(min=next(theirs))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    model.register_forward_hook(lambda *_: forwards.append(1))
    expected = evaluate(model, iter(batches[:1]), CPU)
    forwards.clear()
    assert evaluate(model, iter(batches[:1]), CPU, in_step=True) == expected  # the fillers count for nothing
    assert len(forwards) == 3 and next(theirs, None) is None


def test_only_the_places_of_mask_keep_their_target(tiny_shards: Path) -> None:
    specials = load_manifest(tiny_shards).tokenizer.specials
    kept = dropped = 0
    for batch in shares(tiny_shards, 1)[0]:
        only = only_mask_token(batch, specials.mask)
        assert torch.equal(only.tokens, batch.tokens) and torch.equal(only.masked, batch.masked)
        stands = batch.tokens[batch.masked].tolist()
        for token, before, after in zip(stands, batch.labels.tolist(), only.labels.tolist(), strict=True):
            hidden = token == specials.mask
            assert after == (before if hidden else IGNORED)
            kept, dropped = kept + hidden, dropped + (not hidden)
    masked = load_manifest(tiny_shards).counts.masked
    assert kept + dropped == masked > 1000 and 0.75 < kept / masked < 0.85  # 80 % by BERT's recipe


def test_shuffling_moves_ordinary_tokens_among_themselves_alone(tiny_shards: Path) -> None:
    specials = astuple(load_manifest(tiny_shards).tokenizer.specials)
    moved = total = 0
    for batch in shares(tiny_shards, 1)[0]:
        before = batch.tokens.clone()
        after = shuffled_context(batch, specials, seed=0)
        assert torch.equal(batch.tokens, before)  # a new batch, not a changed one
        assert torch.equal(after.labels, batch.labels) and torch.equal(after.segments, batch.segments)
        fixed = torch.isin(before, torch.tensor(specials))
        fixed[batch.masked] = True
        assert torch.equal(after.tokens[fixed], before[fixed])
        for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
            assert torch.equal(after.tokens[start:end].sort()[0], before[start:end].sort()[0])
        moved, total = moved + int((after.tokens != before).sum()), total + int((~fixed).sum())
    assert moved / total > 0.85


@pytest.mark.parametrize(("ranks", "size"), [(2, 16), (3, 5), (1, 1000)])
def test_shuffling_is_the_same_for_any_ranks_and_batches(tiny_shards: Path, ranks: int, size: int) -> None:
    specials = astuple(load_manifest(tiny_shards).tokenizer.specials)

    def shuffled(batches: list[list[MicroBatch]], seed: int) -> dict[int, tuple[list[int], list[int]]]:
        return sequences([[shuffled_context(batch, specials, seed) for batch in share] for share in batches])

    expected = shuffled(shares(tiny_shards, 1), 0)
    assert len(expected) == load_manifest(tiny_shards).counts.samples
    assert shuffled(shares(tiny_shards, ranks, size), 0) == expected
    assert shuffled(shares(tiny_shards, ranks, size), 1) != expected


def test_unigram_entropy_by_hand() -> None:
    counts = torch.tensor([0, 7, 3, 0])  # p with one added: 1/14, 8/14, 4/14, 1/14
    targets = torch.tensor([1, 1, 2, 3])
    expected = -(2 * math.log(8 / 14) + math.log(4 / 14) + math.log(1 / 14)) / 4
    assert unigram_entropy(targets, counts) == pytest.approx(expected, rel=1e-12)


def test_the_marks_for_context(tiny_shards: Path, tiny_model: ModelConfig) -> None:
    """A fresh model is near the uniform; one that does not know an order loses nothing to shuffling."""
    manifest = load_manifest(tiny_shards)
    loader = Loader(tiny_shards, manifest, 0, 1)
    counts = torch.from_numpy(np.load(tiny_shards / manifest.token_counts.file))
    metrics = evaluate_context(Bert(tiny_model), loader, counts, CPU, 64)
    uniform = math.log(len(counts))
    assert metrics["mask_loss"] == pytest.approx(uniform, rel=0.02)

    labels = torch.cat([only_mask_token(batch, manifest.tokenizer.specials.mask).labels for batch in loader.sweep(64)])
    frequency = [(count + 1) / (int(counts.sum()) + len(counts)) for count in counts.tolist()]
    hidden = labels[labels != IGNORED].tolist()
    entropy = -sum(math.log(frequency[label]) for label in hidden) / len(hidden)
    assert metrics["mask_unigram_entropy"] == pytest.approx(entropy, rel=1e-9)
    assert entropy < uniform

    keen = Bert(replace(tiny_model, initializer_range=0.5))  # its logits feel every token and place
    metrics = evaluate_context(keen, loader, counts, CPU, 64)
    assert abs(metrics["mask_loss"] - metrics["mask_loss_shuffled"]) > 1e-3
    with torch.no_grad():
        keen.position_table.zero_()
        keen.segment_table.zero_()
    metrics = evaluate_context(keen, loader, counts, CPU, 64)
    assert metrics["mask_loss"] == pytest.approx(metrics["mask_loss_shuffled"], rel=1e-5)


def pretend(monkeypatch: pytest.MonkeyPatch, model: Bert) -> None:
    """Have the command find a checkpoint of this model wherever it looks for one."""
    record = {"config": {"model": asdict(model.model)}, "state": {"step": 1}}
    found = Checkpoint(Path("runs/run"), {}, {}, record)
    monkeypatch.setattr(trainer.evaluate, "_select", lambda *arguments: [found])
    monkeypatch.setattr(trainer.evaluate, "load_model", lambda found, fillers, weights: model)


def test_the_command_refuses_shards_of_another_vocabulary(
    tiny_shards: Path,
    own_shards: Path,
    tiny_model: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, Bert(tiny_model))
    arguments = ["--checkpoint", "run", "--heldout", str(tiny_shards), "--train", str(own_shards)]
    assert main(arguments) == 0
    assert '"mask_unigram_entropy": ' in capsys.readouterr().out
    manifest = own_shards / "manifest.json"
    text, sha256 = manifest.read_text(), load_manifest(own_shards).tokenizer.sha256
    manifest.write_text(text.replace(sha256, "0" * 64))
    assert main(arguments) == 2
    assert "were made with different tokenizers" in capsys.readouterr().err
    manifest.write_text(text.replace('"vocab_size": 120', '"vocab_size": 60'))
    assert main(arguments) == 2
    assert "has a vocabulary of 60 entries but the model of run has 120" in capsys.readouterr().err
    manifest.write_text(text)
    (own_shards / "token_counts.npy").unlink()
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer.evaluate: error: ") and "token_counts.npy: no histogram can be read" in line
    with pytest.raises(SystemExit):
        main([*arguments, "--micro-batch", "0"])
    assert "--micro-batch is 0: must be 1 or more" in capsys.readouterr().err


def test_the_command_reads_data_sets_at_addresses(
    own_shards: Path,
    tmp_path: Path,
    tiny_model: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The metrics are the same, and no shard of the training data is fetched."""
    pretend(monkeypatch, Bert(tiny_model, seed=3))
    address, cache = f"file://{own_shards}", tmp_path / "cache"
    outputs = []
    for place in (str(own_shards), address):
        arguments = ["--checkpoint", "run", "--heldout", place, "--train", place, "--cache-folder", str(cache)]
        assert main(arguments) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and '"mask_loss_shuffled": ' in outputs[0]
    assert list(cache.glob("*/*.tar"))

    shutil.rmtree(cache)
    assert main(["--checkpoint", "run", "--heldout", str(own_shards), "--train", address, *arguments[-2:]]) == 0
    assert capsys.readouterr().out == outputs[0]
    assert list(cache.glob("*/manifest.json")) and not list(cache.glob("*/*.tar"))

    next(own_shards.glob("*.tar")).unlink()
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trainer.evaluate: error: {address}: missing or truncated: ")
    with pytest.raises(SystemExit):
        main([*arguments, "--cache-gigabytes", "-1"])
    assert "--cache-gigabytes is -1.0: must be 0 or more" in capsys.readouterr().err


# ---- a target ------------------------------------------------------------------------------------------------


def test_a_target_is_reached_when_all_that_is_asked_for_is() -> None:
    assert StopTarget().reached({"mlm_loss": 0.0, "mlm_accuracy": 1.0}) == ""
    target = StopTarget(mlm_accuracy=0.72, mask_loss=1.5)
    good = {"mlm_accuracy": 0.72, "mask_loss": 1.5, "mlm_loss": 9.0}
    assert target.reached(good) == "mlm_accuracy 0.72 (target 0.72), mask_loss 1.5 (target 1.5)"
    assert not target.reached(good | {"mlm_accuracy": 0.719}) and not target.reached(good | {"mask_loss": 1.51})
    assert not target.reached({"mlm_accuracy": 0.9}) and not target.reached(good | {"mask_loss": math.nan})
    assert StopTarget(nsp_accuracy=72, mlm_loss=0).problems() == [
        "mlm_loss is 0: must be above 0",
        "nsp_accuracy is 72: must be above 0 and at most 1",
    ]
    with pytest.raises(TrainerError, match="stop_at.nsp_loss is set, but none of the run.s held-out shards has pairs"):
        StopTarget(nsp_loss=0.1).require(paired=False)


def test_two_ranks_end_at_the_target_and_are_evaluated_together(
    tiny_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends with 0, saved; the same command ends at once, a higher target resumes. One process agrees."""
    config = write_config(
        tmp_path, tiny_shards, 12, evaluation={"every_steps": 4, "stop_at": {"mlm_loss": 100.0, "nsp_accuracy": 1e-6}}
    )
    run, heldout = tmp_path / "run", f"phases.0.heldout={tiny_shards}"

    def train(*overrides: str) -> str:
        options = [part for override in (heldout, *overrides) for part in ("--set", override)]
        ended = ranks.finish(ranks.fork(2, "trainer/__main__.py", "--config", str(config), *options))
        assert [code for code, _ in ended] == [0, 0], ended
        return ended[0][1]

    assert "done: 4 steps" in train()
    assert json.loads((run / "ended.json").read_text()) == {"how": "reached", "step": 4}
    assert (run / "step-00000004" / "checkpoint.json").is_file()
    [end], [record] = lines(run, "end"), lines(run, "heldout")
    assert end["how"] == "done" and end["reason"].startswith(f"reached mlm_loss {record['mlm_loss']:.4g} (target 100")
    assert read_history(run).end == f"done: {end['reason']}"  # what the report says
    assert 0 < record["mask_accuracy"] < 1 and record["mask_loss"] != record["mlm_loss"]

    assert "done: 4 steps" in train() and len(lines(run, "heldout")) == 1
    assert "done: 12 steps" in train("evaluation.stop_at.mlm_loss=0.01")
    assert json.loads((run / "ended.json").read_text()) == {"how": "done", "step": 12}

    command = ["--checkpoint", str(run), "--heldout", str(tiny_shards), "--train", str(tiny_shards)]
    assert main(command) == 0
    alone = json.loads(capsys.readouterr().out)
    ended = ranks.finish(ranks.fork(2, "trainer/evaluate.py", *command, "--micro-batch", "7"))
    assert [code for code, _ in ended] == [0, 0], ended
    said, metrics = ended[0][1].split("{")  # one rank's, and both of its streams
    assert said.startswith("trainer.evaluate: weights: step 12 of ") and said.count("\n") == 2
    assert json.loads("{" + metrics) == pytest.approx(alone, rel=1e-6) and not ended[1][1]
    assert main([*command, "--average", "2"]) == 0
    mean = json.loads(capsys.readouterr().out)
    ended = ranks.finish(ranks.fork(2, "trainer/evaluate.py", *command, "--average", "2"))
    assert json.loads("{" + ended[0][1].split("{")[1]) == pytest.approx(mean, rel=1e-6) and mean != alone
    last = lines(run, "heldout")[-1]
    assert {name: last[name] for name in alone if name in last} == pytest.approx(
        {name: alone[name] for name in alone if name in last}, rel=1e-6
    )
    command[1] = str(tmp_path)
    ended = ranks.finish(ranks.fork(2, "trainer/evaluate.py", *command))
    assert [code for code, _ in ended] == [2, 2] and "no whole checkpoint in" in ended[0][1] + ended[1][1]


def test_ranks_share_the_samples_of_the_command(
    tiny_shards: Path, tiny_model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, Bert(tiny_model))
    seen: list[int] = []
    monkeypatch.setattr(
        trainer.evaluate, "evaluate_context", lambda _, loader, *rest: seen.extend(sequences([list(loader.sweep(16))]))
    )
    shards = str(tiny_shards)
    options = argparse.Namespace(checkpoint="run", average=None, heldout=shards, train=shards, micro_batch=16)
    for rank in range(3):
        trainer.evaluate._evaluate_command(options, CacheConfig(), World(rank, 3, rank, 3, CPU))
    assert sorted(seen) == list(range(load_manifest(tiny_shards).counts.samples))
