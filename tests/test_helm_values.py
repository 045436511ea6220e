"""The chart's values: each is described, a mistake is refused in one line, and the pods are as safe as promised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import helm
from tests.helpers.helm import EXAMPLES, Json, job_spec, one, pod, rendered, template
from tests.test_monitoring_dashboards import known

REFUSALS = [  # an example, what is changed in it, and the beginning of the line
    ("job", "nodes=0", "at '/nodes': minimum: got 0, want 1"),
    ("job", "nodse=2", "at '': additional properties 'nodse' not allowed"),
    ("job", "kind=pytorchjob", "at '/kind': value must be one of"),
    ("job", "shm=300Gi", "shm is 300Gi, but counts against resources.memory, 256Gi: "),
    ("job", "image.repository=null", "image.repository is missing: "),
    ("job", "env.PET_NNODES=3", "env.PET_NNODES: the chart sets a pod's place in the run: "),
    ("job", "env.WORLD_SIZE=3", "env.WORLD_SIZE: the chart sets a pod's place in the run: "),
    ("job", "env.TMPDIR=/data", "env.TMPDIR: the chart points it to a writable path: "),
    ("job", "stepSeconds=null", "stepSeconds and saveSeconds are missing: "),
    ("job", "evaluationSeconds=null", "evaluationSeconds is missing, but a phase has held-out shards: "),
    ("job", "saveSeconds=null", "stepSeconds and saveSeconds are missing: "),
    ("job", "terminationGracePeriodSeconds=238", "terminationGracePeriodSeconds is 238, but a stop may take 239: "),
    (
        "job",
        "maxLostSeconds=1199",
        "100 steps of run.checkpoint.every_steps take 1200 seconds, more than maxLostSeconds, 1199: ",
    ),
    (
        "job",
        "run.checkpoint.every_steps=200",
        "200 steps of run.checkpoint.every_steps take 2400 seconds, more than maxLostSeconds, 1800: ",
    ),
    ("job", "run.checkpoint=null", "run.checkpoint is not a mapping: "),
    ("job", "runs.accessMode=ReadWriteOnce", "runs.accessMode is ReadWriteOnce, but nodes is 2: "),
    ("job", "--set-json=run={}", "run is empty: "),
    ("job", "run.run.name=", "run.run.name is missing: "),
    ("job", "run.phases=null", "run.phases is not a list of phases: "),
    ("job", "run.run.seed=9007199254740994", "run.run.seed is above 2^53, where Helm rounds numbers: "),
    (
        "job",
        "run.run.folder=/data/run",
        "run.run.folder is /data/run: it must be an address or under runs.path, /runs, ",
    ),
    (
        "job",
        "run.run.folder=/runs/../data/run",
        "run.run.folder is /runs/../data/run: it must be an address or under runs.path, /runs, ",
    ),
    ("job", "run.run.device=cpu", "run.run.device is cpu, but gpus is 8: "),
    ("trainjob", "run.run.device=cuda", "run.run.device is cuda, but gpus is 0: "),
    ("job", "run.run.ranks=8", "run.run.ranks is 8, but nodes × ranks per node is 16: "),
    ("job", "run.metrics.port=9000", "run.metrics.port is 9000, but metricsPort is 9464: "),
    ("job", "run.phases[0].train=data/train", "run.phases.0.train is data/train: shards must be under data.path, "),
    ("job", "data.claim=null", "run.phases.0.train is /data/train-128, but data.claim is missing: "),
    (
        "jobset",
        "--set-json=networkPolicy.egress=[]",
        "run.phases.0.train is s3://corpus/train-128, but networkPolicy.egress allows no outside connection: ",
    ),
    (
        "job",
        "run.run.folder=s3://bucket/runs/first",
        "run.run.folder is s3://bucket/runs/first, but networkPolicy.egress allows no outside connection: ",
    ),
    ("jobset", "shardCache=70Gi", "run.cache.gigabytes does not fit into shardCache, 70Gi: "),
    (
        "jobset",
        "networkPolicy.monitoringNamespace=null",
        "monitoring.podMonitor is on, but networkPolicy.monitoringNamespace is null: ",
    ),
    ("data_prep", "--set-json=dataPrep.commands=[]", "dataPrep.commands is empty: "),
    ("data_prep", "data.claim=null", "data.claim is missing: "),
    (
        "data_prep",
        "--set-json=networkPolicy.egress=[]",
        "dataPrep.commands contains an address, but networkPolicy.egress allows no outside connection: ",
    ),
    ("data_prep", "dataPrep.repository=null,image.repository=null", "dataPrep.repository is missing: "),
    (
        "data_prep",
        "dataPrep.commands[0][0]=vocab",
        "dataPrep.commands: a restarted pod could not run vocab again, since its folder would exist: ",
    ),
    (
        "data_prep",
        '--set-json=dataPrep.commands=[["vocab"]]',
        "dataPrep.pods is more than 1, but only one pod can run vocab: ",
    ),
    ("data_prep", "dataPrep.pods=0", "at '/dataPrep/pods': minimum: got 0, want 1"),
    ("data_prep", "env.JOB_COMPLETION_INDEX=3", "env.JOB_COMPLETION_INDEX: the chart sets a pod's place in the run: "),
]
NAMES = [  # of the release
    ("2nd", "the release is named 2nd: use lowercase letters, digits and -, with a letter first"),
    ("b" * 49, "the release's name is 1 characters too long: shorten it, since pods would be named b"),
]


def refused(example: str, *words: str, release: str = "bert") -> str:
    """The one line about what is refused."""
    rendered(example)  # or there is no Helm
    done = template(example, *words, release=release)
    assert done.returncode != 0 and not done.stdout
    said = done.stderr.replace("Use --debug flag to render out invalid YAML", "").strip()
    if said.startswith("Error: values don't meet the specifications of the schema(s)"):
        said = said.partition("lambert:\n- ")[2]
    assert said and "\n" not in said, said
    return said


@pytest.mark.parametrize(("example", "change", "line"), REFUSALS, ids=lambda value: value[:40])
def test_what_does_not_fit_is_refused(example: str, change: str, line: str) -> None:
    assert line in refused(example, change if change.startswith("--") else f"--set={change}")


@pytest.mark.parametrize(("name", "line"), NAMES, ids=["first", "long"])
def test_a_name_that_pods_cannot_have_is_refused(name: str, line: str) -> None:
    assert line in refused("job", release=name)


def test_a_text_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run: {name", encoding="utf-8")
    assert "run is not valid YAML: " in refused("job", f"--set-file=run={tmp_path / 'run.yaml'}")


def test_every_refusal_is_tested() -> None:
    lines = [line for _, _, line in REFUSALS] + [line for _, line in NAMES] + ["run is not valid YAML: "]
    texts = [path.read_text(encoding="utf-8") for path in (helm.CHART / "templates").iterdir()]
    wanted = re.findall(r'\bfail \(?(?:printf )?"(.+?)"(?: |\)| -)', "".join(texts))
    assert len(wanted) == "".join(texts).count("{{- fail ")
    for text in wanted:
        head = text.rpartition(": ")[0]  # without the remedy
        start = re.compile(".+".join(re.escape(part) for part in re.split("%[svd]", head)) + ": ")
        assert any(start.match(line) for line in lines), text


@pytest.mark.parametrize("seconds", ["239", "null"])
def test_a_stop_has_the_time_that_it_may_take(seconds: str) -> None:
    """A look at each step of 12 s, an evaluation of 30 and a save of 60, twice; 20 to be scraped, and 15."""
    grace = pod(rendered("job", f"--set=terminationGracePeriodSeconds={seconds}"))["terminationGracePeriodSeconds"]
    assert grace == 2 * (12 + 30 + 60) + 20 + 15
    slower = pod(rendered("job", "--set=run.metrics.log_every_steps=3"))["terminationGracePeriodSeconds"]
    assert slower == grace + 2 * 2 * 12


# ---- the values ------------------------------------------------------------------------------------------------


def leaves(tree: Json, where: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}"


def test_every_value_is_described() -> None:
    lines = (helm.CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        key = re.match(r" *(\w+): *\S", line)
        assert not key or before.strip().startswith("# "), line


def test_what_an_estimate_is_read_from_is_exported() -> None:
    text = (helm.CHART / "values.yaml").read_text(encoding="utf-8")
    names = set(re.findall(r"lambert_\w+", text))
    assert names and all(name in known() or f"{name}_bucket" in known() for name in names)


def schemas(tree: Any, where: str = "") -> Iterator[tuple[str, Json]]:
    """Every mapping that the schema describes, with its place."""
    if tree.get("type") == "object":
        yield where, tree
    for key, value in tree.get("properties", {}).items():
        yield from schemas(value, f"{where}.{key}")
    if "items" in tree:
        yield from schemas(tree["items"], f"{where}[]")


def test_the_schema_knows_the_values_and_nothing_else() -> None:
    schema = json.loads((helm.CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text(encoding="utf-8"))
    known: set[str] = set()
    for where, mapping in schemas(schema):
        free = re.search(r"Affinity$|egress\[\]\.(to|ports)\[\]$|^\.topologySpreadConstraints\[\]$", where)
        assert free or "additionalProperties" in mapping, where
        if mapping.get("additionalProperties") is False and "[]" not in where:
            known |= {f"{where}.{key}"[1:] for key in mapping["properties"]}
    sections = {key for key in known if any(other.startswith(f"{key}.") for other in known)}
    assert {key for key in known - sections if not key.startswith("affinity.")} | {"affinity"} == set(leaves(values))


@pytest.mark.parametrize(
    "section", ["image", "resources", "runs", "data", "rdma", "networkPolicy", "monitoring", "dataPrep"]
)
def test_a_typo_in_a_section_is_refused(section: str) -> None:
    assert f"at '/{section}': additional properties 'typo' not allowed" in refused("job", f"--set={section}.typo=1")


def test_numbers_arrive_as_they_are() -> None:
    """Go's own words for ten million are 1e+07."""
    documents = rendered("job", "--set=env.NCCL_BUFFSIZE=10000000", "--set-string=env.NCCL_DEBUG=true")
    [container] = pod(documents)["containers"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (given["NCCL_BUFFSIZE"], given["NCCL_DEBUG"]) == ("10000000", "true")


# ---- safety ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_pods_are_restricted(name: str) -> None:
    """Pods meet the Pod Security level `restricted`, and their root file system is read-only."""
    spec = pod(rendered(name, "--set=rdma.resource=null"))
    assert spec["automountServiceAccountToken"] is False and "hostNetwork" not in spec
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"/tmp", "/home/lambert", "/cache"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert all(
        kind in {"configMap", "persistentVolumeClaim", "emptyDir"}
        for volume in spec["volumes"]
        for kind in volume
        if kind != "name"
    )
    for volume in spec["volumes"]:
        assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"]


def test_rdma_is_asked_for_beside_the_gpus() -> None:
    spec = pod(rendered("jobset", "--set=rdma.hostNetwork=true"))
    [container] = spec["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    for side in ("requests", "limits"):
        devices = {key: count for key, count in container["resources"][side].items() if "/" in key}
        assert devices == {"nvidia.com/gpu": 8, "rdma/hca": 8}
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


def test_shared_memory_is_memory_with_a_limit() -> None:
    spec = pod(rendered("job"))
    [volume] = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_network_is_the_gangs_alone(name: str) -> None:
    documents = rendered(name)
    policy = one(documents, "NetworkPolicy")["spec"]
    gang = {"podSelector": policy["podSelector"]}
    assert policy["podSelector"]["matchLabels"].items() <= job_spec(documents)["template"]["metadata"]["labels"].items()
    inside, scrape = policy["ingress"]
    assert inside == {"from": [gang]}  # all ports
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert scrape == {"from": [monitoring], "ports": [{"port": 9464, "protocol": "TCP"}]}
    names = {"ports": [{"port": port, "protocol": protocol} for port in (53, 5353) for protocol in ("UDP", "TCP")]}
    values = yaml.safe_load(EXAMPLES[name].read_text(encoding="utf-8"))
    status = {"to": [{"namespaceSelector": {}}], "ports": [{"port": 10443, "protocol": "TCP"}]}  # of a TrainJob
    more = [status] * (name == "trainjob") + values.get("networkPolicy", {}).get("egress", [])
    assert policy["egress"] == [{"to": [gang]}, names, *more]
    assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_checkpoints_outlive_the_release() -> None:
    claim = one(rendered("job"), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert not [each for each in rendered("jobset") if each["kind"] == "PersistentVolumeClaim"]  # it names one


def test_a_run_at_an_address_needs_no_claim() -> None:
    """It works on the node's disk instead, and may have several nodes whatever the access mode of claims is."""
    options = ("run.run.folder=s3://bucket/runs/first", "networkPolicy.enabled=false", "runs.accessMode=ReadWriteOnce")
    done = template("job", f"--set={','.join(options)}")
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert not [each for each in made if each["kind"] == "PersistentVolumeClaim"]
    config = yaml.safe_load(one(made, "ConfigMap")["data"]["run.yaml"])
    assert config["run"]["folder"] == "s3://bucket/runs/first" and config["cache"]["folder"] == "/shards"
    pod = one(made, "Job")["spec"]["template"]["spec"]
    names = {volume["name"] for volume in pod["volumes"]}
    assert "shards" in names and "runs" not in names
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} <= names


def test_another_configuration_makes_another_pod() -> None:
    """An upgrade thus cannot change a run in progress: a pod's template and the ConfigMap are immutable."""
    first, second = rendered("job"), rendered("job", "--set=run.run.seed=2")
    marks = {job_spec(each)["template"]["metadata"]["annotations"]["checksum/config"] for each in (first, second)}
    assert len(marks) == 2 and one(first, "ConfigMap")["immutable"]
