"""Builds the images and runs them; needs only podman: python docker/check.py [--help].

It builds both targets of Dockerfile.cpu, and Dockerfile on a stand-in for NGC's base (system PyTorch, a compiler, pip
constraints) or on a real one. The `prepare` image makes shards, the other two train on two CPU ranks. All of them run
with a read-only root file system, no capabilities, no network, and as user 10001. Every module of Lambert must be
importable there, and pip must find no conflict. SIGTERM must end a run with code 75 and a checkpoint, and the same
command must continue from there to the end. A real base must have NVIDIA's Apex, the stand-in none. The first failed
check ends the program.
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
    "--security-opt=label=disable",  # SELinux labels would hide the mounted folders
    "--network=none",
)
BUILD = ("build", "--quiet", "--format", "docker")
STEPS = 400  # long enough to be stopped halfway
STOP_WITHIN = 120  # seconds
DONE, REFUSED, STOPPED = 0, 2, 75  # from trainer/exits.py
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAND_IN = """
FROM {base}
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev
RUN python3 -m pip install --break-system-packages numpy==2.2.6 torch==2.13.0 setuptools {index}
RUN mkdir -p /etc/pip && python3 -m pip freeze | grep -v -e '@' > /etc/pip/constraint.txt
ENV PIP_CONSTRAINT=/etc/pip/constraint.txt
"""
IMPORT = """
import importlib, sys
from pathlib import Path
root, names, failed = Path(sys.argv[1]), 0, []
for path in sorted(path for top in sys.argv[2:] for path in (root / top).rglob("*.py")):
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    try:
        importlib.import_module(name)
    except Exception as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
    names += 1
print(names, *failed, sep="\\n")
"""  # imports every module below some folders; prints their number, then a line for each that fails
CONFLICTS = """
import subprocess, sys
print(subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True).stdout)
"""
CODE = {
    "lambert-prepare": ("data_prep",),
    "lambert-train-cpu": ("data_prep", "kernels", "trainer", "deploy"),
    "lambert": ("data_prep", "kernels", "trainer", "deploy"),
}
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
    modules()
    conflicts()
    prepare(options.work)
    for image, apex in (("lambert-train-cpu", "absent"), ("lambert", "NVIDIA" if options.gpu_base else "absent")):
        train(options.work, image, apex)
    bill_of_materials(options)
    section(f"Done in {time.monotonic() - started:.0f} s")
    return 0


def context(options: argparse.Namespace) -> None:
    """Check which files .dockerignore lets through, as the builder sees them."""
    section("Build context")
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
    demand(tops <= kept | made_by_podman, f"the context also contains {tops - kept}: exclude them in .dockerignore")
    demand(not any("__pycache__" in name for name in names), "the context contains byte code: exclude __pycache__")


def stand_in(options: argparse.Namespace) -> str:
    """Build a base with everything that Dockerfile needs from NGC's; returns its tag."""
    section("Stand-in for NGC's image")
    index = "" if options.torch_index == "" else f"--extra-index-url {options.torch_index or CPU_INDEX}"
    base = options.base or default_base("Dockerfile.cpu")
    (options.work / "StandIn").write_text(STAND_IN.format(base=base, index=index))
    made = [*BUILD, *options.build_option, "--file", options.work / "StandIn", "--tag", "lambert-stand-in"]
    podman(*made, options.work / "corpus")
    return "localhost/lambert-stand-in"


def build(options: argparse.Namespace, image: str, file: str, target: str, base: str | None) -> None:
    """Build a target, and print its build time and size."""
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
    demand(config["Labels"]["org.opencontainers.image.version"] == version, "its version label is not pyproject.toml's")


def contents() -> None:
    """Check that the images lack pip, a compiler and, for data preparation, PyTorch."""
    section("Contents of the images")
    program = (
        "import importlib.util, shutil; "
        "print(*(n for n in ('torch', 'pip') if importlib.util.find_spec(n)), shutil.which('gcc') or '-')"
    )
    for image, expected in {"lambert-prepare": "-", "lambert-train-cpu": "torch -"}.items():
        found = podman("run", "--rm", *LOCKED, "--entrypoint", "python", image, "-c", program).strip()
        demand(found == expected, f"of torch, pip and gcc, {image} contains {found}")
        print(f"{image}: of torch, pip and gcc, contains {found}")


