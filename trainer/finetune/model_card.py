"""The model card (README.md) of a fine-tuned model. It states only what the command itself did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.convert.hugging_face import class_name
from trainer.convert.model_card import markdown_table, shape_in_words
from trainer.finetune.result import SettingSummary
from trainer.finetune.run import FineTuningJob
from trainer.finetune.sweep_report import CLASSES_SHOWN, table
from trainer.model.bert import ModelConfig

PIPELINES = {  # transformers' pipeline for each class; multiple choice has none
    "BertForSequenceClassification": "text-classification",
    "BertForTokenClassification": "token-classification",
    "BertForQuestionAnswering": "question-answering",
}


def card(job: FineTuningJob, rows: list[SettingSummary], tree: Mapping[str, Any], machine: str) -> str:
    """Write the card's text; it names files without their folders.

    ``tree``: the contents of results.json; ``machine``: the hardware it ran on, in words.
    """
    options, base, runs = job.options, Path(job.options.model).resolve().name, tree["runs"]
    seconds = sum(run["seconds"] for run in runs)
    sections = [
        _front(job.task.export_class),
        f"# {base}, fine-tuned for {options.task}",
        _head(job, base),
        "## Data\n\n" + "\n".join(_data(job)),
        "## Recipe\n\n" + _recipe(job, rows, tree),
        "## Metrics\n\n" + _metrics(job, tree),
        f"## Hardware and time\n\n{machine}: {seconds:,.0f} s of training and evaluation in {len(runs)} run(s).",
        "## Limits\n\nIt was evaluated only on the files above: not on other kinds of text, and not for bias, toxicity "
        "or private text, which its data or its pre-training data may contain.",
    ]
    return "\n\n".join(sections) + "\n"


def _front(export_class: str) -> str:
    lines = ["---", "license: # state it before you publish this model", "library_name: transformers"]
    if export_class in PIPELINES:
        lines.append(f"pipeline_tag: {PIPELINES[export_class]}")
    return "\n".join([*lines, "tags:", "- bert", "---"])


def _head(job: FineTuningJob, base: str) -> str:
    model, task = job.model, job.task
    place = "[CLS], through the pooler" if task.pooled else "the tokens"
    head = "a hidden layer and an output" if task.hidden_head else "a linear head"
    labels = f" Labels: {', '.join(f'`{label}`' for label in task.labels)}." if task.labels else ""
    opening = (
        f"A {shape_in_words(model)} and {model.heads} heads, with {head} on {place}, fine-tuned from `{base}` (sha256 "
        f"of its weights and vocabulary `{job.identity['model']}`).{labels}"
    )
    if task.hidden_head:
        return opening + "\n\ntransformers has no class for this head: the weights keep Lambert's own names."
    pairs = 1 in job.dev.units[0][0].segments
    return f"{opening}\n\n```python\n{_code(task.export_class, model, pairs)}\n```"


def _code(export_class: str, model: ModelConfig, pairs: bool) -> str:
    if export_class not in PIPELINES:
        name = class_name(export_class, model)
        return f'from transformers import {name}\n\n{name}.from_pretrained("…")'
    given = {
        "question-answering": '(question="…", context="…")',
        "text-classification": '({"text": "…", "text_pair": "…"})' if pairs else '("…")',
        "token-classification": '("…")',
    }[PIPELINES[export_class]]
    return f'from transformers import pipeline\n\npipeline("{PIPELINES[export_class]}", model="…"){given}'


def _data(job: FineTuningJob) -> Iterator[str]:
    options = job.options
    train, dev = (job.identity[part][0] for part in ("train", "dev"))  # their sha256; the names say which rows
    yield f"- training data: `{options.wish.train.name}`, {len(job.training):,} examples, sha256 `{train}`"
    if job.task.labels:
        counts = (f"`{label}` ({number:,.10g})" for label, number in list(job.training.classes.items())[:CLASSES_SHOWN])
        yield f"- classes: {', '.join(counts)}"
    yield f"- dev data, used to evaluate and to choose: `{options.dev.name}`, {len(job.dev.table):,}, sha256 `{dev}`"
    yield from (f"- also scored at the end: `{part.path.name}`, {len(part.table):,}" for part in job.also)


def _recipe(job: FineTuningJob, rows: list[SettingSummary], tree: Mapping[str, Any]) -> str:
    recipe, chosen = job.options.recipe, tree["chosen"]
    clipping = f"clipped to a norm of {recipe.clipping:g}" if recipe.clipping else "not clipped"
    return (
        f"- {chosen['epochs']:g} epochs in batches of {chosen['batch']}, AdamW with a peak rate of {chosen['rate']:g}, "
        f"warm-up over {recipe.warmup:.0%} of the steps and linear decay, weight decay {recipe.weight_decay:g} "
        f"(matrices only), gradients {clipping}\n"
        f"- at most {recipe.length} tokens, dropout {job.model.dropout:g}, attention dropout "
        f"{job.model.attention_dropout:g}, seed {chosen['seed']}\n"
        f"- chosen out of {len(tree['runs'])} run(s): the best seed of the setting with the best median:\n\n"
        f"```\n{table(rows, job.task.measure)}\n```"
    )


def _metrics(job: FineTuningJob, tree: Mapping[str, Any]) -> str:
    options = job.options
    known = [(options.dev, tree["chosen"]["dev"])]
    known += [(Path(path), metrics) for path, metrics in tree.get("also", {}).items()]
    if "test" in tree and options.test is not None:
        known.append((options.test, tree["test"]))
    names, odd = list(tree["chosen"]["dev"]), bool(tree["chosen"]["how"] == "degenerate")
    lines = [(file.name, *(f"{metrics[name]:.4f}" for name in names)) for file, metrics in known]
    return (
        markdown_table(("file", *names), lines)
        + odd * "\n\nIt gives the same answer for every input: it has learned nothing."
    )
