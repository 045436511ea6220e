"""Measures the build on this machine: its speed, its memory, and whether its output is identical. Prints one table.

    python -m data_prep.bench --input TEXT... --tokenizer DIR [--google CHECKOUT [--tensorflow PYTHON]] [--only ...]

rates     `encode_batch` of the library `tokenizers` alone, with its own threads, on the sentences that the build
          makes; and the build as users run it, from the start of the command to its end. They alternate; medians.
memory    The peak of all processes of a build together, for two sizes of text and for 1 and 5 passes over it. A
          page that n processes share counts 1/n in each (PSS). Our claim is about anonymous memory; file-backed pages
          (the mapped tokenized text, programs, libraries) come on top, and the system may drop them at any time.
google    The create_pretraining_data.py of a checkout of github.com/google-research/bert, and the build with one
          process, each pinned to one core. They alternate; medians of the CPU time, without Google's imports. The
          script runs with a stand-in for TensorFlow that only counts what is written, which favours it. It also runs
          with the real TensorFlow if an interpreter has it. It is slow, and its rate does not depend on the amount of
          text, so it gets less text.
identity  Whether 1, 2 and 4 processes, and 1, 2 and 3 ranks if MPI is installed, make the same shards.

Rates are in MB (1,000,000 bytes) of UTF-8 text per second, memory in MB. The text is plain .jsonl, taken from the
start of the input.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from data_prep.cleaning import clean
from data_prep.corpus import read_chunks
from data_prep.errors import DataError
from data_prep.formats import Reading
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, load_manifest
from data_prep.measured_run import MeasuredRun, run_measured
from data_prep.options import CommandParser, check_place, check_range
from data_prep.sentences import split_sentences
from data_prep.sources import find_sources
from data_prep.streams import say_error
from data_prep.tokenizer import bert_encoder, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SEQUENCE_LENGTH, LANGUAGE = 128, "en"
PROCESSES, RANKS, DUPLICATES = (1, 2, 4), (1, 2, 3), 5
MB = 1_000_000
LEAST, MOST = 0.001, 1_000_000  # megabytes of text to measure with
BATCH = 8192  # sentences per `encode_batch`: 128, or all at once, is slower
STAGE = re.compile(r"^data_prep: (\w+) [^%\n]* in (?:(\d+) min )?([\d.]+) s(?:, [\d,]+ a second)?$", re.MULTILINE)
MPI_SETTINGS = {  # Open MPI: allow root, and more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
GOOGLE = """\
import os, runpy, sys, time
import tensorflow.compat.v1 as tensorflow
sys.modules["tensorflow"] = tensorflow
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
print("imports", time.process_time(), flush=True)
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # the unchanged script, with the TensorFlow 1 API
IMPORTS, WROTE = re.compile(r"^imports ([\d.]+)$", re.MULTILINE), re.compile(r"Wrote (\d+) total instances")
TENSORFLOW = """\
import glob, sys
from types import SimpleNamespace as Names
class Message(Names):
    int64_list = float_list = Names(value=())
    SerializeToString = bytes
def writer(path):
    sizes = []
    return Names(write=lambda record: sizes.append(len(record)), close=sizes.clear)
def define(name, default, text):
    setattr(flags.FLAGS, name, default)
def run():
    for name, value in (argument[2:].split("=", 1) for argument in sys.argv[1:]):
        kind = type(getattr(flags.FLAGS, name))
        setattr(flags.FLAGS, name, value == "true" if kind is bool else kind(value) if kind in (int, float) else value)
    sys.modules["__main__"].main(sys.argv)
kinds = dict.fromkeys(["DEFINE_string", "DEFINE_integer", "DEFINE_float", "DEFINE_bool"], define)
flags = Names(FLAGS=Names(), mark_flag_as_required=str, **kinds)
gfile = Names(GFile=lambda path, mode: open(path, encoding="utf-8"), Glob=glob.glob)
python_io = Names(TFRecordWriter=writer)
train = Names(**dict.fromkeys(["Example", "Features", "Feature", "Int64List", "FloatList"], Message))
logging = Names(INFO=0, set_verbosity=int, info=lambda text, *values: print(text % values if values else text))
app = Names(run=run)
"""  # the part of the TensorFlow 1 API that create_pretraining_data.py uses


