"""What a model would put where [MASK] stands: ``python -m trainer.fill_mask --model MODEL TEXT …``

MODEL is a run's folder, a checkpoint, or any Hugging Face BERT with its MLM head, such as ``trainer.export`` writes.
A text may hold several [MASK]s; each is answered by itself, with the others left masked.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

import torch

from data_prep.errors import DataError
from data_prep.tokenizer import Tokenizer, load_tokenizer
from trainer.batch import IGNORED, MicroBatch, Rows
from trainer.errors import TrainerError
from trainer.finetune.task import Example, collate
from trainer.model import Bert
from trainer.weights import load_bert

MASK = "[MASK]"
Answer = list[tuple[str, float]]  # tokens and their probabilities, the likeliest first


def fill_masks(model: Bert, tokenizer: Tokenizer, texts: list[str], top: int = 5) -> list[list[Answer]]:
    """For each text and each [MASK] in it, the ``top`` likeliest tokens with their probabilities.

    What is beyond the model's positions is cut off. Raises TrainerError if a text holds no [MASK] that is left.
    """
    examples = [_example(text, tokenizer, model.model.max_positions) for text in texts]
    batch = collate([(example,) for example in examples], range(len(texts)), torch.int64)
    rows = {field.name: getattr(batch, field.name) for field in fields(Rows)}
    nothing = torch.full_like(batch.places, IGNORED)
    given = MicroBatch(**rows, masked=batch.places, labels=nothing, is_next=torch.full((len(texts),), IGNORED))
    with torch.no_grad():
        logits, _ = model.eval().logits(given)  # (P, V)
    best = logits.softmax(-1).topk(min(top, logits.shape[1]))
    answers = [
        [(tokenizer.pieces[token], share) for token, share in zip(tokens, shares, strict=True)]
        for tokens, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    found = iter(answers)
    return [[next(found) for _ in example.places] for example in examples]


def _example(text: str, tokenizer: Tokenizer, longest: int) -> Example:
    """[CLS] text [SEP], with its masks at ``places``."""
    specials, tokens, places = tokenizer.specials, [tokenizer.specials.cls], list[int]()
    for number, part in enumerate(text.split(MASK)):
        if number:
            places.append(len(tokens))
            tokens.append(specials.mask)
        tokens += [token for ids in tokenizer.encode([part]) for token in ids]
    tokens = [*tokens[: longest - 1], specials.sep]
    kept = tuple(place for place in places if place < longest - 1)
    if not kept:
        raise TrainerError(
            f"no {MASK} in the {longest} tokens that the model holds of {text!r}; put one where a token is wanted"
        )
    return Example(tuple(tokens), (0,) * len(tokens), kept)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0, or 2 after one line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.fill_mask", description="Fill [MASK] in texts.")
    parser.add_argument("--model", required=True, type=Path, help="a run's folder, a checkpoint, a Hugging Face BERT")
    parser.add_argument("--top", type=int, default=5, help="how many tokens for each [MASK] (%(default)s)")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a text with one [MASK] or more")
    options = parser.parse_args(arguments)
    if options.top < 1:
        parser.error(f"--top is {options.top}: must be 1 or more")
    try:
        model, folder, missing = load_bert(options.model)
        if "MLM head" in missing:
            raise TrainerError(f"{options.model} has no MLM head, which alone knows tokens: name a model that has one")
        answers = fill_masks(model, load_tokenizer(folder), options.texts, options.top)
    except (TrainerError, DataError, OSError) as error:
        print(f"trainer.fill_mask: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for text, places in zip(options.texts, answers, strict=True):
        print(text)
        for best in places:
            print("    " + "  ".join(f"{token} {share:.1%}" for token, share in best))
    return 0


if __name__ == "__main__":
    sys.exit(main())
