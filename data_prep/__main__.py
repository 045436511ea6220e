"""Command line: `python -m data_prep vocab | build | verify | inspect | publish`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import fields
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from data_prep.build import build
from data_prep.builders import parse_builder
from data_prep.combining_marks import LIMIT, loss
from data_prep.corpus import read_paragraphs
from data_prep.errors import CopyError, DataError, PassingError, shortage
from data_prep.formats import Reading
from data_prep.inputs import find_inputs
from data_prep.inspection import describe, show_samples, warn_of_markup, warnings
from data_prep.manifest import load_manifest
from data_prep.metrics import BuildMetrics, check_textfile, push, serve, write_textfile
from data_prep.options import CommandParser, check_place, check_range
from data_prep.settings import SETTING_CHOICES, Settings, make_settings
from data_prep.sources import FORMATS, find_left_out, find_sources, parse_where, say_left_out
from data_prep.streams import complain, flush, print_result, warn
from data_prep.verify import verify, verify_published
from data_prep.vocab import COVERAGE, LARGEST_MULTIPLE, LARGEST_VOCABULARY, LEAST_ALPHABET, learn_tokenizer
from data_prep.workers import Stopped, on_ranks, stop_on_sigterm

FAILED, BAD_INPUT, INTERRUPTED, STOPPED = 1, 2, 130, 143  # exit codes; after FAILED, a retry may succeed
PUBLISHERS = 8  # files sent in parallel
MOST_PROCESSES = 4096
VERSIONS = ("tokenizers", "sentencex")  # settings that the environment decides, not the user
EXAMPLES = """\
from text to shards:
  python -m data_prep vocab --input corpus/ --out tokenizer/ --size 30000
  python -m data_prep build --input corpus/ --tokenizer tokenizer/ --out shards-128/ --sequence-length 128
  python -m data_prep verify --full shards-128/
  python -m data_prep inspect shards-128/

