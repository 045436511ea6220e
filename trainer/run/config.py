"""The run's configuration: one YAML file, read strictly into frozen dataclasses.

Each section is a dataclass next to the code that it configures. This file composes, reads, overrides and checks
them. All problems of a file are reported together, each with what to change.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from data_prep.json_text import read_text, shown
from trainer.bounds import outside
from trainer.checkpoint.reading import CheckpointConfig
from trainer.data.cache import CacheConfig
from trainer.data.remote import is_remote
from trainer.engine.engine import EngineConfig
from trainer.engine.optimizer import OptimizerConfig
from trainer.engine.schedule import MOST_TOKENS, Phase
from trainer.errors import TrainerError, shortage
from trainer.model.bert import ModelConfig
from trainer.monitor.guard import GuardConfig
from trainer.monitor.metrics import MetricsConfig
from trainer.ranks.world import LONGEST_TIMEOUT_SECONDS
from trainer.run.evaluation import EvaluationConfig
from trainer.store.objects import require_address
from trainer.strict_yaml import LARGEST_YAML_BYTES, parse_yaml

LONGEST_TEXT = 4096  # characters; the longest path that Linux accepts
MOST_ITEMS = 1000  # in a list
REPLACED = {"metrics.tensorboard": "write metrics.trackers: [tensorboard] if it is true; else remove it"}
_WRONG = object()  # stands for a value that cannot be used
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True)
class RunConfig:
    """What the run is called, where it writes, and what makes it random."""

    name: str  # names the run in metrics, reports and dashboards
    # checkpoints, metrics and the resolved configuration go here: a folder that all nodes see, or an address of an
    # object store, s3://bucket/runs/first, which needs no common folder; docs/object_store.md
    folder: str
    seed: int = 1  # for the initial weights, the order of samples and dropout
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPUs if there are any, else CPUs
    # auto: continue from the newest checkpoint in the folder, if any; never: refuse a folder that has one
    resume: Literal["auto", "never", "required"] = "auto"
    # weights for a fresh start: a .safetensors file written by trainer.weights, another run's folder or checkpoint,
    # or a Hugging Face BERT's folder; null: random weights from the seed
    weights: str | None = None
    # required number of ranks, or null for any; it catches a missing host file, with which deepspeed uses one node only
    ranks: int | None = None
    timeout_seconds: int = 600  # for a collective, and for all ranks to start; then the run stops
    shuffle_window: int = 8  # number of shards whose samples are shuffled together

    def problems(self) -> list[str]:
        """List invalid values, each with what to change."""
        found = []
        if not self.folder:
            found.append("folder is empty: name one for this run")
        elif is_remote(self.folder):
            try:
                require_address(self.folder)
            except TrainerError as error:
                found.append(f"folder is {error}")
        if self.weights == "":
            found.append("weights is empty: name a file or a folder, or set it to null")
        if not 0 <= self.seed < 2**63:
            found.append(f"seed is {shown(self.seed)}: must be between 0 and 2^63 - 1")
        found += outside(self, ranks=(1, 2**20), timeout_seconds=(1, inf), shuffle_window=(1, 2**20))
        if self.timeout_seconds > LONGEST_TIMEOUT_SECONDS:
            said = shown(self.timeout_seconds)
            found.append(f"timeout_seconds is {said}: must be {LONGEST_TIMEOUT_SECONDS} (thirty days) or less")
        return found


@dataclass(frozen=True)
class Config:
    """The configuration of a whole run."""

    run: RunConfig
    model: ModelConfig
    phases: tuple[Phase, ...]
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def problems(self) -> list[str]:
        """List contradictions between sections, each with what to change."""
        found = []
        if not self.phases:
            found.append("phases is empty: a run needs at least one")
        if self.optimizer.implementation == "apex" and self.engine.offload_optimizer:
            found.append(
                "optimizer.implementation is apex, which runs on GPUs, but engine.offload_optimizer runs the optimizer "
                "on CPUs: set the first to lambert, or remove the second"
            )
        lingers = self.metrics.port is not None or self.metrics.trackers
        if lingers and self.metrics.linger_seconds >= self.run.timeout_seconds:
            found.append(
                f"metrics.linger_seconds is {self.metrics.linger_seconds} but run.timeout_seconds is "
                f"{self.run.timeout_seconds}: ranks wait that long at the end: lower the first or raise the second"
            )
        if all(phase.heldout is None for phase in self.phases):
            asked = {"stop_at": self.evaluation.stop_at.named, "every_steps": self.evaluation.every_steps is not None}
            missing = "is set but no phase has held-out shards: name some in phases.0.heldout"
            found += [f"evaluation.{name} {missing}" for name, given in asked.items() if given]
        names = [phase.name for phase in self.phases]
        for name in sorted({name for name in names if names.count(name) > 1}):
            found.append(f"phases: two phases are named {name!r}: give each its own name")
        for index, phase in enumerate(self.phases):
            tokens = self.evaluation.micro_batch * phase.sequence_length
            if phase.heldout is not None and tokens >= MOST_TOKENS:
                said = f"one of phases.{index} may have {tokens:,} tokens: must be under {MOST_TOKENS:,}: lower it"
                found.append(f"evaluation.micro_batch is {self.evaluation.micro_batch}: {said}")
            if phase.sequence_length > self.model.max_positions:
                found.append(
                    f"phases.{index}.sequence_length is {phase.sequence_length} but model.max_positions is "
                    f"{self.model.max_positions}: raise max_positions or shorten the sequences"
                )
            elif phase.spread_positions is not None and phase.spread_positions > self.model.max_positions:
                found.append(
                    f"phases.{index}.spread_positions is {phase.spread_positions} but model.max_positions is "
                    f"{self.model.max_positions}: lower the first or raise the second"
                )
        return found


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``path`` and apply ``overrides`` ("section.key=value"; list items are numbered).

    Raises TrainerError that lists every problem: unknown keys (with the nearest known one), missing
    keys, wrong types, invalid values and contradictions between sections.
    """
    return load_given(path, overrides)[0]