@dataclass(frozen=True)
class Measurement:
    """A row of the table."""

    name: str
    value: float
    unit: str
    note: str = ""


@dataclass(frozen=True)
class TextFile:
    """A .jsonl file and the size of its text in UTF-8 bytes."""

    path: Path
    bytes: int

    def __str__(self) -> str:
        return f"{self.bytes / MB:.4g} MB"


@dataclass(frozen=True)
class BuildBench:
    """The options of a measurement and the folders it writes."""

    options: argparse.Namespace
    work: Path  # folder for everything the benchmark writes
    out: Path  # the data set of the last build
    cores: int

    def cut(self, megabytes: float) -> TextFile:
        """Writes the first ``megabytes`` of the input to a .jsonl file."""
        path, size = self.work / f"text-{megabytes:g}.jsonl", 0
        with path.open("w", encoding="utf-8") as file:
            for _, document in groupby(read_paragraphs(self.options.input), itemgetter(0)):
                taken = []
                for _, paragraph in document:
                    if size < megabytes * MB:
                        taken.append(paragraph)
                        size += len(paragraph.encode())
                file.write(json.dumps({"text": "\n\n".join(taken)}, ensure_ascii=False) + "\n")
                if size >= megabytes * MB:
                    return TextFile(path, size)
        raise DataError(f"the input has {size / MB:.4g} MB of text, {megabytes:g} wanted; give more, or ask for less")

    def build(self, text: TextFile, processes: int, duplicates: int = 1, ranks: int = 0, **watch: Any) -> MeasuredRun:
        """Builds into ``out``, under MPI if ``ranks`` is set; ``watch`` goes to `run_measured`."""
        shutil.rmtree(self.out, ignore_errors=True)
        command = ["mpirun", "-n", str(ranks), sys.executable, "-m", "mpi4py"] if ranks else [sys.executable]
        command += ["-m", "data_prep", "build", f"--input={text.path}", f"--out={self.out}", f"--language={LANGUAGE}"]
        command += [f"--tokenizer={self.options.tokenizer.resolve()}", f"--sequence-length={SEQUENCE_LENGTH}"]
        command += [f"--processes={processes}", f"--duplicates={duplicates}"]
        say(f"building {text}, {f'ranks {ranks}' if ranks else f'processes {processes}'}, duplicates {duplicates}")
        return run_measured(command, ROOT, os.environ | MPI_SETTINGS, **watch)


