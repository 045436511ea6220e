"""The benchmark: every part measures something on a corpus of a few thousand words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.bench import TENSORFLOW, main
from data_prep.errors import DataError
from data_prep.measured_run import memory, run_measured
from tests.helpers.corpora import write_corpus

pytestmark = pytest.mark.slow

SCRIPT = '''\
"""Asks of TensorFlow all that Google's script asks."""
import tensorflow as tf

flags = tf.flags
FLAGS = flags.FLAGS
flags.DEFINE_string("input_file", None, "")
flags.DEFINE_string("output_file", None, "")
flags.DEFINE_string("vocab_file", None, "")
flags.DEFINE_bool("do_lower_case", False, "")
flags.DEFINE_bool("do_whole_word_mask", False, "")
flags.DEFINE_integer("max_seq_length", 0, "")
flags.DEFINE_integer("max_predictions_per_seq", 0, "")
flags.DEFINE_integer("dupe_factor", 10, "")
flags.DEFINE_float("masked_lm_prob", 0.0, "")
flags.DEFINE_float("short_seq_prob", 0.0, "")


def main(_):
    tf.logging.set_verbosity(tf.logging.INFO)
    writer = tf.python_io.TFRecordWriter(FLAGS.output_file)
    assert (FLAGS.do_lower_case, FLAGS.do_whole_word_mask) == (True, False)
    assert (FLAGS.max_seq_length, FLAGS.max_predictions_per_seq, FLAGS.dupe_factor) == (128, 19, 1)
    assert (FLAGS.masked_lm_prob, FLAGS.short_seq_prob) == (0.15, 0.1)
    with tf.gfile.GFile(FLAGS.vocab_file, "r") as reader:
        assert reader.readline() == "[PAD]\\n"
    for name in tf.gfile.Glob(FLAGS.input_file):
        with tf.gfile.GFile(name, "r") as reader:
            while line := reader.readline():
                whole = tf.train.Feature(int64_list=tf.train.Int64List(value=[len(line)]))
                share = tf.train.Feature(float_list=tf.train.FloatList(value=[0.5]))
                assert whole.int64_list.value and not whole.float_list.value and share.float_list.value
                example = tf.train.Example(features=tf.train.Features(feature={"a": whole, "b": share}))
                writer.write(example.SerializeToString())
    writer.close()
    tf.logging.info("Wrote %d total instances", 7)


if __name__ == "__main__":
    flags.mark_flag_as_required("input_file")
    tf.app.run()
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text of 40 kB and its tokenizer."""
    return write_corpus(tmp_path_factory.mktemp("text"), [20] * 36, 10, 10)


def measure(inputs: tuple[Path, Path], folder: Path, *more: str) -> dict[str, list[dict[str, str | float]]]:
    """Run the benchmark; returns its results by part."""
    text, tokenizer = inputs
    out = folder / "measurements.json"
    sizes = ["--megabytes", "0.01", "--large-megabytes", "0.03", "--google-megabytes", "0.005", "--repeats", "1"]
    command = ["--input", str(text), "--tokenizer", str(tokenizer), "--json", str(out), *sizes]
    assert main([*command, *more]) == 0
    results: dict[str, list[dict[str, str | float]]] = json.loads(out.read_text("utf-8"))
    return results


def test_rates_and_memory_are_measured(
    inputs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {core})  # builds of one process start sooner
    results = measure(inputs, tmp_path, "--only", "rates", "memory")
    assert list(results) == ["machine", "rates", "memory"]
    assert [row["unit"] for row in results["rates"]] == ["MB/s"] * 2 + ["s"] * 4
    assert [row["name"] for row in results["rates"][2:5]] == ["  tokenized", "  planned", "  wrote"]
    assert all(float(row["value"]) >= 0 for row in results["rates"])
    values = [float(row["value"]) for row in results["memory"]]
    assert [row["unit"] for row in results["memory"]] == ["MB"] * 6
    for anonymous, total in zip(values[::2], values[1::2], strict=True):
        assert 10 < anonymous < total  # an interpreter with numpy alone has more
    printed = capsys.readouterr()
    assert all(str(row["name"]) in printed.out for row in results["rates"] + results["memory"])
    assert "bench: building" in printed.err


def test_google_is_measured_with_our_settings(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    checkout = tmp_path / "bert"
    real = tmp_path / "real" / "tensorflow" / "compat"
    for folder in (checkout, real):
        folder.mkdir(parents=True)
    (checkout / "create_pretraining_data.py").write_text(SCRIPT)
    (real / "v1.py").write_text(f"{TENSORFLOW}print('the real one')\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "real"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    more = ["--google", str(checkout), "--tensorflow", str(python)]
    rows = measure(inputs, tmp_path, "--only", "google", *more)["google"]
    assert [row["unit"] for row in rows] == ["MB/s"] * 3 and all(float(row["value"]) > 0 for row in rows)
    names = [str(row["name"]).removeprefix("Google's script, ") for row in rows]
    assert names == ["the whole build, one core", "a stand-in for TensorFlow", "the real TensorFlow"]
    assert all(", 7 samples; the build is " in str(row["note"]) for row in rows[1:])


def test_all_ways_to_build_make_the_same(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    (row,) = measure(inputs, tmp_path, "--only", "identity")["identity"]
    assert row["value"] == 0 and "processes 1, processes 2, processes 4" in str(row["note"])
    assert ("ranks 1, ranks 2, ranks 3" in str(row["note"])) == bool(shutil.which("mpirun"))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--megabytes", "1"], "MB of text, 1 wanted"),
        (["--only", "google", "--google", "absent"], "create_pretraining_data.py"),
    ],
)
def test_what_can_not_be_measured_costs_one_line(
    inputs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], more: list[str], problem: str
) -> None:
    sizes = [] if "--megabytes" in more else ["--megabytes", "0.01", "--google-megabytes", "0.01"]
    assert main(["--input", str(inputs[0]), "--tokenizer", str(inputs[1]), *sizes, *more]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("bench: ")]
    assert line.startswith("data_prep.bench: error: ") and problem in line


def test_memory_is_that_of_all_processes_below() -> None:
    hold = "import sys; held = bytearray(b'x') * 50_000_000; print(flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # it is held
        anonymous, total = memory(process.pid)
        process.stdin.close()
    assert 50_000_000 < anonymous < total < 150_000_000
    assert memory(process.pid) == (0, 0)


def test_a_command_is_watched(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    code = "import os, time; held = bytearray(b'x') * 50_000_000; time.sleep(0.5); print(os.sched_getaffinity(0))"
    done = run_measured([sys.executable, "-c", code], tmp_path, dict(os.environ), core, look=True)
    assert done.output == str({core}) and done.seconds >= 0.5 > done.cpu > 0 and done.anonymous > 50_000_000
    with pytest.raises(DataError, match="exit code 3 of .*: at last"):
        run_measured(
            [sys.executable, "-c", "import sys; print('first\\nat last'); sys.exit(3)"], tmp_path, dict(os.environ)
        )
