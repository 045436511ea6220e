"""Writes the model card of an export: README.md and a figure, only from what the run itself recorded.

The sources are the checkpoint's record, the run's metrics log, and the manifests of the shards if they are still
available and unchanged since the run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from data_prep.json_text import shown
from trainer.checkpoint.average import steps
from trainer.checkpoint.reading import Checkpoint, model_of
from trainer.checkpoint.trained_tokenizer import manifests_of, recorded
from trainer.engine.schedule import Phase
from trainer.errors import TrainerError
from trainer.model.bert import ModelConfig
from trainer.monitor.metrics_log import METRICS_LOG, TIME_STATES, Record, lines

PICTURE = "learning.png"
# keys of a phase that are on the card if they differ from their defaults
_PHASE_KEYS = {key: getattr(Phase, key) for key in ("masks", "spread_positions", "mlm_weight", "nsp_weight")}
_SOURCES = 20  # how many corpus files are listed by name
_PAIRS = {"nsp": "next-sentence prediction", "sop": "sentence-order prediction"}
_UNSTATED = "# state it before you publish this model: python -m trainer.export --license, or here"


@dataclass
class Logged:
    """The contents of a metrics log up to a step."""

    heldout: dict[int, Record] = field(default_factory=dict)  # number of a phase: its last evaluation
    attempts: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # ranks and seconds of each attempt
    facts: dict[str, str] = field(default_factory=dict)  # the start record of the last attempt
    times: list[float] = field(default_factory=list)  # of the first and the last line

    def take(self, record: Record, step: int, ends: Sequence[int]) -> None:
        """Take the next record. Evaluations count up to ``step``; ``ends``: the steps at which the phases end."""
        if "time" in record:
            self.times = [*self.times[:1], float(record["time"])]
        match record.get("event"):
            case "attempt":
                self.attempts.append((1, {}))
            case "start" if self.attempts:
                self.facts = {key: str(value) for key, value in record.items()}
                self.attempts[-1] = (int(record["ranks"]), {})
            case "heldout" if record["step"] <= step:
                phase = record.get("phase", bisect_left(ends, record["step"]))  # absent in an old metrics log
                self.heldout[min(phase, len(ends) - 1)] = record
        if "spent" in record and self.attempts:
            self.attempts[-1] = (self.attempts[-1][0], record["spent"])


def write_card(folder: Path, averaged: Sequence[Checkpoint], licence: str | None, language: str | None) -> None:
    """Write the card of the checkpoints' average into ``folder``, with learning curves if there is a metrics log.

    The newest checkpoint comes first. A single one is its own average.
    """
    found = averaged[0]
    record, config = found.record, found.record["config"]
    said = read_metrics_log(found.folder.parent / METRICS_LOG, record["state"]["step"], config["phases"])
    sections = [
        _front(licence, language),
        _head(averaged, model_of(found)),
        "## Data\n\n" + "\n\n".join(_data(record)),
        "## Recipe\n\n" + _recipe(record),
    ]
    if said is not None:
        _draw(found.folder.parent, folder / PICTURE)
        sections.append(f"## Learning curves\n\n![losses and accuracies, training and held out]({PICTURE})")
        if said.heldout:
            sections.append("## Held-out metrics\n\n" + _heldout(said, config["phases"], averaged))
        sections.append("## Hardware and time\n\n" + _hardware(said))
        sections.append("## Versions\n\n" + _versions(said.facts, record))
    sections.append(
        "## Limits\n\n" + _limits(said if len(averaged) == 1 else None)
    )  # the metrics are not those of a mean
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def read_metrics_log(path: Path, step: int, phases: Sequence[dict[str, Any]]) -> Logged | None:
    """The contents of a metrics log up to ``step``; None if it is missing, too old, or contains no step.

    Raises TrainerError if the file is not a metrics log.
    """
    if not path.is_file():
        return None
    ends, said, stepped = list(accumulate(phase["steps"] for phase in phases)), Logged(), False
    try:
        for record in lines(path):
            said.take(record, step, ends)
            stepped = stepped or record.get("event") == "step"
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise TrainerError(f"{path} contains an invalid record ({shown(error)}): move it away") from None
    return said if stepped and said.facts and said.times else None


def _front(licence: str | None, language: str | None) -> str:
    stated = {name: text for name, text in (("language", language), ("license", licence)) if text}
    rows = [yaml.safe_dump(stated, allow_unicode=True, width=math.inf).rstrip("\n")] if stated else []
    rows += [] if licence else [f"license: {_UNSTATED}"]
    return "\n".join(["---", *rows, "library_name: transformers", "pipeline_tag: fill-mask", "tags:", "- bert", "---"])


def _head(averaged: Sequence[Checkpoint], model: ModelConfig) -> str:
    found = averaged[0]
    record, name = found.record, found.record["config"]["run"]["name"]
    padding = (model.vocab_rows - model.vocab_size) * (model.hidden + 1)
    parameters = sum(shape.numel() for shape in found.shapes.values()) - padding
    manifests = [manifest for _, manifest in manifests_of(record)]
    known = {_PAIRS.get(manifest.settings.pairs, "") for manifest in manifests if manifest is not None} - {""}
    tasks = " on " + " and ".join(["masked language modelling", *sorted(known)]) if None not in manifests else ""
    state, origin = record["state"], record["config"]["run"]["weights"]
    begun = "random weights" if origin is None else f"the weights {Path(origin).name}"
    return f"""# {name}

