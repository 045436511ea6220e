"""Checkpoints: other numbers of ranks and stages, damage, kills and full disks, and how a run handles them."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.helpers import ranks
from tests.helpers.corpora import contents
from tests.helpers.runs import change_record, lines, wait_for, write_config
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint import shared_folder
from trainer.checkpoint.reading import CheckpointConfig
from trainer.checkpoint.shared_folder import prune
from trainer.engine.schedule import Phase
from trainer.errors import TrainerError
from trainer.run.resume_checks import require_same_run

pytestmark = pytest.mark.slow

PART = "part-00001-of-00002.safetensors"
FULL = "File too large"  # what a file meets at its size limit, as it would a full disk


def train(root: Path, size: int, stage: int, steps: int, *options: str) -> list[tuple[int, str]]:
    start = ranks.start if "device=cuda" in options else ranks.fork  # CUDA does not survive a fork
    return ranks.finish(
        start(size, "tests/helpers/checkpoint_on_ranks.py", str(root), str(stage), str(steps), *options)
    )


def losses(root: Path, first: int) -> list[float]:
    loaded: list[float] = json.loads((root / f"losses-{first}.json").read_text())
    return loaded


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on two ranks under ZeRO 1 in ``straight``; three of them and a checkpoint in ``half``."""
    folder = tmp_path_factory.mktemp("saved")
    for name, steps in (("straight", 6), ("half", 3)):
        (folder / name).mkdir()
        assert [code for code, _ in train(folder / name, 2, 1, steps, "every=1")] == [0, 0]
    return folder


@pytest.fixture
def half(saved: Path, tmp_path: Path) -> Path:
    """A copy of the three-step run."""
    return Path(shutil.copytree(saved / "half", tmp_path / "half"))


def test_same_ranks_go_on_bit_for_bit_and_both_ways_of_saving_write_the_same_bytes(saved: Path, half: Path) -> None:
    """``straight`` saves each step while it trains on; the resumed run waits for its save."""
    assert [code for code, _ in train(half, 2, 1, 3, "asynchronous=false")] == [0, 0]
    assert losses(half, 3) == losses(saved / "straight", 0)[3:]
    ours, theirs = (contents(root / "step-00000006") for root in (half, saved / "straight"))
    assert ours == theirs and len(ours) == 3
    assert (half / "latest").read_text() == "step-00000006\n"


def test_a_run_in_fp16_goes_on_bit_for_bit_under_zero_3_while_its_loss_scale_moves(tmp_path: Path) -> None:
    """This holds even if its optimizer moves into host memory."""
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    for root, parts in ((straight, [(6, "")]), (halves, [(3, ""), (3, "offload=optimizer")])):
        root.mkdir()
        for steps, offload in parts:
            ended = train(root, 2, 3, steps, "precision=fp16", *filter(None, [offload]))
            assert [code for code, _ in ended] == [0, 0], ended
    assert losses(halves, 0) + losses(halves, 3) == losses(straight, 0)
    assert contents(halves / "step-00000006") == contents(straight / "step-00000006")
    assert checkpoint.read(halves / "step-00000006").record["loss_scale"]["scale"] == 2.0**13


@pytest.mark.parametrize(("size", "stage"), [(1, 1), (3, 2), (1, 0)])
def test_other_ranks_and_stages_go_on_within_rounding(saved: Path, half: Path, size: int, stage: int) -> None:
    assert {code for code, _ in train(half, size, stage, 3)} == {0}
    assert losses(half, 3) == pytest.approx(losses(saved / "straight", 0)[3:], rel=1e-6)


def test_a_run_moves_from_stage_1_on_two_ranks_to_3_on_three_to_2_on_one(saved: Path, half: Path) -> None:
    """Weights that are read back under ZeRO 3 reach the shards that forward gathers."""
    assert {code for code, _ in train(half, 3, 3, 2)} == {0}
    assert {code for code, _ in train(half, 1, 2, 1)} == {0}
    assert losses(half, 3) + losses(half, 5) == pytest.approx(losses(saved / "straight", 0)[3:], rel=1e-6)


def test_parts_make_whole_tensors_of_the_models_shapes(half: Path) -> None:
    found, passed = checkpoint.newest(half)
    assert found is not None and not passed
    weights = checkpoint.load_weights(found)
    assert {name: w.shape for name, w in weights.items()} == found.shapes
    assert all(w.dtype == torch.float32 and w.numel() > 0 for w in weights.values())


