"""Leftovers that are in the way of a save or cannot be removed are reported once, by path, and do not stop the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.runs import lines, write_config
from trainer.checkpoint import reading as checkpoint
from trainer.checkpoint.leftovers import drafts, move_aside, remove, stuck, temporary
from trainer.checkpoint.reading import CheckpointConfig
from trainer.checkpoint.shared_folder import prune, stuck_saves
from trainer.convert.folder import becoming

pytestmark = pytest.mark.slow

NOBODY = 65534


def link(path: Path, elsewhere: Path) -> None:
    """Make a link as somebody short of disk space would: the folder on another disk, a link in its place."""
    if path.exists():
        shutil.move(path, elsewhere)
    else:
        elsewhere.mkdir()
        (elsewhere / "other").write_text("somebody's")
    path.symlink_to(elsewhere)


def fill(path: Path) -> None:
    """A folder of somebody else's."""
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "other").write_text("somebody's")


Obstacle = Callable[[Path, Path], None]  # given the run's folder, which has steps 10 to 40, and one elsewhere
OBSTACLES: dict[str, tuple[Obstacle, int]] = {  # and how many warnings name what stays
    "an old checkpoint is a link": (lambda run, far: link(run / "step-00000020", far), 1),
    "the newest checkpoint is a link": (lambda run, far: link(run / "step-00000040", far), 1),
    "a link has the draft's name": (lambda run, far: link(run / ".step-00000050.tmp", far), 1),
    "a link leads nowhere": (lambda run, far: (run / ".step-00000050.tmp").symlink_to(far), 1),
    "a link has an older draft's name": (lambda run, far: link(run / ".step-00000020.tmp", far), 1),
    "a link has the next checkpoint's name": (
        lambda run, far: link(run / "step-00000050", far),
        2,
    ),
    "a file has the next checkpoint's name": (lambda run, far: (run / "step-00000050").touch(), 0),
    "a folder has the next checkpoint's name": (lambda run, far: fill(run / "step-00000050"), 0),
    "a file has the draft's name": (lambda run, far: (run / ".step-00000050.tmp").touch(), 0),
    "a folder has the draft's name": (lambda run, far: fill(run / ".step-00000050.tmp"), 0),
    "a folder has the name of the pointer's draft": (lambda run, far: fill(run / ".latest.tmp"), 0),
    "a folder has the pointer's name": (lambda run, far: fill(run / "latest"), 1),
}


def train(config: Path, *overrides: str, script: str = "trainer/__main__.py", size: int = 1) -> tuple[int, str]:
    options = [word for override in overrides for word in ("--set", override)]
    return ranks.finish(ranks.fork(size, script, "--config", str(config), *options))[0]