A {shape_in_words(model)}, {model.heads} heads and a \
vocabulary of {model.vocab_size:,}: {parameters:,} parameters. Pre-trained{tasks}, from {begun}; \
this is {steps(averaged)}, after {state["samples"]:,} sequences and {state["tokens"]:,} tokens.

```python
from transformers import pipeline

pipeline("fill-mask", model="…")("A text with a [MASK] in it.")
```"""


def shape_in_words(model: ModelConfig) -> str:
    """The model's kind, layers and width, as "BERT of 12 layers, hidden size 768"."""
    kind = "pre-LN BERT" if model.layer_norm == "before" else "BERT"
    return f"{kind} of {model.layers} layer{'s' * (model.layers > 1)}, hidden size {model.hidden}"


# ---- data ----------------------------------------------------------------------------------------------------


def _data(record: dict[str, Any]) -> Iterator[str]:
    for phase, manifest in manifests_of(record):
        name = f"**{phase['name']}**, sequences of up to {phase['sequence_length']} tokens: "
        if manifest is None:
            known = recorded(record)
            note = "" if known is None else f" Their tokenizer has sha256 `{known}`."
            yield (
                f"{name}shards whose manifest has sha256 `{phase['shards']}`; it was not available for this card.{note}"
            )
            continue
        corpus, settings, counts = manifest.corpus, manifest.settings, manifest.counts
        part = f"{corpus.documents - corpus.duplicates - corpus.other_part:,} of {corpus.documents:,} documents"
        files = corpus.files[:_SOURCES]
        rows = [
            f"{name}{counts.samples:,} samples with {counts.tokens:,} tokens, made from {part} "
            f"({corpus.tokens:,} tokens), {settings.duplicates} time(s).",
            *(f"- `{file.name}`: {file.tokens:,} tokens, sha256 `{file.sha256}`" for file in files),
        ]
        if len(corpus.files) > _SOURCES:
            rows.append(f"- and {len(corpus.files) - _SOURCES:,} more files")
        share, tokenizer = f"{settings.masked_share:.0%} of the tokens", manifest.tokenizer
        rows += [
            f"- masks: {share}, by {settings.masking}, {settings.max_predictions} at most, {phase['masks']}; "
            f"pairs: {settings.pairs}; held out: {settings.held_out_share:.1%} of the documents",
            f"- tokenizer: {tokenizer.vocab_size:,} pieces, sha256 `{tokenizer.sha256}`; manifest: `{phase['shards']}`",
        ]
        yield rows[0] + "\n\n" + "\n".join(rows[1:])


# ---- recipe and metrics --------------------------------------------------------------------------------------


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with a header row."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows))