# ---- damage ----------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: (folder / PART).unlink(), f"is damaged: {PART} is missing"),
    "short": (lambda folder: (folder / PART).write_bytes(b"x"), f"is damaged: {PART} has 1 bytes instead of"),
    "extra": (
        lambda folder: (folder / "part-00002-of-00003.safetensors").touch(),
        "part-00002-of-00003.safetensors belongs to another save",
    ),
    "unlisted": (
        lambda folder: change_record(folder, lambda tree: tree["parts"].pop()),
        "its list of parts does not come from",
    ),
    "no record": (lambda folder: (folder / "checkpoint.json").unlink(), "it has no readable checkpoint.json"),
    "half a record": (lambda folder: (folder / "checkpoint.json").write_text("{"), "has no readable checkpoint.json"),
    "record": (
        lambda folder: flip(
            folder / "checkpoint.json", (folder / "checkpoint.json").read_text().index('"step": 3') + 8
        ),
        "the sha256 of checkpoint.json differs",
    ),
    "deep record": (
        lambda folder: (folder / "checkpoint.json").write_text('{"a": ' * 100_000),
        "has no readable checkpoint.json",
    ),
    "no parts": (
        lambda folder: change_record(folder, lambda tree: tree.pop("parts")),
        "its checkpoint.json is malformed",
    ),
    "parts of no names": (
        lambda folder: change_record(folder, lambda tree: tree.update(parts=[1, 2])),
        "its checkpoint.json is malformed",
    ),
    "shapes": (
        lambda folder: change_record(folder, lambda tree: tree["shapes"].update(token_table=[2**63, 1])),
        "its checkpoint.json is malformed",
    ),
    "negative shapes": (
        lambda folder: change_record(folder, lambda tree: tree["shapes"].update(token_table=[-4, -4])),
        "its checkpoint.json is malformed",
    ),
    "large shapes": (
        lambda folder: change_record(folder, lambda tree: tree["shapes"].update(token_table=[2**19, 2**19])),
        "its shapes need more bytes than its parts have",
    ),
    "list for a record": (
        lambda folder: change_record(folder, lambda tree: tree.update(record=[1])),
        "its checkpoint.json is malformed",
    ),
    "foreign": (
        lambda folder: change_record(folder, lambda tree: tree.update(format="another")),
        "is not a checkpoint of this version of Lambert",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_not_whole_is_passed_over_by_name(half: Path, kind: str) -> None:
    harm, said = DAMAGE[kind]
    harm(half / "step-00000003")
    found, passed = checkpoint.newest(half)
    assert found is not None and found.folder.name == "step-00000002"
    assert len(passed) == 1 and "step-00000003" in passed[0] and said in passed[0]


def test_a_flipped_byte_is_named(half: Path) -> None:
    flip(half / "step-00000003" / PART, -7)
    found, _ = checkpoint.newest(half)
    assert found is not None
    with pytest.raises(TrainerError, match=f"sha256 of {PART} differs"):
        checkpoint.load_weights(found)
    found, passed = checkpoint.newest(half, {"step-00000003": "flipped"})
    assert found is not None and found.folder.name == "step-00000002" and passed == ["flipped"]


def test_a_pointer_to_a_folder_that_is_gone_is_named(half: Path) -> None:
    shutil.rmtree(half / "step-00000003")
    found, passed = checkpoint.newest(half)
    assert found is not None and found.folder.name == "step-00000002"
    assert passed == [f"{half / 'latest'} names step-00000003, which does not exist"]
    for name in ("step-00000001", "step-00000002"):
        shutil.rmtree(half / name)
    with pytest.raises(TrainerError, match="no whole checkpoint in .*; .* names step-00000003, which does not exist"):
        checkpoint.find(half)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"step-00000003" + b"a" * 100_000, "names step-00000003aaaa"),
        (b"a" * 100_000, "names aaaa"),
        (b"../half\n", "names ../half, which does not exist"),
        (b"\0\xff\n\n\n", "which does not exist"),
        (b"", "names , which does not exist"),
    ],
)
def test_the_folders_are_what_is_read_whatever_the_pointer_holds(half: Path, content: bytes, said: str) -> None:
    (half / "latest").write_bytes(content)
    found, [passed] = checkpoint.newest(half)
    assert found is not None and found.folder.name == "step-00000003"
    assert passed.startswith(f"{half / 'latest'} names ") and said in passed
    assert "\n" not in passed and len(passed) < len(str(half)) + 200


@pytest.mark.parametrize("model", [None, {"layers": 2**63}, {"layers": "2"}, {"widths": 3}, [1]])
def test_a_record_of_no_model_is_one_line(half: Path, model: object) -> None:
    change_record(half / "step-00000003", lambda tree: tree["record"].update(config={"model": model}))
    with pytest.raises(TrainerError, match="step-00000003 does not describe a valid model") as error:
        checkpoint.load_model(checkpoint.find(half))
    assert "\n" not in str(error.value)


