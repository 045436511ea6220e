"""Encode texts, pairs of texts or single tokens as contextual vectors with any BERT.

    python -m trainer.encode --model bert --out vectors.npy "The bank was closed." "He sat on the bank."
    python -m trainer.encode --model runs/first --out vectors.parquet --input pairs.tsv --pool cls
    python -m trainer.encode --model bert --out tokens.parquet --marked "The [[bank]] was closed." "On the [[bank]]."

Each input line is a text, or two texts separated by a tab. With ``--json premise,hypothesis`` each line is a JSON
object with these fields, and its ``id`` is kept. Rows are in the order of the texts. The model runs unpadded, in fp32.
"[MASK]" or "[SEP]" in a text is ordinary text, never the control token.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from data_prep.atomic import replacing
from data_prep.encoding import read_utf8
from data_prep.errors import DataError
from data_prep.options import CommandParser
from data_prep.tokenizer import Tokenizer, load_tokenizer
from kernels import backend
from trainer.checkpoint.fetched import fetched
from trainer.console import complain, print_result, teller
from trainer.convert.weights import load_bert, require_new
from trainer.encode.vectors import EncodedPart, Text, write_npy, write_parquet
from trainer.errors import TrainerError, exit_code
from trainer.finetune.lines import loads
from trainer.finetune.task import Example, collate, fit, pack
from trainer.model.batch import Rows
from trainer.model.bert import Bert, pool
from trainer.options import add_kernels, path_or_address

POOLS = ("mean", "max", "cls", "pooler")
LAYERS = ("last", "mean4", "concat4")
_FOUR = 4  # layers, as in the feature-based use of Devlin et al. (2019), section 5.3
_TEXTS, _LETTERS = 4096, 200_000  # limits of one part, which is in memory at once
_BATCH = 8192  # tokens per forward pass
_PATIENCE = 5.0  # seconds between two lines of progress
_tell = teller("trainer.encode")
_MARKED = re.compile(r"\[\[(.+?)\]\]")
_WRITERS = {".npy": write_npy, ".parquet": write_parquet}


@dataclass(frozen=True)
class Pooling:
    """How the tokens' outputs are combined."""

    pool: str = "mean"  # one of POOLS (mean and max skip [CLS] and [SEP]); or "tokens": each token at ``places``
    layers: str = "last"  # one of LAYERS: the last layer, or the last four averaged or concatenated


# ---- texts to tokens -----------------------------------------------------------------------------------------


def read_texts(lines: Iterable[str], place: str, fields: Sequence[str] = ()) -> Iterator[Text]:
    """Read one text or pair per line; with ``fields``, from JSON objects. Raises TrainerError for an invalid line."""
    for number, line in enumerate(lines, 1):
        where, line = f"{place} {number}", line.removesuffix("\n").removesuffix("\r")
        identity = None
        if fields:
            try:
                record = loads(line)
                texts = [record[field] for field in fields]
                identity = None if record.get("id") is None else str(record["id"])
            except (ValueError, KeyError, TypeError):
                raise TrainerError(f"{where}: not a JSON object with {' and '.join(fields)}: see --json") from None
        else:
            texts = line.split("\t")
        if len(texts) > 2 or not all(isinstance(text, str) and text.strip() for text in texts):
            raise TrainerError(
                f"{where}: no text, an empty one, or more than two: write one text, or two separated by a tab"
            )
        yield Text(where, texts[0], texts[1] if len(texts) > 1 else None, identity)


def decoded(lines: Iterable[bytes], place: str) -> Iterator[str]:
    """Decode UTF-8 lines, with or without a byte order mark. Raises TrainerError for an invalid line."""
    for number, line in enumerate(lines, 1):
        text = read_utf8(line)
        if text is None:
            raise TrainerError(f"{place} {number}: not UTF-8 text; save it as UTF-8")
        yield text.removeprefix("\ufeff") if number == 1 else text


