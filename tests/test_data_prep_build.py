"""The whole build: the same bytes from any number of processes and after kill -9; one line for bad input."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data_prep import corpus, pairs
from data_prep.__main__ import main
from data_prep.build import build
from data_prep.errors import KilledError
from data_prep.manifest import load_manifest
from data_prep.settings import make_settings
from data_prep.verify import verify
from data_prep.workers import start_workers
from tests.helpers.corpora import SPECIAL_IDS, contents, read_samples, write_corpus, write_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
GOOD = {"a.txt": b"w0\nw1\n\nw2"}


def command(text: Path, tokenizer: Path, out: Path, *more: str) -> list[str]:
    """Arguments of a build of many small shards, by one process unless ``more`` says otherwise."""
    options = ["--sequence-length", "32", "--samples-per-shard", "16", "--processes", "1", *more]
    return ["build", "--input", str(text), "--tokenizer", str(tokenizer), "--out", str(out), *options]


def start(arguments: list[str], hash_seed: str = "0") -> subprocess.Popen[str]:
    """Start a build as a user does."""
    env = os.environ | {"PYTHONHASHSEED": hash_seed, "TOKENIZERS_PARALLELISM": "true"}
    line = [sys.executable, "-m", "data_prep", *arguments]
    return subprocess.Popen(line, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def test_same_bytes_for_any_number_of_processes_and_hash_seed(tmp_path: Path) -> None:
    text, tokenizer = write_corpus(tmp_path, [60] * 120, 8, 10)  # several chunks of text
    for processes in ("1", "2", "3"):
        more = ["--processes", processes, "--samples-per-shard", "100"]
        run = start(command(text, tokenizer, tmp_path / processes, *more), processes)
        assert run.wait(120) == 0
    one, two, three = (contents(tmp_path / processes) for processes in ("1", "2", "3"))
    assert len(one) > 40 and one == two == three
    assert verify(tmp_path / "1", full=True) == []
    assert not any(name.startswith(".") or name.endswith(".tmp") for name in one)


def test_same_bytes_however_the_work_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, tokenizer = write_corpus(tmp_path, [1, 7, 30] * 10, 8)
    build([text], tokenizer, tmp_path / "whole", make_settings(32), 1)
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 500)
    monkeypatch.setattr(pairs, "BLOCK_TOKENS", 300)
    build([text], tokenizer, tmp_path / "cut", make_settings(32), 2)
    assert contents(tmp_path / "whole") == contents(tmp_path / "cut")


def test_killed_and_rerun_equals_never_killed(tmp_path: Path) -> None:
    text, tokenizer = write_corpus(tmp_path, [60] * 60, 8, 10)
    arguments = command(text, tokenizer, tmp_path / "killed", "--processes", "2")
    run = start(arguments)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "killed").glob("shard-*.tar"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.002)
    run.send_signal(signal.SIGKILL)
    assert run.wait(60) == -signal.SIGKILL
    time.sleep(1)  # the workers end by themselves
    out = tmp_path / "killed"
    made = {path.name: path.stat().st_ino for path in out.glob("shard-*.tar")}
    assert made and not (out / "manifest.json").exists()
    (out / "shard-00001.tar").write_bytes(b"damaged by the crash")
    with (out / "shard-00000.tar").open("r+b") as tar:
        tar.write(b"9")  # in the name of its first member
    (out / "shard-00009.tar.1.tmp").write_bytes(b"left by the crash")

    assert main(arguments) == 0
    assert main(command(text, tokenizer, tmp_path / "whole")) == 0
    assert contents(out) == contents(tmp_path / "whole")
    kept = {path.name: path.stat().st_ino for path in out.glob("shard-*.tar")}
    assert all(
        kept[name] == inode for name, inode in made.items() if name not in ("shard-00000.tar", "shard-00001.tar")
    )


def test_a_killed_worker_fails_the_run_at_once(tmp_path: Path) -> None:
    with start_workers(2) as workers, pytest.raises(KilledError, match="run the same command again"):
        list(workers.map(signal.raise_signal, [signal.SIGKILL]))


def test_what_may_pass_has_another_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, tokenizer = write_corpus(tmp_path, [20] * 5, 8)

    def lose_a_worker(*_: object, **__: object) -> None:
        raise KilledError("a worker process was killed")

    monkeypatch.setattr("data_prep.build.tokenize", lose_a_worker)
    assert main(command(text, tokenizer, tmp_path / "out")) == 1  # after 2, Kubernetes would not try again


def test_a_build_that_is_whole_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = write_corpus(tmp_path, [20] * 5, 8)
    arguments = command(text, tokenizer, tmp_path / "out")
    assert main(arguments) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert main(arguments) == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    # Another seed, another corpus: neither may touch it.
    assert main([*arguments, "--seed", "2"]) == 2
    text.write_text(text.read_text() + "\n\nd0w0 d0w1\nd0w2")
    assert main(arguments) == 2
    assert "holds another build, of other text or settings" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def test_manifest_counts_are_those_of_the_samples(tmp_path: Path) -> None:
    text, tokenizer = write_corpus(tmp_path, [20] * 10, 8)
    settings = make_settings(32, duplicates=2, samples_per_shard=30)
    manifest = build([text], tokenizer, tmp_path / "out", settings, 1)
    assert manifest == load_manifest(tmp_path / "out")
    samples = list(read_samples(tmp_path / "out"))
    counts = manifest.counts
    assert counts.samples == len(samples) == sum(shard.samples for shard in manifest.shards)
    assert counts.tokens == sum(len(sample.ids) for sample in samples)
    assert counts.masked == sum(len(sample.positions) for sample in samples)
    assert counts.is_next == sum(sample.is_next for sample in samples)
    assert max(len(sample.positions) for sample in samples) <= manifest.settings.max_predictions == 4
    assert (manifest.corpus.documents, manifest.corpus.sentences, manifest.corpus.tokens) == (10, 200, 1600)
    unigrams = np.load(tmp_path / "out" / manifest.token_counts.file)
    everything = np.concatenate([sample.ids for sample in samples])
    expected = np.bincount(everything, minlength=manifest.tokenizer.vocab_size)
    expected[sorted(SPECIAL_IDS)] = 0
    assert unigrams.dtype == np.int64 and unigrams.tolist() == expected.tolist()


def test_duplicates_seeds_and_order_differ(tmp_path: Path) -> None:
    text, tokenizer = write_corpus(tmp_path, [20] * 10, 8)
    made = {}
    for name, settings in {"a": make_settings(32), "b": make_settings(32, seed=2)}.items():
        build([text], tokenizer, tmp_path / name, settings, 1)
        made[name] = [sample.ids.tolist() for sample in read_samples(tmp_path / name)]
    assert made["a"] != made["b"] and made["a"] != sorted(made["a"])
    build([text], tokenizer, tmp_path / "c", make_settings(32, duplicates=2), 1)
    twice = [tuple(sample.ids.tolist()) for sample in read_samples(tmp_path / "c")]
    assert len(set(twice)) > 0.95 * len(twice) > 1.8 * len(made["a"])


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        ({}, [], "no text files in"),
        ({"a.txt": b" \n\n"}, [], "no text found in "),
        ({"a.jsonl": b'{"text": "w0", "split": "x"}'}, ["--where", "split=y"], "no text found in records"),
        ({"a.txt": b"w0\nw1\nw2"}, [], "one document only (sentences: 3)"),
        ({"a.txt": b"w0\n\nw1\n\nw2"}, [], "no pair of sentences: 3 of 3 documents"),
        ({"a.txt": b"w0\nw1\n\nw2", "b.txt": b"w0\ncaf\xe9\n"}, [], "b.txt, line 2: not UTF-8"),
        (GOOD, ["--tokenizer", "absent"], "tokenizer folder absent does not exist"),
        (GOOD, ["--sequence-length", "4", "--duplicates", "0"], "--duplicates 0: wanted"),
        (GOOD, ["--where", "split"], "--where split: wanted field=value"),
        (GOOD, ["--processes", "0"], "--processes 0: wanted 1 to 4096"),
    ],
)
def test_bad_input_costs_one_line(
    tmp_path: Path,
    files: dict[str, bytes],
    arguments: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    tokenizer = write_tokenizer(tmp_path / "t", ["w0", "w1", "w2"])
    assert main(command(folder, tokenizer, tmp_path / "out", *arguments)) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and errors[0].startswith("data_prep: error: ") and message in errors[0]
    assert not (tmp_path / "out").exists()


def test_work_of_another_build_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = write_corpus(tmp_path, [4, 4], 8)
    work = tmp_path / "out" / ".work"
    (work / "store").mkdir(parents=True)  # killed before its mark was made, or after it was removed: nobody's
    (work / "plan").write_bytes(b"of another text")
    assert main(command(text, tokenizer, tmp_path / "out")) == 0
    work.mkdir()
    (tmp_path / "out" / "manifest.json").unlink()
    (work / "fingerprint").write_text("another, perhaps still at work")
    before = contents(tmp_path / "out")
    assert main(command(text, tokenizer, tmp_path / "out")) == 2
    assert "holds another build" in capsys.readouterr().err and contents(tmp_path / "out") == before


def test_killed_at_any_moment_and_rerun(tmp_path: Path) -> None:
    text, tokenizer = write_corpus(tmp_path, [60] * 100, 8, 10)
    arguments = command(text, tokenizer, tmp_path / "out", "--samples-per-shard", "1000")
    for wanted in (".work/store/ids.*", ".work/plan.*", "shard-*.tmp", "tokenizer/vocab.txt.*"):
        run = start(arguments)
        while run.poll() is None and not list((tmp_path / "out").glob(wanted)):
            time.sleep(0.001)
        run.kill()
        run.wait(60)
    assert main(arguments) == 0
    assert main(command(text, tokenizer, tmp_path / "whole", "--samples-per-shard", "1000")) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_full_disk_is_named_and_the_work_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, tokenizer = write_corpus(tmp_path, [20] * 5, 8)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert main(command(text, tokenizer, tmp_path / "out")) == 1
    assert "fingerprint: No space left on device" in capsys.readouterr().err
    assert main(command(text, tokenizer, tmp_path / "out")) == 0


def test_a_store_that_is_refused_leaves_all_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = write_corpus(tmp_path, [4, 4], 8)
    before = contents(tmp_path)
    for store in (text, tokenizer):
        assert main(command(text, tokenizer, tmp_path / "out", "--store", str(store))) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert not (tmp_path / "out").exists() and contents(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("counts.npy", 0, "counts.npy: no counts: its .npy header does not fit its 0 bytes; remove it"),
        ("counts.npy", 100, "counts.npy: no counts: its .npy header does not fit its 100 bytes; remove it"),
        ("ids", -2, "ids does not match counts.npy"),
        ("continues", 0, "continues does not match"),
        ("sentences", -8, "sentences does not match"),
        ("sentences", -3, "sentences does not match"),
        ("documents", -8, "sentences does not match"),
        ("digests", -1, "digests does not match"),
        ("fingerprint", 1, " holds the tokens of other text or settings"),
    ],
)
def test_a_store_that_is_damaged_is_reported_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, size: int, said: str
) -> None:
    text, tokenizer = write_corpus(tmp_path, [4, 4], 8)
    store = tmp_path / "store"
    assert main(command(text, tokenizer, tmp_path / "out", "--store", str(store))) == 0
    path = store / name
    path.write_bytes(path.read_bytes()[:size])
    if name == "fingerprint":
        path.write_bytes(b"\xff\xfe")
    capsys.readouterr()
    assert main(command(text, tokenizer, tmp_path / "other", "--store", str(store), "--seed", "3")) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("data_prep: error: ")]
    assert said in line, line


def test_the_vocabulary_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, tokenizer = write_corpus(tmp_path, [4, 4], 8)
    assert main(command(tmp_path, tokenizer, tmp_path / "out")) == 2
    assert "vocab.txt is inside" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_output_reads_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = write_corpus(tmp_path, [20] * 5, 8)
    assert main(command(text, tokenizer, tmp_path / "out", "--samples-per-shard", "1000")) == 0
    output, progress = capfd.readouterr()
    assert "corpus: 1 file, 5 documents" in output and " in 1 shard, " in output
    assert "wrote" in progress and "a second" not in progress  # too short to have a rate
    with pytest.raises(SystemExit) as stop:
        main(["build", "--sequence-length", "many"])
    (line,) = capfd.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith("data_prep: error: argument --sequence-length: invalid int")


def test_a_reader_may_leave_early(tmp_path: Path) -> None:
    text, tokenizer = write_corpus(tmp_path, [60] * 60, 8, 10)
    assert main(command(text, tokenizer, tmp_path / "out", "--samples-per-shard", "1000")) == 0
    line = f"{sys.executable} -m data_prep inspect {tmp_path / 'out'} --samples 2000 | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("corpus: 1 file")


def test_a_log_that_is_gone_ends_no_work(tmp_path: Path) -> None:
    """The log's disk is full, or its reader has left: the work is done, and the exit code reports the result."""
    text, tokenizer = write_corpus(tmp_path, [60] * 60, 8, 10)
    words = " ".join(command(text, tokenizer, tmp_path / "out"))
    for line, code in (
        (f"{words} 2> /dev/full > {tmp_path / 'result'}", 0),
        (f"{words.replace('/out', '/again')} 2>&1 | true", 0),
        (f"verify {tmp_path / 'out'} {tmp_path / 'again'} {text} {tmp_path / 'nowhere'} | true", 2),
        (f"verify {tmp_path / 'nowhere'} 2> /dev/full", 2),
        (f"verify {tmp_path / 'out'} > /dev/full", 1),
    ):
        shell = ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m data_prep {line}"]
        assert (subprocess.run(shell, cwd=ROOT, capture_output=True).returncode, line) == (code, line)
    assert verify(tmp_path / "out", full=True) == verify(tmp_path / "again", full=True) == []
    assert "complete, in" in (tmp_path / "result").read_text()


def test_small_vocabulary_and_foreign_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = write_corpus(tmp_path, [4, 4], 8)
    small = write_tokenizer(tmp_path / "small", ["d0w0"])
    assert main(command(text, small, tmp_path / "out")) == 2
    assert "vocabulary of 6 pieces is too small" in capsys.readouterr().err
    for name, message in (("shard-0.tar", "another build"), ("thesis.doc", "other files")):
        out = tmp_path / name.split(".")[0]
        out.mkdir()
        (out / name).write_bytes(b"precious")
        assert main(command(text, tokenizer, out)) == 2
        assert message in capsys.readouterr().err
        assert contents(out) == {name: b"precious"}
