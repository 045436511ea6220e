"""Predict the tokens behind [MASK]: ``python -m trainer.fill_mask --model MODEL TEXT …``

MODEL is a run's folder, a checkpoint, or any Hugging Face BERT with its MLM head, such as one from ``trainer.export``.
A text may contain several [MASK]s; each is predicted independently, with the others left masked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from textwrap import shorten

import torch

from data_prep.errors import DataError
from data_prep.options import CommandParser
from data_prep.tokenizer import Tokenizer, load_tokenizer
from kernels import backend
from trainer.bounds import outside
from trainer.checkpoint.fetched import fetched
from trainer.console import complain, print_result, teller
from trainer.convert.weights import load_bert
from trainer.errors import TrainerError, exit_code
from trainer.finetune.task import Example, collate
from trainer.model.batch import IGNORED, MicroBatch, Rows
from trainer.model.bert import Bert
from trainer.options import add_kernels, path_or_address

MASK = "[MASK]"
Answer = list[tuple[str, float]]  # tokens and their probabilities, the likeliest first


def fill_masks(model: Bert, tokenizer: Tokenizer, texts: list[str], top: int = 5) -> list[list[Answer]]:
    """Return, for each [MASK] of each text, the ``top`` likeliest tokens with their probabilities.

    Long texts are truncated to the model's positions. Raises TrainerError if that cuts off a [MASK], or if a text
    contains none.
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
    """Encode [CLS] text [SEP]; ``places`` are the positions of its masks."""
    shown = repr(shorten(text, 60, placeholder=" …"))
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # how Python represents a byte that is not UTF-8
        raise TrainerError(f"{shown} is not UTF-8 text: write it as UTF-8")
    specials, tokens, places = tokenizer.specials, [tokenizer.specials.cls], list[int]()
    for number, part in enumerate(text.split(MASK)):
        if number:
            places.append(len(tokens))
            tokens.append(specials.mask)
        tokens += [token for ids in tokenizer.encode([part]) for token in ids]
    if not places:
        raise TrainerError(f"no {MASK} in {shown}; put one where a token is wanted")
    if lost := sum(place >= longest - 1 for place in places):
        raise TrainerError(
            f"{lost} of {len(places)} {MASK} are beyond the model's limit of {longest} tokens in {shown}: shorten it"
        )
    tokens = [*tokens[: longest - 1], specials.sep]
    return Example(tuple(tokens), (0,) * len(tokens), tuple(places))


def _lines(texts: list[str], answers: list[list[Answer]]) -> Iterator[str]:
    for text, places in zip(texts, answers, strict=True):
        yield text
        for best in places:
            yield "    " + "  ".join(f"{token} {share:.1%}" for token, share in best)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error prints one line."""
    parser = CommandParser(prog="python -m trainer.fill_mask", description="Predict the tokens behind [MASK] in texts.")
    parser.add_argument("--model", required=True, type=path_or_address, help="a run, a checkpoint, a Hugging Face BERT")
    parser.add_argument("--top", type=int, default=5, help="how many tokens to list for each [MASK] (%(default)s)")
    add_kernels(parser)
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a text with at least one [MASK]")
    options = parser.parse_args(arguments)
    if problems := outside(options, top=(1, 1000)):
        parser.error(f"--{problems[0]}")
    try:
        with backend.using(options.kernels):
            backend.resolve("cpu")
            tell = teller("trainer.fill_mask")
            model, folder, missing = load_bert(fetched(options.model, tell), tell)
            if "MLM head" in missing:
                raise TrainerError(
                    f"{options.model} has no MLM head, so it cannot predict tokens: name a model that has one"
                )
            answers = fill_masks(model, load_tokenizer(folder), options.texts, options.top)
        print_result("\n".join(_lines(options.texts, answers)))
    except (TrainerError, DataError, backend.UnavailableError, OSError, MemoryError) as error:
        complain("trainer.fill_mask", error)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
