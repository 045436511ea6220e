"""Maps the weights of Hugging Face's BERT, or its pre-LN MegatronBert, to ours and back, by name and shape.

Our BERT packs query, key and value into one projection (3D, D), pads the vocabulary, and names parameters without
modules (``mlp_in_weight``). It has no separate tensor for the tied decoder; an export stores the table once, under the
token table's name, and transformers ties the decoder to it on loading. Pure functions.

Ours names a pre-LN encoder's LayerNorms by what precedes them, MegatronBert by what follows: our ``mlp_norm`` is the
next layer's ``attention.ln``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.errors import TrainerError
from trainer.model.bert import Bert, ModelConfig

# The decoder bias of pieces that only fill up the vocabulary: exact in fp32, fp16 and bf16, and its exp is 0.
SILENT = -8192.0
MODEL_TYPES = {"after": "bert", "before": "megatron-bert"}  # transformers' name of a model by its layer_norm
_NAMES = {
    "token_table": "bert.embeddings.word_embeddings.weight",
    "segment_table": "bert.embeddings.token_type_embeddings.weight",
    "position_table": "bert.embeddings.position_embeddings.weight",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "mlm": "cls.predictions.transform.dense",
    "mlm_norm": "cls.predictions.transform.LayerNorm",
    "decoder_bias": "cls.predictions.bias",
    "nsp": "cls.seq_relationship",
}
_LAYER_NAMES = {
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_in": "intermediate.dense",
    "mlp_out": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_ENCODER_NORMS = ("embedding_norm", "attention_norm", "mlp_norm")  # MegatronBert has other names for these
_HEADS = {"pooler": "pooler", "mlm": "MLM head", "decoder": "MLM head", "nsp": "NSP head"}
_PADDED = ("token_table", "decoder_bias")  # vocab_rows here, vocab_size there
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def class_name(kind: str, model: ModelConfig) -> str:
    """The transformers class for ``kind``, such as "BertForPreTraining": itself, or its MegatronBert counterpart."""
    return f"Megatron{kind}" if model.layer_norm == "before" else kind


def to_hugging_face(weights: dict[str, Tensor], model: ModelConfig, fillers: int = 0) -> dict[str, Tensor]:
    """Bert's ``state_dict`` under transformers' names, without the vocabulary's padding.

    The last ``fillers`` tokens get SILENT as their decoder bias, so their probability is zero there too. Raises
    TrainerError if a tensor is missing, unexpected, empty, or differs in shape from the model's.
    """
    _check_shapes(weights, model)
    out = {}
    for name, tensor in weights.items():
        targets = _hugging_face_names(name, model)
        parts = tensor.chunk(3) if len(targets) == 3 else (tensor,)  # (3D, ...) -> q, k, v of (D, ...)
        for target, part in zip(targets, parts, strict=True):
            out[target] = part[: model.vocab_size] if name in _PADDED else part
    if fillers:
        kept = weights["decoder_bias"][: model.vocab_size - fillers]
        out[_NAMES["decoder_bias"]] = torch.cat([kept, kept.new_full((fillers,), SILENT)])
    return out


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference between outputs, as a share of the largest; ``theirs`` may have extra filler columns.

    Silent outputs are left out, because they exceed all others. Infinite if only one of the two is silent.
    """
    count, silent = ours.shape[1], theirs <= SILENT / 2
    if not (torch.equal(silent[:, :count], ours <= SILENT / 2) and bool(silent[:, count:].all())):
        return math.inf
    heard, theirs = ~silent[:, :count], theirs[:, :count]
    return float((ours - theirs)[heard].abs().max() / theirs[heard].abs().max())