def to_examples(texts: Sequence[Text], tokenizer: Tokenizer, longest: int, marked: bool) -> list[tuple[Example, int]]:
    """Tokenize the texts; return each with the number of tokens that were truncated to fit ``longest``.

    ``places`` are all ordinary tokens, or with ``marked`` only those between [[ and ]]. Raises TrainerError for a text
    that has none.
    """
    sides = ([text.first for text in texts], [text.second or "" for text in texts])
    found = [[_unmarked(text) if marked else (text, []) for text in side] for side in sides]
    first, second = (
        tokenizer.encoder.encode_batch([text for text, _ in side], add_special_tokens=False) for side in found
    )
    out = []
    for number, text in enumerate(texts):
        a, b = first[number], second[number]
        if not a.ids or (text.second is not None and not b.ids):
            raise TrainerError(f"{text.where}: no token in {text.first!r}")
        kept_a, kept_b = fit(len(a.ids), len(b.ids), longest - (2 if text.second is None else 3))
        example = pack(tokenizer.encoder, a.ids[:kept_a], None if text.second is None else b.ids[:kept_b])
        inside = [
            start + place
            for encoding, kept, side, start in ((a, kept_a, found[0], 1), (b, kept_b, found[1], kept_a + 2))
            for place, (low, high) in enumerate(encoding.offsets[:kept])
            if not marked or any(low < end and begin < high for begin, end in side[number][1])
        ]
        if not inside:
            raise TrainerError(
                f"{text.where}: no token between [[ and ]]" + " after truncation" * (kept_a < len(a.ids))
            )
        out.append((replace(example, places=tuple(inside)), len(a.ids) + len(b.ids) - kept_a - kept_b))
    return out


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks from a text; return it with the start and end of each marked word."""
    clean, spans, end = "", [], 0
    for match in _MARKED.finditer(text):
        clean += text[end : match.start()]
        spans.append((len(clean), len(clean) + len(match[1])))
        clean, end = clean + match[1], match.end()
    return clean + text[end:], spans


# ---- tokens to vectors ---------------------------------------------------------------------------------------


def encode(
    model: Bert, examples: Sequence[Example], pooling: Pooling, control: tuple[int, ...]
) -> list[NDArray[np.float32]]:
    """Return each example's fp32 vectors, in order (see `EncodedPart`). ``control``: the ids of [CLS] and [SEP]."""
    device = model.token_table.device
    out: dict[int, NDArray[np.float32]] = {}
    for chosen in _by_length(examples):
        batch = collate([(examples[i],) for i in chosen], range(len(chosen)), torch.float32).to(device)
        found = pooled(model, batch, batch.places, pooling, control).float().cpu().numpy()
        rows = [len(examples[i].places) if pooling.pool == "tokens" else 1 for i in chosen]
        for i, vectors in zip(chosen, np.split(found, np.cumsum(rows)[:-1]), strict=True):
            out[i] = vectors
    return [out[i] for i in range(len(examples))]


def _by_length(examples: Sequence[Example]) -> Iterator[list[int]]:
    """Group the examples' numbers into batches of similar length, of at most ``_BATCH`` tokens."""
    batch, tokens = list[int](), 0
    for number in sorted(range(len(examples)), key=lambda i: len(examples[i].tokens)):
        length = len(examples[number].tokens)
        if batch and tokens + length > _BATCH:
            yield batch
            batch, tokens = [], 0
        batch.append(number)
        tokens += length
    if batch:
        yield batch


@torch.no_grad()
def pooled(model: Bert, batch: Rows, places: Tensor, pooling: Pooling, control: tuple[int, ...]) -> Tensor:
    """Return vectors (B, D), or (P, D) for single tokens; "concat4" is four times as wide, lowest layer first."""
    layers: list[Tensor] = []
    wanted = [] if pooling.layers == "last" else list(model.layers)[-_FOUR:-1]
    # A layer's second output is the residual; in a pre-LN model only this is transformers' hidden state.
    hooks = [layer.register_forward_hook(lambda layer, inputs, outputs: layers.append(outputs[1])) for layer in wanted]
    try:
        x = model.encode(batch)  # (T, D)
    finally:
        for hook in hooks:
            hook.remove()
    if layers:
        layers.append(x)
        x = torch.stack(layers).mean(0) if pooling.layers == "mean4" else torch.cat(layers, -1)
    match pooling.pool:
        case "pooler":
            return pool(x, batch, model.pooler_weight, model.pooler_bias)
        case "cls":
            return x[batch.cu_seqlens[:-1].long()]
        case "tokens":
            return x[places]
    ordinary = ~torch.isin(batch.tokens, torch.tensor(control, device=x.device))  # (T,)
    counts = F.pad(ordinary.cumsum(0), (1, 0))[batch.cu_seqlens.long()].diff()  # (B,)
    return torch.segment_reduce(x[ordinary], pooling.pool, lengths=counts, axis=0)


