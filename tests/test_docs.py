"""README, CONTRIBUTING and docs: links lead somewhere, named files exist, commands parse, and a first user's run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import ranks
from tests.helpers.pages import LINK, PAGES, README, Command, blocks, commands, headings, named_files, program, prose
from tests.helpers.ranks import ROOT

HISTORY = ROOT / "docs" / "lab.md"  # dated entries: what they name may be gone
MADE = ("deploy/monitoring/targets/",)  # by users
COMMANDS = sorted({command for page in PAGES for command in commands(page)}, key=str)
PROSE = {page: page.read_text(encoding="utf-8") for page in PAGES}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# ---- links, files and form -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for target in LINK.findall(PROSE[page]):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if re.match(r"https?:", target):
            continue
        if not place.exists() or (anchor and anchor not in headings(place.read_text(encoding="utf-8"))):
            lost.append(target)
    assert not lost


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY], ids=name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = {path for path in named_files(PROSE[page]) if not path.startswith(MADE)}
    assert not [path for path in sorted(named) if not (any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists())]


def test_every_page_is_in_the_index() -> None:
    linked = {(ROOT / target).resolve() for target in LINK.findall(PROSE[README])}
    assert not [name(page) for page in PAGES[1:] if page.parent.name != "runbooks" and page not in linked]


def test_the_readme_is_short() -> None:
    lines = PROSE[README].splitlines()
    assert len(lines) < 150
    assert not [line for line in lines if len(line) > 100]
    assert not [cell for line in lines if line.startswith("|") for cell in line.split("|") if len(cell.strip()) > 120]
    assert [command.words for command in commands(README)][:2] == [("make", "demo"), ("make", "test")]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_parenthesis_is_inside_another(page: Path) -> None:
    for part in re.split(r"\n\s*\n|\n(?=\||\s*- )", prose(PROSE[page])):
        assert not re.search(r"\([^()]*\(", part), part


# ---- commands ------------------------------------------------------------------------------------------------


def test_commands_are_found() -> None:
    starts = {command.words[0] for command in COMMANDS}
    assert {"python", "make", "deepspeed", "torchrun", "mpirun", "srun", "sbatch", "pytest"} <= starts


@pytest.mark.parametrize("target", sorted({c.words[1] for c in COMMANDS if c.words[0] == "make"}))
def test_make_has_the_target(target: str) -> None:
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None and target in phony[1].split()


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "lab.md"], ids=name)  # notes of then
def test_every_module_that_is_named_exists(page: Path) -> None:
    code = " ".join(re.findall(r"`([^`]+)`", PROSE[page])) + " ".join(blocks(PROSE[page]))
    modules = set(re.findall(r"\bpython -m ((?:data_prep|kernels|trainer|deploy|tests)[\w.]*)", code))
    assert not [module for module in sorted(modules) if importlib.util.find_spec(module.rstrip(".")) is None]


def parsed(command: Command) -> list[str] | None:
    """A command as tests/helpers/parse_commands.py takes it; None for a program that is not Lambert's."""
    words = list(command.words)
    if words[0] in ("deepspeed", "torchrun"):
        return words
    found = program(command.words)
    if found is None or not takes_options(found.name):
        return None
    return [found.name, *found.arguments]


def takes_options(program: str) -> bool:
    """Whether a module or script of this tree parses arguments: any other would run to its end."""
    path = ROOT / (program if program.endswith(".py") else program.replace(".", "/"))
    files = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
    return any("parse_args(" in file.read_text(encoding="utf-8") for file in files if file.exists())


@pytest.mark.slow
def test_every_command_is_accepted_by_its_program() -> None:
    asked = {command: words for command in COMMANDS if (words := parsed(command)) is not None}
    assert len(asked) > 30
    done = subprocess.run(
        [sys.executable, ROOT / "tests/helpers/parse_commands.py"],
        input=json.dumps(list(asked.values())),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True)
    assert not [f"{command}: {problem}" for command, problem in found if problem]


# ---- a first user --------------------------------------------------------------------------------------------

SMALL = {"30522": "600", "0.005": "0.3"}
SIZES = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 128}
FIRST = "## Your own text to a model"
OTHERS = (  # commands of the docs that go on from there, by how they begin
    ("prepare.md", "python -m data_prep build", "--part held-out"),
    ("prepare.md", "python -m data_prep verify", ""),
    ("prepare.md", "python -m data_prep inspect", ""),
    ("use.md", "python -m trainer.evaluate", ""),
    ("use.md", "python -m trainer.encode", "--input texts.txt"),
    ("use.md", "python -m trainer.weights", ""),
    ("monitoring.md", "python -m trainer.report", ""),
)


def run(words: list[str], folder: Path) -> None:
    """Run a command of a page in ``folder``, at small size."""
    words = [SMALL.get(word, word) for word in words]
    if words[0] == "deepspeed":
        launcher = shutil.which("deepspeed") or str(Path(sys.executable).with_name("deepspeed"))
        words = [launcher, "--num_accelerators", "1", "--master_port", str(ranks.free_port()), *words[1:]]
    elif words[:2] == ["python", "-m"] and words[2].startswith("trainer"):  # those that import PyTorch
        forked = ranks.fork_one(0, 1, 0, "tests/helpers/forked_commands.py", str(folder), *words[2:])
        [(code, said)] = ranks.finish([forked])
        assert code == 0, f"{words}\n{said}"
        return
    elif words[0] == "python":
        words[0] = sys.executable
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_a_first_users_commands_run(tmp_path: Path) -> None:
    """The five commands of the README, and what the docs do with their results."""
    section = PROSE[README].partition(FIRST)[2].partition("\n## ")[0]
    own = list(commands(README, section))
    (configuration,) = blocks(section, "yaml")
    (tmp_path / "corpus").mkdir()
    records = (ROOT / "deploy/demo/corpus/demo_corpus.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(record)["text"] for record in records[:12]]
    (tmp_path / "corpus/own.txt").write_text("\n\n".join(text.replace("\n\n", "\n") for text in texts), "utf-8")
    (tmp_path / "texts.txt").write_text("The bank was closed.\nHe sat on the bank.\n", "utf-8")
    tree = yaml.safe_load(configuration.replace("30522", SMALL["30522"]))
    tree["model"] |= SIZES
    tree["phases"][0] |= {"global_batch": 8, "micro_batch": 4, "steps": 6, "warmup_steps": 2}
    tree["metrics"] = {"port": None, "log_every_steps": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    for command in own:
        run(list(command.words), tmp_path)
    assert len(own) == 5 and (tmp_path / "bert/model.safetensors").is_file()
    for page, start, part in OTHERS:
        found = [c for c in commands(ROOT / "docs" / page) if " ".join(c.words).startswith(start)]
        run(list(next(c.words for c in found if part in " ".join(c.words))), tmp_path)
    assert (tmp_path / "vectors.npy").is_file() and (tmp_path / "runs/first/report.png").is_file()
