"""A run follows each part of its configuration, and leaves the files that it promises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import trainer.evaluate
import trainer.export
from data_prep.build import build
from data_prep.manifest import load_manifest
from data_prep.settings import make_settings
from kernels.dropout import token_keys
from tests.helpers import ranks
from tests.helpers.runs import lines, write_config
from tests.test_trainer_checkpoint import PART, flip
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint.reading import find, load_model, load_weights, require_finite
from trainer.checkpoint.train_state import state_of
from trainer.data.loader import Loader
from trainer.engine.schedule import learning_rate
from trainer.errors import TrainerError
from trainer.ranks.world import World
from trainer.run.config import load
from trainer.run.evaluation import evaluate
from trainer.run.fresh import build_model
from trainer.run.phases import open_phases

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def train(config: Path, *overrides: str, size: int = 1) -> tuple[int, str]:
    """Rank 0's exit code and output."""
    options = [word for override in overrides for word in ("--set", override)]
    return ranks.finish(ranks.fork(size, "trainer/__main__.py", "--config", str(config), *options))[0]


def saved(run: Path) -> list[int]:
    """The steps whose checkpoints are there."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in run.glob("step-*/checkpoint.json"))


@pytest.fixture(scope="module")
def plain(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run of six steps, next to its folder: all are saved, the fourth and the last evaluated."""
    folder = tmp_path_factory.mktemp("plain")
    own = {"checkpoint": {"every_steps": 1, "keep": 9}, "metrics": {"log_every_steps": 1}}
    config = write_config(folder, tiny_shards, 6, **own)
    code, said = train(config, f"phases.0.heldout={tiny_shards}", "evaluation.every_steps=4")
    assert code == 0, said
    return config


def losses(run: Path) -> list[float]:
    """The losses of a run's steps."""
    return [line["loss"] for line in lines(run, "step")]


# ---- its sections ----------------------------------------------------------------------------------------------


def test_the_first_loss_is_that_of_the_seeds_weights_and_dropout(plain: Path) -> None:
    config = load(plain)
    plan = open_phases(config, World(0, 1, 0, 1, CPU))
    [data] = plan.phases
    step, model = data.loader.read(data.order, 0, *data.batch(0)), build_model(plan)
    with torch.no_grad():
        parts = [
            model(batch, token_keys(config.run.seed, 0, batch.samples, batch.positions, batch.cu_seqlens))
            for batch in step.micro_batches
        ]
    by_hand = sum(float(part.mean(step.counts)) for part in parts)
    assert losses(plain.parent / "run")[0] == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize(("mlm", "nsp"), [(0.25, 3.0), (1.0, 0.0), (0.0, 1.0)])
