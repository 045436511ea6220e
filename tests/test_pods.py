"""Pods of the chart's Jobs, started as a cluster would, and the place that each kind gives its pods.

tests/tools/pod_contract.py has the other kinds and faults; none of them needs a cluster.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from data_prep.__main__ import main
from deploy.node import Node, read_node
from tests.helpers import ranks
from tests.helpers.corpora import contents, write_corpus
from tests.helpers.pods import INDEX, KINDS, PORT, RUN, SIZE, contract, gang, preparation
from tests.helpers.runs import lines
from tests.helpers.sshd import wait_for
from tests.tools.pod_contract import EVERY, STEPS, stop

pytestmark = pytest.mark.slow


def expected(config: str, folder: Path) -> dict[int, Any]:
    """The losses, step by step, of two ranks without any launcher or network."""
    (folder / "run.yaml").write_text(config)
    options = ["--config", f"{folder}/run.yaml", "--set", f"run.folder={folder / RUN}", "--set", "metrics.port=null"]
    done = ranks.finish(
        ranks.fork(SIZE, f"{ranks.ROOT}/tests/helpers/trainer_on_ranks.py", str(folder), "[]", *options)
    )
    assert [code for code, _ in done] == [0] * SIZE, done
    return {line["step"]: line["loss"] for line in lines(folder / RUN, "step")}


def test_pods_stop_at_the_kubelets_signal_and_go_on(tiny_shards: Path, tmp_path: Path) -> None:
    given = contract("job", tmp_path, tiny_shards, tiny_shards, STEPS, EVERY)
    with gang(given, tmp_path) as run:
        stop(run)
        assert run.losses() == expected(given.config, tmp_path)
        assert list(run.losses()) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_finds_its_place_in_what_it_is_told(kind: str, tiny_shards: Path, tmp_path: Path) -> None:
    given = contract(kind, tmp_path, tiny_shards, tiny_shards, STEPS, EVERY)
    for index in range(SIZE):
        environ = {name: str(index) if value == INDEX else value for name, value in given.environ.items()}
        node = read_node({}, environ, lambda: pytest.fail("the number of ranks is given"))
        assert node == Node(index, SIZE, 1, given.name(0), PORT)


def test_pods_prepare_one_data_set_and_a_killed_one_is_made_up_for(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus", [60] * 150, 8, 10)
    out = tmp_path / "data/train"
    words = ["build", "--input", "/corpus/corpus.txt", "--tokenizer", "/corpus/words", "--out", "/data/train"]
    words += ["--sequence-length", "32", "--samples-per-shard", "20"]
    here = [f"{tmp_path}{word}" if word.startswith("/corpus") else word for word in words]
    assert main([*here[:6], str(tmp_path / "whole"), *here[7:]]) == 0
    with gang(preparation(tmp_path, 2, words), tmp_path) as run:
        killed = run.start(1)
        assert wait_for(lambda: len(list(out.glob("shard-*.tar"))) > 2), run.output()
        killed.send(signal.SIGKILL)
        assert killed.end() == 128 + signal.SIGKILL and not (out / "manifest.json").exists(), run.output()
        pods = [run.start(index) for index in range(2)]
        assert [pod.end() for pod in pods] == [0, 0], run.output()
    assert contents(out) == contents(tmp_path / "whole")
