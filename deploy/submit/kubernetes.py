"""Submits a run to Kubernetes: helm installs the chart deploy/helm/lambert as a release with the run's name."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.manifest import MANIFEST
from deploy.submit.order import ROOT, Order, SubmitError, ask, failure, planned, require_program, run, tell, yaml_of
from trainer.console import print_result
from trainer.data.remote import is_remote
from trainer.plan.estimate import Plan
from trainer.run.config import Config

CHART = ROOT / "deploy/helm/lambert"
DATA = "/data/"  # where the chart mounts data.claim
CONTEXT = {"kubectl": "--context", "helm": "--kube-context"}  # each program's option
NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # of a release


def submit(order: Order) -> None:
    """Check the run, then install or print it. Raises SubmitError, TrainerError or DataError."""
    if not re.fullmatch(NAME, order.name):
        better = re.sub(r"[^a-z0-9]+", "-", order.name.lower()).strip("-").lstrip("-0123456789") or "first"
        said = "a release's name takes lowercase letters, digits and -, with a letter first"
        raise SubmitError(f"run.name is {order.name!r}: {said}: give --set run.name={better}")
    _check_words(order)
    require_program("helm", "install Helm 3 or 4")
    plan = planned(order, located(order))
    with tempfile.TemporaryDirectory(prefix="lambert-") as folder:
        words = chart_words(order, plan, Path(folder))
        manifests = ask(["helm", "template", order.name, str(CHART), *words])
        tell("checked: the configuration and the chart; the run checks its shards and its folder when it starts")
        if order.options.dry_run:
            print_result(manifests.rstrip())
            return
        _require_new(order)
        _install(order, words)
    print_result(summary(order, manifests))


def located(order: Order) -> Config:
    """The configuration with the places here of the data sets that pods see below /data.

    Raises SubmitError if the plan needs a data set that is not here.
    """
    config, copy = order.config, order.options.data
    if order.on_cpus or order.options.no_plan:
        return config
    phases, missing = [], []
    for index, phase in enumerate(config.phases):
        place = Path(phase.train)
        if copy is not None and phase.train.startswith(DATA):
            place = copy / phase.train.removeprefix(DATA)
        if not is_remote(phase.train) and not (place / MANIFEST).is_file():
            missing.append(f"phases.{index}.train is {phase.train}, and {place} has no {MANIFEST} here")
        phases.append(phase if is_remote(phase.train) else replace(phase, train=str(place)))
    if missing:
        raise SubmitError(f"{'; '.join(missing)}: name a local copy of the claim with --data, or give --no-plan")
    return replace(config, phases=tuple(phases))


def chart_words(order: Order, plan: Plan | None, folder: Path) -> list[str]:
    """The options of helm. Estimates of the plan come first, so values of the user's own replace them."""
    (folder / "plan.yaml").write_text(json.dumps({} if plan is None else estimates(plan)), encoding="utf-8")
    (folder / "run.yaml").write_text(yaml_of(in_pods(order.given)), encoding="utf-8")
    options = order.options
    size = f"nodes={options.nodes},gpus={options.gpus}"
    if order.on_cpus:
        size = f"nodes={options.nodes},gpus=0,cpuRanks={options.gpus}"
    own = ["--set", size, "--set-file", f"run={folder / 'run.yaml'}"]
    return [*place(order), "--values", str(folder / "plan.yaml"), *order.more, *own]


def estimates(plan: Plan) -> dict[str, float]:
    """The chart's estimates of a step and a save, in seconds; it allows a stop twice their time."""
    step = max(each.step_seconds["total"] for each in plan.phases)
    return {"stepSeconds": max(0.1, round(step, 1)), "saveSeconds": max(1.0, round(plan.checkpoints.write_seconds, 1))}


def in_pods(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration for the chart, which sets run.folder itself unless it is an address.

    A folder of this machine means nothing in a pod.
    """
    kept = is_remote(str(tree["run"].get("folder", "")))
    return {**tree, "run": {key: value for key, value in tree["run"].items() if kept or key != "folder"}}


def place(order: Order, option: str = "--kube-context") -> list[str]:
    """The options of helm, or of kubectl with ``--context``, that say where the release is."""
    options = order.options
    found = [option, options.kube_context] if options.kube_context else []
    return found + (["--namespace", options.namespace] if options.namespace else [])


def summary(order: Order, manifests: str) -> str:
    """Commands that watch and stop the release."""
    name, pods = order.name, f"--selector app.kubernetes.io/instance={order.name}"
    kubectl, helm = (shlex.join([each, *place(order, way)]) for each, way in CONTEXT.items())
    progress = f"          {kubectl} get trainjob {name} -o jsonpath='{{.status.trainerStatus}}'\n"
    return (
        f"submitted {name} as release {name}: {order.size()}\n"
        f"  watch   {kubectl} get pods {pods}\n"
        f"          {kubectl} logs --follow {pods},batch.kubernetes.io/job-completion-index=0\n"
        f"{progress if re.search('^kind: TrainJob$', manifests, re.MULTILINE) else ''}"
        f"  stop    {helm} uninstall {name}\n"
        f"          it saves and ends; its claim stays, and the same command continues the run"
    )


def _check_words(order: Order) -> None:
    order.refuse_words(r"(--namespace|-n|--kube-context)", "give it before --, so that every command gets it")
    order.refuse_words(r"--kube", "choose the cluster with the variable KUBECONFIG, so that every command gets it")
    order.refuse_words(r"(--set[a-z-]*=)?(.*,)?(nodes|gpus|cpuRanks|run)=", "the run is planned: use options before --")
    order.refuse_words(
        r"(--wait|--atomic|--rollback-on-failure|--dry-run|--output|-o|-g|--generate-name|--help|-h)", "leave it out"
    )


def _require_new(order: Order) -> None:
    """Raise SubmitError if there is such a release, or if Helm cannot tell."""
    done = run(["helm", "status", order.name, *place(order)])
    if done.returncode == 0:
        helm = shlex.join(["helm", "uninstall", order.name, *place(order)])
        raise SubmitError(f"there is a release {order.name}: give another run.name, or first stop it with {helm}")
    if "not found" not in done.stderr:
        raise failure(done)


def _install(order: Order, words: list[str]) -> None:
    """Install the release. If that fails halfway, remove what it left, but never another's release of this name."""
    try:
        ask(["helm", "install", order.name, str(CHART), *words])
    except SubmitError:
        left = run(["helm", "status", order.name, "--output", "json", *place(order)])
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(left.stdout)["info"]["status"] == "failed":
                run(["helm", "uninstall", order.name, *place(order)])
        raise
