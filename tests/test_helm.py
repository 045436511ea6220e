"""The Helm chart as Helm renders it: what its kinds promise, and what it refuses.

No API server is here: that a cluster takes the objects is known as far as their schemas say it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from kubeflow_trainer_api import models  # type: ignore[import-untyped]

from data_prep.__main__ import _parser
from deploy.launch import LaunchParser, split
from deploy.node import NODE_OPTIONS
from tests.helpers import helm
from tests.helpers.helm import EXAMPLES, Json, job_spec, one, pod, rendered
from tests.helpers.programs import program
from tests.helpers.ranks import ROOT
from trainer.exits import REFUSED, STOPPED
from trainer.run.config import Config, load

pytestmark = pytest.mark.slow

KINDS = ("job", "jobset", "trainjob")
OPTIONS: dict[str, tuple[str, ...]] = {  # on top of an example, each to be taken by the schemas
    "job": ("--set=rdma.hostNetwork=true", "--set=queue=gpus", "--set=schedulerName=volcano", "--set=image.tag=1.2"),
    "jobset": ("--set-json=networkPolicy.egress=[{}]", "--set=networkPolicy.enabled=false", "--set=data.claim=shards"),
    "trainjob": ("--set=serviceAccountName=trainer", "--set=monitoring.podMonitor=true", "--set=runs.claim=runs"),
    "data_prep": (
        "--set=networkPolicy.monitoringNamespace=null",
        "--set=priorityClassName=low",
        "--set=dataPrep.pods=1",
    ),
}
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}


def environment(documents: list[Json]) -> Json:
    [container] = pod(documents)["containers"]
    entries = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
    assert len(entries) == len(container["env"])
    return entries


# ---- what is rendered ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_what_the_chart_makes(name: str) -> None:
    committed = helm.documents((helm.FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert rendered(name) == committed, (
        "the chart has changed: `python -m tests.tools.render_chart` writes the examples again"
    )


def test_the_chart_has_the_rules_of_the_monitoring() -> None:
    for name in helm.RULES:
        copy = (helm.CHART / "monitoring" / name).read_bytes()
        assert copy == (helm.MONITORING / name).read_bytes(), "`python -m tests.tools.render_chart` copies the rules"


@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_lint_finds_nothing(name: str) -> None:
    rendered(name)  # or there is no Helm
    done = helm.run("lint", "--strict", str(helm.CHART), "--values", str(EXAMPLES[name]))
    assert done.returncode == 0 and "WARN" not in done.stdout + done.stderr, done.stdout + done.stderr


def test_the_version_is_the_projects() -> None:
    chart = yaml.safe_load((helm.CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


def problems(document: Json) -> list[str]:
    """Violations of the schema for the document's kind, including unknown keys."""
    kind = document["kind"]
    if kind in MODELS:
        try:
            kept = MODELS[kind].from_dict(document).to_dict()
        except ValueError as error:
            return [str(error)]
        return list(dropped(document, kept))  # it leaves out what it does not know
    if kind == "PodMonitor":
        return [] if document["spec"].keys() == {"selector", "podMetricsEndpoints"} else ["unknown keys"]
    if kind == "PrometheusRule":
        command = [program("promtool"), "check", "rules", "/dev/stdin"]
        done = subprocess.run(command, input=yaml.safe_dump(document["spec"]), capture_output=True, text=True)
        return [] if done.returncode == 0 else [done.stderr]
    try:
        kubernetes_validate.validate(document, "1.35", strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error)]
    return []


