"""What a model would put where [MASK] stands: ``python -m trainer.fill_mask --model FOLDER TEXT …``

The folder is any Hugging Face BERT with its pre-training heads, such as ``trainer.export`` writes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from trainer.errors import TrainerError
from trainer.export import load_transformers


def fill_masks(folder: Path, texts: list[str], top: int = 5) -> list[list[list[tuple[str, float]]]]:
    """For each text and each [MASK] in it, the ``top`` likeliest tokens with their probabilities.

    Raises TrainerError if a text holds no [MASK].
    """
    from transformers import AutoTokenizer

    model = load_transformers(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    answers = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", truncation=True)
        places = inputs["input_ids"][0] == tokenizer.mask_token_id  # (S,)
        if not places.any():
            raise TrainerError(f"no {tokenizer.mask_token} in {text!r}; put one where a token is wanted")
        with torch.no_grad():
            logits = model(**inputs).prediction_logits[0, places]  # (masks, V)
        best = logits.softmax(-1).topk(top)
        tokens = [tokenizer.convert_ids_to_tokens(row) for row in best.indices.tolist()]
        rows = zip(tokens, best.values.tolist(), strict=True)
        answers.append([list(zip(names, shares, strict=True)) for names, shares in rows])
    return answers


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0, or 2 after one line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.fill_mask", description="Fill [MASK] in texts.")
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face folder")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a text with one [MASK] or more")
    options = parser.parse_args(arguments)
    try:
        answers = fill_masks(options.model, options.texts)
    except (TrainerError, OSError) as error:
        print(f"trainer.fill_mask: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for text, places in zip(options.texts, answers, strict=True):
        print(text)
        for best in places:
            print("    " + "  ".join(f"{token} {share:.1%}" for token, share in best))
    return 0


if __name__ == "__main__":
    sys.exit(main())