@pytest.fixture(scope="module")
def done(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run that is at step 40, and keeps five checkpoints."""
    folder = tmp_path_factory.mktemp("done")
    config = write_config(folder, tiny_shards, 40, checkpoint={"every_steps": 10, "keep": 5})
    code, said = train(config)
    assert code == 0, said
    return config


@pytest.mark.parametrize("what", OBSTACLES)
def test_saves_go_on_whatever_is_in_their_way(done: Path, tmp_path: Path, what: str) -> None:
    obstruct, warnings = OBSTACLES[what]
    run, far = Path(shutil.copytree(done.parent / "run", tmp_path / "run")), tmp_path / "far"
    obstruct(run, far)
    before = sorted(path.relative_to(far) for path in far.rglob("*"))
    code, said = train(done, f"run.folder={run}", "phases.0.steps=70", "checkpoint.keep=1")
    assert code == 0, said
    assert not lines(run, "checkpoint_failed")
    assert [line["step"] for line in lines(run, "checkpoint")][-3:] == [50, 60, 70]
    assert checkpoint.read(run / "step-00000070").record["state"]["step"] == 70
    warned = [line for line in said.splitlines() if "warning: " in line and str(run) in line]
    assert len(warned) == warnings, said
    assert sorted(path.relative_to(far) for path in far.rglob("*")) == before
    found = {path.name for path in run.glob("step-*")}
    assert "step-00000070" in found and len(found) <= 2


def test_two_ranks_write_into_the_same_other_folder(done: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(done.parent / "run", tmp_path / "run"))
    link(run / ".step-00000050.tmp", tmp_path / "far")
    code, said = train(done, f"run.folder={run}", "phases.0.steps=50", size=2)
    assert code == 0, said
    assert len(checkpoint.read(run / "step-00000050").parts) == 2


def test_the_preflight_and_the_start_tell_it_and_change_nothing(done: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(done.parent / "run", tmp_path / "run"))
    link(run / "step-00000020", tmp_path / "far")
    (run / ".step-00000030.tmp").symlink_to(tmp_path / "far")
    before = sorted(path.name for path in run.iterdir())
    code, said = train(done, f"run.folder={run}", script="trainer/preflight.py")
    assert code == 0, said
    assert sorted(path.name for path in run.iterdir()) == before
    for name in ("step-00000020", ".step-00000030.tmp"):
        [line] = [line for line in said.splitlines() if f"{run / name}: " in line]
        assert line.startswith("lambert: warning: no save will be able to remove ") and "it is a link" in line


# ---- without permission ----------------------------------------------------------------------------------------


def as_nobody(folder: Path, code: str) -> str:
    """The output of ``code``, run in ``folder`` by a user whom permissions bind."""
    became = f"os.setgid({NOBODY}); os.setuid({NOBODY})\n" if os.getuid() == 0 else ""
    imports = "import os, sys\nfrom pathlib import Path\n"
    imports += "from trainer.checkpoint.shared_folder import CheckpointConfig, prune, stuck_saves\n"
    whole = f"{imports}os.chdir(sys.argv[1])\n{became}{code}"
    [(ended, said)] = ranks.finish([ranks.fork_one(0, 1, 0, "-c", whole, str(folder))])
    assert ended == 0, said
    return said


def test_what_may_not_be_removed_is_reported_and_the_rest_is_removed(tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        (tmp_path / f"step-{step:08d}" / "part").mkdir(parents=True)
    (tmp_path / ".step-00000005.tmp" / "part").mkdir(parents=True)
    if os.getuid() == 0:
        for path in (tmp_path, *tmp_path.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    closed = [tmp_path / "step-00000020", tmp_path / ".step-00000005.tmp"]
    for path in closed:
        path.chmod(0o500)
    show = "for path, why in sorted(found.items()): print(why)"
    seen = as_nobody(tmp_path, f"found = stuck_saves(Path())\n{show}").splitlines()
    assert [line.split(":")[0] for line in seen] == [".step-00000005.tmp", "step-00000020"]
    reported = as_nobody(tmp_path, f"found = prune(Path(), CheckpointConfig(keep=2), 50)\n{show}").splitlines()
    assert reported == [
        ".step-00000005.tmp: Permission denied, for part in it",
        ".step-00000020.tmp: Permission denied, for part in it",
    ]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".step-00000005.tmp", ".step-00000020.tmp", "step-00000040", "step-00000050"]
    for path in tmp_path.iterdir():
        path.chmod(0o700)


def test_a_folder_that_may_not_be_changed_fails_no_prune(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / f"step-{step:08d}").mkdir()
    tmp_path.chmod(0o555)
    reported = as_nobody(tmp_path, "print(*prune(Path(), CheckpointConfig(keep=1), 20).values())")
    tmp_path.chmod(0o755)
    assert reported == "step-00000010: Permission denied\n"


# ---- names -----------------------------------------------------------------------------------------------------


def test_a_free_name_is_found_and_no_other_programs_draft_is_taken_for_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert temporary(path) == tmp_path / ".out.tmp"
    (tmp_path / ".out.tmp").touch()
    (tmp_path / ".out.tmp1").symlink_to("nowhere")
    for foreign in (".out.tmp1.tmp", ".out.tmpfile", ".out.1.tmp", ".other.tmp", "out.tmp"):
        (tmp_path / foreign).touch()
    assert temporary(path) == tmp_path / ".out.tmp2"
    assert drafts(tmp_path, "out") == [tmp_path / ".out.tmp", tmp_path / ".out.tmp1"]


def test_what_is_aside_is_removed_but_for_a_link(tmp_path: Path) -> None:
    assert move_aside(tmp_path / "absent") is None and remove(tmp_path / "absent") == ""
    fill(tmp_path / "a")
    assert move_aside(tmp_path / "a") == tmp_path / ".a.tmp" and remove(tmp_path / ".a.tmp") == ""
    (tmp_path / "b").symlink_to(tmp_path)
    aside = move_aside(tmp_path / "b")
    assert aside is not None and aside.is_symlink() and "it is a link" in remove(aside)
    assert stuck([aside, tmp_path]).keys() == {aside}


def test_an_export_needs_no_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".out.tmp").symlink_to(tmp_path / "elsewhere")
    with becoming(tmp_path / "out") as draft:
        (draft / "file").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.tmp", "out"]


def test_checkpoints_and_drafts_alike_are_foreseen(tmp_path: Path) -> None:
    assert stuck_saves(tmp_path / "absent") == {} == prune(tmp_path / "absent", CheckpointConfig(), 1)
