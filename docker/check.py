"""The images, built and run for real where there is podman and no more: python docker/check.py [--help].

Builds both targets of Dockerfile.cpu, and Dockerfile on a base that stands in for NGC's (PyTorch of the system, a
compiler, pip constraints) or on a real one. In the first it makes shards, on the others it trains on two CPU ranks: all
of it with a read-only root file system, no capability, no network, as user 10001. A stop by SIGTERM must end with code
75 and a checkpoint, and the same command must go on from there to its end. Fails at the first thing that is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "deploy/demo/corpus/demo_corpus.jsonl"
USER = 10001
LOCKED = (
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--security-opt=label=disable",  # where SELinux is on, its labels would hide the folders that are mounted
    "--network=none",
)
BUILD = ("build", "--quiet", "--format", "docker")
STEPS = 400  # enough to be stopped in the midst of
STOP_WITHIN = 120  # seconds
DONE, REFUSED, STOPPED = 0, 2, 75  # of trainer/exits.py
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAND_IN = """
FROM {base}
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev
RUN python3 -m pip install --break-system-packages numpy==2.2.6 torch==2.13.0 setuptools {index}
RUN mkdir -p /etc/pip && python3 -m pip freeze | grep -v -e '@' > /etc/pip/constraint.txt
ENV PIP_CONSTRAINT=/etc/pip/constraint.txt
"""
CONFIG = """
run: {{name: check, folder: /runs/check, seed: 1}}
model: {{layers: 1, hidden: 128, heads: 4, intermediate: 512, max_positions: 64, vocab_size: 2048}}
phases:
  - {{name: only, train: /data/train, sequence_length: 32, global_batch: 64, micro_batch: 32, steps: {steps},
     learning_rate: 1.0e-3}}
checkpoint: {{every_steps: {steps}}}
metrics: {{port: 9464, log_every_steps: 10, linger_seconds: 0}}
"""


def main() -> int:
    """Run all steps in order; returns the exit code."""
    options = read_options()
    options.work = options.work.resolve()
    started = time.monotonic()
    remove(options.work)
    for folder in ("corpus", "data", "sbom"):
        (options.work / folder).mkdir(parents=True)
    shutil.copy(CORPUS, options.work / "corpus")
    context(options)
    build(options, "lambert-prepare", "Dockerfile.cpu", "prepare", options.base)
    build(options, "lambert-train-cpu", "Dockerfile.cpu", "train", options.base)
    build(options, "lambert", "Dockerfile", "train", options.gpu_base or stand_in(options))
    contents()
    prepare(options.work)
    for image in ("lambert-train-cpu", "lambert"):
        train(options.work, image)
    bill_of_materials(options)
    section(f"Done in {time.monotonic() - started:.0f} s")
    return 0


def context(options: argparse.Namespace) -> None:
    """What .dockerignore lets through, as the builder sees it."""
    section("The build's context")
    (options.work / "Context").write_text("FROM scratch\nCOPY . /\n")
    podman("build", "--quiet", "--file", options.work / "Context", "--tag", "lambert-context", ROOT)
    tar = options.work / "context.tar"
    made = podman("create", "lambert-context", "none").strip()
    podman("export", "--output", tar, made)
    podman("rm", made)
    names = subprocess.run(["tar", "-tf", tar], capture_output=True, text=True, check=True).stdout.split()
    tar.unlink()
    tops = {name.partition("/")[0] for name in names if not name.endswith("/")}
    print(f"{len(names)} files and folders, in: {' '.join(sorted(tops))}")
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    made_by_podman = {"dev", "etc", "proc", "run", "sys"}
    demand(tops <= kept | made_by_podman, f"the context also holds {tops - kept}")
    demand(not any("__pycache__" in name for name in names), "the context holds byte code")


def stand_in(options: argparse.Namespace) -> str:
    """A base with what Dockerfile asks of NGC's: its tag."""
    section("A stand-in for NGC's image")
    index = "" if options.torch_index == "" else f"--extra-index-url {options.torch_index or CPU_INDEX}"
    base = options.base or default_base("Dockerfile.cpu")
    (options.work / "StandIn").write_text(STAND_IN.format(base=base, index=index))
    made = [*BUILD, *options.build_option, "--file", options.work / "StandIn", "--tag", "lambert-stand-in"]
    podman(*made, options.work / "corpus")
    return "localhost/lambert-stand-in"