def modules() -> None:
    """Check that every module of each image can be imported there, as its user, with a read-only root."""
    section("Modules")
    for image, folders in CODE.items():
        imported = ("run", "--rm", *LOCKED, "--entrypoint", "python", image, "-c", IMPORT, "/app", *folders)
        count, *failed = podman(*imported).splitlines()
        demand(not failed, f"modules that {image} cannot import:\n" + "\n".join(failed))
        print(f"{image}: {count} modules")


def conflicts() -> None:
    """Check that Lambert's packages fit those of the GPU image's base. The other images are checked when built."""
    section("pip check")
    said = podman("run", "--rm", *LOCKED, "--entrypoint", "python", "lambert", "-c", CONFLICTS).splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {re.split(r"[^\w.-]", name)[0] for name in project["dependencies"]}
    found = [line for line in said if line.split(" ")[0] in ours]
    demand(bool(said) and not found, "\n".join(found or ["pip is missing"]))
    print(*said, sep="\n")


def prepare(work: Path) -> None:
    """Make a vocabulary and shards in the image without PyTorch."""
    section("Shards")
    mounts = (f"--volume={work / 'corpus'}:/corpus:ro", f"--volume={work / 'data'}:/data:U")
    begin = ("run", "--rm", *LOCKED, *mounts, "lambert-prepare")
    text = ("--input", "/corpus", "--where", "split=train")
    podman(*begin, "vocab", *text, "--out", "/data/words", "--size", 2048)
    podman(*begin, "build", *text, "--tokenizer", "/data/words", "--out", "/data/train", "--sequence-length", 32)
    print(podman(*begin, "verify", "--full", "/data/train").strip())


def train(work: Path, image: str, apex: str) -> None:
    """Train on two ranks, stop by SIGTERM, resume to the end; then try a configuration that must be refused.

    ``apex``: what the run must say first about Apex: absent, or NVIDIA.
    """
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
        print(f"at step {last_step(runs)}: healthy")
        podman("stop", "--time", STOP_WITHIN, made)
        code, end = ended(made, runs)
        print(f"stopped: code {code}, {end}")
        demand(code == STOPPED and end["how"] == "stopped" and 30 <= end["step"] < STEPS, logs(made))
    saved = [path.name for path in (runs / "check").glob("step-*")]
    demand(any(int(name.partition("-")[2]) == end["step"] for name in saved), f"no checkpoint at that step: {saved}")

    with started(*begin) as made:
        wait_for(lambda: not running(made), made)
        said = apex_of(logs(made))
        demand(said.startswith(apex), f"the run says of Apex: {said!r}; expected {apex}")
        print(f"Apex: {said}")
        code, last = ended(made, runs)
        print(f"restarted: code {code}, {last}")
        demand(code == DONE and last == {"how": "done", "step": STEPS}, logs(made))
        demand(f"at step {end['step']}" in logs(made), "the run did not continue from the checkpoint:\n" + logs(made))

    refused = podman("run", "--rm", *begin, "--set", "optimizer.name=sgd", code=REFUSED)
    demand("optimizer.name: 'sgd' is not one of" in refused, refused)
    print(f"invalid configuration: code {REFUSED}, {refused.strip().splitlines()[-1].strip()}")


def apex_of(log: str) -> str:
    """The entry for Apex in a run's first line: absent, a version, or an unrelated package of that name."""
    found = re.search(r" · apex (.+?) · ", log)
    return found[1] if found else "nothing"


@contextmanager
def started(*words: object) -> Iterator[str]:
    """Run a container in the background; always removes it at the end."""
    made = podman("run", "--detach", *words).strip()
    try:
        yield made
    finally:
        podman("rm", "--force", "--volumes", made)


