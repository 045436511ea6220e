"""A submission to Kubernetes with the real Helm, to an API server of ours that keeps objects and starts nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.submit import kubernetes
from deploy.submit.__main__ import main
from deploy.submit.kubernetes import in_pods
from tests.helpers import helm
from tests.helpers.api_server import Api, api_server
from tests.helpers.helm import documents, one, pod
from tests.helpers.runs import write_config
from tests.helpers.submissions import CARD, error

pytestmark = pytest.mark.slow

CLUSTER = ["--set", "image.repository=registry/lambert,data.claim=shards"]
KEPT = ["ConfigMap", "Job", "NetworkPolicy", "PersistentVolumeClaim", "Service"]


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with Helm and a Python on the PATH, and no cluster."""
    try:
        program = helm.helm()
    except helm.NoHelmError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(program).parent}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    return tmp_path


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with api_server(tmp_path) as served:
        monkeypatch.setenv("KUBECONFIG", str(served.kubeconfig))
        yield served


@pytest.fixture
def config(tiny_shards: Path, tmp_path: Path) -> Path:
    """A configuration for pods; of its data set only the two files that the planner reads are here, in copy/."""
    path = write_config(tmp_path, tiny_shards, 40, metrics={"port": 9464})
    tree = yaml.safe_load(path.read_text())
    tree["run"]["folder"], tree["phases"][0]["train"] = "runs/test", "/data/train"
    path.write_text(yaml.safe_dump(tree))
    (tmp_path / "copy/train").mkdir(parents=True)
    for name in ("manifest.json", "length_counts.npy"):
        shutil.copy(tiny_shards / name, tmp_path / "copy/train")
    return path


def submit(config: Path, *words: str, more: list[str] | None = None) -> int:
    own = ["--config", str(config), "--nodes", "2", "--gpus", "8", "--data", "copy", *CARD]
    return main(["kubernetes", *own, *words, "--", *(CLUSTER if more is None else more)])


