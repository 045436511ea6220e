"""Writes and reads BERT as a Hugging Face folder: config.json, model.safetensors and the tokenizer's files.

A pre-LN BERT is transformers' MegatronBert.

``write_folder`` can have transformers verify the result, on random batches. ``read_folder`` takes any BERT that
Lambert can compute, also one without some of the heads.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.atomic import sync
from data_prep.errors import DataError
from data_prep.json_text import read_json
from data_prep.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer
from trainer.checkpoint.leftovers import drafts, remove, temporary
from trainer.convert.hugging_face import (
    MODEL_TYPES,
    class_name,
    difference,
    from_hugging_face,
    to_hugging_face,
    unused_names,
)
from trainer.convert.proof import check_tokenizer, config_facts, require_equal
from trainer.errors import TrainerError, shortage
from trainer.model.batch import MicroBatch
from trainer.model.bert import Bert, ModelConfig

LOGIT_TOLERANCE = 1e-5  # largest allowed difference of fp32 logits, as a share of the largest logit
_ACTIVATIONS = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}
_SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings"),
    *("vocab_size", "type_vocab_size"),
)
_REALS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps", "initializer_range")
_IMPORTED_ACTIVATIONS = {"gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}


@dataclass(frozen=True)
class Parity:
    """The largest difference from transformers' logits, as a share of the largest logit."""

    mlm: float
    nsp: float


def write_folder(
    weights: dict[str, Tensor],
    model: ModelConfig,
    tokenizer_folder: Path,
    out: Path,
    proven: bool = False,
    finish: Callable[[Path], None] = lambda folder: None,
    tokenizer_sha256: str | None = None,
) -> Parity | None:
    """Write an export to ``out`` atomically. If ``proven``, run ``check`` first and return its result.

    ``finish`` receives the folder before it gets its final name, to add files. ``tokenizer_sha256`` is stored with the
    weights, so that readers of the folder can verify its tokenizer. Raises TrainerError if ``out`` exists and is not an
    empty folder, if the tokenizer's files are missing or have another vocabulary size, if a weight does not fit the
    model, or if ``check`` or ``finish`` raises it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainerError(f"{out} already exists; name a folder that does not exist or is empty")
    tokenizer = _tokenizer(tokenizer_folder, model)
    exported = to_hugging_face(weights, model, tokenizer.fillers)
    tensors = {name: t.detach().float().cpu().contiguous() for name, t in exported.items()}
    with becoming(out) as temporary:
        save_file(tensors, temporary / "model.safetensors", metadata=metadata_of(tokenizer_sha256))
        (temporary / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
        (temporary / "config.json").write_text(json.dumps(config_of(model, tokenizer.specials.pad), indent=2) + "\n")
        tokenizer.save(temporary)
        limit_length(temporary, model)
        finish(temporary)
        parity = check(temporary, weights, model, tokenizer) if proven else None
    return parity


def metadata_of(tokenizer_sha256: str | None) -> dict[str, str]:
    """The metadata of model.safetensors: the format that `transformers` requires, and the tokenizer's sha256."""
    return {"format": "pt"} | ({} if tokenizer_sha256 is None else {"tokenizer": tokenizer_sha256})


