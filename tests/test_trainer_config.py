"""The configuration: strict keys and types, every problem in one error, and it can be written and read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trainer.errors import TrainerError
from trainer.run.config import Config, fingerprint, load, to_tree

ROOT = Path(__file__).parent.parent
MINIMAL = """
run: {name: r, folder: runs/r}
model: {}
phases:
  - {name: a, train: shards, sequence_length: 128, steps: 100, learning_rate: 1e-4, global_batch: 10, micro_batch: 2}
"""


def loaded(tmp_path: Path, *overrides: str, text: str = MINIMAL) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path, overrides)


def problems(tmp_path: Path, *overrides: str, text: str = MINIMAL) -> list[str]:
    """The problems of a configuration, without their common headline."""
    with pytest.raises(TrainerError) as error:
        loaded(tmp_path, *overrides, text=text)
    return str(error.value).split("\n  - ")[1:]


def test_a_number_may_be_written_as_people_write_it(tmp_path: Path) -> None:
    assert yaml.safe_load("1e-4") == "1e-4"  # the trap: YAML 1.1 sees a text
    assert loaded(tmp_path).phases[0].learning_rate == 0.0001
    for text, value in (("1e-4", 1e-4), ("0.0001", 1e-4), ("1.0e-4", 1e-4), ("6", 6.0), ("'6e-3'", 6e-3)):
        config = loaded(tmp_path, f"phases.0.learning_rate={text}")
        assert config.phases[0].learning_rate == value and type(config.phases[0].learning_rate) is float


def test_all_mistakes_are_reported_at_once_each_with_its_remedy(tmp_path: Path) -> None:
    text = MINIMAL.replace("folder: runs/r", "folder: runs/r, sed: 3").replace("global_batch: 10, ", "") + (
        "optimizer: {name: sgd}\nengine: {zero_stage: 0, precision: bf16}\n"
    )
    found = problems(tmp_path, text=text)
    assert len(found) == 4
    assert found[0] == "run.sed: unknown key; did you mean seed?"
    assert found[1] == "phases.0.global_batch, micro_batch, accumulation: set exactly two of them; the third follows"
    assert found[2] == "optimizer.name: 'sgd' is not one of lamb, adam"
    assert found[3].startswith("engine.precision bf16 does not work with zero_stage 0")
    assert "set zero_stage to 1, 2 or 3" in found[3]


def test_contradictions_between_sections_are_reported(tmp_path: Path) -> None:
    second = MINIMAL.strip().splitlines()[-1].replace("128", "1024")
    found = problems(tmp_path, text=f"{MINIMAL}{second}\n")
    assert found[0].startswith("phases: two phases are named 'a'")
    assert found[1].startswith("phases.1.sequence_length is 1024 but model.max_positions is 512")
    overrides = ("phases.0.spread_positions=256", "model.max_positions=128")
    assert problems(tmp_path, *overrides)[0].startswith(
        "phases.0.spread_positions is 256 but model.max_positions is 128"
    )
    assert problems(tmp_path, "phases=[]") == ["phases is empty: a run needs at least one"]
    [host] = problems(tmp_path, "optimizer.implementation=apex", "engine.offload_optimizer=true")
    assert host.startswith("optimizer.implementation is apex, which runs on GPUs, but engine.offload_optimizer runs")
    asked = ("phases.0.micro_batch=auto", "phases.0.global_batch=null")
    for more in ([], ["phases.0.accumulation=2"]):
        [batch] = problems(tmp_path, *asked, *more)
        assert batch.startswith("phases.0.micro_batch is auto, and global_batch is not set: set these two, and not ")
    [wait] = problems(tmp_path, "run.timeout_seconds=20")
    assert wait.startswith("metrics.linger_seconds is 20.0 but run.timeout_seconds is 20: ranks wait that long")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("phases.0.steps=1e6", "phases.0.steps: expected a whole number, found str '1e6'"),
        ("phases.0.steps=true", "phases.0.steps: expected a whole number, found bool True"),
        ("phases.0.steps=-1", "phases.0.steps is -1: must be 1 or more"),
        ("phases.0.micro_batch=Auto", "phases.0.micro_batch: expected a whole number or auto, found str 'Auto'"),
        ("phases.0.steps=0", "phases.0.steps, samples, epochs, minutes: set exactly one of them"),
        ("phases.0.epochs=3", "phases.0.steps, samples, epochs, minutes: set exactly one of them"),
        ("phases.0.decay=cosine", "phases.0.decay: 'cosine' is not one of polynomial, exponential"),
        ("phases.0.decay=exponential", "phases.0.decay_rate, decay_steps: set both for decay: exponential"),
        ("metrics.linger_seconds=-1", "metrics.linger_seconds is -1.0: must be 0 or more"),
        ("metrics.device_teraflops=0", "metrics.device_teraflops is 0.0: must be above 0, or null"),
        ("optimizer.min_trust_ratio=-1", "optimizer.min_trust_ratio is -1.0: must be 0 (off) or more"),
        ("optimizer.max_trust_ratio=0", "optimizer.max_trust_ratio is 0.0: must be above 0 and not below min_trust"),
        ("optimizer={min_trust_ratio: 2, max_trust_ratio: 1}", "optimizer.max_trust_ratio is 1.0: must be above 0"),
        ("optimizer.adapted=none", "optimizer.adapted: 'none' is not one of decayed, all"),
        ("optimizer={name: adam, adapted: all}", "optimizer.adapted is for LAMB, but name is adam: remove it, or set"),
        ("optimizer={name: adam, max_trust_ratio: 1}", "optimizer.max_trust_ratio is for LAMB, but name is adam"),
        ("optimizer.name=apex", "optimizer.name: 'apex' is not one of lamb, adam"),
        ("optimizer.implementation=nvidia", "optimizer.implementation: 'nvidia' is not one of lambert, apex"),
        ("optimizer={implementation: apex, min_trust_ratio: 1}", "optimizer.min_trust_ratio is set but Apex's FusedL"),
        ("engine.nvme=true", "engine.nvme: unknown key; known keys: zero_stage, precision"),
        ("engine.offload_optimizer=cpu", "engine.offload_optimizer: expected true or false, found str 'cpu'"),
        ("phases.0.warmup_steps=101", "phases.0.warmup_steps is 101: must be between 0 and steps (100)"),
        ("phases.0.learning_rate=fast", "phases.0.learning_rate: expected a number, found str 'fast'"),
        ("phases.0.learning_rate=true", "phases.0.learning_rate: expected a number, found bool True"),
        ("phases.0.power=.nan", "phases.0.power: expected a number, found float nan"),
        ("optimizer.weight_decay=nan", "optimizer.weight_decay: expected a number, found str 'nan'"),
        ("engine.initial_loss_scale=1e999", "engine.initial_loss_scale: expected a number, found str '1e999'"),
        ("engine.zero_stage=true", "engine.zero_stage: True is not one of 0, 1, 2, 3"),
        ("engine.zero_stage=7", "engine.zero_stage: 7 is not one of 0, 1, 2, 3"),
        ("run.name=", "run.name: expected a text, found nothing"),
        ("run.seed=-1", "run.seed is -1: must be between 0 and 2^63 - 1"),
        ("run.seed=9223372036854775808", "run.seed is 9223372036854775808: must be between 0 and 2^63 - 1"),
        ("optimizer=lamb", "optimizer: expected a mapping of keys, found str 'lamb'"),
        ("phases=short", "phases: expected a list, found str 'short'"),
        ("phases.0.masks=whole", "phases.0.masks: 'whole' is not one of static, dynamic"),
        ("metrics.port=0", "metrics.port is 0: must be between 1 and 65535, or be null for no exporter"),
        ("optimiser.name=adam", "optimiser: unknown key; did you mean optimizer?"),
        (
            "metrics.tensorboard=true",
            "metrics.tensorboard: unknown key; write metrics.trackers: [tensorboard] if it is",
        ),
        ("metrics.trackers=mlflow", "metrics.trackers: expected a list, found str 'mlflow'"),
        ("metrics.trackers=[mlflo]", "metrics.trackers.0: 'mlflo' is not one of tensorboard, mlflow, wandb"),
        ("metrics.trackers=[wandb, wandb]", "metrics.trackers names wandb twice: name it once"),
        ("evaluation.stop_at.mlm_acuracy=0.72", "evaluation.stop_at.mlm_acuracy: unknown key; did you mean mlm_accura"),
        ("evaluation.stop_at.mlm_accuracy=72", "evaluation.stop_at.mlm_accuracy is 72.0: must be above 0 and at most"),
        ("evaluation.stop_at.mlm_accuracy=0.72", "evaluation.stop_at is set but no phase has held-out shards: name so"),
        ("phases.1.steps=5", "--set phases.1.steps: no such key in this configuration; list items are numbered"),
        ("run.name.first=5", "--set run.name.first: no such key in this configuration"),
        ("run.name", "--set run.name: write it as section.key=value"),
        ("run.name=[", "--set run.name: the value '[' is not YAML; quote it"),
    ],
)
def test_a_bad_value_is_one_line(tmp_path: Path, override: str, message: str) -> None:
    found = problems(tmp_path, override)
    assert len(found) == 1 and found[0].startswith(message) and "\n" not in found[0]


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    """A wrong type hides neither its section's other problems nor those between sections; nor is one reported twice."""
    overrides = ("run.seed=-1", "run.port=1", "model.hidden=wide", "model.layers=0", "model.dropout=1.5", "optimizr=1")
    found = problems(tmp_path, *overrides, "phases.0.warmup_steps=x", "phases.0.steps=-1", "model.max_positions=64")
    assert [line.split(" is ")[0].split(":")[0] for line in found] == [
        *("optimizr", "run.port", "run.seed", "model.hidden", "model.layers", "model.dropout"),
        *("phases.0.warmup_steps", "phases.0.steps"),
    ]
    found = problems(tmp_path, "engine.kernels=3", "model.max_positions=64")
    assert [line.split(":")[0].split(" is ")[0] for line in found] == ["engine.kernels", "phases.0.sequence_length"]
    assert problems(tmp_path, "run.timeout_seconds=99999999999999")[0].endswith("must be 2592000 (thirty days) or less")