def bill_of_materials(options: argparse.Namespace) -> None:
    """Write an SBOM of each image from its archive."""
    section("SBOMs (SPDX)")
    if options.syft is None:
        print("skipped: syft is not on the PATH; name it with --syft")
        return
    for image in ("lambert-prepare", "lambert-train-cpu", "lambert"):
        archive, file = options.work / f"{image}.tar", options.work / "sbom" / f"{image}.spdx.json"
        podman("save", "--quiet", "--format", "oci-archive", "--output", archive, image)
        run(options.syft, "scan", "--quiet", f"oci-archive:{archive}", "--output", f"spdx-json={file}")
        archive.unlink()
        packages = json.loads(file.read_text())["packages"]
        addresses = [ref["referenceLocator"] for package in packages for ref in package.get("externalRefs", ())]
        counts = {kind: sum(address.startswith(f"pkg:{kind}/") for address in addresses) for kind in ("pypi", "deb")}
        print(f"{file.name}: {len(packages)} packages, {counts['pypi']} from PyPI, {counts['deb']} from Debian")
        demand(any("pkg:pypi/tokenizers@" in address for address in addresses), "the SBOM does not list tokenizers")


def last_step(runs: Path) -> int:
    """Return the last step that the run has logged."""
    path = runs / "check/metrics.jsonl"
    steps = re.findall(r'"step": (\d+)', path.read_text()) if path.exists() else []
    return int(steps[-1]) if steps else 0


def running(container: str) -> bool:
    """Whether a container is still running."""
    return bool(inspect(container)["State"]["Running"])


def ended(container: str, runs: Path) -> tuple[int, dict[str, Any]]:
    """Return a container's exit code and the contents of ended.json."""
    return inspect(container)["State"]["ExitCode"], json.loads((runs / "check/ended.json").read_text())


def logs(container: str) -> str:
    """Return a container's output."""
    return run("podman", "logs", container, merged=True)


def inspect(thing: str) -> dict[str, Any]:
    """Return podman's description of an image or container."""
    return dict(json.loads(podman("inspect", thing, shown=False))[0])


def default_base(file: str) -> str:
    """Return the default base of a Dockerfile."""
    found = re.search(r"^ARG BASE=(.+)$", (ROOT / "docker" / file).read_text(), re.MULTILINE)
    assert found
    return found[1]


def wait_for(done: Callable[[], bool], container: str) -> None:
    """Wait until ``done()``. Fails with the container's output if it ends first, or after half an hour."""
    deadline = time.monotonic() + 1800
    while not done():
        demand(time.monotonic() < deadline, logs(container))
        demand(running(container) or done(), logs(container))
        time.sleep(0.2)


def podman(*words: object, code: int = 0, shown: bool = True) -> str:
    """Run a podman command, which must exit with ``code``; returns its output."""
    if shown:
        print("$ " + shlex.join(["podman", *map(str, words)]), flush=True)
    return run("podman", *words, code=code, merged=code != 0)


def run(*words: object, code: int = 0, merged: bool = False) -> str:
    """Run a program, which must exit with ``code``. Returns its output, with standard error if ``merged``."""
    errors = subprocess.STDOUT if merged else subprocess.PIPE
    done = subprocess.run([*map(str, words)], stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    demand(done.returncode == code, f"exit code {done.returncode}, expected {code}:\n{done.stdout}{done.stderr or ''}")
    return done.stdout


def remove(folder: Path) -> None:
    """Remove files that containers wrote. Without root, they belong to other users outside podman's namespace."""
    subprocess.run([*(["podman", "unshare"] if os.geteuid() else []), "rm", "-rf", folder], check=True)


def demand(fact: bool, otherwise: str) -> None:
    """End the program with an error unless ``fact`` holds."""
    if not fact:
        raise SystemExit(f"check: error: {otherwise}")


def section(title: str) -> None:
    """Print a section title."""
    print(f"\n== {title}", flush=True)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Build Lambert's images and run them with podman.")
    parser.add_argument("--base", help="Debian-like base of Dockerfile.cpu and the stand-in (default: its own)")
    parser.add_argument("--gpu-base", help="base of Dockerfile; still runs on CPUs (default: a stand-in)")
    parser.add_argument("--torch-index", help='index of CPU-only PyTorch; "" uses pip\'s own configuration')
    parser.add_argument("--build-option", action="append", default=[], metavar="X", help="for podman build; repeatable")
    parser.add_argument("--syft", default=shutil.which("syft"), help="path of syft (default: from the PATH)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/containers", help="work folder; deleted first")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