def test_another_model_is_refused_with_both_shapes(half: Path) -> None:
    change_record(half / "step-00000003", lambda tree: tree["shapes"].update(token_table=[256, 32]))
    ended = train(half, 1, 1, 1)
    assert ended[0][0] == 2
    assert "comes from another model: 1 parameters differ, first token_table ([256, 32] there, [128, 32]" in ended[0][1]


# ---- what is kept ----------------------------------------------------------------------------------------------


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """Folders with the names of checkpoints, and one with another."""
    for step in (10, 20, 30, 40, 990):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "step-notes").mkdir()
    (tmp_path / ".step-00000031.tmp").mkdir()
    return tmp_path


def test_prune_keeps_the_newest_and_leaves_no_half_save(named: Path) -> None:
    prune(named, CheckpointConfig(keep=2), 990)
    assert names(named) == ["step-00000040", "step-00000990", "step-notes"]


def test_prune_never_counts_a_later_folder_that_a_resume_passed_over(named: Path) -> None:
    """Saving step 40 must leave step 40, even if ``keep`` is 1 and there is a damaged step 990."""
    prune(named, CheckpointConfig(keep=1), 40)
    assert names(named) == ["step-00000040", "step-00000990", "step-notes"]


def test_prune_never_removes_every_so_many_steps(named: Path) -> None:
    prune(named, CheckpointConfig(every_steps=10, keep=1, keep_every_steps=20), 990)
    assert names(named) == ["step-00000020", "step-00000040", "step-00000990", "step-notes"]


def test_keep_every_steps_that_meets_no_checkpoint_is_refused() -> None:
    assert CheckpointConfig(every_steps=100, keep_every_steps=1000).problems() == []
    for often in (0, 150):
        [problem] = CheckpointConfig(every_steps=100, keep_every_steps=often).problems()
        assert f"keep_every_steps is {often}: must be a multiple of every_steps (100)" in problem


# ---- saves that fail, are slow or are killed -------------------------------------------------------------------


def test_a_save_that_fails_on_one_rank_is_reported_on_all_and_leaves_no_name(tmp_path: Path) -> None:
    """Steps 2 and 3 meet a full disk on one rank, step 4 on the other; training goes on, and step 5 is saved."""
    for code, output in train(tmp_path, 2, 1, 5, "every=1", "full=1:2:3,0:4:4"):
        assert code == 0, output
        reported = [line for line in output.splitlines() if line.startswith("step ")]
        assert [line.split()[1] for line in reported] == ["1:", "2:", "3:", "4:", "5:"]
        assert reported[0] == "step 1: whole" and reported[4] == "step 5: whole"
        assert all(
            f"rank {rank}: " in line and FULL in line for rank, line in zip((1, 1, 0), reported[1:4], strict=True)
        )
    assert names(tmp_path) == ["step-00000001", "step-00000005"]
    assert all(len(contents(tmp_path / name)) == 3 for name in names(tmp_path))


def test_a_publication_that_fails_leaves_latest_as_it_was(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(source), None, str(target))

    draft = half / ".step-00000004.tmp"
    draft.mkdir()
    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match=r"step-00000004.tmp' -> '.*step-00000004'"):
        shared_folder._publish(draft, half / "step-00000004", b"{}")
    assert names(half) == [".step-00000004.tmp", "step-00000001", "step-00000002", "step-00000003"]
    assert (half / "latest").read_text() == "step-00000003\n"


def test_an_amended_checkpoint_is_whole_at_any_moment(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(source), None, str(target))

    def state() -> tuple[Any, Any, str]:
        found = checkpoint.read(half / "step-00000002")
        return found.record, found.parts, (half / "latest").read_text()

    before = state()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="Input/output error"):
            shared_folder.amend(half / "step-00000002", guard={"gaps": [[0, 8, 16]]})
    assert state() == before and before[2] == "step-00000003\n"
    shared_folder.amend(half / "step-00000002", guard={"gaps": [[0, 8, 16]]})
    assert state() == ({**before[0], "guard": {"gaps": [[0, 8, 16]]}}, before[1], "step-00000002\n")
    assert len(contents(half / "step-00000002")) == 3
    checkpoint.verify(checkpoint.read(half / "step-00000002"))


def test_a_disk_slower_than_a_collective_may_be_holds_up_no_rank(tmp_path: Path) -> None:
    for code, output in train(tmp_path, 2, 1, 1, "slow=9", "timeout=6"):
        assert code == 0 and "step 1: whole" in output, output


