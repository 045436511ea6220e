"""A submission to a real Slurm of two hosts: what arrives there, and what its own errors leave behind.

``python -m tests.tools.job_table`` runs such a job to its end, and disturbs it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launches import PYTHON, SETTINGS, Site, site
from tests.helpers.ranks import ROOT
from tests.helpers.runs import write_config
from tests.helpers.slurm import ask, fetch_slurm, slurm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.skip("only root can start the hosts")
    fetch_slurm()
    with site(tmp_path_factory.mktemp("site") / "home") as place, slurm(place):
        yield place


def submit(cluster: Site, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Submit the configuration in a folder from there, on the first host."""
    own = ["slurm", "--config", "run.yaml", "--nodes", "2", "--gpus", "1", *words]
    environ = cluster.environ() | SETTINGS
    command = cluster.hosts[0].command([PYTHON, "-m", "deploy.submit", *own], folder, environ)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_slurm_takes_a_job_or_refuses_it_whole(cluster: Site, tiny_shards: Path, tmp_path: Path) -> None:
    write_config(tmp_path, tiny_shards, 40, run={"device": "cpu"})
    refused = submit(cluster, tmp_path, "--", "--partition=nowhere")
    assert (refused.returncode, refused.stdout) == (1, "")
    *_, line = refused.stderr.splitlines()
    why = "invalid partition specified: nowhere; Batch job submission failed: Invalid partition name specified"
    assert line == f"deploy.submit: error: sbatch: {why}"
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    taken = submit(cluster, tmp_path, "--", "--hold", "--cpus-per-task=1", "--time=30")
    assert taken.returncode == 0, taken.stderr
    job = taken.stdout.partition("as job ")[2].partition(":")[0]
    said = ask(cluster, "scontrol", "show", "job", job)
    found = dict(word.split("=", 1) for word in said.split() if "=" in word)
    about = {"JobName": "test", "NumNodes": "2-2", "NumTasks": "2", "WorkDir": str(tmp_path), "Requeue": "1"}
    assert found | about | {"StdOut": f"{tmp_path}/test-{job}.log"} == found
    (copy,) = (tmp_path / "submitted").iterdir()
    assert f"{ROOT}/deploy/slurm/train.sbatch --config submitted/{copy.name}\n" in said
    stop, *_ = taken.stdout.partition("stop ")[2].split(" && ")  # the rest is for a job that runs
    ask(cluster, *stop.split())
    assert "Requeue=0" in ask(cluster, "scontrol", "show", "job", job)
    ask(cluster, *taken.stdout.splitlines()[-1].split()[1:])
    assert "JobState=CANCELLED" in ask(cluster, "scontrol", "show", "job", job)