The text is UTF-8, plain or compressed (.gz, .bz2, .xz, .zst), in .txt or .text files (a blank line between
documents) or .jsonl, .ndjson or .json files (one document per line, in the field "text"); or it is in .parquet
files (one document per row, in the column "text"), or in .tar files (WebDataset's samples). wikiextractor's
wiki_00 files need --format wikiextractor."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    The code is 0 on success. After one line on stderr for each problem, it is 2 for bad input, and 1 if a resource ran
    out, a server failed or a worker was killed.
    """
    options = _parser().parse_args(arguments)
    with stop_on_sigterm():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.command(options))
    except (DataError, OSError, MemoryError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        lacks = shortage(error)
        complain(f"{said or type(error).__name__} ({lacks})" if lacks else said)
        return FAILED if lacks or isinstance(error, PassingError) else BAD_INPUT
    except Stopped:
        complain("stopped by SIGTERM; to resume a build, run the same command again")
        return STOPPED
    except KeyboardInterrupt:
        complain("interrupted; to resume a build, run the same command again")
        return INTERRUPTED


def _vocab(options: argparse.Namespace) -> int:
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise DataError(f"{options.out} is not empty; choose another --out or remove it")
    check_range("--size", options.size, 1, LARGEST_VOCABULARY)
    check_range("--multiple-of", options.multiple_of, 1, LARGEST_MULTIPLE)
    check_range("--character-coverage", options.character_coverage, 0, 1)
    reading = Reading(parse_where(options.where), options.text_field, options.bad_bytes, options.format)
    inputs = find_inputs(options.input, options.downloads, options.redirects, reading.format)
    sources = find_sources(inputs, reading.where, reading.format)
    say_left_out(find_left_out(inputs, reading.format))
    left = {source.name: Counter[str]() for source in sources}
    paragraphs = (
        paragraph.text for source in sources for paragraph in read_paragraphs(source, reading, left[source.name])
    )
    chosen = (options.cased, options.multiple_of, options.character_coverage, options.keep_accents)
    learnt = learn_tokenizer(paragraphs, options.size, *chosen)
    learnt.tokenizer.save(options.out)
    size, more = learnt.tokenizer.vocab_size, ""
    if learnt.left_out:
        more = (
            f"; {learnt.left_out:,} rare characters ({learnt.share:.3%} of the text) have none and become [UNK]: "
            f"a larger {learnt.limit} takes more"
        )
    elif size < options.size:
        more = f", fewer than {options.size:,}: the text has no more"
    print_result(f"{options.out}: {size:,} pieces{more}")
    for line in warn_of_markup({name: counts["markup"] for name, counts in left.items()}):
        warn(line)
    if learnt.marks.other > LIMIT * learnt.words:
        warn(loss(learnt.marks.other))
    return 0


def _build(options: argparse.Namespace) -> int:
    chosen = {field.name: getattr(options, field.name) for field in fields(Settings) if field.name not in VERSIONS}
    settings = make_settings(**chosen)
    check_range("--processes", options.processes, 1, MOST_PROCESSES)
    builder = None if options.builder is None else parse_builder(options.builder)
    start = time.monotonic()
    metrics = BuildMetrics(options.out.resolve().name, {name: getattr(settings, name) for name in VERSIONS})
    if options.metrics_file:
        check_textfile(options.metrics_file)
    with serve(metrics, options.metrics_port, options.metrics_address), push(metrics, options.metrics_push):
        inputs = find_inputs(options.input, options.downloads, options.redirects, settings.format)
        where = (inputs, options.tokenizer, options.out)
        manifest = build(*where, settings, options.processes, options.store, metrics, builder)
    if options.metrics_file:
        write_textfile(metrics, options.metrics_file)
    seconds = time.monotonic() - start
    print_result("\n".join([*describe(manifest), f"{options.out}: complete, in {seconds:.1f} s"]))
    for line in warnings(manifest):
        warn(line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    code = 0
    for place in options.places:
        try:
            if "://" in place:
                problems, samples = verify_published(place, options.stock)
            else:
                problems = verify(Path(place), options.full, options.stock)
                samples = load_manifest(Path(place)).counts.samples
        except CopyError as error:  # still verify the other data sets
            complain(str(error))
            code = code or FAILED
            continue
        except (DataError, OSError) as error:
            problems = [str(error)]
        for problem in problems:
            complain(problem)
            code = BAD_INPUT
        if not problems:
            alike = f", the same for webdataset {version('webdataset')}" if options.stock else ""
            print_result(f"{place}: complete, {samples:,} samples{alike}")
    return code


def _inspect(options: argparse.Namespace) -> int:
    check_range("--samples", options.samples, 0)
    if options.picture:
        check_place("--picture", options.picture, ".png")
    for line in chain(describe(load_manifest(options.folder)), show_samples(options.folder, options.samples)):
        if not print_result(line):
            break
    if options.picture:
        from data_prep.picture import draw

        draw(options.folder, options.picture)
        print_result(f"{options.picture}: written")
    return 0


def _publish(options: argparse.Namespace) -> int:
    from data_prep.publish import publish

    if options.builder is not None and parse_builder(options.builder).number:
        print_result(f"{options.url}: left to builder 0")
        return 0
    done = publish(options.folder, options.url, PUBLISHERS)
    print_result(f"{options.url}: {done.files:,} files, {done.bytes:,} bytes, all verified; {done.sent:,} sent now")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "python -m data_prep",
        description="Turn text into shards of masked sentence pairs for BERT pre-training.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    corpus = CommandParser(add_help=False)
    add = corpus.add_argument_group("text").add_argument
    named = "text files, folders of text files, or https:// and s3:// addresses; a-{00..99}.tar names 100 files"
    add("--input", nargs="+", required=True, metavar="PATH", help=named)
    add("--downloads", type=Path, metavar="DIR", help="keep copies of the files at addresses here, also for other runs")
    add("--redirects", nargs="+", default=(), metavar="URL", help="other servers that an address may redirect to")
    add("--text-field", default="text", metavar="NAME", help="field or column with the text (%(default)s)")
    add("--where", metavar="FIELD=VALUE", help="take only the records with this field")
    add(
        "--bad-bytes",
        choices=SETTING_CHOICES["bad_bytes"],
        default="strict",
        help="bytes that are not UTF-8: an error, or replaced and counted (%(default)s)",
    )
    add(
        "--format",
        choices=FORMATS,
        default="auto",
        help="format of files with another extension; wikiextractor: its <doc …> text (also in .txt) or its JSON",
    )
    corpus.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to create")
    _add_vocab(commands.add_parser("vocab", parents=[corpus], help="learn a WordPiece vocabulary"))
    _add_build(commands.add_parser("build", parents=[corpus], help="build the shards, or only those still missing"))

    check = commands.add_parser("verify", help="check data sets against their manifests")
    what = "a folder, or an address as for `publish`, or https://…; of an address, every shard is read"
    check.add_argument("places", nargs="+", metavar="DIR", help=what)
    check.add_argument("--full", action="store_true", help="also hash every shard and decode every sample")
    check.add_argument("--stock", action="store_true", help="also read every sample with stock webdataset, and compare")
    check.set_defaults(command=_verify)

    inspect = commands.add_parser("inspect", help="show statistics, and a few samples as text")
    inspect.add_argument("folder", type=Path, metavar="DIR")
    inspect.add_argument("--samples", type=int, default=3, metavar="N", help="samples to show (%(default)s)")
    inspect.add_argument("--picture", type=Path, metavar="PNG", help="plot lengths, tokens, masks, shards to this file")
    inspect.set_defaults(command=_inspect)

    send = commands.add_parser("publish", help="copy a data set to an object store and verify it; a rerun resumes")
    send.add_argument("folder", type=Path, metavar="DIR")
    send.add_argument("url", metavar="URL", help="s3://bucket/path, gs://…, or any URL that fsspec can write to")
    send.add_argument("--builder", metavar="K/N", help="publish only if K is 0, for builders that end together")
    send.set_defaults(command=_publish)
    return parser


def _add_vocab(vocab: argparse.ArgumentParser) -> None:
    add = vocab.add_argument
    add("--size", type=int, required=True, metavar="N", help="maximum vocabulary size, control tokens included")
    add("--multiple-of", type=int, default=1, metavar="N", help="pad the size with pieces that are never predicted")
    add("--cased", action="store_true", help="keep capitals and accents")
    add("--keep-accents", action="store_true", help="lower-case the text, but keep accents and vowel signs")
    covered = f"share of the text's characters that get a piece; at least {LEAST_ALPHABET:,} do (%(default)s)"
    add("--character-coverage", type=float, default=COVERAGE, metavar="X", help=covered)
    vocab.set_defaults(command=_vocab)


def _add_build(build_parser: argparse.ArgumentParser) -> None:
    text = build_parser.add_argument_group("documents and sentences").add_argument
    code = "ISO 639-1 code for sentence splitting; if unsupported, a related language's rules apply, or English"
    text("--language", default="en", metavar="CODE", help=f"{code} (%(default)s)")
    text("--given-words", action="store_true", help="for masking, Chinese characters between two spaces are one word")
    text("--drop-duplicates", action="store_true", help="keep only the first of identical documents")
    text("--held-out-share", type=float, default=0.0, metavar="X", help="share to hold out, by a hash of the text")
    text(
        "--part", choices=SETTING_CHOICES["part"], default="all", help="which side of the held-out share (%(default)s)"
    )
    add = build_parser.add_argument_group("samples").add_argument
    add("--tokenizer", type=Path, required=True, metavar="DIR", help="folder written by `vocab` or `transformers`")
    add("--sequence-length", type=int, required=True, metavar="N", help="maximum tokens per sample")
    add(
        "--pairs",
        choices=SETTING_CHOICES["pairs"],
        default="nsp",
        help="second task: next sentence, order, or none (%(default)s)",
    )
    add("--short-sequence-rate", type=float, default=0.1, metavar="X", help="share of shortened samples (%(default)s)")
    add("--cut", choices=SETTING_CHOICES["cut"], default="either", help="where a long pair is truncated (%(default)s)")
    add(
        "--masking",
        choices=SETTING_CHOICES["masking"],
        default="token",
        help="unit that is masked together (%(default)s)",
    )
    add("--masked-share", type=float, default=0.15, metavar="X", help="share of the tokens to predict (%(default)s)")
    add("--max-predictions", type=int, metavar="N", help="maximum masked tokens per sample (the share of a full one)")
    add("--duplicates", type=int, default=1, metavar="N", help="passes over the text, with new masks (%(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="random seed for pairs, masks and order (%(default)s)")
    add("--samples-per-shard", type=int, default=8192, metavar="N", help="samples per shard (%(default)s)")
    run = build_parser.add_argument_group("run").add_argument
    cores = len(os.sched_getaffinity(0))
    run("--processes", type=int, default=cores, metavar="N", help="workers; does not change the shards (%(default)s)")
    run("--builder", metavar="K/N", help="one of N builders that share --out: this is builder K, from 0 to N - 1")
    run("--store", type=Path, metavar="DIR", help="keep the tokenized text here, for other builds from the same text")
    run("--metrics-port", type=int, metavar="N", help="serve Prometheus metrics on this port during the build (off)")
    run("--metrics-address", default="0.0.0.0", metavar="IP", help="address of the metrics port (%(default)s)")
    run("--metrics-file", type=Path, metavar="PROM", help="write the metrics here, for node_exporter")
    run("--metrics-push", metavar="URL", help="push the metrics to this Pushgateway; the group is named after --out")
    build_parser.set_defaults(command=_build)


if __name__ == "__main__":
    code = on_ranks(main)
    flush()
    sys.exit(code)