def test_a_required_key_is_missed(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: r, ", "").replace(", sequence_length: 128", "")
    missing = [f"{key}: missing; it has no default" for key in ("run.name", "phases.0.sequence_length")]
    assert problems(tmp_path, text=text) == missing
    text = MINIMAL.replace(", steps: 100, learning_rate: 1e-4", "")
    assert problems(tmp_path, text=text) == [
        "phases.0.steps, samples, epochs, minutes: set exactly one of them, the length of the phase",
        "phases.0.learning_rate is 0.0: must be above 0",
    ]


def test_overrides_reach_sections_that_the_file_leaves_out(tmp_path: Path) -> None:
    config = loaded(tmp_path, "optimizer.beta2=0.95", "phases.0.heldout=other", "metrics.port=null", "run.name=a=b")
    assert (config.optimizer.beta2, config.phases[0].heldout) == (0.95, "other")
    assert (config.metrics.port, config.run.name) == (None, "a=b")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no configuration at"), (b"- 1", "is not a mapping"), (b"", "is not a mapping"), (b"a: [", "as YAML")]
    + [(b"a: \xff", "as YAML")],
)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TrainerError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_the_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    overrides = ("phases.0.heldout=h", "metrics.port=null", "optimizer.max_trust_ratio=10", "phases.0.power=0.5")
    config = loaded(tmp_path, *overrides, "phases.0.masks=dynamic", "evaluation.stop_at.mlm_accuracy=0.72")
    assert config.evaluation.stop_at.named == {"mlm_accuracy": 0.72}
    tree = to_tree(config)
    assert loaded(tmp_path, text=yaml.safe_dump(tree)) == config
    assert tree["engine"]["loss_scale_growth_interval"] == 1000  # every default is stated
    assert fingerprint(tree) == fingerprint(to_tree(load(tmp_path / "run.yaml")))
    plain = to_tree(loaded(tmp_path))
    assert fingerprint(tree) != fingerprint(plain)
    assert (tree["phases"][0]["masks"], plain["phases"][0]["masks"]) == ("dynamic", "static")


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    assert load(path).phases


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: a}\nrun: {name: b}\n")
    with pytest.raises(TrainerError, match="the key 'run' is repeated"):
        load(path)
