"""Writes the fine-tuned model as a Hugging Face model of the task's own class, compared with the trained one.

A head with a hidden layer has no class in transformers; its weights keep Lambert's own names.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data_prep.tokenizer import Tokenizer
from trainer.checkpoint.leftovers import move_aside, remove
from trainer.console import Tell, warn
from trainer.convert.folder import (
    LOGIT_TOLERANCE,
    becoming,
    config_of,
    limit_length,
    load_transformers,
    metadata_of,
    random_batch,
)
from trainer.convert.hugging_face import class_name, to_hugging_face
from trainer.convert.proof import Facts, check_tokenizer, config_facts, require_equal
from trainer.errors import TrainerError
from trainer.finetune.task import Task, TaskBatch, TaskModel
from trainer.model.batch import Rows
from trainer.model.bert import Bert, ModelConfig

HEADS = {  # transformers' classes, and what each calls its head; those of a pre-LN model have the same heads
    "BertForSequenceClassification": "classifier",
    "BertForTokenClassification": "classifier",
    "BertForMultipleChoice": "classifier",
    "BertForQuestionAnswering": "qa_outputs",
}


def write_model(
    out: Path,
    weights: dict[str, Tensor],
    model: ModelConfig,
    task: Task,
    tokenizer: Tokenizer,
    tell: Tell,
    card: str = "",
) -> None:
    """Write the folder atomically, replacing an older one; ``tell`` receives what was verified.

    ``card``: the text of README.md.

    Raises TrainerError if transformers does not find every name, or gives different answers.
    """
    exports = task.export_class in HEADS and not task.hidden_head
    tensors = to_transformers(weights, model, task) if exports else weights
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    known = metadata_of(tokenizer.sha256())
    with becoming(out) as draft:
        file = draft / ("model.safetensors" if exports else "weights.safetensors")
        save_file(tensors, file, metadata=known if exports else known | {"model": json.dumps(asdict(model))})
        file.chmod(0o644)  # safetensors makes it readable for its owner only
        tokenizer.save(draft)
        if card:
            (draft / "README.md").write_text(card, encoding="utf-8")
        if exports:
            limit_length(draft, model)
            written = json.dumps(config(model, task, tokenizer.specials.pad), indent=2)
            (draft / "config.json").write_text(written + "\n", "utf-8")
            said = f"{out}: {class_name(task.export_class, model)}, {prove(draft, weights, model, task, tokenizer)}"
        else:
            said = f"{out}: transformers has no class for this head: the weights keep Lambert's own names"
        older = move_aside(out)
    if older is not None and (reason := remove(older)):
        warn(f"left behind: {reason}", tell)
    tell(said)


def to_transformers(weights: dict[str, Tensor], model: ModelConfig, task: Task) -> dict[str, Tensor]:
    """Rename the weights of a ``TaskModel`` as the task's transformers class has them."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Bert(model).state_dict().items()}
    whole = {name: weights[name] if name in weights else torch.zeros(shape) for name, shape in shapes.items()}
    renamed = to_hugging_face(whole, model)
    kept = {n: t for n, t in renamed.items() if n.startswith("bert.") and (task.pooled or ".pooler." not in n)}
    head = HEADS[task.export_class]
    return kept | {f"{head}.weight": weights["head_weight"], f"{head}.bias": weights["head_bias"]}


def config(model: ModelConfig, task: Task, pad: int) -> dict[str, Any]:
    """The contents of config.json in the exported folder; ``pad``: the id of [PAD]."""
    tree = {name: value for name, value in config_of(model, pad).items() if name != "tie_word_embeddings"}
    tree["architectures"] = [class_name(task.export_class, model)]
    labels = task.labels or tuple(f"LABEL_{number}" for number in range(task.outputs))
    if (
        task.export_class != "BertForQuestionAnswering"
    ):  # its two outputs are the first and the last place, without dropout
        if model.layer_norm == "after":  # MegatronBert has no such setting, and its heads always drop
            tree["classifier_dropout"] = None if task.drops else 0.0
        tree["id2label"] = {str(number): label for number, label in enumerate(labels)}
        tree["label2id"] = {label: number for number, label in enumerate(labels)}
    if task.export_class == "BertForSequenceClassification":
        tree["problem_type"] = "single_label_classification" if task.labels else "regression"
    return tree