def build(options: argparse.Namespace, image: str, file: str, target: str, base: str | None) -> None:
    """Build a target, and show how long it took and how large it is."""
    section(f"Build {image}: {file}, target {target}")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    given = {"VERSION": version, "BASE": base, "TORCH_INDEX": options.torch_index if file.endswith("cpu") else None}
    arguments = [f"--build-arg={name}={value}" for name, value in given.items() if value is not None]
    started = time.monotonic()
    where = ("--file", ROOT / "docker" / file, "--target", target, "--tag", image)
    podman(*BUILD, *options.build_option, *arguments, *where, ROOT)
    config = inspect(image)
    print(f"{time.monotonic() - started:.0f} s; {config['Size'] / 1e6:.0f} MB")
    demand(config["Config"]["User"].startswith(str(USER)), f"runs as {config['Config']['User']}")
    demand(config["Labels"]["org.opencontainers.image.version"] == version, "a wrong version on its label")


def contents() -> None:
    """What must not be in the images."""
    section("What the images hold")
    program = (
        "import importlib.util, shutil; "
        "print(*(n for n in ('torch', 'pip') if importlib.util.find_spec(n)), shutil.which('gcc') or '-')"
    )
    for image, expected in {"lambert-prepare": "-", "lambert-train-cpu": "torch -"}.items():
        found = podman("run", "--rm", *LOCKED, "--entrypoint", "python", image, "-c", program).strip()
        demand(found == expected, f"of torch, pip and gcc {image} has {found}")
        print(f"{image}: of torch, pip and gcc only {found}")


def prepare(work: Path) -> None:
    """A vocabulary and shards, in the image that has no PyTorch."""
    section("Shards")
    mounts = (f"--volume={work / 'corpus'}:/corpus:ro", f"--volume={work / 'data'}:/data:U")
    begin = ("run", "--rm", *LOCKED, *mounts, "lambert-prepare")
    text = ("--input", "/corpus", "--where", "split=train")
    podman(*begin, "vocab", *text, "--out", "/data/words", "--size", 2048)
    podman(*begin, "build", *text, "--tokenizer", "/data/words", "--out", "/data/train", "--sequence-length", 32)
    print(podman(*begin, "verify", "--full", "/data/train").strip())


def train(work: Path, image: str) -> None:
    """Two ranks; a stop by SIGTERM; on to the end; and a configuration that is refused."""
    section(f"Train in {image}")
    runs = work / image
    runs.mkdir()
    (work / "run.yaml").write_text(CONFIG.format(steps=STEPS))
    mounts = (
        f"--volume={work / 'data'}:/data:ro",
        f"--volume={work / 'run.yaml'}:/run.yaml:ro",
        f"--volume={runs}:/runs:U",
    )
    begin = (*LOCKED, *mounts, image, "--nproc-per-node", 2, "--config", "/run.yaml")

    with started(*begin) as made:
        wait_for(lambda: last_step(runs) >= 30, made)
        podman("healthcheck", "run", made)
        print(f"at step {last_step(runs)}, and healthy")
        podman("stop", "--time", STOP_WITHIN, made)
        code, end = ended(made, runs)
        print(f"stopped: code {code}, {end}")
        demand(code == STOPPED and end["how"] == "stopped" and 30 <= end["step"] < STEPS, logs(made))
    saved = [path.name for path in (runs / "check").glob("step-*")]
    demand(any(int(name.partition("-")[2]) == end["step"] for name in saved), f"no checkpoint of it: {saved}")

    with started(*begin) as made:
        wait_for(lambda: not running(made), made)
        code, last = ended(made, runs)
        print(f"started again: code {code}, {last}")
        demand(code == DONE and last == {"how": "done", "step": STEPS}, logs(made))
        demand(f"at step {end['step']}" in logs(made), "it did not go on from the checkpoint:\n" + logs(made))

    refused = podman("run", "--rm", *begin, "--set", "optimizer.name=sgd", code=REFUSED)
    demand("optimizer.name: 'sgd' is not one of" in refused, refused)
    print(f"a configuration that is wrong: code {REFUSED}, {refused.strip().splitlines()[-1].strip()}")


@contextmanager
def started(*words: object) -> Iterator[str]:
    """A container that runs in the background; removed at the end, whatever comes."""
    made = podman("run", "--detach", *words).strip()
    try:
        yield made
    finally:
        podman("rm", "--force", "--volumes", made)


