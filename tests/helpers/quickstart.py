"""Runs the commands of docs/cluster/quickstart.md at small size, on two hosts, in a folder that is like a checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.helpers import nodes
from tests.helpers.launches import Site
from tests.helpers.pages import blocks
from tests.helpers.ranks import ROOT
from tests.helpers.sshd import children_of, wait_for

PAGE = ROOT / "docs/cluster/quickstart.md"
CODE = ("data_prep", "kernels", "trainer", "deploy")
SMALL = {  # what a page says, and what is executed: a small vocabulary, one CPU rank per node
    "30522": "600",
    "preflight --network": "preflight --network --device cpu --seconds 5",
    "slots=8": "slots=1",
    "NCCL_SOCKET_IFNAME=eth0": f"GLOO_SOCKET_IFNAME={nodes.INTERFACE}",
    "OMP_NUM_THREADS=8": "OMP_NUM_THREADS=1",
    "--nproc-per-node 8": "--nproc-per-node 1",
    "--ntasks-per-node 8 --gpus-per-node 8": "--ntasks-per-node 1",
    "sbatch --wait": "sbatch --wait --cpus-per-task=1",
    "sbatch deploy": "sbatch --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --time=30 deploy",
}
SIZES = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 128}
NOT_HERE = re.compile(r"(make setup|\. \.venv/bin/activate|podman build|kubectl) ?")  # starts of commands
PATIENCE = 600.0  # seconds


def sections() -> dict[str, list[str]]:
    """The command blocks of each way to start a run, by the section's title; the page's last section is about them."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {title: blocks(text) for title, text in zip(parts[:-2:2], parts[1:-2:2], strict=True)}


def small(block: str) -> str:
    """A block as it is executed: at small size, without the commands that nothing here can run."""
    for said, executed in SMALL.items():
        block = block.replace(said, executed)
    whole = block.replace("\\\n", "\\\0").splitlines()
    return "\n".join(line for line in whole if not NOT_HERE.match(line)).replace("\\\0", "\\\n")


def configuration(**changes: Any) -> dict[str, Any]:
    """The page's run.yaml, of a small model and few steps on CPUs; ``changes`` are of its phase."""
    [text] = blocks(PAGE.read_text(encoding="utf-8"), "yaml")
    tree: dict[str, Any] = yaml.safe_load(text.replace("30522", SMALL["30522"]))
    tree["run"]["device"] = "cpu"
    tree["model"] |= SIZES
    tree["phases"][0] |= {"global_batch": 8, "micro_batch": 4, "warmup_steps": 2} | changes
    tree["metrics"] = {"log_every_steps": 1, "linger_seconds": 0}
    return tree


def checkout(folder: Path, **changes: Any) -> Path:
    """A folder with the code, a corpus and a run.yaml."""
    folder.mkdir(parents=True)
    for name in CODE:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "corpus").mkdir()
    records = (ROOT / "deploy/demo/corpus/demo_corpus.jsonl").read_text(encoding="utf-8").splitlines()
    for number, record in enumerate(records[:12]):
        (folder / f"corpus/{number}.txt").write_text(json.loads(record)["text"], "utf-8")
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration(**changes)))
    return folder


class Shell:
    """A shell on one of the hosts, which runs blocks one after another, as a user types them."""

    def __init__(self, site: Site, folder: Path, environ: dict[str, str], host: int = 0) -> None:
        self.folder, self.count = folder, 0
        self.log = folder / f"shell-{len(list(folder.glob('shell-*.log')))}.log"
        given = site.environ() | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | environ
        with self.log.open("w") as file:
            command = site.hosts[host].command(["bash", "-e", "-o", "pipefail"], folder, given)
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, text=True)

    def run(self, block: str) -> None:
        """Run a block to its end; fails with all output if one of its commands fails."""
        self.start(block)
        self.finish()

    def start(self, block: str) -> None:
        """Type a block. Its commands cannot read from the shell's own input, as ssh would."""
        assert self.process.stdin is not None
        self.count += 1
        place = self.folder / f".block-{self.process.pid}-{self.count}"
        place.write_text(f"{small(block)}\n")
        self.process.stdin.write(f". {place} < /dev/null\ntouch {self._done}\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """Wait until all that was typed has run."""
        done = self._done
        wait_for(lambda: done.exists() or self.process.poll() is not None, PATIENCE)
        assert done.exists(), self.output()

    @property
    def _done(self) -> Path:
        return self.folder / f".done-{self.process.pid}-{self.count}"

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """End the shell and everything that it still runs."""
        for pid in children_of(self.process.pid):
            for child in children_of(pid):
                os.kill(child, 9)
        self.process.kill()
        self.process.wait()