def load_given(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, dict[str, Any]]:
    """The configuration that `load` returns, and what ``path`` and ``overrides`` say of it, without defaults.

    The file is read once, because it may be a pipe.
    """
    try:
        tree = parse_yaml(read_text(Path(path), LARGEST_YAML_BYTES))
    except FileNotFoundError:
        raise TrainerError(f"no configuration at {path}: name an existing YAML file") from None
    except (OSError, ValueError) as error:
        if shortage(error):
            raise
        raise TrainerError(f"cannot read {path} as YAML: {error}") from None
    problems: list[str] = []
    if not isinstance(tree, dict):
        raise TrainerError(f"{path} is not a mapping: start it with sections, for example `run:`")
    for override in overrides:
        _override(tree, override, problems)
    config = _build(Config, tree, "", problems)
    if problems:
        noun = "problem" if len(problems) == 1 else "problems"
        raise TrainerError("\n  - ".join([f"{path}: {len(problems)} {noun}", *problems]))
    return config, tree


def to_tree(config: Config) -> dict[str, Any]:
    """Return the configuration as plain data with every default stated; ``load`` reads it back."""
    tree = json.loads(json.dumps(dataclasses.asdict(config)))
    return {str(key): value for key, value in tree.items()}


def fingerprint(tree: Any) -> str:
    """Return a short hash of plain data."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def _override(tree: Any, override: str, problems: list[str]) -> None:
    path, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", path):
        given = override if re.fullmatch(r"[\w.]{1,80}", override) else shown(override)
        problems.append(f"--set {given}: write it as section.key=value")
        return
    try:
        value = parse_yaml(text)
    except ValueError as error:
        problems.append(f"--set {path}: the value {shown(text)} is not YAML; quote it ({error})")
        return
    *parents, last = path.split(".")
    at: Any = tree
    try:
        for part in parents:
            if isinstance(at, list):
                at = at[_place(part)]
            else:
                at = at.setdefault(part, {})
        at[_place(last) if isinstance(at, list) else last] = value
    except (LookupError, ValueError, TypeError, AttributeError):
        problems.append(f"--set {path}: no such key in this configuration; list items are numbered from 0")


def _place(text: str) -> int:
    """Parse a list item's number. Raises ValueError for anything else, including -1."""
    if not text.isdigit():
        raise ValueError(text)
    return int(text)