def test_at_any_moment_the_last_whole_checkpoint_is_there(tmp_path: Path) -> None:
    """The ranks are paused in the middle of their work, so the disk holds what a kill would leave."""
    processes = ranks.fork(2, "tests/helpers/saving_on_ranks.py", str(tmp_path))
    try:
        wait_for((tmp_path / "latest").exists, *processes)
        seen = [0]
        while len(seen) < 40 or len(set(seen)) < 6:
            time.sleep(0.002 * (len(seen) % 10))
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            wait_for(lambda: all(psutil.Process(p.pid).status() == psutil.STATUS_STOPPED for p in processes))
            found, passed = checkpoint.newest(tmp_path)
            assert found is not None and not passed
            step = found.record["step"]
            assert torch.equal(checkpoint.load_weights(found)["a"], torch.full((200_000,), float(step)))
            pointed = (tmp_path / "latest").read_text().strip()
            assert seen[-1] <= step and pointed in (f"step-{step:08d}", f"step-{step - 1:08d}")
            seen.append(step)
            for process in processes:
                process.send_signal(signal.SIGCONT)
    finally:
        for process in processes:
            process.kill()
        ranks.finish(processes)


# ---- runs ------------------------------------------------------------------------------------------------------


def limit(process: ranks.Forked, size: int) -> None:
    """No file of this process may grow beyond ``size`` from now on."""
    psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk_costs_a_run_checkpoints_but_not_itself_unless_it_lasts(tiny_shards: Path, tmp_path: Path) -> None:
    path, folder = write_config(tmp_path, tiny_shards, 100_000), tmp_path / "run"

    def saves(event: str) -> int:
        return len(lines(folder, event))

    first, second = processes = ranks.fork(2, "trainer/__main__.py", "--config", str(path))
    wait_for(lambda: saves("checkpoint"), *processes)
    limit(second, 10_000)
    wait_for(lambda: saves("checkpoint_failed") > 1, *processes)
    limit(second, resource.RLIM_INFINITY)
    before = saves("checkpoint")
    wait_for(lambda: saves("checkpoint") > before, *processes)
    second.send_signal(signal.SIGTERM)
    (code, said), other = ranks.finish(processes)
    assert (code, other[0]) == (75, 75), said
    assert f"lambert: no checkpoint in {folder}: a fresh start from the seed 5" in said
    failed = lines(folder, "checkpoint_failed")[0]
    assert "rank 1: " in failed["reason"] and FULL in failed["reason"]
    assert f"lambert: step {failed['step']}/100000  no checkpoint: {failed['reason']}" in said.splitlines()
    whole = lines(folder, "checkpoint")[-1]
    assert whole["bytes"] == sum(path.stat().st_size for path in (folder / f"step-{whole['step']:08d}").iterdir())
    assert 0 < whole["stall_seconds"] < 60 and 0 < whole["seconds"] < 60

    flip(folder / f"step-{whole['step']:08d}" / PART, -7)
    first, second = processes = ranks.fork(2, "trainer/__main__.py", "--config", str(path))
    before = saves("checkpoint")
    wait_for(lambda: saves("checkpoint") > before, *processes)
    limit(first, 10_000)  # rank 0: its JSON lines are longer than that, too
    time.sleep(0.3)
    first.send_signal(signal.SIGTERM)
    (code, said), (other_code, other_said) = ranks.finish(processes)
    assert (code, other_code) == (1, 1), said + other_said  # with room, the same command goes on
    assert f"step-{whole['step']:08d} is damaged: the sha256 of {PART} differs" in said
    resumed = next(line for line in said.splitlines() if "resumed from" in line)
    assert f"step-{whole['step']:08d}" not in resumed
    [error] = [line for line in said.splitlines() if line.startswith("trainer: ")]
    assert "rank 0: error: the last checkpoint, of step " in error and FULL in error
    assert "trainer: " not in other_said and "Traceback" not in said + other_said
    assert f"{folder / 'metrics.jsonl'}: losing lines until it can be written again" in said
    assert not (folder / "ended.json").exists()
    found, _ = checkpoint.newest(folder)
    assert found is not None and not list(folder.glob(".step-*"))


@pytest.fixture
def record() -> tuple[dict[str, Any], tuple[Phase, ...]]:
    """The record of a checkpoint in the second of three phases, and the phases."""
    phases = tuple(Phase(name, "shards", 32, 100, 0.1, global_batch=8, micro_batch=4) for name in "abc")
    identity = {
        **{"seed": 1, "shuffle_window": 8, "optimizer": "lamb", "model": {"hidden": 16, "heads": 2}},
        "phases": [
            {"name": n, "shards": f"hash of {n}", "masks": "static", "loss_weights": [1.0, 1.0]}
            | {"global_batch": 8, "batch_warmup": [[60, 4]]}
            for n in "abc"
        ],
    }
    return {"identity": identity, "state": {"phase": 1, "phase_step": 50}}, phases


