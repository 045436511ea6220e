"""The layout: the checkout keeps every rule, and each rule reports a fault that is planted.

The rules for source files are in layout_rules.py. Those that need a process or a search path are below.
"""

from __future__ import annotations

import importlib.machinery
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from tests.helpers.layout_rules import (
    LONGEST_FILE,
    LONGEST_FUNCTION,
    LONGEST_KERNEL,
    LOOP,
    PACKAGES,
    RULES,
    SOURCES,
    Rule,
    Source,
    docstrings_open_with_a_subject,
    file_names_are_clear,
    files_and_functions_are_short,
    imports_point_one_way,
    modules_import_one_another_without_a_circle,
    no_failure_is_swallowed,
    no_state_is_global,
    nothing_is_pickled,
    one_file_reads_the_environment,
    one_file_uses_private_names,
    rooms_import_from_rooms_before_them,
    the_top_of_tests_holds_tests,
    the_top_of_the_trainer_is_what_a_user_can_run,
    the_train_loop_reads_as_one_piece,
    the_trainer_prints_in_one_file,
    two_packages_have_one_importer_each,
    under,
)
from tests.helpers.ranks import ROOT

# ---- each rule, and its faults -------------------------------------------------------------------------------

LONG = "\n" * LONGEST_FUNCTION + "    pass\n"
LONG_KERNEL = "@triton.jit\ndef kernel():\n" + "    pass\n" * LONGEST_KERNEL
TWO_LOOPS = "def train():\n    while True:\n        pass\n\ndef _train():\n    {}\n"
FAULTS: tuple[tuple[Rule, str, str, str], ...] = (  # the rule, a file, its text, and what the rule says of it
    (imports_point_one_way, "data_prep/new.py", "import torch", "imports ['torch']"),
    (imports_point_one_way, "data_prep/new.py", "def f():\n    import webdataset", "imports ['webdataset']"),
    (imports_point_one_way, "data_prep/new.py", "def f():\n    from trainer import errors", "imports ['trainer']"),
    (imports_point_one_way, "kernels/new.py", "import numpy", "imports ['numpy']"),
    (imports_point_one_way, "kernels/new.py", "from . import flat", "imports ['.']"),
    (imports_point_one_way, "trainer/new.py", "import apex", "imports ['apex']"),
    (imports_point_one_way, "trainer/new.py", "from deploy import node", "imports ['deploy']"),
    (imports_point_one_way, "trainer/new.py", "from data_prep import build", "imports ['data_prep.build']"),
    (two_packages_have_one_importer_each, "trainer/new.py", "import deepspeed.comm", "deepspeed"),
    (two_packages_have_one_importer_each, "kernels/new.py", "import prometheus_client", "client"),
    (two_packages_have_one_importer_each, "trainer/engine/engine.py", "", "does not import deepspeed"),
    (one_file_uses_private_names, "trainer/new.py", "zero._grad_acc_hooks", "['_grad_acc_hooks']"),
    (one_file_uses_private_names, "trainer/new.py", "parameter.ds_tensor.shape", "['ds_tensor']"),
    (one_file_uses_private_names, "trainer/new.py", "getattr(engine, 'fp16_groups')", "['fp16_groups']"),
    (one_file_uses_private_names, "trainer/new.py", "zero.cpu_offload", "['cpu_offload']"),
    (one_file_uses_private_names, "trainer/new.py", "self._deepspeed.optimizer", "['optimizer']"),
    (one_file_reads_the_environment, "trainer/new.py", "import os\nos.environ['A']", "reads"),
    (one_file_reads_the_environment, "kernels/new.py", "from os import getenv", "reads"),
    (the_trainer_prints_in_one_file, "trainer/new.py", "from functools import partial\npartial(print, 'a')", "prints"),
    (the_trainer_prints_in_one_file, "trainer/run/new.py", "say(f'warning: {a}')", "the prefix of a warning"),
    (rooms_import_from_rooms_before_them, "trainer/model/new.py", "from trainer.data import order", "from ['data']"),
    (rooms_import_from_rooms_before_them, "trainer/run/new.py", "import trainer.evaluate", "from ['evaluate']"),
    (rooms_import_from_rooms_before_them, "trainer/attic/new.py", "", "attic is not in ROOMS"),
    (modules_import_one_another_without_a_circle, "trainer/errors.py", "from trainer import console", "in a circle"),
    (the_top_of_the_trainer_is_what_a_user_can_run, "trainer/new.py", "", "not a command"),
    (the_top_of_tests_holds_tests, "tests/new.py", "", "no test"),
    (file_names_are_clear, "trainer/data/queue.py", "", "hides"),
    (file_names_are_clear, "kernels/utils.py", "", "vague"),
    (files_and_functions_are_short, "deploy/new.py", "\n" * (LONGEST_FILE + 1), "over 400 lines"),
    (files_and_functions_are_short, "docker/new.py", f"def f():{LONG}", "f is over 60 lines"),
    (files_and_functions_are_short, "data_prep/new.py", f"class A:\n  async def f():{LONG}", "f is over 60 lines"),
    (files_and_functions_are_short, "kernels/new.py", LONG_KERNEL, "kernel is over 110 lines"),
    (docstrings_open_with_a_subject, "docker/new.py", "import os", "no docstring"),
    (docstrings_open_with_a_subject, "deploy/new.py", '"""In a file."""', "the file: In a file."),
    (docstrings_open_with_a_subject, "tests/new.py", 'class A:\n    """Of it."""', "A: Of it."),
    (docstrings_open_with_a_subject, "trainer/new.py", '"""A."""\ndef f():\n    """\n    By it.\n    """', "f: By it."),
    (the_train_loop_reads_as_one_piece, LOOP, "def train():\n    pass", "no loop"),
    (the_train_loop_reads_as_one_piece, LOOP, TWO_LOOPS.format("step % 10"), "remainder"),
    (the_train_loop_reads_as_one_piece, LOOP, TWO_LOOPS.format("loss.item()"), "loss.item"),
    (the_train_loop_reads_as_one_piece, LOOP, TWO_LOOPS.format("run.world.is_main"), "world.is_main"),
    (no_failure_is_swallowed, "docker/new.py", "try:\n    f()\nexcept:\n    pass", "line 3"),
    (no_failure_is_swallowed, "trainer/new.py", "try:\n    f()\nexcept (OSError, Exception):\n    f()", "line 3"),
    (no_failure_is_swallowed, "deploy/new.py", "with contextlib.suppress(Exception):\n    f()", "line 1"),
    (nothing_is_pickled, "trainer/new.py", "import pickle\npickle.loads(b'')", "uses ['pickle.loads']"),
    (nothing_is_pickled, "trainer/new.py", "torch.save({}, path)", "uses ['torch.save']"),
    (nothing_is_pickled, "trainer/new.py", "torch.load(path)", "line 1 reads a pickle"),
    (nothing_is_pickled, "data_prep/new.py", "np.load(path, allow_pickle=True)", "line 1 reads a pickle"),
    (no_state_is_global, "kernels/new.py", "def f():\n    global n\n    n = 1", "a global"),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_checkout_keeps_every_rule(rule: Rule) -> None:
    broken = list(rule(SOURCES))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("rule", "path", "text", "said"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_rule_sees_a_planted_fault(rule: Rule, path: str, text: str, said: str) -> None:
    others = [source for source in SOURCES if source.path != path]
    found = list(rule([*others, Source(path, text)]))
    assert [line for line in found if line.startswith(path) and said in line], found


def test_every_rule_has_a_fault() -> None:
    assert {rule for rule, *_ in FAULTS} == set(RULES)


# ---- rules that need a process or a search path --------------------------------------------------------------


def loaded(names: Iterable[str], root: Path) -> list[str]:
    """The packages among torch, webdataset and trainer that importing some modules of a tree loads."""
    heavy = "[m for m in ('torch', 'webdataset', 'trainer') if m in sys.modules]"
    code = f"import sys, {', '.join(names)}; print(*{heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_data_preparation_runs_without_torch(tmp_path: Path) -> None:
    assert not loaded([".".join(source.parts) for source in under(SOURCES, "data_prep")], ROOT)
    (tmp_path / "webdataset.py").touch()
    (tmp_path / "data_prep.py").write_text("import webdataset")
    assert loaded(["data_prep"], tmp_path) == ["webdataset"]


def strangers(search: Sequence[str]) -> list[str]:
    """Our packages whose names lead out of this checkout, on a search path such as ``sys.path``."""
    places = {name: importlib.machinery.PathFinder.find_spec(name, search) for name in PACKAGES}
    origins = {name: Path(str(spec.origin)).resolve() for name, spec in places.items() if spec is not None}
    return [name for name in PACKAGES if origins.get(name) != (ROOT / name / "__init__.py").resolve()]


def test_names_resolve_to_this_checkout(tmp_path: Path) -> None:
    assert not strangers(sys.path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").touch()
    assert strangers([str(tmp_path), *sys.path]) == ["kernels"]


def taken(installed: Iterable[Distribution]) -> set[str]:
    """The installed distributions that have one of our names, or that of NVIDIA's apex."""
    names = {re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower() for distribution in installed}
    return names & {"kernels", "trainer", "apex", "data-prep", "lambert"}


def test_nobody_elses_package_has_our_names(tmp_path: Path) -> None:
    """PyPI has a ``kernels``, a ``trainer`` and an ``apex``; none of them is ours, or NVIDIA's."""
    assert not taken(distributions())
    (tmp_path / "Data_Prep-1.0.dist-info").mkdir()
    (tmp_path / "Data_Prep-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: Data_Prep\nVersion: 1.0\n")
    assert taken(distributions(path=[str(tmp_path)])) == {"data-prep"}


def wrong_order(settings: str, folder: Path) -> str:
    """Ruff's report on the order of imports in a checkout that has folders named like modules."""
    for name in ("numpy", "torch", "trainer"):
        (folder / name).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(settings)
    (folder / "new.py").write_text("import numpy\nimport torch\n\nimport trainer\n")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def test_the_style_does_not_depend_on_the_folders_of_runs(tmp_path: Path) -> None:
    """A run may write to a folder of any name, such as numpy."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "All checks passed!" in wrong_order(settings, tmp_path / "ours")
    assert "I001" in wrong_order(re.sub(r"(?m)^src = \[\].*$", "", settings), tmp_path / "planted")


def types(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_types_hold(tmp_path: Path) -> None:
    """This is a test, so that mypy's minute runs in parallel with the other tests."""
    done = types()
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "new.py").write_text("def f(x): return x")
    assert "Function is missing a type annotation" in types(str(tmp_path / "new.py")).stdout