def _build(cls: Any, tree: Any, where: str, problems: list[str]) -> Any:
    """Build an instance of dataclass ``cls`` from a mapping; add what is wrong to ``problems``.

    A wrong value is replaced by its default so that the rest can still be checked. If a wrong value has no default,
    returns ``_WRONG``.
    """
    if not isinstance(tree, dict):
        problems.append(f"{where or 'the file'}: expected a mapping of keys, found {_seen(tree)}")
        return _WRONG
    types_of = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in tree:
        if key not in fields:
            path = _join(where, key if key.isidentifier() else shown(key))
            near = difflib.get_close_matches(key[:200], list(fields), 1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(fields)}"
            problems.append(f"{path}: unknown key; {REPLACED.get(path, hint)}")
    values, wrong = dict[str, Any](), set[str]()
    for name, spec in fields.items():
        before = len(problems)
        if name in tree:
            values[name] = _value(types_of[name], tree[name], _join(where, name), problems)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            problems.append(f"{_join(where, name)}: missing; it has no default")
            values[name] = _WRONG
        if len(problems) > before:
            wrong.add(name)
    values = {name: value for name, value in values.items() if value is not _WRONG}
    if any(f.default is f.default_factory is dataclasses.MISSING and f.name not in values for f in fields.values()):
        return _WRONG
    built = cls(**values)
    problems += [_join(where, problem) for problem in built.problems() if not any(name in problem for name in wrong)]
    return built


def _value(kind: Any, value: Any, where: str, problems: list[str], words: Sequence[str] = ()) -> Any:
    """Convert ``value`` to ``kind``: a dataclass, a tuple of them, a Literal, an optional or a plain scalar.

    ``words``: what it may be as well, for the message.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where, problems)
    if origin is tuple:
        if not isinstance(value, list):
            problems.append(f"{where}: expected a list, found {_seen(value)}")
            return _WRONG
        if len(value) > MOST_ITEMS:
            problems.append(f"{where} has {len(value):,} items: must be {MOST_ITEMS:,} at most")
            return _WRONG
        found = tuple(_value(arguments[0], v, f"{where}.{i}", problems) for i, v in enumerate(value))
        return _WRONG if _WRONG in found else found
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        words = [word for a in arguments if get_origin(a) is Literal for word in get_args(a)]
        if isinstance(value, str) and value in words:
            return value
        kind = next(a for a in arguments if a is not type(None) and get_origin(a) is not Literal)
        return _value(kind, value, where, problems, words)
    if origin is Literal:
        if not any(value == a and type(value) is type(a) for a in arguments):  # True == 1, but is not a ZeRO stage
            choices = ", ".join(str(a) for a in arguments)
            problems.append(f"{where}: {shown(value)} is not one of {choices}")
            return _WRONG
        return value
    return _scalar(kind, value, where, problems, words)


def _scalar(kind: Any, value: Any, where: str, problems: list[str], words: Sequence[str]) -> Any:
    if kind is float:
        # YAML 1.1 reads 1e-4 as text, but users mean a number
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                number = float(value)
            except (ValueError, OverflowError):
                number = nan
            if isfinite(number):
                return number
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        if kind is not str or (len(value) <= LONGEST_TEXT and not _UNPRINTABLE.search(value)):
            return value
        limit = f"must have {LONGEST_TEXT:,} characters at most, and no line ends or control characters"
        problems.append(f"{where} is {shown(value)}: {limit}")
        return _WRONG
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    problems.append(f"{where}: expected {' or '.join([names[kind], *words])}, found {_seen(value)}")
    return _WRONG


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _seen(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {shown(value)}"