def test_weights_change_the_gradient_and_not_the_reported_losses(
    plain: Path, tmp_path: Path, mlm: float, nsp: float
) -> None:
    """The gradient by hand; with a weight of 0 and no weight decay, the head of that loss keeps its weights."""
    weights = (f"phases.0.mlm_weight={mlm}", f"phases.0.nsp_weight={nsp}", "optimizer.weight_decay=0")
    code, said = train(plain, f"run.folder={tmp_path / 'run'}", "phases.0.steps=2", *weights)
    assert code == 0, said
    first, theirs = lines(tmp_path / "run", "step")[0], lines(plain.parent / "run", "step")[0]
    assert [first[name] for name in ("loss", "mlm_loss", "nsp_loss")] == pytest.approx(
        [theirs[name] for name in ("loss", "mlm_loss", "nsp_loss")], rel=1e-6
    )
    config = load(plain)
    plan = open_phases(config, World(0, 1, 0, 1, CPU))
    [data] = plan.phases
    step, model = data.loader.read(data.order, 0, *data.batch(0)), build_model(plan)
    for batch in step.micro_batches:
        out = model(batch, token_keys(config.run.seed, 0, batch.samples, batch.positions, batch.cu_seqlens))
        loss = mlm / step.counts.targets * out.mlm_loss + nsp / step.counts.pairs * out.nsp_loss
        torch.autograd.backward(loss)
    norm = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    assert first["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    trained, start = load_weights(find(tmp_path / "run")), build_model(plan).state_dict()
    kept = {name.split("_")[0] for name in start if torch.equal(trained[name], start[name])}
    assert kept == ({"mlm", "decoder"} if mlm == 0 else {"nsp", "pooler"} if nsp == 0 else set())


def test_the_optimizer_and_the_saver_do_as_they_are_told(plain: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, said = train(plain, f"run.folder={run}", "optimizer.weight_decay=0.5", "checkpoint.keep=1")
    assert code == 0, said
    ours, theirs = losses(run), losses(plain.parent / "run")
    assert ours[0] == theirs[0] and ours[2] != theirs[2]
    assert (saved(run), saved(plain.parent / "run")) == ([6], [1, 2, 3, 4, 5, 6])


def test_a_checkpoint_holds_the_metrics_of_its_own_step_alone(plain: Path) -> None:
    run = plain.parent / "run"
    evaluations = {line["step"]: line for line in lines(run, "heldout")}
    assert list(evaluations) == [4, 6]
    for step in saved(run):
        metrics = checkpoint.read(run / f"step-{step:08d}").record["heldout"]
        assert bool(metrics) == (step in evaluations)
        assert metrics.items() <= evaluations.get(step, {}).items()


def test_each_phase_has_rates_and_heldout_shards_of_its_own(tiny_shards: Path, tmp_path: Path) -> None:
    """Each phase is evaluated and saved at its end, although no ``every_steps`` asks for it."""
    documents = (tiny_shards.parent / "corpus.txt").read_text().split("\n\n")
    for name, part in (("a", documents[:3]), ("b", documents[3:6])):
        text, tokenizer = tmp_path / f"{name}.txt", tiny_shards.parent / "tokenizer"
        text.write_text("\n\n".join(part) + "\n")
        build([text], tokenizer, tmp_path / name, make_settings(32), processes=1)
    path = write_config(tmp_path, tiny_shards, 5, checkpoint={"every_steps": 100})
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    [phase] = tree["phases"]
    rates = ({"warmup_steps": 2}, {"steps": 4, "warmup_steps": 3, "learning_rate": 0.003})
    tree["phases"] = [
        phase | own | {"name": n, "heldout": str(tmp_path / n)} for n, own in zip("ab", rates, strict=True)
    ]
    path.write_text(yaml.safe_dump(tree))
    code, said = train(path)
    assert code == 0, said
    run, phases = tmp_path / "run", load(path).phases
    expected = [learning_rate(phase, step + 1) for phase in phases for step in range(phase.steps)]
    assert [line["learning_rate"] for line in lines(run, "step")] == expected
    evaluations = lines(run, "heldout")
    assert [line["step"] for line in evaluations] == saved(run) == [5, 9]
    for line, name in zip(evaluations, "ab", strict=True):
        model, folder = load_model(find(run / f"step-{line['step']:08d}")), tmp_path / name
        metrics = evaluate(model, Loader(folder, load_manifest(folder), 0, 1).sweep(64), CPU)
        assert {key: line[key] for key in metrics} == pytest.approx(metrics, rel=1e-6)


# ---- its resumes -----------------------------------------------------------------------------------------------


def test_a_resume_refuses_each_change_that_would_break_it(plain: Path, own_shards: Path, tmp_path: Path) -> None:
    """All changes are reported; with other shards, masks and batch are not. Unchanged, the run continues."""
    run = Path(shutil.copytree(plain.parent / "run", tmp_path / "run"))
    longer = (f"run.folder={run}", "phases.0.steps=8")
    code, said = train(
        plain,
        *longer,
        *("run.seed=6", "run.shuffle_window=3", "optimizer.name=adam"),
        *("phases.0.masks=dynamic", "phases.0.global_batch=31"),
    )
    assert code == 2 and "Traceback" not in said, said
    window = load(plain).run.shuffle_window
    for change in (
        "seed was 5, now 6",
        f"shuffle_window was {window}, now 3",
        "optimizer was lamb, now adam",
        "masks of phase only were static",
        "global batch of phase only was 30, now 31",
    ):
        assert change in said
    manifest = own_shards / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    code, said = train(plain, *longer, f"phases.0.train={own_shards}")
    assert code == 2 and "only, in this order, with the same training shards as before, must come first" in said, said
    assert saved(run)[-1] == 6
    code, said = train(plain, *longer)
    assert code == 0 and saved(run)[-1] == 8, said


def test_one_rank_proves_every_part_of_two(tiny_shards: Path, tmp_path: Path) -> None:
    config, run = write_config(tmp_path, tiny_shards, 4, checkpoint={"every_steps": 2}), tmp_path / "run"
    code, said = train(config, size=2)
    assert code == 0, said
    flip(run / "step-00000004" / PART, -7)
    code, said = train(config)
    damaged = f"skipped: rank 0: checkpoint {run / 'step-00000004'} is damaged: the sha256 of {PART}"
    assert code == 0 and damaged in said and f"resumed from {run / 'step-00000002'} at step 2" in said, said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": {"position": 10**30}}, f"position in its record is {10**30}"),
        ({"state": {"step": -4}}, "step in its record is -4"),
        ({"state": {"phase": 3}}, "phase in its record is 3"),
        ({"optimizer": {"steps": True}}, "steps in its record is True"),
        ({"loss_scale": {"scale": 1e308}}, "loss scale in its record is 1e+308"),
        ({"heldout": {"mlm_loss": "low"}}, "heldout in its record is {"),
        ({"heldout": ["low"]}, "heldout in its record is ['low']"),
        ({"identity": None}, "its record lacks"),
    ],
)
def test_a_record_that_no_run_can_go_on_from_is_damage(
    plain: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = Path(shutil.copytree(plain.parent / "run" / "step-00000006", tmp_path / "step-00000006"))
    assert state_of(checkpoint.read(folder)).step == 6
    change_record(folder, change)
    with pytest.raises(TrainerError) as error:
        state_of(checkpoint.read(folder))
    assert str(error.value).startswith(f"checkpoint {folder} is damaged: {said}")


def test_checkpoints_whose_records_cannot_be_are_passed_over(plain: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(plain.parent / "run", tmp_path / "run"))
    change_record(run / "step-00000006", {"state": {"position": 10**30}})
    (run / "step-00000005" / "checkpoint.json").write_text("[" * 100_000)
    (run / "latest").write_text("a" * 100_000)
    code, said = train(plain, f"run.folder={run}")
    assert code == 0 and f"resumed from {run / 'step-00000004'} at step 4" in said, said
    assert f"skipped: {run / 'latest'} names aaaa" in said
    assert f"skipped: checkpoint {run / 'step-00000006'} is damaged: position in its record is 1000" in said
    assert f"skipped: {run / 'step-00000005'} is not a whole checkpoint" in said


def change_record(folder: Path, parts: dict[str, Any]) -> None:
    """Change parts of a checkpoint's record, and update its checksum."""
    path = folder / "checkpoint.json"
    tree = json.loads(path.read_text())
    del tree["sha256"]
    for name, part in parts.items():
        tree["record"][name] = tree["record"][name] | part if isinstance(part, dict) else part
    path.write_text(json.dumps({**tree, "sha256": checkpoint.tree_sha256(tree)}))


def test_weights_that_are_not_finite_are_not_saved(tiny_shards: Path, tmp_path: Path) -> None:
    """This holds however rarely the numbers are checked."""
    config = write_config(
        tmp_path,
        tiny_shards,
        12,
        engine={"precision": "fp32"},
        optimizer={"name": "adam"},
        checkpoint={"every_steps": 1, "keep": 1, "asynchronous": False},
        metrics={"log_every_steps": 100},
    )
    code, said = train(config, "phases.0.learning_rate=100", "optimizer.weight_decay=10")  # a thousandfold each step
    assert code == 2 and "diverged" in said, said
    found, passed = checkpoint.newest(tmp_path / "run")
    assert found is not None and not passed
    require_finite("newest", load_weights(found))


def test_a_pre_ln_run_resumes_to_the_same_bits_and_goes_out_as_what_it_is(
    tiny_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, heldout = {"layer_norm": "before", "layers": 2}, f"phases.0.heldout={tiny_shards}"
    weights = []
    for name, steps in (("whole", [4]), ("resumed", [2, 4])):
        config = write_config(tmp_path, tiny_shards, 4, model=model, run={"folder": str(tmp_path / name)})
        for until in steps:
            code, said = train(config, f"phases.0.steps={until}", "phases.0.power=0", heldout)
            assert code == 0, said
        weights.append(load_weights(find(tmp_path / name)))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    command = ["--checkpoint", str(tmp_path / "whole")]
    assert trainer.evaluate.main([*command, "--heldout", str(tiny_shards), "--train", str(tiny_shards)]) == 0
    metrics, evaluations = json.loads(capsys.readouterr().out), lines(tmp_path / "whole", "heldout")[-1]
    assert {n: metrics[n] for n in ("mlm_loss", "nsp_loss")} == pytest.approx(
        {n: evaluations[n] for n in ("mlm_loss", "nsp_loss")}, rel=1e-6
    )
    assert trainer.export.main([*command, "--out", str(tmp_path / "bert")]) == 0  # proven inside
    assert "A pre-LN BERT of 2 layers, hidden size 16, 2 heads" in (tmp_path / "bert" / "README.md").read_text()
    code, said = train(config, "model.layer_norm=after", "phases.0.steps=5")
    assert code == 2 and "belongs to another run (model.layer_norm was before, now after)" in said, said