def compare_rates(bench: BuildBench) -> Iterator[Measurement]:
    """Compares the library alone with the whole build, alternating."""
    text = bench.cut(bench.options.megabytes)
    sentences = split(text, bench.work / "sentences.txt")
    alone, builds = [], []
    for _ in range(bench.options.repeats):
        say(f"encode_batch alone on {text}")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            alone.append(fresh.submit(encode, sentences, bench.options.tokenizer).result())
        builds.append(bench.build(text, bench.cores))
    library = text.bytes / MB / statistics.median(alone)
    middle = sorted(builds, key=lambda done: done.seconds)[len(builds) // 2]
    whole = text.bytes / MB / middle.seconds
    yield Measurement(f"encode_batch alone, {bench.cores} threads", library, "MB/s", f"{text}, median of {len(alone)}")
    yield Measurement(f"the whole build, {bench.cores} processes", whole, "MB/s", f"{whole / library:.2f} of that")
    stages = {name: 60 * int(minutes or 0) + float(seconds) for name, minutes, seconds in STAGE.findall(middle.output)}
    for name, seconds in stages.items():
        yield Measurement(f"  {name}", seconds, "s")
    yield Measurement("  everything else: start, hashes, manifest", middle.seconds - sum(stages.values()), "s")


def compare_memory(bench: BuildBench) -> Iterator[Measurement]:
    """Peak memory by size of the text and by number of passes over it."""
    small, large = bench.cut(bench.options.megabytes), bench.cut(bench.options.large_megabytes)
    peaks = []
    for text, duplicates in ((small, 1), (large, 1), (small, DUPLICATES)):
        done = bench.build(text, bench.cores, duplicates, look=True)
        peaks.append(done)
        name = f"{text}, duplicates {duplicates}"
        times = f"{done.anonymous / peaks[0].anonymous:.2f} times the first"
        yield Measurement(f"{name}: anonymous memory", done.anonymous / MB, "MB", times)
        times = f"{done.total / peaks[0].total:.2f} times the first"
        yield Measurement(f"{name}: with file-backed pages", done.total / MB, "MB", times)


def compare_google(bench: BuildBench) -> Iterator[Measurement]:
    """Compares Google's script with our build, each on one core, alternating."""
    ours, theirs = bench.cut(bench.options.megabytes), bench.cut(bench.options.google_megabytes)
    core = min(os.sched_getaffinity(0))
    stand_in = bench.work / "stand-in"
    (stand_in / "tensorflow" / "compat").mkdir(parents=True)
    (stand_in / "tensorflow" / "compat" / "v1.py").write_text(TENSORFLOW)
    pythons = {"a stand-in for TensorFlow": (Path(sys.executable), os.environ | {"PYTHONPATH": str(stand_in)})}
    if bench.options.tensorflow:
        pythons["the real TensorFlow"] = (bench.options.tensorflow, dict(os.environ))
    runner, sentences = bench.work / "run_google.py", split(theirs, bench.work / "google.txt")
    runner.write_text(GOOGLE)
    builds: list[float] = []
    scripts: dict[str, list[float]] = {name: [] for name in pythons}
    wrote: dict[str, int] = {}
    for _ in range(bench.options.repeats):
        builds.append(bench.build(ours, 1, core=core).cpu)
        for name, (python, environment) in pythons.items():
            say(f"Google's script on {theirs}, with {name}")
            command = [str(python), str(runner), *google_command(bench, sentences)]
            done = run_measured(command, bench.work, environment, core)
            imports, samples = IMPORTS.search(done.output), WROTE.findall(done.output)
            if imports is None or not samples:
                raise DataError(f"Google's script did not report its number of samples: {done.output[-200:]}")
            scripts[name].append(done.cpu - float(imports[1]))
            wrote[name] = int(samples[-1])
    made = load_manifest(bench.out).counts.samples
    rate = ours.bytes / MB / statistics.median(builds)
    yield Measurement("the whole build, one core", rate, "MB/s", f"{ours}, {made:,} samples, median of {len(builds)}")
    for name, seconds in scripts.items():
        base = theirs.bytes / MB / statistics.median(seconds)
        note = f"{theirs}, {wrote[name]:,} samples; the build is {rate / base:.1f} times as fast"
        yield Measurement(f"Google's script, {name}", base, "MB/s", note)


def google_command(bench: BuildBench, sentences: Path) -> list[str]:
    """The command line of Google's script, with the settings and the vocabulary of the last build."""
    settings, tokenizer = load_manifest(bench.out).settings, bench.out / TOKENIZER_FOLDER
    flags = {
        "input_file": sentences,
        "output_file": os.devnull,
        "vocab_file": tokenizer / "vocab.txt",
        "do_lower_case": str(load_tokenizer(tokenizer).settings["do_lower_case"]).lower(),
        "max_seq_length": settings.sequence_length,
        "max_predictions_per_seq": settings.max_predictions,
        "masked_lm_prob": settings.masked_share,
        "short_seq_prob": settings.short_sequence_rate,
        "dupe_factor": settings.duplicates,
    }
    script = bench.options.google.resolve() / "create_pretraining_data.py"
    return [str(script), *(f"--{name}={value}" for name, value in flags.items())]


def compare_identity(bench: BuildBench) -> Iterator[Measurement]:
    """Compares shards across process and rank counts. Raises DataError at the end if they differ."""
    text = bench.cut(bench.options.megabytes)
    mpi = shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None
    manifests: dict[str, Manifest] = {}
    for count, ranks in [(count, 0) for count in PROCESSES] + [(1, count) for count in RANKS if mpi]:
        bench.build(text, count, ranks=ranks)
        manifests[f"ranks {ranks}" if ranks else f"processes {count}"] = load_manifest(bench.out)
    first, *others = manifests
    different = [name for name in others if manifests[name] != manifests[first]]
    made = ", ".join(manifests) + ("" if mpi else "; no ranks, since mpirun or mpi4py is missing")
    yield Measurement("data sets that differ from the first", len(different), "", f"of {len(manifests)}: {made}")
    if different:
        raise DataError(f"the shards with {' and with '.join(different)} differ from those with {first}")


MEASUREMENTS = {
    "rates": compare_rates,
    "memory": compare_memory,
    "google": compare_google,
    "identity": compare_identity,
}


def read_paragraphs(inputs: list[Path]) -> Iterator[tuple[int, str]]:
    """(document number, text) of each paragraph of the input."""
    for chunk in read_chunks(find_sources(inputs), Reading()):
        yield from chunk.paragraphs


def split(text: TextFile, path: Path) -> Path:
    """Writes the sentences that a build makes from a text, one per line, with a blank line between documents."""
    say(f"splitting {text} into sentences")
    with path.open("w", encoding="utf-8") as file:
        for _, document in groupby(read_paragraphs([text.path]), itemgetter(0)):
            for _, paragraph in document:
                file.writelines(f"{sentence}\n" for sentence in split_sentences(clean(paragraph)[0], LANGUAGE)[0])
            file.write("\n")
    return path


def encode(sentences: Path, tokenizer: Path) -> float:
    """Seconds for `encode_batch` over all sentences, ids not read. Needs a process with default threading."""
    lines = [line for line in sentences.read_text("utf-8").split("\n") if line]
    loaded = load_tokenizer(tokenizer)
    encoder = bert_encoder(loaded.pieces, loaded.settings)
    start = time.perf_counter()
    for first in range(0, len(lines), BATCH):
        encoder.encode_batch(lines[first : first + BATCH], add_special_tokens=False)
    return time.perf_counter() - start


def say(what: str) -> None:
    """Prints a progress line."""
    say_error(f"bench: {what}")


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line. Raises DataError for anything that would fail later."""
    parser = CommandParser("python -m data_prep.bench", description="Measure the build on this machine.")
    add = parser.add_argument
    add("--input", nargs="+", type=Path, required=True, metavar="PATH", help="text files or folders, as for `build`")
    add("--tokenizer", type=Path, required=True, metavar="DIR", help="tokenizer folder, as for `build`")
    add("--google", type=Path, metavar="DIR", help="checkout of github.com/google-research/bert")
    add("--tensorflow", type=Path, metavar="PYTHON", help="interpreter that has TensorFlow 2, for Google's script")
    add(
        "--only",
        nargs="+",
        choices=MEASUREMENTS,
        metavar="PART",
        help=f"any of {', '.join(MEASUREMENTS)} (all that can run)",
    )
    add("--megabytes", type=float, default=20, metavar="X", help="text for every part (%(default)s)")
    add("--large-megabytes", type=float, default=120, metavar="X", help="the larger text for memory (%(default)s)")
    add("--google-megabytes", type=float, default=2, metavar="X", help="text for Google's script (%(default)s)")
    add("--repeats", type=int, default=3, metavar="N", help="repeats of each timed run (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    options.only = options.only or [part for part in MEASUREMENTS if part != "google" or options.google]
    if "google" in options.only and options.google is None:
        parser.error("--only google needs --google, a checkout")
    for size in ("megabytes", "large_megabytes", "google_megabytes"):
        check_range("--" + size.replace("_", "-"), getattr(options, size), LEAST, MOST)
    check_range("--repeats", options.repeats, 1)
    if options.json:
        check_place("--json", options.json, ".json", new=True)  # it could be a tokenizer.json
    return options


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and returns the exit code: 0, or 2 after one error line on stderr."""
    try:
        measure(read_options(arguments))
    except (DataError, OSError) as error:
        say_error(f"data_prep.bench: error: {error}")
        return 2
    return 0


def measure(options: argparse.Namespace) -> None:
    """Runs every chosen part, and prints each row as soon as it is known."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = f"{model[1] if model else platform.machine()}, Python {platform.python_version()}"
    print(machine)
    results: dict[str, list[dict[str, str | float]]] = {}
    with tempfile.TemporaryDirectory(prefix="data-prep-bench-") as work:
        bench = BuildBench(options, Path(work), Path(work, "out"), len(os.sched_getaffinity(0)))
        for part in options.only:
            print(f"\n{part}", flush=True)
            results[part] = []
            for row in MEASUREMENTS[part](bench):
                results[part].append(asdict(row))
                print(f"  {row.name:<50}{row.value:>10,.2f} {row.unit:<6}{row.note}".rstrip(), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, **results}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
