"""Small inputs for the fine-tuning tests: a made-up vocabulary, a random BERT in Hugging Face's format, easy tasks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from data_prep.draws import bits
from data_prep.tokenizer import load_tokenizer
from trainer.convert.folder import write_folder
from trainer.model.bert import Bert, ModelConfig

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [first + second for first in ("ba", "de", "go", "ku") for second in ("me", "ni", "po")]
PIECES = [*SPECIALS, *WORDS, "##s", ".", ","]  # "bames" is two pieces
TINY = ModelConfig(
    layers=2, hidden=32, heads=2, intermediate=64, max_positions=40, vocab_size=len(PIECES), initializer_range=0.1
)


def tokenizer_folder(folder: Path) -> Path:
    """Write a tokenizer of PIECES in the format of ``transformers``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}), encoding="utf-8")
    load_tokenizer(folder).save(folder)
    return folder


def bert_folder(folder: Path, model: ModelConfig = TINY, pooler: bool = True) -> Path:
    """Write a random BERT and its tokenizer in Hugging Face's format; without a pooler, as from a masked-LM class."""
    made = folder / "bert"
    write_folder(Bert(model, seed=4).state_dict(), model, tokenizer_folder(folder / "tokenizer"), made)
    if not pooler:
        tensors = load_file(made / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
        save_file(kept, made / "model.safetensors", metadata={"format": "pt"})
    return made


def sentences(count: int, first: int = 0) -> list[list[str]]:
    """Texts of 3 to 8 of WORDS; each depends only on its number."""
    made = []
    for number in range(first, first + count):
        draws = bits(23, number, np.arange(10))
        made.append([WORDS[int(draw % len(WORDS))] for draw in draws[: 3 + int(draws[9] % 6)]])
    return made


def write_classes(path: Path, count: int, first: int = 0) -> Path:
    """Write a TSV with the columns sentence and label: the label is 1 if most words begin with b or d."""
    rows = [
        f"{' '.join(words)}\t{int(np.mean([word[0] in 'bdf' for word in words]) > 0.5)}"
        for words in sentences(count, first)
    ]
    path.write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    return path


def write_numbers(path: Path, count: int, first: int = 0) -> Path:
    """Write a TSV of text pairs, each labeled with 5 times the share of its words that begin with b or d."""
    rows = []
    for words in sentences(count, first):
        share = 5 * float(np.mean([word[0] in "bd" for word in words]))
        rows.append(f"{' '.join(words[:-1])}\t{words[-1]}\t{share:.3f}")
    path.write_text("\n".join(["sentence1\tsentence2\tlabel", *rows]) + "\n", encoding="utf-8")
    return path


def write_data(folder: Path, train: int = 96, dev: int = 60) -> Path:
    """Write a folder with a training and a dev file of classes, in the format of SST-2."""
    folder.mkdir(parents=True, exist_ok=True)
    write_classes(folder / "train.tsv", train)
    write_classes(folder / "dev.tsv", dev, first=10_000)
    return folder