def dropped(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from dropped(value, kept[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is unknown"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from dropped(value, other, f"{where}.{number}")
    elif given != kept:
        yield f"{where} is {given!r}, and read as {kept!r}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_schemas_take_it(name: str) -> None:
    for words in ((), OPTIONS[name]):
        assert not [found for document in rendered(name, *words) for found in problems(document)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_schemas_refuse_an_unknown_key(name: str) -> None:
    """The schemas are strict, both at the top of a specification and deep inside a pod."""
    for document in json.loads(json.dumps(rendered(name))):
        document.setdefault("spec", {})["shards"] = 1
        assert problems(document), document["kind"]
    documents = json.loads(json.dumps(rendered(name)))
    pod(documents)["containers"][0]["securityContext"]["runAsNonroot"] = True
    assert [found for document in documents for found in problems(document)]


def test_the_pod_monitor_finds_the_pods() -> None:
    documents = rendered("jobset")
    monitor = one(documents, "PodMonitor")["spec"]
    [endpoint] = monitor["podMetricsEndpoints"]
    labels = job_spec(documents)["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert endpoint.keys() == {"port", "interval"}
    [container] = pod(documents)["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]


def test_the_prometheus_rule_is_the_monitorings() -> None:
    groups = one(rendered("jobset"), "PrometheusRule")["spec"]["groups"]
    files = [(helm.MONITORING / name).read_text(encoding="utf-8") for name in helm.RULES]
    base = yaml.safe_load(EXAMPLES["jobset"].read_text(encoding="utf-8"))["monitoring"]["runbooks"]
    assert groups == [
        group for text in files for group in yaml.safe_load(text.replace("docs/runbooks", base))["groups"]
    ]


# ---- the gang --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_pod_has_just_the_environment_that_the_launcher_reads(name: str) -> None:
    documents = rendered(name)
    given = environment(documents)
    values = yaml.safe_load(EXAMPLES[name].read_text(encoding="utf-8"))
    dockerfile = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
    places = {"HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "MPLCONFIGDIR"}
    for place in places:
        assert re.search(rf"^(?:ENV|   ) {place}={re.escape(given[place])}(?: \\)?$", dockerfile, re.MULTILINE), place
    own = {variable for variable, _ in NODE_OPTIONS.values()} if name != "trainjob" else set()  # Trainer sets them
    own -= {"PET_MAX_RESTARTS"}  # of a range of nodes, which the chart does not offer
    assert given.keys() == own | places | values.get("env", {}).keys()
    if own:
        assert given["PET_NNODES"] == str(values["nodes"]) and given["PET_NPROC_PER_NODE"] == "8"
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        assert given["PET_NODE_RANK"] == {"fieldRef": {"fieldPath": index}}


def test_node_0_is_where_its_name_leads() -> None:
    documents = rendered("job")
    job, service = one(documents, "Job"), one(documents, "Service")
    assert pod(documents)["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    labels = job_spec(documents)["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert environment(documents)["PET_MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    # JobSet's names: <set>-<replicated job>-<job>-<pod>.<set>
    documents = rendered("jobset")
    name = one(documents, "JobSet")["metadata"]["name"]
    assert environment(documents)["PET_MASTER_ADDR"] == f"{name}-node-0-0.{name}"


@pytest.mark.parametrize("name", KINDS)
def test_the_launcher_takes_its_command_line(name: str) -> None:
    spec = pod(rendered(name))
    [container] = spec["containers"]
    assert container["command"] == ["python", "-m", "deploy.launch"]
    own, rest = split(container["args"])
    assert 0 < LaunchParser().parse_args(own).grace_seconds < spec["terminationGracePeriodSeconds"]
    assert rest == ["--config", "/etc/lambert/run.yaml"]


@pytest.mark.parametrize("name", KINDS)
def test_the_whole_gang_starts_again(name: str) -> None:
    documents = rendered(name)
    spec, nodes = job_spec(documents), yaml.safe_load(EXAMPLES[name].read_text(encoding="utf-8"))["nodes"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == nodes
    assert spec["podReplacementPolicy"] == "Failed" and pod(documents)["restartPolicy"] == "Never"
    actions: dict[int | str, str] = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": ["disrupted"], "containerName": "node"})
        assert codes["containerName"] == "node"
        actions |= dict.fromkeys(codes["values"], rule["action"])
    if name == "job":
        assert actions == {REFUSED: "FailJob", STOPPED: "Ignore", "disrupted": "Ignore"}
        assert spec["backoffLimit"] == nodes * 10
    else:
        assert actions == dict.fromkeys((REFUSED, STOPPED, "disrupted"), "FailJob")
        assert spec["backoffLimit"] == 0


@pytest.mark.parametrize(
    ("message", "action"),  # as Kubernetes' Job controller words them
    [
        (
            "Container node for pod a/b-node-0-0-x failed with exit code 2 matching FailJob rule at index 0",
            "FailJobSet",
        ),
        ("Container node for pod a/b-node-0-0-x failed with exit code 75 matching FailJob rule at index 1", "Restart"),
        ("Pod a/b-node-0-1-x has condition DisruptionTarget matching FailJob rule at index 2", "Restart"),
        ("words of a later version", "FailJobSet"),
    ],
)
def test_a_job_set_tells_a_stop_from_a_refusal(message: str, action: str) -> None:
    policies = [
        one(rendered("jobset"), "JobSet")["spec"]["failurePolicy"],
        one(rendered("trainjob"), "TrainingRuntime")["spec"]["template"]["spec"]["failurePolicy"],
    ]
    for policy in policies:
        rules = [
            rule
            for rule in policy["rules"]
            if any(re.search(pattern, message) for pattern in rule.get("onJobFailureMessagePatterns", [""]))
        ]
        assert rules[0]["action"].startswith(action) and rules[0]["onJobFailureReasons"] == ["PodFailurePolicy"]
        assert policy["maxRestarts"] == 10


def test_trainer_knows_the_gang() -> None:
    documents = rendered("trainjob")
    job, runtime = one(documents, "TrainJob"), one(documents, "TrainingRuntime")
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert job["spec"]["runtimeRef"] == reference
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 2}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    assert runtime["metadata"]["annotations"]["helm.sh/hook"] == "pre-install"  # it must be there before the TrainJob
    assert "PET_" not in json.dumps(documents)


# ---- the configuration -----------------------------------------------------------------------------------------


def read(documents: list[Json], folder: Path) -> Config:
    path = folder / "run.yaml"
    path.write_text(one(documents, "ConfigMap")["data"]["run.yaml"], encoding="utf-8")
    return load(path)


@pytest.mark.parametrize("name", KINDS)
def test_the_trainer_takes_the_configuration(name: str, tmp_path: Path) -> None:
    documents = rendered(name)
    config = read(documents, tmp_path)
    [container] = pod(documents)["containers"]
    assert config.run.device == ("cuda" if "nvidia.com/gpu" in container["resources"]["limits"] else "cpu")
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert config.run.folder == f"/runs/{config.run.name}" and "readOnly" not in mounts["/runs"]
    assert {"name": "metrics", "containerPort": config.metrics.port} in container["ports"]
    replicas = job_spec(documents)["parallelism"]
    assert config.run.ranks == replicas * (container["resources"]["limits"].get("nvidia.com/gpu") or 2)
    remote = "://" in config.phases[0].train
    assert ("/shards" in mounts) == (config.cache.folder == "/shards") == remote
    assert ("/data" in mounts) == (not remote)


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/configs").glob("b*.yaml")), ids=lambda path: path.stem)
def test_a_file_arrives_as_it_is(path: Path, tmp_path: Path) -> None:
    """All its numbers survive Go's YAML."""
    text = path.read_text(encoding="utf-8").replace(" data/", " /data/").replace(" runs/", " /runs/")
    (tmp_path / "given.yaml").write_text(text, encoding="utf-8")
    given = load(tmp_path / "given.yaml", ["run.device=cuda", "run.ranks=16"])
    words = (f"--set-file=run={tmp_path / 'given.yaml'}", "--set=stepSeconds=0.1")
    assert read(rendered("job", *words), tmp_path) == given


def test_what_the_chart_assumes_is_the_trainers() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (helm.CHART / "templates").glob("*.tpl"))
    defaults = {
        (section, field.name): field.default
        for section, kind in get_type_hints(Config).items()
        if section != "phases"
        for field in dataclasses.fields(kind)
    }
    assumed = re.findall(r'dig "(\w+)" "(\w+)" (\d[\d.]*)', text)
    assert {("checkpoint", "every_steps"), ("cache", "gigabytes")} <= {(section, key) for section, key, _ in assumed}
    assumed = [each for each in assumed if each[0] != "run"]
    assumed += [("metrics", key, value) for key, value in re.findall(r'dig "(\w+)" ([\d.]+) \$metrics', text)]
    assert len(assumed) == 4
    assert all(float(value) == defaults[section, key] for section, key, value in assumed)
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values["metricsPort"] == defaults["metrics", "port"]


# ---- data preparation ------------------------------------------------------------------------------------------


def test_data_prep_takes_its_command_lines() -> None:
    spec = pod(rendered("data_prep"))
    steps = [*spec["initContainers"], *spec["containers"]]
    options = [_parser().parse_args(step["args"]) for step in steps]
    assert all(step["command"] == ["python", "-m", "data_prep"] for step in steps)
    assert [each.processes for each in options[:2]] == [32, 32] and options[0].sequence_length == 128
    assert [step.get("ports", [{}])[0].get("name") for step in steps] == ["metrics", "metrics", None, None]
    assert [each.builder for each in options] == ["$(JOB_COMPLETION_INDEX)/4"] * 4


def test_each_pod_of_data_prep_is_a_builder() -> None:
    several, one_pod = rendered("data_prep"), rendered("data_prep", "--set=dataPrep.pods=1")
    spec = job_spec(several)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (spec["backoffLimit"], job_spec(one_pod)["backoffLimit"]) == (16, 4)
    assert "completionMode" not in job_spec(one_pod) and "--builder" not in json.dumps(one_pod)
