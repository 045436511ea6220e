"""Command line: `python -m data_prep vocab | build | verify | inspect`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from inspect import signature
from pathlib import Path
from typing import NoReturn

from data_prep.build import build
from data_prep.corpus import find_sources, parse_where, read_paragraphs
from data_prep.errors import DataError
from data_prep.inspection import describe, show_samples, warnings
from data_prep.manifest import load_manifest
from data_prep.settings import make_settings
from data_prep.tokenizer import train_tokenizer
from data_prep.verify import verify

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes
EXAMPLES = """\
from text to shards:
  python -m data_prep vocab --input corpus/ --out tokenizer/ --size 30000
  python -m data_prep build --input corpus/ --tokenizer tokenizer/ --out shards-128/ --sequence-length 128
  python -m data_prep verify --full shards-128/
  python -m data_prep inspect shards-128/

text is .txt (a blank line between documents) or .jsonl (a document a line, in the field "text"), plain or
compressed (.gz, .bz2, .xz), in UTF-8"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error is said."""

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(BAD_INPUT, f"data_prep: error: {message}; see {self.prog} --help\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, or 2 after one line on stderr for each problem."""
    options = _parser().parse_args(arguments)
    try:
        code = int(options.command(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who read our output has seen enough, as `inspect ... | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except DataError as error:
        _complain(str(error))
        return BAD_INPUT
    except OSError as error:  # a disk that is full or not ours
        _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        _complain("interrupted; a build goes on when its command is run again")
        return INTERRUPTED


def _vocab(options: argparse.Namespace) -> int:
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise DataError(f"{options.out} is not empty; choose another --out or remove it")
    where = parse_where(options.where)
    sources = find_sources(options.input, where)
    paragraphs = (text for source in sources for _, text in read_paragraphs(source, where))
    tokenizer = train_tokenizer(paragraphs, options.size, options.cased)
    tokenizer.save(options.out)
    few = "" if tokenizer.vocab_size == options.size else f", fewer than {options.size:,}: the text has no more"
    print(f"{options.out}: {tokenizer.vocab_size:,} pieces{few}")
    return 0


def _build(options: argparse.Namespace) -> int:
    chosen = {name: getattr(options, name) for name in signature(make_settings).parameters}
    settings = make_settings(**chosen)
    if options.processes < 1:
        raise DataError(f"--processes {options.processes}: wanted 1 or more")
    start = time.monotonic()
    manifest = build(options.input, options.tokenizer, options.out, settings, options.processes)
    seconds = time.monotonic() - start
    print("\n".join([*describe(manifest), f"{options.out}: whole, in {seconds:.1f} s"]))
    for line in warnings(manifest):
        print(f"data_prep: warning: {line}", file=sys.stderr)
    return 0


def _verify(options: argparse.Namespace) -> int:
    code = 0
    for folder in options.folders:
        try:
            problems = verify(folder, options.full)
        except (DataError, OSError) as error:  # the other folders are proved all the same
            problems = [str(error)]
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
    parser = Parser(
        "python -m data_prep",
        description="Text to shards of masked sentence pairs, for BERT's pre-training.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    corpus = Parser(add_help=False)
    add = corpus.add_argument
    add("--input", nargs="+", type=Path, required=True, metavar="PATH", help="text files, and folders of them")
    add("--where", metavar="FIELD=VALUE", help="take only the .jsonl records with this field")
    add("--out", type=Path, required=True, metavar="DIR", help="folder to make")

    vocab = commands.add_parser("vocab", parents=[corpus], help="learn a WordPiece vocabulary")
    vocab.add_argument("--size", type=int, required=True, metavar="N", help="pieces at most, control tokens included")
    vocab.add_argument("--cased", action="store_true", help="keep capitals and accents")
    vocab.set_defaults(command=_vocab)

    shards = commands.add_parser("build", parents=[corpus], help="make the shards, or those still missing")
    add = shards.add_argument
    add("--tokenizer", type=Path, required=True, metavar="DIR", help="as `vocab` or Hugging Face makes it")
    add("--sequence-length", type=int, required=True, metavar="N", help="most tokens of a sample")
    add("--seed", type=int, default=1, metavar="N", help="of pairs, masks and order (%(default)s)")
    add("--duplicates", type=int, default=1, metavar="N", help="passes over the text, each masked anew (%(default)s)")
    add("--masked-share", type=float, default=0.15, metavar="X", help="share of the tokens to predict (%(default)s)")
    add(
        "--short-sequence-rate", type=float, default=0.1, metavar="X", help="pairs cut to a random length (%(default)s)"
    )
    add("--samples-per-shard", type=int, default=8192, metavar="N", help="samples of a shard (%(default)s)")
    add("--language", default="en", metavar="CODE", help="ISO 639-1, for splitting sentences (%(default)s)")
    cores = len(os.sched_getaffinity(0))
    add("--processes", type=int, default=cores, metavar="N", help="any number gives the same shards (%(default)s)")
    shards.set_defaults(command=_build)

    check = commands.add_parser("verify", help="prove data sets against their manifests")
    check.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    check.add_argument("--full", action="store_true", help="also hash every shard and decode every sample")
    check.set_defaults(command=_verify)

    inspect = commands.add_parser("inspect", help="show statistics, and samples as text")
    inspect.add_argument("folder", type=Path, metavar="DIR")
    inspect.add_argument("--samples", type=int, default=3, metavar="N", help="to show (%(default)s)")
    inspect.set_defaults(command=_inspect)
    return parser


if __name__ == "__main__":
    sys.exit(main())
