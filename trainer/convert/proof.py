"""Checks that transformers reads an exported folder correctly: every setting, every token id, and tokenized text.

Logits do not reveal a wrong dropout, padding id, label name or special token. So the model and the tokenizer that
transformers builds from the folder are compared with ours, field by field.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open

from data_prep.tokenizer import CLEANING, CONTINUING, DEFAULT_SETTINGS, Tokenizer
from trainer.convert.hugging_face import MODEL_TYPES
from trainer.errors import TrainerError
from trainer.model.bert import ModelConfig

Facts = dict[str, tuple[Any, Any]]  # name in the folder's file: the value that transformers sees, and the right one

_MOST_PIECES = 2_000  # how many pieces of the vocabulary go into the texts for comparing the tokenizers
_TEXTS = (
    "Crème brûlée, naïve: 3.14 (§5)!",
    "東京 is 1,300 km away",
    "ÀÉÎ ß İ ŒUVRE",
    "e\u0301 a\u0308",
    "  two \t words\n",
)


def config_facts(folder: Path, theirs: Any, kind: str, model: ModelConfig, pad: int) -> Facts:
    """The fields of config.json that all exports share. ``theirs``: the model that transformers built from it."""
    bert = theirs.bert
    tables, layer = bert.embeddings, bert.encoder.layer[0]
    norm = bert.encoder.ln if model.layer_norm == "before" else tables.LayerNorm
    written = json.loads((folder / "config.json").read_text("utf-8"))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}
    return {
        "model_type": (written.get("model_type"), MODEL_TYPES[model.layer_norm]),
        "architectures": (written.get("architectures"), [kind]),
        "dtype": (written.get("dtype"), "float32" if dtypes == {"F32"} else f"a mixture: {sorted(dtypes)}"),
        "position_embedding_type": (written.get("position_embedding_type"), "absolute"),
        "initializer_range": (theirs.config.initializer_range, model.initializer_range),
        "pad_token_id": (tables.word_embeddings.padding_idx, pad),
        "vocab_size": (tables.word_embeddings.num_embeddings, model.vocab_size),
        "type_vocab_size": (tables.token_type_embeddings.num_embeddings, model.segments),
        "max_position_embeddings": (tables.position_embeddings.num_embeddings, model.max_positions),
        "hidden_size": (tables.word_embeddings.embedding_dim, model.hidden),
        "layer_norm_eps": (norm.eps, model.layer_norm_eps),
        "hidden_dropout_prob": (tables.dropout.p, model.dropout),
        "attention_probs_dropout_prob": (layer.attention.self.dropout.p, model.attention_dropout),
        "num_hidden_layers": (len(bert.encoder.layer), model.layers),
        "num_attention_heads": (layer.attention.self.num_attention_heads, model.heads),
        "intermediate_size": (layer.intermediate.dense.out_features, model.intermediate),
    }


def tokenizer_facts(folder: Path, theirs: Any, tokenizer: Tokenizer, model: ModelConfig) -> Facts:
    """The settings of the folder's tokenizer. ``theirs``: the tokenizer that transformers built from it."""
    written = DEFAULT_SETTINGS | json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    ids = {
        f"{name}_token_id": (getattr(theirs, f"{name}_token_id"), i) for name, i in asdict(tokenizer.specials).items()
    }
    cleaning = {name: (written[name], tokenizer.settings[name]) for name in CLEANING}
    return (
        ids
        | cleaning
        | {
            "model_max_length": (theirs.model_max_length, model.max_positions),
            "the number of tokens": (len(theirs), tokenizer.vocab_size),
        }
    )


def require_equal(path: Path, facts: Facts) -> None:
    """Raise TrainerError, naming the field, if transformers sees a wrong value."""
    for name, (found, wanted) in facts.items():
        if found != wanted:
            raise TrainerError(f"{path}: transformers reads {name} as {found!r}, but it should be {wanted!r}")


def check_tokenizer(folder: Path, tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Compare the folder's tokenizer, as transformers loads it, with ``tokenizer``.

    Raises TrainerError if a setting, the token of an id, or the tokens of a text differ.
    """
    import transformers

    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    require_equal(folder / "tokenizer_config.json", tokenizer_facts(folder, theirs, tokenizer, model))
    named = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["tokenizer_class"]
    if not hasattr(transformers, named):  # transformers would silently fall back to another class
        raise TrainerError(f"{folder / 'tokenizer_config.json'}: transformers has no tokenizer_class {named!r}")
    ids = {number: piece for piece, number in theirs.get_vocab().items()}
    named = {f"token {number}": (ids.get(number), piece) for number, piece in enumerate(tokenizer.pieces)}
    require_equal(folder / "tokenizer.json", named)
    words = [piece for piece in tokenizer.pieces if not piece.startswith((CONTINUING, "["))]
    words = words[:: -(-len(words) // _MOST_PIECES) or 1]
    joined = " ".join(words)
    added = (f"a {token.content} b{token.content}." for token in tokenizer.added.values())
    specials = tokenizer.specials
    for text in (*_TEXTS, joined, joined.upper(), "".join(words)[:100], *added):
        wanted = [specials.cls, *next(tokenizer.encode([text])), specials.sep]
        cut = {f"the text {text[:60]!r}": (theirs(text, verbose=False).input_ids, wanted)}
        require_equal(folder / "tokenizer.json", cut)
