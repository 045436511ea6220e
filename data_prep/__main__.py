"""Command line: `python -m data_prep vocab | build | verify | inspect`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from data_prep.build import build
from data_prep.corpus import find_sources, parse_where, read_paragraphs
from data_prep.errors import DataError
from data_prep.inspection import describe, show_samples, warnings
from data_prep.manifest import load_manifest
from data_prep.settings import make_settings
from data_prep.tokenizer import train_tokenizer
from data_prep.verify import verify

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, or 2 after one line on stderr for each problem."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (DataError, OSError) as error:  # OSError: a disk that is full or not ours
        _complain(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def _vocab(options: argparse.Namespace) -> int:
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise DataError(f"{options.out} is not empty; choose another --out or remove it")
    where = parse_where(options.where)
    sources = find_sources(options.input)
    paragraphs = (text for source in sources for _, text in read_paragraphs(source, where))
    tokenizer = train_tokenizer(paragraphs, options.size, options.cased)
    tokenizer.save(options.out)
    print(f"{tokenizer.vocab_size:,} pieces in {options.out}")
    return 0


def _build(options: argparse.Namespace) -> int:
    settings = make_settings(
        sequence_length=options.sequence_length,
        seed=options.seed,
        duplicates=options.duplicates,
        masked_share=options.masked_share,
        short_sequence_rate=options.short_sequence_rate,
        samples_per_shard=options.samples_per_shard,
        language=options.language,
        where=options.where,
    )
    if options.processes < 1:
        raise DataError(f"--processes {options.processes}: wanted 1 or more")
    start = time.monotonic()
    manifest = build(options.input, options.tokenizer, options.out, settings, options.processes)
    seconds = time.monotonic() - start
    for line in describe(manifest):
        print(line)
    print(f"{options.out}: whole, in {seconds:.1f} s")
    for line in warnings(manifest):
        print(f"data_prep: warning: {line}", file=sys.stderr)
    return 0


def _verify(options: argparse.Namespace) -> int:
    code = 0
    for folder in options.folders:
        problems = verify(folder, options.full)
        for problem in problems:
            _complain(problem)
            code = BAD_INPUT
        if not problems:
            print(f"{folder}: whole, {load_manifest(folder).counts.samples:,} samples")
    return code


def _inspect(options: argparse.Namespace) -> int:
    for line in describe(load_manifest(options.folder)):
        print(line)
    for line in show_samples(options.folder, options.samples):
        print(line)
    return 0


def _complain(problem: str) -> None:
    print(f"data_prep: error: {problem}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("data_prep", description="Text to shards of masked sentence pairs.")
    commands = parser.add_subparsers(required=True, metavar="command")
    corpus = argparse.ArgumentParser(add_help=False)
    corpus.add_argument("--input", nargs="+", type=Path, required=True, help=".txt and .jsonl files, folders")
    corpus.add_argument("--where", metavar="FIELD=VALUE", help="take only these .jsonl records")
    corpus.add_argument("--out", type=Path, required=True, help="folder to make")

    vocab = commands.add_parser("vocab", parents=[corpus], help="learn a WordPiece vocabulary")
    vocab.add_argument("--size", type=int, required=True, help="pieces, control tokens included")
    vocab.add_argument("--cased", action="store_true", help="keep capitals and accents")
    vocab.set_defaults(command=_vocab)

    shards = commands.add_parser("build", parents=[corpus], help="make the shards, or the missing ones")
    shards.add_argument("--tokenizer", type=Path, required=True, help="folder, as `vocab` makes it")
    shards.add_argument("--sequence-length", type=int, required=True, help="tokens of a sample at most")
    shards.add_argument("--seed", type=int, default=1)
    shards.add_argument("--duplicates", type=int, default=1, help="passes, each with other pairs and masks")
    shards.add_argument("--masked-share", type=float, default=0.15, help="of the tokens (0.15)")
    shards.add_argument("--short-sequence-rate", type=float, default=0.1, help="of the samples (0.1)")
    shards.add_argument("--samples-per-shard", type=int, default=8192)
    shards.add_argument("--language", default="en", help="of the sentence splitter, ISO 639-1 (en)")
    shards.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="(all cores)")
    shards.set_defaults(command=_build)

    check = commands.add_parser("verify", help="prove data sets against their manifests")
    check.add_argument("folders", nargs="+", type=Path)
    check.add_argument("--full", action="store_true", help="hash and decode everything")
    check.set_defaults(command=_verify)

    inspect = commands.add_parser("inspect", help="statistics and samples as text")
    inspect.add_argument("folder", type=Path)
    inspect.add_argument("--samples", type=int, default=3)
    inspect.set_defaults(command=_inspect)
    return parser


if __name__ == "__main__":
    sys.exit(main())
