"""Several builders of one data set: the same bytes for any number of them, and whichever of them are killed."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import subprocess
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_prep import builders, shares
from data_prep.__main__ import main
from data_prep.build import build
from data_prep.builders import Builder, OvertakenError, make_once, own_first, owners, parse_builder
from data_prep.errors import DataError
from data_prep.pieces import read_tokens
from data_prep.settings import Settings, make_settings
from data_prep.verify import verify
from tests.helpers.corpora import contents, write_corpus, write_tokenizer
from tests.helpers.ranks import ROOT

PATIENCE = 60.0  # seconds
SETTINGS = make_settings(32, samples_per_shard=16)


def command(text: Path, tokenizer: Path, out: Path, *more: str) -> list[str]:
    """Arguments of a build of many small shards by one process."""
    options = ["--sequence-length", "32", "--samples-per-shard", "50", "--processes", "1", *more]
    return ["build", "--input", str(text), "--tokenizer", str(tokenizer), "--out", str(out), *options]


def start(arguments: list[str], builder: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "data_prep", *arguments, "--builder", builder]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def ends(run: subprocess.Popen[str], code: int = 0) -> str:
    """Wait until a builder has ended with ``code``; returns what it printed to stderr."""
    said = run.communicate(timeout=PATIENCE)[1]
    assert run.returncode == code, said
    return said


def kill_at(arguments: list[str], builder: str, wanted: str, count: int = 1) -> None:
    """Run a builder that is killed when it has written, but not yet renamed, the ``count``-th file with such a name."""
    child = os.fork()
    if child == 0:
        sync, seen = os.fsync, list[str]()

        def killing(handle: Any) -> None:
            path = os.readlink(f"/proc/self/fd/{handle}")
            if fnmatch(path, wanted):
                seen.append(path)
            if len(seen) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(handle)

        os.fsync = killing  # type: ignore[assignment]
        main([*arguments, "--builder", builder])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def many_files(folder: Path) -> tuple[Path, Path]:
    """Files of many sizes: empty, blank, compressed, and one that is most of the corpus."""
    text = folder / "text"
    text.mkdir()
    for number, documents in enumerate((3, 0, 1, 40, 2, 5)):
        lines = ["\n".join(f"w{(d + s) % 30} w{s % 7} w{d % 30}" for s in range(6)) for d in range(documents)]
        (text / f"{number}.txt").write_text("\n\n".join(lines))
    (text / "2b.txt").write_text("\n \n")
    (text / "3b.txt.gz").write_bytes(gzip.compress(b"w1 w2\nw3\n\nw4 w5\nw6 w7\n"))
    return text, write_tokenizer(folder / "t", [f"w{number}" for number in range(30)])


# ---- who makes what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 40])
@pytest.mark.parametrize("units", [0, 1, 7, 100])
def test_every_builder_makes_all_units_and_its_own_first(count: int, units: int) -> None:
    orders = [list(own_first(Builder(number, count), units)) for number in range(count)]
    own = [[unit for unit in order if unit % count == number] for number, order in enumerate(orders)]
    assert sorted(unit for some in own for unit in some) == list(range(units))
    for some, order in zip(own, orders, strict=True):
        assert order[: len(some)] == some and sorted(order) == list(range(units))
    if count == 5 and units == 100:  # two that help do not make the same units
        assert sum(first == second for first, second in zip(orders[0][20:], orders[1][20:], strict=True)) < 10


def test_every_builder_owns_an_equal_part_of_the_text() -> None:
    for sizes in ([10] * 10, [1, 0, 98, 1], [0, 0], [7], [1, 1, 1]):
        places = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        for count in (1, 2, 3, 5):
            found = [owners(*ends, places[-1], count) for ends in zip(places, places[1:], strict=False)]
            assert all(len(some) and some.start >= 0 and some.stop <= count for some in found)
            whole = {builder for some in found for builder in some}
            assert whole == set(range(count)) or sum(sizes) == 0
    assert [owners(place, place + 10, 100, 5) for place in (0, 10, 90)] == [range(1), range(1), range(4, 5)]


@pytest.mark.parametrize("text", ["5/5", "1/0", "0/0", "-1/2", "a/b", "1", "1/2/3", "", "0/99999", "٣/5"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="wanted K/N, builder K of N"):
        parse_builder(text)
    assert parse_builder("4/5") == Builder(4, 5)


# ---- a step that one builder does ----------------------------------------------------------------------------


def test_a_stalled_step_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builders, "STALLED_SECONDS", 0.3)
    step = tmp_path / "plan.npy"
    (tmp_path / "plan.npy.claim").symlink_to("7")
    make_once(Builder(0, 9), "the plan", step, step.touch)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "data_prep: waiting for builder 7 to make the plan; 0 bytes so far"
    assert said[1].startswith("data_prep: warning: builder 7 has written nothing for ") and len(said) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["plan.npy"]


def test_a_step_goes_on_where_its_builder_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = tmp_path / "plan.npy"
    (tmp_path / "plan.npy.claim").symlink_to("7")
    make_once(Builder(7, 9), "the plan", step, step.touch)
    assert step.exists() and capsys.readouterr().err == ""


def test_a_step_that_fails_is_free_for_others_and_one_that_was_overtaken_is_done(tmp_path: Path) -> None:
    step = tmp_path / "plan.npy"

    def fail(error: Exception, done: bool) -> None:
        if done:
            step.touch()
        raise error

    for error in (OvertakenError(), OSError("gone")):
        with pytest.raises(type(error)):
            make_once(Builder(0, 2), "the plan", step, partial(fail, error, False))
        assert not list(tmp_path.iterdir())
    make_once(Builder(0, 2), "the plan", step, partial(fail, OvertakenError(), True))
    with pytest.raises(DataError):
        make_once(Builder(0, 2), "it", tmp_path / "other", partial(fail, DataError("bad text"), False))


# ---- the same bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SETTINGS, make_settings(32, drop_duplicates=True, duplicates=2, pairs="sop")])
def test_one_builder_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """Every builder stops at a stage, and the next one goes on; a rerun finds the data set complete."""
    monkeypatch.setattr(shares, "PIECE_CHARACTERS", 300)
    text, tokenizer = many_files(tmp_path)
    build([text], tokenizer, tmp_path / "whole", settings, 1)
    for number, stage in enumerate(("join_tokens", "plan_pieces", "measured_shards")):
        with monkeypatch.context() as patch:
            patch.setattr(shares, stage, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                build([text], tokenizer, tmp_path / "out", settings, 1, builder=Builder(number, 5))
    build([text], tokenizer, tmp_path / "out", settings, 1, builder=Builder(0, 5))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    build([text], tokenizer, tmp_path / "out", settings, 1, builder=Builder(1, 5))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


@pytest.mark.slow
def test_five_builders_at_once(tmp_path: Path) -> None:
    text, tokenizer = write_corpus(tmp_path, [60] * 30, 8, 10)
    for place in ("one", "five"):
        arguments = command(text, tokenizer, tmp_path / place, "--store", str(tmp_path / f"store-{place}"))
        runs = [start(arguments, f"{number}/5") for number in range(5)] if place == "five" else []
        assert runs or main(arguments) == 0
        for run in runs:
            ends(run)
    one, five = (contents(tmp_path / place) for place in ("one", "five"))
    assert len(one) > 20 and one == five and not verify(tmp_path / "five", full=True)
    assert contents(tmp_path / "store-five") == contents(tmp_path / "store-one")


def test_a_builder_that_is_killed_is_made_up_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = write_corpus(tmp_path, [60] * 30, 8, 10)
    assert main(command(text, tokenizer, tmp_path / "whole")) == 0
    out = tmp_path / "out"
    kill_at(command(text, tokenizer, out), "1/2", f"{out}/shard-*.tar.*", 3)
    assert len(list(out.glob("shard-*.tar"))) == 2
    assert main(command(text, tokenizer, out, "--builder", "0/2")) == 0
    assert f"{out}/.work stays until these builders have ended or are started again: 1" in capsys.readouterr().err
    assert not verify(out, full=True)
    assert main(command(text, tokenizer, out, "--builder", "1/2")) == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_what_a_killed_builder_was_writing_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, tokenizer = many_files(tmp_path)
    out, left = tmp_path / "out", tmp_path / "out/shard-00000.idx.npy.2ef4437a.tmp"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shares, "measured_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        build([text], tokenizer, out, SETTINGS, 1, builder=Builder(0, 2))
    for _ in ("killed while the other one works", "killed after that"):
        left.touch()
        (out / ".work/builders/1").touch()
        build([text], tokenizer, out, SETTINGS, 1, builder=Builder(0, 2))
        assert not verify(out, full=True)


def test_a_restarted_builder_makes_only_what_is_missing(tmp_path: Path) -> None:
    text, tokenizer = write_corpus(tmp_path, [60] * 60, 8, 10)
    assert main(command(text, tokenizer, tmp_path / "whole")) == 0
    out = tmp_path / "out"
    for wanted, count in ((f"{out}/.work/store/pieces/*", 1), (f"{out}/.work/made/shard-*", 3)):
        kill_at(command(text, tokenizer, out), "0/3", wanted, count)
    made = {path.stem: (out / f"{path.stem}.tar").stat().st_ino for path in out.glob(".work/made/*.npz")}
    assert len(made) == 2 and "shard-00000" in made
    (out / "shard-00000.tar").write_bytes(b"damaged")
    assert main(command(text, tokenizer, out, "--builder", "0/3")) == 0
    assert contents(out) == contents(tmp_path / "whole")
    kept = {name: (out / f"{name}.tar").stat().st_ino for name in made}
    assert {name for name in made if kept[name] != made[name]} <= {"shard-00000"}


# ---- what is refused -----------------------------------------------------------------------------------------


def test_builders_of_different_builds_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = write_corpus(tmp_path, [20] * 5, 8)
    out = tmp_path / "out"
    (out / ".work").mkdir(parents=True)  # another builder has just created it
    (out / ".work/fingerprint").write_text("f" * 64)
    assert main(command(text, tokenizer, out, "--builder", "1/2")) == 2
    assert "holds another build" in capsys.readouterr().err
    assert contents(out) == {".work/fingerprint": b"f" * 64}


def test_a_builder_killed_while_it_marks_a_folder_does_not_claim_it_for_good(tmp_path: Path) -> None:
    text, tokenizer = write_corpus(tmp_path, [20] * 5, 8)
    store = tmp_path / "store"
    assert main(command(text, tokenizer, tmp_path / "one", "--builder", "0/2", "--store", str(store))) == 0
    mark = (store / "fingerprint").read_text()
    shutil.rmtree(store)
    store.mkdir()
    (store / "fingerprint.claim").symlink_to(mark)  # made before the mark itself
    assert main(command(text, tokenizer, tmp_path / "two", "--builder", "1/2", "--store", str(store))) == 0
    assert (store / "fingerprint").read_text() == mark and not (store / "fingerprint.claim").is_symlink()


def test_bad_text_leaves_nothing_and_does_not_disturb_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, tokenizer = write_corpus(tmp_path, [20] * 5, 8)
    text.write_bytes(text.read_bytes() + b"\ncaf\xe9\n")
    out = tmp_path / "out"
    assert main(command(text, tokenizer, out, "--builder", "1/2")) == 2
    assert "not UTF-8" in capsys.readouterr().err and not out.exists()
    for place in (".work/builders", ".work/store/pieces"):
        (out / place).mkdir(parents=True)
    (out / ".work/builders/0").touch()
    assert main(command(text, tokenizer, out, "--builder", "1/2")) == 2
    assert list(contents(out)) == [".work/builders/0", ".work/fingerprint", *sorted(contents(out))[2:]]


def test_a_damaged_piece_takes_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokenizer = write_corpus(tmp_path, [20] * 5, 8)
    pieces = tmp_path / "out/.work/store/pieces"
    for name in ("000000-000000.npz", "000000.count"):
        pieces.mkdir(parents=True, exist_ok=True)
        (pieces / name).write_bytes(b"1")
        (pieces.parent / "fingerprint").unlink(missing_ok=True)
    with pytest.raises(DataError, match="000000-000000.npz is damaged; remove it, and run again"):
        list(read_tokens(pieces, 1))
    (pieces / "000000.count").write_bytes(b"")
    with pytest.raises(DataError, match="000000.count holds no number of pieces; remove it"):
        list(read_tokens(pieces, 1))


def test_one_builder_publishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", str(tmp_path), f"file://{tmp_path}/there", "--builder", "1/2"]) == 0
    assert capsys.readouterr().out == f"file://{tmp_path}/there: left to builder 0\n"
    for place in ("0/2", ""):  # such as of a variable that is not set
        assert main(["publish", str(tmp_path), f"file://{tmp_path}/there", "--builder", place]) == 2
    assert "--builder : wanted K/N" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
