"""The quickstart: each section goes from text to a model, and its commands do what it says.

The first commands run here, on two hosts with real sshds; tests/tools/quickstart.py runs all of them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from data_prep.__main__ import _parser
from data_prep.manifest import load_manifest
from tests.helpers import helm
from tests.helpers.launches import site
from tests.helpers.pages import blocks
from tests.helpers.quickstart import NOT_HERE, PAGE, Shell, checkout, configuration, sections, small
from trainer.run.config import load

TITLES = ["deepspeed with a host file", "Containers", "Kubernetes", "Slurm"]


def test_each_section_goes_from_text_to_a_model() -> None:
    assert list(sections()) == TITLES
    for title, commands in sections().items():
        text = "\n".join(commands)
        for word in ("vocab", "build" if title != "Slurm" else "prepare-array", "run.yaml", "trainer.export"):
            assert word in text, (title, word)
        assert "trainer.preflight" in text or title == "Kubernetes"
        assert re.search(r"^(kill|podman stop|helm uninstall|scancel --signal=TERM) ", text, re.MULTILINE)
        assert not [line for line in small(text).splitlines() if NOT_HERE.match(line)]


def test_the_small_run_is_the_pages() -> None:
    tree = configuration()
    assert tree["run"]["folder"] == "runs/first" and tree["phases"][0]["train"] == "data/train-128"
    assert tree["phases"][0]["steps"] == 100000


def test_the_charts_values_make_two_builders_and_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `helm install` of the page, rendered: its pods get the page's commands and run.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(blocks(PAGE.read_text(encoding="utf-8"), "yaml")[0])
    text = "\n".join(sections()["Kubernetes"]).replace("\\\n", " ")
    [change] = re.findall(r"^(sed .+) > pods\.yaml$", text, re.MULTILINE)
    (tmp_path / "pods.yaml").write_text(subprocess.check_output(shlex.split(change), text=True))
    found = {}
    for name, words in re.findall(r"^helm install (\w+) deploy/helm/lambert (.+)$", text, re.MULTILINE):
        try:
            done = helm.run("template", name, str(helm.CHART), *shlex.split(words))
        except helm.NoHelmError as error:
            pytest.skip(str(error))
        assert done.returncode == 0, done.stderr
        found[name] = helm.documents(done.stdout)
    [vocab] = helm.pod(found["vocab"])["containers"]
    [build] = helm.pod(found["prep"])["containers"]
    assert _parser().parse_args(vocab["args"]).size == 30522 and "--builder" not in str(vocab["args"])
    options = _parser().parse_args(build["args"])
    assert (options.builder, options.sequence_length) == ("$(JOB_COMPLETION_INDEX)/2", 128)
    assert str(options.tokenizer) == str(_parser().parse_args(vocab["args"]).out) == "/data/vocab"
    (tmp_path / "config.yaml").write_text(helm.one(found["bert"], "ConfigMap")["data"]["run.yaml"])
    config = load(tmp_path / "config.yaml")
    assert (config.run.ranks, config.run.folder) == (16, "/runs/first")
    assert config.phases[0].train == str(options.out)
    assert helm.one(found["bert"], "PersistentVolumeClaim")["metadata"]["name"] == "bert-runs"


@pytest.mark.slow
def test_two_hosts_prepare_together_and_read_the_host_file(tmp_path: Path) -> None:
    setup, prepare, check, *_ = sections()["deepspeed with a host file"]
    with site(tmp_path / "home") as place:
        shell = Shell(place, checkout(tmp_path / "work", steps=4), {})
        try:
            shell.run(setup)
            shell.run(prepare)
            shell.run(check.splitlines()[0])
        finally:
            shell.close()
    assert load_manifest(tmp_path / "work/data/train-128").counts.samples > 100
    assert not (tmp_path / "work/data/train-128/.work").exists()
    assert shell.output().count("data/train-128: complete") == 2