def encode_parts(
    texts: Iterable[Text], model: Bert, tokenizer: Tokenizer, pooling: Pooling, marked: bool = False, cut: bool = False
) -> Iterator[EncodedPart]:
    """Encode the texts, one bounded part at a time. Raises TrainerError for a text that is too long, unless ``cut``.

    Reports at the end how many texts were truncated.
    """
    longest, control = model.model.max_positions, (tokenizer.specials.cls, tokenizer.specials.sep)
    start = shortened = 0
    for part in _gathered(texts, _LETTERS // 8 if pooling.pool == "tokens" else _LETTERS):
        found = to_examples(part, tokenizer, longest, marked)
        for text, (_, lost) in zip(part, found, strict=True):
            if lost and not cut:
                raise TrainerError(
                    f"{text.where}: {lost} tokens more than the model's {longest} positions: shorten the "
                    "text, or truncate long texts with --cut"
                )
            shortened += lost > 0
        examples = [example for example, _ in found]
        yield EncodedPart(start, part, examples, encode(model, examples, pooling, control))
        start += len(part)
    if shortened:
        _tell(f"{shortened:,} of {start:,} texts were truncated to {longest} tokens")


def _gathered(texts: Iterable[Text], most: int) -> Iterator[list[Text]]:
    """Group texts into parts of a bounded size: about ``most`` letters, since a text has no more tokens than that."""
    part, letters = list[Text](), 0
    for text in texts:
        part.append(text)
        letters += len(text.first) + len(text.second or "")
        if len(part) == _TEXTS or letters >= most:
            yield part
            part, letters = [], 0
    if part:
        yield part


# ---- the command ---------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error prints one line."""
    parser = CommandParser(prog="python -m trainer.encode", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model",
        required=True,
        type=path_or_address,
        help="a run's folder, a checkpoint, a Hugging Face BERT, or a fine-tuned one; also at an address",
    )
    parser.add_argument("--out", required=True, type=Path, help="the .npy or .parquet file to write; must not exist")
    parser.add_argument("--input", help="a file with one text per line; - is standard input")
    parser.add_argument(
        "--json", default="", metavar="FIELD[,FIELD]", help="the lines are JSON objects; read these fields"
    )
    parser.add_argument("--pool", choices=POOLS, help="how to combine the tokens' outputs (mean)")
    parser.add_argument("--layers", choices=LAYERS, default="last", help="which layers' outputs to use (%(default)s)")
    each = parser.add_mutually_exclusive_group()
    each.add_argument("--tokens", action="store_true", help="write a row for each token, to .parquet")
    each.add_argument("--marked", action="store_true", help="write a row for each token between [[ and ]], to .parquet")
    parser.add_argument("--cut", action="store_true", help="truncate texts that are too long, instead of refusing them")
    add_kernels(parser)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts to encode, instead of --input")
    options = parser.parse_args(arguments)
    single = options.tokens or options.marked
    if (options.input is None) != bool(options.texts):
        parser.error("name either --input or texts, not both")
    if single and (options.pool or options.out.suffix != ".parquet"):
        parser.error("--tokens and --marked write a row per token: use a .parquet file and no --pool")
    if options.out.suffix not in _WRITERS:
        parser.error(f"--out is {options.out}: must end in .npy or .parquet")
    if options.json.count(",") > 1:
        parser.error(f"--json is {options.json}: must name one or two fields")
    try:
        with backend.using(options.kernels), _lines(options) as (lines, place):
            _run(options, single, read_texts(lines, place, list(filter(None, options.json.split(",")))))
    except (TrainerError, DataError, backend.UnavailableError, OSError, MemoryError) as error:
        complain("trainer.encode", error)
        return exit_code(error)
    return 0


def _run(options: argparse.Namespace, single: bool, texts: Iterable[Text]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = backend.resolve(device)
    require_new(options.out)
    pooling = Pooling("tokens" if single else options.pool or "mean", options.layers)
    if pooling.layers != "last" and pooling.pool == "pooler":
        raise TrainerError(f"--layers {pooling.layers}: the pooler reads only the last layer: use --layers last")
    model, folder, missing = load_bert(fetched(options.model, _tell), _tell)
    tokenizer = load_tokenizer(folder)
    if pooling.layers != "last" and model.model.layers < _FOUR:
        raise TrainerError(
            f"--layers {pooling.layers}: needs {_FOUR} layers, but the model has {model.model.layers}: use --layers "
            "last"
        )
    if pooling.pool == "pooler" and "pooler" in missing:
        raise TrainerError(f"{options.model} has no pooler: choose another --pool")
    model.to(device).eval()
    parts = encode_parts(texts, model, tokenizer, pooling, options.marked, options.cut)
    parts = _with_progress(parts, f"kernels: {kernels.name} ({kernels.reason})")
    with replacing(options.out) as file:
        _WRITERS[options.out.suffix](file, parts, tokenizer.pieces if single else None)
    print_result(str(options.out))


@contextmanager
def _lines(options: argparse.Namespace) -> Iterator[tuple[Iterable[str], str]]:
    """Open the input lines, separated only by line feeds; also return the name of a line for messages."""
    match options.input:
        case None:
            yield decoded(map(os.fsencode, options.texts), "text"), "text"
        case "-":
            yield decoded(sys.stdin.buffer, "line"), "line"
        case path if Path(path).is_dir():
            raise TrainerError(f"--input {path} is a folder: name a file of texts in it")
        case path:
            with open(path, "rb") as file:
                yield decoded(file, f"{path}, line"), f"{path}, line"


def _with_progress(parts: Iterable[EncodedPart], first: str) -> Iterator[EncodedPart]:
    """Pass the parts on; print ``first``, then a line of progress now and then.

    Raises TrainerError if there are no parts.
    """
    began = reported = time.monotonic()
    done = 0
    for part in parts:
        if not done:
            _tell(first)
        yield part
        done, now = part.start + len(part.texts), time.monotonic()
        if now - reported > _PATIENCE:
            reported = now
            _tell(f"{done:,} texts, {done / (now - began):,.0f} per second")
    if not done:
        raise TrainerError("the input has no texts: name some")


if __name__ == "__main__":
    sys.exit(main())