# ---- proof, by transformers ------------------------------------------------------------------------------------


def prove(folder: Path, weights: dict[str, Tensor], model: ModelConfig, task: Task, tokenizer: Tokenizer) -> str:
    """Compare transformers' answers with ours on random texts, in fp32, and describe the largest difference.

    Raises TrainerError for a missing or unknown name, a setting or token that transformers reads differently, and
    answers that differ by more than LOGIT_TOLERANCE.
    """
    if importlib.util.find_spec("transformers") is None:
        return "not verified: transformers is not installed here"
    kind = class_name(task.export_class, model)
    theirs = load_transformers(folder, kind)
    facts = config_facts(folder, theirs, kind, model, tokenizer.specials.pad)
    require_equal(folder / "config.json", facts | _facts(theirs, model, task))
    check_tokenizer(folder, tokenizer, model)
    ours = TaskModel(model, task, 0)
    ours.load_state_dict({name: tensor.float().cpu() for name, tensor in weights.items()})
    ours.eval()
    worst = 0.0
    for seed in range(2):
        batch = _batch(random_batch(model, seed))
        with torch.no_grad():
            a, b = ours.answers(batch), _padded(theirs, batch, task)
        worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    if not worst <= LOGIT_TOLERANCE:  # written this way, NaN fails too
        raise TrainerError(
            f"{folder}: transformers' answers differ by {worst:.1e} of the largest; {LOGIT_TOLERANCE} is allowed"
        )
    return f"whose answers in transformers differ from ours by at most {worst:.1e} of the largest"


def _facts(theirs: Any, model: ModelConfig, task: Task) -> Facts:
    """The settings that the task adds to config.json, as read and as expected."""
    facts: Facts = {}
    if task.export_class != "BertForQuestionAnswering":
        names = task.labels or tuple(f"LABEL_{number}" for number in range(task.outputs))
        facts["id2label"] = (tuple(theirs.config.id2label.get(number) for number in range(task.outputs)), names)
        facts["label2id"] = (tuple(theirs.config.label2id.get(name) for name in names), tuple(range(task.outputs)))
        facts["classifier_dropout"] = (theirs.dropout.p, model.dropout if task.drops else 0.0)
    if task.export_class == "BertForSequenceClassification":
        wanted = "single_label_classification" if task.labels else "regression"
        facts["problem_type"] = (theirs.config.problem_type, wanted)
    return facts


def _batch(rows: Rows) -> TaskBatch:
    """A batch of random texts in which the head reads every token."""
    tensors = {name: getattr(rows, name) for name in Rows.__dataclass_fields__}
    return TaskBatch(**tensors, places=torch.arange(len(rows.tokens)), targets=torch.zeros(0))


def _padded(theirs: Any, batch: TaskBatch, task: Task) -> Tensor:
    """Run a transformers model on the padded batch; the rows are those of ``TaskModel.answers``."""
    present = torch.arange(batch.max_seqlen) < batch.cu_seqlens.diff()[:, None]  # (B, S)
    tokens = torch.zeros(present.shape, dtype=torch.int64).masked_scatter(present, batch.tokens)
    segments = torch.zeros_like(tokens).masked_scatter(present, batch.segments)
    inputs = {"input_ids": tokens, "attention_mask": present.long(), "token_type_ids": segments}
    if task.export_class == "BertForMultipleChoice":
        inputs = {name: tensor[:, None] for name, tensor in inputs.items()}  # (B, 1, S): each a record with one choice
    out = theirs(**inputs)
    if task.export_class == "BertForQuestionAnswering":
        return torch.stack([out.start_logits[present], out.end_logits[present]], 1)  # (T, 2)
    answers: Tensor = out.logits  # (B, outputs), or (B, S, outputs)
    return answers if task.pooled else answers[present]