def _recipe(record: dict[str, Any]) -> str:
    config, state = record["config"], record["state"]
    rows, notes = [], []
    for number, (phase, known) in enumerate(zip(config["phases"], record["identity"]["phases"], strict=False)):
        if number > state["phase"]:
            break
        minutes, warmup = phase.get("minutes"), f"{phase['warmup_steps']:,}"
        taken = phase["steps"] if number < state["phase"] else state["phase_step"]
        steps = f"{taken:,} of {phase['steps']:,}"
        if minutes is not None:
            steps, warmup = f"{minutes:g} minutes", f"{phase['warmup_minutes']:g} minutes"
        decay = f"{phase['decay']}, power {phase['power']:g}" if phase["decay"] == "polynomial" else phase["decay"]
        rate = (f"{phase['learning_rate']:.4g}", warmup, decay)
        batches = [*(stage["global_batch"] for stage in phase.get("batch_warmup", ())), known["global_batch"]]
        batch = " → ".join(map(str, batches))
        rows.append((phase["name"], phase["sequence_length"], steps, batch, *rate))
        if special := [f"{k} {phase[k]}" for k, usual in _PHASE_KEYS.items() if phase.get(k, usual) != usual]:
            notes.append(f"- phase {phase['name']}: {', '.join(special)}\n")
    optimizer = ", ".join(f"{k} {v}" for k, v in config["optimizer"].items() if k != "name" and v is not None)
    model = config["model"]
    prior = f"; decoder prior {model.get('decoder_prior', 'zero')}" if config["run"]["weights"] is None else ""
    return "\n\n".join(
        [
            markdown_table(("phase", "length", "steps", "batch", "peak rate", "warm-up steps", "decay"), rows),
            f"{''.join(notes)}- optimizer: {config['optimizer']['name']} ({optimizer})\n"
            f"- dropout {model['dropout']:g}, attention dropout {model['attention_dropout']:g}; GELU "
            f"{'exact' if model['gelu'] == 'none' else 'approximated by tanh'}; LayerNorm "
            f"{model.get('layer_norm', 'after')} each sublayer{prior}\n"
            f"- precision {record['precision']}, ZeRO stage {config['engine']['zero_stage']}, seed "
            f"{config['run']['seed']}; {state['skipped']:,} steps skipped, {state['restarts']:,} restarts",
        ]
    )


def _draw(run: Path, path: Path) -> None:
    from matplotlib import rc_context

    from trainer.monitor.history import read_history
    from trainer.monitor.panels import PANEL_ROWS, STYLE
    from trainer.monitor.summary import draw

    with rc_context(STYLE):
        draw(read_history(run), "", rows_wanted=PANEL_ROWS[:1]).savefig(path, dpi=80, format="png")


def _heldout(said: Logged, phases: Sequence[dict[str, Any]], averaged: Sequence[Checkpoint]) -> str:
    names = [f"{task}_{kind}" for task in ("mlm", "mask", "nsp") for kind in ("loss", "accuracy")]
    shown = [name for name in names if any(name in record for record in said.heldout.values())]
    rows = [
        (
            phases[number]["name"],
            f"{record['step']:,}",
            _day(record["time"]),
            *(_metric(record, name) for name in shown),
        )
        for number, record in sorted(said.heldout.items())
    ]
    head = ("phase", "step", "date", *(name.replace("_", " ") for name in shown))
    note = "Losses are in nats. `mlm` covers all targets, `mask` only those replaced by [MASK]. Masks are static."
    last = max(record["step"] for record in said.heldout.values())
    if len(averaged) > 1:
        note += " They were measured with the weights of single steps, not with their mean."
    elif last != (step := averaged[0].record["state"]["step"]):
        note += f" These weights are from step {step:,}."
    return f"{markdown_table(head, rows)}\n\n{note}"


def _metric(record: Record, name: str) -> str:
    value = record.get(name)
    return "" if value is None else f"{value:.1%}" if name.endswith("accuracy") else f"{value:.4f}"


def _day(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d")


def _hardware(said: Logged) -> str:
    facts, hours = said.facts, dict.fromkeys(TIME_STATES, 0.0)
    for ranks, spent in said.attempts:
        for on, seconds in spent.items():
            hours[on] = hours.get(on, 0.0) + ranks * seconds / 3600
    unit = "GPU-hours" if facts.get("device") == "cuda" else "CPU-rank-hours"
    device = facts.get("hardware", facts.get("device", ""))
    split = ", ".join(f"{on} {_hours(value)}" for on, value in hours.items() if value)
    return (
        f"{facts['ranks']} rank(s) on {device} in the last of {len(said.attempts)} attempt(s), from "
        f"{_day(said.times[0])} to {_day(said.times[-1])}: {_hours(math.fsum(hours.values()))} {unit} over all "
        f"attempts ({split})."
    )


def _hours(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _versions(facts: dict[str, str], record: dict[str, Any]) -> str:
    names = ("torch", "deepspeed", "kernels", "apex")
    known = [f"{name} {facts[name]}" for name in names if facts.get(name, "absent") != "absent"]
    manifests = [manifest for _, manifest in manifests_of(record) if manifest is not None]
    known += sorted({f"{name} {getattr(m.settings, name)}" for m in manifests for name in ("tokenizers", "sentencex")})
    return "- " + "\n- ".join([f"configuration {facts['config']}", *known])


def _limits(said: Logged | None) -> str:
    known = "the held-out metrics above" if said is not None and said.heldout else "what is stated above"
    return (
        f"Nothing is known about this model except {known}. It has not been evaluated on any task, on text unlike "
        "its training data, or for bias, toxicity, or memorized private text, which a corpus may contain. It fills in "
        "masked words and is meant to be fine-tuned; it is not a source of facts."
    )