def from_hugging_face(tensors: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Bert's ``state_dict`` from the tensors of transformers' class with both heads or none, with zero padding rows.

    Missing heads are left out. Raises TrainerError if any other tensor is missing, a shape does not fit, or the decoder
    is not tied to the token table.
    """
    tensors = _modern_names(tensors)
    for name, partner in _TIED.items():
        if {name, partner} <= tensors.keys() and not torch.equal(tensors[name], tensors[partner]):
            raise TrainerError(f"{name} differs from {partner}; Lambert's BERT ties the two")
    out = {}
    for name, shape in _shapes(model).items():
        theirs = _hugging_face_names(name, model)
        sources = [tensors[source] for source in theirs if source in tensors]
        if sources:
            tensor = torch.cat(sources)
            if name in _PADDED and tensor.shape[0] == model.vocab_size:
                padding = tensor.new_zeros(model.vocab_rows - model.vocab_size, *tensor.shape[1:])
                tensor = torch.cat([tensor, padding])
            out[name] = tensor
        elif _head(name) is None:
            raise TrainerError(f"there is no tensor {theirs[0]}; is this the folder of a BERT?")
        if name in out and out[name].shape != shape:
            seen, fit = tuple(out[name].shape), tuple(shape)
            raise TrainerError(f"{theirs[0]}: {name} is {seen}, but the model's is {fit}")
    return out


def missing_heads(weights: dict[str, Tensor], model: ModelConfig) -> list[str]:
    """The heads missing from imported weights, by names for messages."""
    absent = [_head(name) for name in _shapes(model) if name not in weights]
    return list(dict.fromkeys(head for head in absent if head is not None))


def unused_names(tensors: dict[str, Tensor], model: ModelConfig) -> list[str]:
    """The names that ``from_hugging_face`` ignores, such as the heads of other tasks."""
    used = {target for name in _shapes(model) for target in _hugging_face_names(name, model)} | _TIED.keys()
    return sorted(n for n in _modern_names(tensors).keys() - used if not n.endswith("position_ids"))


def _hugging_face_names(name: str, model: ModelConfig) -> list[str]:
    """A parameter's name in Hugging Face's model, or three (query, key, value) for the packed projection."""
    if name in _NAMES:
        return [_NAMES[name]]
    prefix, names, number = "", _NAMES, "-1"
    if name.startswith("layers."):
        _, number, name = name.split(".")
        prefix, names = f"bert.encoder.layer.{number}.", _LAYER_NAMES
    stem, _, kind = name.rpartition("_")  # "mlp_in", "weight"
    if stem in _ENCODER_NORMS and model.layer_norm == "before":
        return [f"{_megatron_norm(stem, int(number), model)}.{kind}"]
    if stem == "qkv":
        return [f"{prefix}attention.self.{part}.{kind}" for part in ("query", "key", "value")]
    return [f"{prefix}{names[stem]}.{kind}"]


def _megatron_norm(stem: str, number: int, model: ModelConfig) -> str:
    """MegatronBert's name of a LayerNorm of layer ``number``, or of the embeddings' (-1)."""
    if stem == "attention_norm":
        return f"bert.encoder.layer.{number}.ln"
    return "bert.encoder.ln" if number + 1 == model.layers else f"bert.encoder.layer.{number + 1}.attention.ln"


def _modern_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under today's BertForPreTraining names: adds BertModel's prefix, and renames old gamma and beta."""
    prefix = "" if any(name.startswith("bert.") for name in tensors) else "bert."
    out = {}
    for name, tensor in tensors.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        out[prefix + name] = tensor
    return out


def _head(name: str) -> str | None:
    """The head that one of our parameters belongs to; None for the encoder."""
    return _HEADS.get(name.split("_")[0])


def _shapes(model: ModelConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Bert(model).state_dict().items()}


def _check_shapes(weights: dict[str, Tensor], model: ModelConfig) -> None:
    shapes = _shapes(model)
    if absent := sorted(shapes.keys() - weights.keys()):
        raise TrainerError(f"the weights lack {len(absent)} tensors, {absent[0]} first")
    if foreign := sorted(weights.keys() - shapes.keys()):
        raise TrainerError(f"the weights contain {len(foreign)} unknown tensors, {foreign[0]} first")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            seen = "empty" if weights[name].numel() == 0 else tuple(weights[name].shape)
            raise TrainerError(f"the weight {name} is {seen}; the model's is {tuple(shape)}")
