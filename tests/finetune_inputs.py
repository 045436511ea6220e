"""Small inputs of the tests of fine-tuning: a made-up vocabulary, a random BERT in Hugging Face's form, easy tasks."""

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
    """A tokenizer of PIECES, as ``transformers`` has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}), encoding="utf-8")
    load_tokenizer(folder).save(folder)
    return folder


def bert_folder(folder: Path, model: ModelConfig = TINY, pooler: bool = True) -> Path:
    """A random BERT with its tokenizer, as Hugging Face has it; without its pooler, as a masked-LM class saves it."""
    made = folder / "bert"
    write_folder(Bert(model, seed=4).state_dict(), model, tokenizer_folder(folder / "tokenizer"), made)
    if not pooler:
        tensors = load_file(made / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
        save_file(kept, made / "model.safetensors", metadata={"format": "pt"})
    return made


def sentences(count: int, first: int = 0) -> list[list[str]]:
    """Texts of 3 to 8 of WORDS, each drawn from its number alone."""
    made = []
    for number in range(first, first + count):
        draws = bits(23, number, np.arange(10))
        made.append([WORDS[int(draw % len(WORDS))] for draw in draws[: 3 + int(draws[9] % 6)]])
    return made


def write_classes(path: Path, count: int, first: int = 0) -> Path:
    """Texts in TSV under the columns sentence and label: 1 where most words begin with b or d."""
    rows = [
        f"{' '.join(words)}\t{int(np.mean([word[0] in 'bdf' for word in words]) > 0.5)}"
        for words in sentences(count, first)
    ]
    path.write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    return path


def write_numbers(path: Path, count: int, first: int = 0) -> Path:
    """Pairs of texts in TSV, and how many of the words begin with b or d, as a share of 5."""
    rows = []
    for words in sentences(count, first):
        share = 5 * float(np.mean([word[0] in "bd" for word in words]))
        rows.append(f"{' '.join(words[:-1])}\t{words[-1]}\t{share:.3f}")
    path.write_text("\n".join(["sentence1\tsentence2\tlabel", *rows]) + "\n", encoding="utf-8")
    return path


def write_data(folder: Path, train: int = 96, dev: int = 60) -> Path:
    """A folder with a training and a dev file of classes, as SST-2 has them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_classes(folder / "train.tsv", train)
    write_classes(folder / "dev.tsv", dev, first=10_000)
    return folder