def bill_of_materials(options: argparse.Namespace) -> None:
    """An SBOM of each image, by one command on its archive."""
    section("What is in them: SPDX")
    if options.syft is None:
        print("left out: there is no syft on the PATH, and --syft names none")
        return
    for image in ("lambert-prepare", "lambert-train-cpu", "lambert"):
        archive, file = options.work / f"{image}.tar", options.work / "sbom" / f"{image}.spdx.json"
        podman("save", "--quiet", "--format", "oci-archive", "--output", archive, image)
        run(options.syft, "scan", "--quiet", f"oci-archive:{archive}", "--output", f"spdx-json={file}")
        archive.unlink()
        packages = json.loads(file.read_text())["packages"]
        addresses = [ref["referenceLocator"] for package in packages for ref in package.get("externalRefs", ())]
        counts = {kind: sum(address.startswith(f"pkg:{kind}/") for address in addresses) for kind in ("pypi", "deb")}
        print(f"{file.name}: {len(packages)} packages, {counts['pypi']} of Python's, {counts['deb']} of Debian's")
        demand(any("pkg:pypi/tokenizers@" in address for address in addresses), "tokenizers is not among them")


def last_step(runs: Path) -> int:
    """The last step that the run has told of."""
    path = runs / "check/metrics.jsonl"
    steps = re.findall(r'"step": (\d+)', path.read_text()) if path.exists() else []
    return int(steps[-1]) if steps else 0


def running(container: str) -> bool:
    """Whether it has not ended."""
    return bool(inspect(container)["State"]["Running"])


def ended(container: str, runs: Path) -> tuple[int, dict[str, Any]]:
    """Its exit code, and what its marker says."""
    return inspect(container)["State"]["ExitCode"], json.loads((runs / "check/ended.json").read_text())


def logs(container: str) -> str:
    """What it printed."""
    return run("podman", "logs", container, merged=True)


def inspect(thing: str) -> dict[str, Any]:
    """What podman knows of an image or a container."""
    return dict(json.loads(podman("inspect", thing, shown=False))[0])


def default_base(file: str) -> str:
    """The base that a Dockerfile names."""
    found = re.search(r"^ARG BASE=(.+)$", (ROOT / "docker" / file).read_text(), re.MULTILINE)
    assert found
    return found[1]


def wait_for(done: Callable[[], bool], container: str) -> None:
    """Until ``done()``; fails with its output where the container ends before, or after half an hour."""
    deadline = time.monotonic() + 1800
    while not done():
        demand(time.monotonic() < deadline, logs(container))
        demand(running(container) or done(), logs(container))
        time.sleep(0.2)


def podman(*words: object, code: int = 0, shown: bool = True) -> str:
    """Run a command of podman, which must end with ``code``; what it prints."""
    if shown:
        print("$ " + shlex.join(["podman", *map(str, words)]), flush=True)
    return run("podman", *words, code=code, merged=code != 0)


def run(*words: object, code: int = 0, merged: bool = False) -> str:
    """Run a program, which must end with ``code``; its standard output, and ``merged`` its errors, too."""
    errors = subprocess.STDOUT if merged else subprocess.PIPE
    done = subprocess.run([*map(str, words)], stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    demand(done.returncode == code, f"code {done.returncode}, not {code}:\n{done.stdout}{done.stderr or ''}")
    return done.stdout


def remove(folder: Path) -> None:
    """Remove what containers wrote; where the user is not root, their users are not theirs."""
    subprocess.run([*(["podman", "unshare"] if os.geteuid() else []), "rm", "-rf", folder], check=True)


def demand(fact: bool, otherwise: str) -> None:
    """End the program where something is not as it must be."""
    if not fact:
        raise SystemExit(f"check: error: {otherwise}")


def section(title: str) -> None:
    """Say what comes next."""
    print(f"\n== {title}", flush=True)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build Lambert's images and run them, with podman.")
    parser.add_argument("--base", help="for Dockerfile.cpu and the stand-in: Debian's or like it (default: its own)")
    parser.add_argument("--gpu-base", help="for Dockerfile; its runs are on CPUs all the same (default: a stand-in)")
    parser.add_argument("--torch-index", help='where PyTorch for CPUs is; "" where pip knows by itself')
    parser.add_argument("--build-option", action="append", default=[], metavar="X", help="for podman build; repeatable")
    parser.add_argument("--syft", default=shutil.which("syft"), help="the program that lists packages")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/containers", help="a folder, made anew")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