def test_a_dry_run_prints_the_manifests(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(config, "--set", "phases.0.steps=60", "--dry-run") == 0
    output = capsys.readouterr()
    found = documents(output.out)
    spec = one(found, "Job")["spec"]
    assert one(found, "Job")["metadata"]["name"] == "test" and spec["completions"] == 2
    run = yaml.safe_load(one(found, "ConfigMap")["data"]["run.yaml"])
    assert run["run"] | {"folder": "/runs/test", "ranks": 16, "device": "cuda"} == run["run"]
    assert run["phases"][0]["train"] == "/data/train" and run["phases"][0]["steps"] == 60
    assert [line.split(":")[1] for line in output.err.splitlines()] == [
        " test fits",
        " checked",
    ]


@pytest.mark.parametrize(("folder", "kept"), [("runs/first", {}), ("s3://b/first", {"folder": "s3://b/first"})])
def test_only_an_address_means_the_same_in_a_pod(folder: str, kept: dict[str, str]) -> None:
    assert in_pods({"run": {"name": "a", "folder": folder}}) == {"run": {"name": "a", **kept}}


def test_the_plan_gives_the_charts_estimates_unless_the_user_does(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(config, "--dry-run") == 0
    planned = pod(documents(capsys.readouterr().out))
    assert planned["terminationGracePeriodSeconds"] == 38  # 2 × (2 steps of 0.1 s + a save of 1 s) + 20 + 15
    (tmp_path / "cluster.yaml").write_text("stepSeconds: 30\n")
    assert submit(config, "--dry-run", more=[*CLUSTER, "--values", "cluster.yaml"]) == 0
    given = pod(documents(capsys.readouterr().out))
    assert given["terminationGracePeriodSeconds"] == 157


def test_a_run_on_cpus_needs_no_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [*CLUSTER, "--set", "stepSeconds=1,saveSeconds=1"]
    assert submit(config, "--set", "run.device=cpu", "--dry-run", more=more) == 0
    output = capsys.readouterr()
    assert "no plan: run.device is cpu" in output.err
    [container] = pod(documents(output.out))["containers"]
    assert {"name": "PET_NPROC_PER_NODE", "value": "8"} in container["env"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_a_release_is_installed_once(config: Path, api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(config, "--namespace", "ml", "--kube-context", "here") == 0
    assert api.kinds() == KEPT and all("/namespaces/ml/" in path for path in api.objects)
    said = capsys.readouterr().out
    assert said.startswith("submitted test as release test: 2 nodes, 16 ranks\n")
    assert "kubectl --context here --namespace ml get pods --selector app.kubernetes.io/instance=test\n" in said
    assert "helm --kube-context here --namespace ml uninstall test\n" in said and "trainjob" not in said
    assert submit(config, "--namespace", "ml", "--kube-context", "here") == 2
    again = "first stop it with helm uninstall test --kube-context here --namespace ml"
    assert error(capsys) == f"there is a release test: give another run.name, or {again}"
    assert api.kinds() == KEPT
    subprocess.run(["helm", "uninstall", "test", "--namespace", "ml"], check=True, capture_output=True)
    assert api.kinds() == ["PersistentVolumeClaim"]


def test_nothing_is_left_if_an_object_is_refused(config: Path, api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.refused.add("Job")
    assert submit(config) == 1
    said = error(capsys)
    assert said.startswith("helm: INSTALLATION FAILED: ") and said.endswith("Job is forbidden: exceeded quota")
    assert [*api.objects] == ["/api/v1/namespaces/default/persistentvolumeclaims/test-runs"]  # the chart keeps it


def test_anothers_release_stays(
    config: Path, api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is installed between our look for one and our own installation."""
    assert submit(config) == 0
    capsys.readouterr()
    monkeypatch.setattr(kubernetes, "_require_new", lambda order: None)
    assert submit(config) == 1
    assert "cannot reuse a name that is still in use" in error(capsys)
    assert api.kinds() == KEPT and "/api/v1/namespaces/default/secrets/sh.helm.release.v1.test.v1" in api.objects


def test_a_train_job_says_where_its_progress_is(config: Path) -> None:
    order: Any = type("Order", (), {"name": "test", "size": lambda self: "", "options": None})()
    order.options = type("Options", (), {"namespace": None, "kube_context": None})()
    said = kubernetes.summary(order, "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\n")
    assert "kubectl get trainjob test -o jsonpath='{.status.trainerStatus}'\n" in said


PHASE = "{name: %s, train: /data/%s, sequence_length: 32, steps: 4, global_batch: 30, micro_batch: 8, learning_rate: 1}"
REFUSED: dict[str, tuple[list[str], list[str] | None, int, str]] = {
    "no cluster": ([], None, 1, "helm: kubernetes cluster unreachable: "),
    "no image": (["--dry-run"], [], 1, "helm: execution error at (lambert/templates/"),
    "an unknown option": (["--dry-run"], ["--bogus"], 1, "helm: unknown flag: --bogus"),
    "a bad name": (["--set", "run.name=BERT_2"], None, 2, "run.name is 'BERT_2': a release's name takes lowercase"),
    "no data": (
        ["--set", f"phases=[{PHASE % ('a', 'a')}, {PHASE % ('b', 'b')}]"],
        None,
        2,
        "phases.0.train is /data/a, and copy/a has no manifest.json here; phases.1.train is /data/b, and copy/b has no",
    ),
    "too large": (["--memory", "1GiB"], None, 2, "phases.0: a micro-batch of 2 sequences needs 1."),
    "a namespace": ([], ["--namespace", "x"], 2, "--namespace after --: give it before --, so that every command"),
    "a namespace, short": ([], ["-nx"], 2, "-nx after --: give it before --, so that every command gets it"),
    "a cluster": ([], ["--kube-apiserver=x"], 2, "--kube-apiserver=x after --: choose the cluster with the variable"),
    "a configuration": (
        [],
        ["--set-literal=run=x"],
        2,
        "--set-literal=run=x after --: the run is planned: use options",
    ),
    "help": ([], ["--help"], 2, "--help after --: leave it out"),
    "nodes": ([], ["--set", "image.tag=1,nodes=4"], 2, "image.tag=1,nodes=4 after --: the run is planned: use opt"),
    "to wait": ([], ["--wait"], 2, "--wait after --: leave it out"),
    "a port": (["--set", "metrics.port=null", "--dry-run"], None, 1, "helm: execution error at"),
    "no estimates": (["--no-plan", "--dry-run"], None, 1, "helm: execution error at"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_in_one_line(name: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, more, code, said = REFUSED[name]
    assert submit(config, *options, more=more) == code
    assert error(capsys).startswith(said)


def test_without_helm_the_line_says_so(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit(config) == 2
    assert error(capsys) == "there is no helm on the PATH: install Helm 3 or 4"