@contextmanager
def becoming(out: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to ``out`` if the block succeeds, and removed if it fails."""
    for left in drafts(out.parent, re.escape(out.name)):  # from a killed process; failing to remove them is harmless
        remove(left)
    draft = temporary(out)
    try:
        draft.mkdir(parents=True)
        yield draft
        for path in (*draft.iterdir(), draft):
            sync(path)
        draft.replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync(out.parent)


def limit_length(folder: Path, model: ModelConfig) -> None:
    """Set model_max_length in tokenizer_config.json to the model's number of positions."""
    settings, limit = folder / "tokenizer_config.json", {"model_max_length": model.max_positions}
    settings.write_text(json.dumps(read_json(settings) | limit, indent=2) + "\n", "utf-8")


def read_folder(folder: Path) -> tuple[dict[str, Tensor], ModelConfig, list[str]]:
    """Read a Hugging Face folder: Bert's ``state_dict``, without heads that the folder lacks; the model; unused names.

    Raises TrainerError if the folder is not a BERT, or a BERT that Lambert cannot compute.
    """
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        if shortage(error):
            raise
        raise TrainerError(f"{folder / 'config.json'} cannot be read: {error}; download or export it again") from error
    if not isinstance(config, dict):
        raise TrainerError(f"{folder / 'config.json'} is not a JSON object; is this the folder of a BERT?")
    model = _model(config, folder)
    tensors = _load_tensors(folder)
    try:
        weights = from_hugging_face(tensors, model)
    except TrainerError as error:
        raise TrainerError(f"{folder}: {error}") from error
    return weights, model, unused_names(tensors, model)


def config_of(model: ModelConfig, pad: int) -> dict[str, Any]:
    """The content of config.json for a model of this shape with both heads. ``pad``: the id of [PAD]."""
    return {
        "architectures": [class_name("BertForPreTraining", model)],
        "model_type": MODEL_TYPES[model.layer_norm],
        "attention_probs_dropout_prob": model.attention_dropout,
        "dtype": "float32",
        "hidden_act": _ACTIVATIONS[model.gelu],
        "hidden_dropout_prob": model.dropout,
        "hidden_size": model.hidden,
        "initializer_range": model.initializer_range,
        "intermediate_size": model.intermediate,
        "layer_norm_eps": model.layer_norm_eps,
        "max_position_embeddings": model.max_positions,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "pad_token_id": pad,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "type_vocab_size": model.segments,
        "vocab_size": model.vocab_size,
    }


def _model(config: dict[str, Any], folder: Path) -> ModelConfig:
    kind = config.get("model_type", "bert")
    if kind not in MODEL_TYPES.values():
        raise TrainerError(f"{folder}: model_type is {kind!r}; Lambert supports only {', '.join(MODEL_TYPES.values())}")
    fixed = {"position_embedding_type": "absolute", "is_decoder": False}
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise TrainerError(f"{folder}: {name} is {config[name]!r}; Lambert supports only {value!r}")
    activation = config.get("hidden_act", "gelu")
    if activation not in _IMPORTED_ACTIVATIONS:
        known = ", ".join(_IMPORTED_ACTIVATIONS)
        raise TrainerError(f"{folder}: hidden_act is {activation!r}; Lambert supports only {known}")
    for names, kinds, what in ((_SIZES, (int,), "whole number"), (_REALS, (int, float), "number")):
        if wrong := [name for name in names if type(config.get(name, 0)) not in kinds]:
            name, value = wrong[0], config[wrong[0]]
            raise TrainerError(f"{folder / 'config.json'}: {name} is {value!r}; it must be a {what}")
    try:
        model = ModelConfig(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            intermediate=config["intermediate_size"],
            max_positions=config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            segments=config["type_vocab_size"],
            dropout=config.get("hidden_dropout_prob", 0.1),
            attention_dropout=config.get("attention_probs_dropout_prob", 0.1),
            layer_norm_eps=config.get("layer_norm_eps", 1e-12),
            layer_norm="before" if kind == MODEL_TYPES["before"] else "after",
            gelu=_IMPORTED_ACTIVATIONS[activation],
            initializer_range=config.get("initializer_range", 0.02),
        )
    except KeyError as error:
        raise TrainerError(f"{folder / 'config.json'} lacks {error}; is this the folder of a BERT?") from error
    if problems := model.problems():
        raise TrainerError(f"{folder / 'config.json'}: {'; '.join(problems)}")
    return model


def _load_tensors(folder: Path) -> dict[str, Tensor]:
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    path = safe if safe.is_file() else pickled
    if not path.is_file():
        raise TrainerError(f"{folder} has neither {safe.name} nor {pickled.name}; is this the folder of a BERT?")
    tensors: dict[str, Tensor]
    try:
        tensors = load_file(safe) if path == safe else torch.load(pickled, "cpu", weights_only=True)
        if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise ValueError("it contains more than tensors")
    except (UnpicklingError, EOFError, AttributeError, LookupError):  # their texts advise running the file's code
        raise TrainerError(f"{path} cannot be read: not a plain weights file; download or export it again") from None
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        if shortage(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TrainerError(f"{path} cannot be read: {reason}; download or export it again") from error
    return tensors


def _tokenizer(folder: Path, model: ModelConfig) -> Tokenizer:
    for name in TOKENIZER_FILES:
        if not (folder / name).is_file():
            raise TrainerError(f"{folder} lacks {name}; name the shards' tokenizer folder")
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        raise TrainerError(str(error)) from None
    if tokenizer.vocab_size != model.vocab_size:
        raise TrainerError(
            f"{folder} has {tokenizer.vocab_size} tokens, but the model has {model.vocab_size}; name the tokenizer "
            "that the model was trained with"
        )
    return tokenizer


def check(folder: Path, weights: dict[str, Tensor], model: ModelConfig, tokenizer: Tokenizer) -> Parity:
    """Compare the model that transformers loads from ``folder`` with ours of ``weights``, on random batches in fp32.

    Ours runs unpadded. Raises TrainerError for a missing or unexpected name, a setting or token that transformers reads
    differently, or a difference above LOGIT_TOLERANCE.
    """
    kind = class_name("BertForPreTraining", model)
    theirs = load_transformers(folder, kind)
    facts = config_facts(folder, theirs, kind, model, tokenizer.specials.pad)
    table = theirs.bert.embeddings.word_embeddings.weight
    facts["tie_word_embeddings"] = (theirs.cls.predictions.decoder.weight is table, True)
    require_equal(folder / "config.json", facts)
    check_tokenizer(folder, tokenizer, model)
    ours = Bert(model, fillers=tokenizer.fillers)
    ours.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    worst = Parity(0.0, 0.0)
    for seed in range(4):
        batch = random_batch(model, seed)
        with torch.no_grad():
            pairs = list(zip(ours.logits(batch), padded_logits(theirs, batch), strict=True))
        mlm, nsp = (difference(a, b) for a, b in pairs)
        worst = Parity(max(worst.mlm, mlm), max(worst.nsp, nsp))
    if not max(worst.mlm, worst.nsp) <= LOGIT_TOLERANCE:  # written so that NaN fails
        seen = f"MLM by {worst.mlm:.1e}, NSP by {worst.nsp:.1e}"
        raise TrainerError(f"{folder}: logits differ from Lambert's, {seen}; only {LOGIT_TOLERANCE} is allowed")
    return worst


def random_batch(model: ModelConfig, seed: int) -> MicroBatch:
    """A batch of eight random sequences, one of 3 tokens and one of maximum length, with 15 % of tokens masked."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> Tensor:  # (count,) int64 in [low, high)
        return torch.randint(low, high, (count,), generator=generator)

    longest = model.max_positions
    lengths = torch.cat([torch.tensor([longest, min(3, longest)]), draw(1, longest + 1, 6)])
    tokens = int(lengths.sum())
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    masked = torch.randperm(tokens, generator=generator)[: max(1, round(0.15 * tokens))].sort().values
    return MicroBatch(
        tokens=draw(0, model.vocab_size, tokens),
        segments=(positions >= longest // 2).long().clamp(max=model.segments - 1),
        positions=positions,
        cu_seqlens=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        max_seqlen=longest,
        samples=draw(0, 1 << 40, lengths.numel()),
        masked=masked,
        labels=draw(0, model.vocab_size, masked.numel()),
        is_next=draw(0, 2, lengths.numel()),
    )


def padded_logits(theirs: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Logits of transformers' class with both heads on the padded batch: MLM (P, V) at ``masked``, NSP (B, 2)."""
    lengths = batch.cu_seqlens.diff()
    present = torch.arange(batch.max_seqlen) < lengths[:, None]  # (B, S)
    tokens = torch.zeros(present.shape, dtype=torch.int64).masked_scatter(present, batch.tokens)
    segments = torch.zeros_like(tokens).masked_scatter(present, batch.segments)
    out = theirs(input_ids=tokens, attention_mask=present.long(), token_type_ids=segments)
    return out.prediction_logits[present][batch.masked], out.seq_relationship_logits


def load_transformers(folder: Path, kind: str = "BertForPreTraining") -> Any:
    """The folder's model as this transformers class, in fp32 and in evaluation mode.

    Raises TrainerError if a weight's name is missing or unexpected.
    """
    if not (folder / "config.json").is_file():  # transformers would look for a model of this name elsewhere
        raise TrainerError(f"{folder} has no config.json: name the folder of a Hugging Face model")
    import transformers
    from transformers.utils import logging as reports

    reports.disable_progress_bar()
    loaded: Any = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    model, info = loaded
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[fault]:
            raise TrainerError(f"{folder}: transformers finds {fault.replace('_', ' ')}: {sorted(info[fault])}")
    return model.eval()