REFUSED: dict[str, tuple[Callable[[Any], None], str | None]] = {
    "nothing": (lambda ours: None, None),
    "seed": (lambda ours: ours.update(seed=2), "seed was 1, now 2"),
    "model": (lambda ours: ours["model"].update(heads=4), "model.heads was 2, now 4"),
    "a key of the model that was not there yet": (lambda ours: ours["model"].update(layer_norm="after"), None),
    "another model by that key": (
        lambda ours: ours["model"].update(layer_norm="before"),
        "model.layer_norm was after, now before",
    ),
    "shards of a phase that is over": (lambda ours: ours["phases"][0].update(shards="x"), "phases a, b, in this order"),
    "masks of a phase that has begun": (
        lambda ours: ours["phases"][1].update(masks="dynamic"),
        "masks of phase b were",
    ),
    "spread positions of a phase that has begun": (
        lambda ours: ours["phases"][1].update(spread_positions=64),
        "spread_positions of phase b was None",
    ),
    "weights of the losses": (
        lambda ours: ours["phases"][1].update(loss_weights=[1.0, 0.25]),
        r"mlm_weight, nsp_weight of phase b were \[1.0, 1.0\], now \[1.0, 0.25\]",
    ),
    "weights of the losses in a later phase": (lambda ours: ours["phases"][2].update(loss_weights=[0.0, 1.0]), None),
    "batch of a phase that goes on": (
        lambda ours: ours["phases"][1].update(global_batch=4),
        "global batch of phase b was 8, now 4",
    ),
    "batch of a phase that is over": (lambda ours: ours["phases"][0].update(global_batch=4), None),
    "warm-up of a batch that grows": (
        lambda ours: ours["phases"][1].update(batch_warmup=[[30, 2], [60, 4]]),
        "batch_warmup of phase b was 60 steps of 4, now 30 steps of 2, 60 steps of 4",
    ),
    "no warm-up of a batch that grows": (
        lambda ours: ours["phases"][1].update(batch_warmup=[]),
        "batch_warmup of phase b was 60 steps of 4, now not set",
    ),
    "warm-up of a batch that has grown in a phase that is over": (
        lambda ours: ours["phases"][0].update(batch_warmup=[]),
        None,
    ),
    "a later phase": (lambda ours: ours["phases"][2].update(name="d", shards="x", masks="dynamic"), None),
    "no later phase": (lambda ours: ours["phases"].pop(), None),
    "a phase that has begun": (lambda ours: ours.update(phases=ours["phases"][:1]), "phases a, b, in this order"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_resume_refuses_what_would_break_it_and_nothing_else(
    record: tuple[dict[str, Any], tuple[Phase, ...]], kind: str
) -> None:
    saved, phases = record
    alter, said = REFUSED[kind]
    ours = json.loads(json.dumps(saved["identity"]))
    alter(ours)
    if said is None:
        require_same_run(saved, ours, phases, Path("step"))
        return
    with pytest.raises(TrainerError, match=f"step belongs to another run \\({said}") as error:
        require_same_run(saved, ours, phases, Path("step"))
    assert "\n" not in str(error.value)


def test_a_checkpoint_from_before_these_keys_resumes(record: tuple[dict[str, Any], tuple[Phase, ...]]) -> None:
    saved, phases = record
    ours = json.loads(json.dumps(saved["identity"]))
    for phase in saved["identity"]["phases"]:
        del phase["batch_warmup"], phase["loss_weights"]
    with pytest.raises(TrainerError, match="batch_warmup of phase b was not set, now 60 steps of 4"):
        require_same_run(saved, ours, phases, Path("step"))
    ours["phases"][1]["batch_warmup"] = []
    require_same_run(saved, ours, phases, Path("step"))


def test_a_phase_that_is_over_may_have_had_any_batch(record: tuple[dict[str, Any], tuple[Phase, ...]]) -> None:
    """The checkpoint was saved at the phase's last step; on other ranks, its settings give another batch."""
    saved, phases = record
    ours = json.loads(json.dumps(saved["identity"]))
    ours["phases"][1] |= {"global_batch": 4, "batch_warmup": []}
    require_same_run(saved, ours, (phases[0], replace(phases[1], steps=50), phases[2]), Path("step"))
