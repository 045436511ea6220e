"""A run on two hosts with real sshds is the same under each launcher, and its user's settings reach every rank.

This covers deepspeed and torchrun, and test_pods.py deploy.launch; tests/tools/fault_table.py covers the others, and
injects faults under all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ranks
from tests.helpers.launches import LAUNCHERS, SETTINGS, TIMEOUT, Site, Started, losses, site
from tests.helpers.programs import program
from tests.helpers.runs import write_config
from tests.helpers.sshd import command_of, environment_of, wait_for

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    program("pdsh")
    with site(tmp_path_factory.mktemp("site") / "home") as place:
        yield place


@pytest.fixture(scope="module")
def expected(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The report for each step of two ranks without a launcher or network."""
    folder = tmp_path_factory.mktemp("expected")
    config = configure(folder, tiny_shards)
    script = str(ranks.ROOT / "tests/helpers/trainer_on_ranks.py")
    options = ["--config", str(config), "--set", f"run.folder={folder / 'run'}"]
    done = ranks.finish(ranks.fork(2, script, str(folder), "[]", *options))
    assert [code for code, _ in done] == [0, 0], done
    return losses(folder / "run")


def configure(folder: Path, shards: Path) -> Path:
    return write_config(folder, shards, STEPS, run={"device": "cpu"}, metrics={"log_every_steps": 1})


@pytest.mark.parametrize("launcher", ["deepspeed, pdsh", "torchrun, PET_*"])
def test_the_losses_are_the_same_and_settings_arrive(
    launcher: str, cluster: Site, expected: list[dict[str, Any]], tiny_shards: Path, tmp_path: Path
) -> None:
    run = Started(cluster, LAUNCHERS[launcher](), configure(tmp_path, tiny_shards), tmp_path / "log")
    try:
        assert wait_for(lambda: run.ended() or len(run.ranks()) == 2, TIMEOUT), run.output()
        given = [environment_of(rank) for rank in run.ranks()]
        assert [{name: words.get(name) for name in SETTINGS} for words in given] == [SETTINGS, SETTINGS], run.output()
        assert set(run.codes()) == {0}, run.output()
        assert losses(run.folder) == expected
        assert wait_for(lambda: not run.pids()), [command_of(pid) for pid in run.pids()]
    finally:
        run.clear()
