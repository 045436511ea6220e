"""Checkpoints: other numbers of ranks and stages, damage, partial ones, and saves that fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import ranks
import torch
from safetensors.torch import load_file

from trainer import checkpoint
from trainer.errors import TrainerError


def train(root: Path, size: int, stage: int, steps: int) -> list[tuple[int, str]]:
    script = "tests/checkpoint_on_ranks.py"
    return ranks.finish(ranks.start(size, script, str(root), str(stage), str(steps)))


def losses(root: Path, first: int) -> list[float]:
    loaded: list[float] = json.loads((root / f"losses-{first}.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on two ranks under ZeRO 1 in ``straight``; three of them and a checkpoint in ``half``."""
    folder = tmp_path_factory.mktemp("saved")
    for name, steps in (("straight", 6), ("half", 3)):
        (folder / name).mkdir()
        assert [code for code, _ in train(folder / name, 2, 1, steps)] == [0, 0]
    return folder


@pytest.fixture
def half(saved: Path, tmp_path: Path) -> Path:
    """A copy of the three-step run."""
    return Path(shutil.copytree(saved / "half", tmp_path / "half"))


def test_same_ranks_go_on_bit_for_bit(saved: Path, half: Path) -> None:
    assert [code for code, _ in train(half, 2, 1, 3)] == [0, 0]
    assert losses(half, 3) == losses(saved / "straight", 0)[3:]
    parts = sorted(path.name for path in (half / "step-00000006").glob("*.safetensors"))
    assert len(parts) == 2
    for part in parts:
        ours, theirs = (load_file(root / "step-00000006" / part) for root in (half, saved / "straight"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("size", "stage"), [(1, 1), (3, 2), (1, 0)])
def test_other_ranks_and_stages_go_on_within_rounding(saved: Path, half: Path, size: int, stage: int) -> None:
    assert {code for code, _ in train(half, size, stage, 3)} == {0}
    assert losses(half, 3) == pytest.approx(losses(saved / "straight", 0)[3:], rel=1e-6)


def test_parts_make_whole_tensors_of_the_models_shapes(half: Path) -> None:
    found, passed = checkpoint.newest(half)
    assert found is not None and not passed
    weights = checkpoint.load_weights(found)
    assert {name: w.shape for name, w in weights.items()} == found.shapes
    assert all(w.dtype == torch.float32 and w.numel() > 0 for w in weights.values())


def test_a_flipped_byte_is_named(half: Path) -> None:
    part = half / "step-00000003" / "part-00001-of-00002.safetensors"
    data = bytearray(part.read_bytes())
    data[-7] ^= 1
    part.write_bytes(data)
    found, _ = checkpoint.newest(half)
    assert found is not None
    with pytest.raises(TrainerError, match="sha256 of part-00001-of-00002.safetensors differs"):
        checkpoint.load_weights(found)


def test_partial_checkpoints_are_passed_over_by_name(half: Path) -> None:
    shutil.copytree(half / "step-00000003", half / "step-00000005")
    (half / "step-00000005" / "part-00000-of-00002.safetensors").unlink()
    (half / "step-00000009").mkdir()
    found, passed = checkpoint.newest(half)
    assert found is not None and found.folder.name == "step-00000003"
    assert len(passed) == 2
    assert "step-00000009" in passed[0] and "no readable checkpoint.json" in passed[0]
    assert "step-00000005" in passed[1] and "part-00000-of-00002.safetensors is missing" in passed[1]


def test_another_model_is_refused_with_both_shapes(half: Path) -> None:
    record = half / "step-00000003" / "checkpoint.json"
    tree = json.loads(record.read_text())
    tree["shapes"]["token_table"] = [256, 32]
    record.write_text(json.dumps(tree))
    ended = train(half, 1, 1, 1)
    assert ended[0][0] == 2
    assert "is of another model: 1 parameters differ, first token_table ([256, 32] there, [128, 32]" in ended[0][1]


def test_a_save_that_fails_on_one_rank_stops_all_and_leaves_no_name(half: Path) -> None:
    """Rank 1's part meets a folder of its name, so the real write fails, as on a full disk or a lost mount."""
    blocked = half / ".step-00000004.tmp" / "part-00001-of-00002.safetensors"
    code = (
        "import sys, pathlib, trainer.checkpoint as c\n"
        "write = c._write_part\n"
        "def block(folder, *rest):\n"
        f"    if rest[-1].rank == 1: pathlib.Path({str(blocked)!r}).mkdir()\n"
        "    write(folder, *rest)\n"
        "c._write_part = block\n"
        f"sys.argv = ['x', {str(half)!r}, '1', '1']\n"
        "import checkpoint_on_ranks; checkpoint_on_ranks.main()\n"
    )
    ended = ranks.finish(ranks.start(2, "-c", code))
    assert [code for code, _ in ended] == [2, 2]
    assert "error: " in ended[1][1] and "directory" in ended[1][1].lower(), ended[1][1]
    assert "error: " not in ended[0][1]
    assert not (half / "step-00000004").exists()
    assert (half / "latest").read_text() == "step-00000003\n"


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """Folders with the names of checkpoints, and one with another."""
    for step in (1, 2, 30, 4, 99):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "step-notes").mkdir()
    (tmp_path / ".step-00000031.tmp").mkdir()
    return tmp_path


def test_prune_keeps_the_newest_and_leaves_no_half_save(named: Path) -> None:
    checkpoint.prune(named, 2, 99)
    assert sorted(path.name for path in named.iterdir()) == ["step-00000030", "step-00000099", "step-notes"]


def test_prune_never_counts_a_later_folder_that_a_resume_passed_over(named: Path) -> None:
    """With ``keep: 1`` and a damaged step 99, saving step 30 must leave step 30."""
    checkpoint.prune(named, 1, 30)
    assert sorted(path.name for path in named.iterdir()) == ["step-00000030", "step-00000099", "step-notes"]


def test_a_list_of_parts_that_is_not_whole_is_damage(half: Path) -> None:
    record = half / "step-00000003" / "checkpoint.json"
    tree = json.loads(record.read_text())
    del tree["parts"][1]
    record.write_text(json.dumps(tree))
    found, passed = checkpoint.newest(half)
    assert found is None and "its list of parts is not that of one save" in passed[0]
