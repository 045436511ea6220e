"""The layout: which way imports point, who may import what, and how long a file and a function may be."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest
from ranks import ROOT

PACKAGES = ("data_prep", "kernels", "trainer")
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SCRIPTS = sorted(path.relative_to(ROOT) for folder in ("deploy", "docker") for path in (ROOT / folder).rglob("*.py"))
# What the trainer sees of data_prep: the contract of a data set, retries where it is remote, what its
# server may do, the endpoint that both serve their metrics by, streams, what text is, and how a command line is read.
DATA_SET = (
    *("atomic", "draws", "encoding", "endpoint", "errors", "json_text", "manifest", "masking", "options"),
    *("retries", "servers", "shards"),
    "streams",
    "tokenizer",
)
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_KERNEL = 400, 60, 110
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, with all its dots."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: a relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def outside(path: Path) -> set[str]:
    """Top-level names that a file imports, the standard library left out."""
    return {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names - {"__future__"}


def importers(name: str) -> list[str]:
    return [path.as_posix() for path in FILES if name in outside(path)]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute or a name, as written."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def mentions(name: str) -> list[str]:
    """Files that use ``name`` ("os.environ"), or import it by itself."""
    found = []
    for path in FILES:
        used = {dotted(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
        if name in used | imported(path):
            found.append(path.as_posix())
    return found


# ---- arrows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_one_way(path: Path) -> None:
    found = outside(path)
    match path.parts[0]:
        case "data_prep":
            assert not found & {"torch", "webdataset", "transformers", "deepspeed", "kernels", "trainer"}
        case "kernels":
            assert found <= {"torch", "triton", "kernels"}
        case "trainer":
            ours = found & {path.name for path in ROOT.iterdir() if path.is_dir()}
            assert ours <= {"trainer", "kernels", "data_prep"}
            used = {name for name in imported(path) if re.fullmatch(r"data_prep\.\w+", name)}
            assert used <= {f"data_prep.{name}" for name in DATA_SET}
    assert not found & {"tests", "deploy", "apex", "pytest"}


def test_data_preparation_runs_without_torch() -> None:
    names = [".".join(path.with_suffix("").parts) for path in FILES if path.parts[0] == "data_prep"]
    code = f"import sys, {', '.join(names)}; print([m for m in ('torch', 'webdataset', 'trainer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "only"), [("deepspeed", "trainer/engine/engine.py"), ("prometheus_client", "trainer/monitor/exporter.py")]
)
def test_one_file_alone_imports_it(name: str, only: str) -> None:
    assert [path for path in importers(name) if not path.startswith("data_prep/")] == [only]
    assert name == "prometheus_client" or importers(name) == [only]


def test_the_environment_is_read_in_one_place() -> None:
    readers = {*mentions("os.environ"), *mentions("os.getenv"), *mentions("os.environb")}
    assert {path for path in readers if not path.startswith("data_prep/")} == {"trainer/ranks/world.py"}


# ---- rooms of the trainer ------------------------------------------------------------------------------------

# Each room may import from those before it, and from what every part uses. The commands at the top import from all.
ROOMS = (
    *("model", "ranks", "data", "engine", "checkpoint", "monitor", "convert", "run", "finetune", "encode", "bench"),
)
SHARED = ("bounds", "errors", "exits", "options", "strict_yaml")


def trainer_module(path: Path) -> tuple[str, ...]:
    return path.with_suffix("").parts[1:]


def test_every_folder_of_the_trainer_is_a_room() -> None:
    assert {path.parts[1] for path in FILES if path.parts[0] == "trainer" and len(path.parts) > 2} == set(ROOMS)


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] == "trainer" and len(p.parts) > 2], ids=str)
def test_rooms_import_from_rooms_before_them(path: Path) -> None:
    room = path.parts[1]
    allowed = {*ROOMS[: ROOMS.index(room) + 1], *SHARED, ""}
    used = {(name.split(".") + [""])[1] for name in imported(path) if name.split(".")[0] == "trainer"}
    assert used <= allowed, f"{path} imports from {sorted(used - allowed)}"


def test_modules_of_the_trainer_import_one_another_without_a_circle() -> None:
    modules = {".".join(("trainer", *trainer_module(p))): p for p in FILES if p.parts[0] == "trainer"}
    left = {name: imported(path) & set(modules) - {name} for name, path in modules.items()}
    while free := {name for name, needs in left.items() if not needs & set(left)}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert not left, f"in a circle, or behind one: {sorted(left)}"


def test_the_top_of_the_trainer_is_what_a_user_can_run() -> None:
    top = [p for p in FILES if p.parts[0] == "trainer" and len(p.parts) == 2 and p.stem not in (*SHARED, "__init__")]
    assert all('if __name__ == "__main__":' in (ROOT / path).read_text(encoding="utf-8") for path in top), top


# ---- names ---------------------------------------------------------------------------------------------------


def test_names_resolve_to_this_checkout() -> None:
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        assert Path(spec.origin).resolve() == (ROOT / name / "__init__.py").resolve()


def test_nobody_elses_package_has_our_names() -> None:
    """PyPI has a ``kernels``, a ``trainer`` and an ``apex``; none of them is ours, or NVIDIA's."""
    names = {re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower() for distribution in distributions()}
    assert "torch" in names
    assert not names & {"kernels", "trainer", "apex", "data-prep", "lambert"}


def test_no_file_hides_one_of_the_standard_library() -> None:
    hidden = [str(path) for path in FILES if path.stem in sys.stdlib_module_names]
    vague = [str(path) for path in FILES if re.search(r"util|helper|common|manager|misc", path.stem)]
    assert not hidden + vague


def test_the_style_is_the_same_where_folders_are_named_as_modules_are(tmp_path: Path) -> None:
    """A run's folder, runs, once turned the order of imports in a file of tests into a fault."""
    (tmp_path / "tests").mkdir()
    for path in [ROOT / "pyproject.toml", *(ROOT / "tests").glob("*.py")]:
        (tmp_path / path.relative_to(ROOT)).write_bytes(path.read_bytes())
        (tmp_path / path.stem).mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- budgets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*FILES, *SCRIPTS], ids=str)
def test_files_and_functions_are_short(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert text.count("\n") <= LONGEST_FILE
    long = [f"{f.name}: {lines}" for f in functions(path) if (lines := length(f)) > longest(f)]
    assert not long
    assert ast.get_docstring(tree(path)), "no docstring"


def test_the_train_loop_reads_as_one_piece() -> None:
    loops = [f for f in functions(Path("trainer/run/train.py")) if f.name in ("train", "_train")]
    assert len(loops) == 2 and any(isinstance(node, ast.While) for loop in loops for node in ast.walk(loop))
    for loop in loops:
        assert length(loop) <= 60
        assert not [node for node in ast.walk(loop) if isinstance(node, ast.Mod)]
        names = {dotted(node) for node in ast.walk(loop) if isinstance(node, ast.Attribute)}
        assert not [name for name in names if name.endswith((".item", ".rank", ".is_main"))]


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def longest(function: Function) -> int:
    kernel = any(dotted(decorator) == "triton.jit" for decorator in function.decorator_list)
    return LONGEST_KERNEL if kernel else LONGEST_FUNCTION


def length(function: Function) -> int:
    """Lines from ``def`` to the end."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


# ---- what is never done --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*FILES, *SCRIPTS], ids=str)
def test_no_failure_is_swallowed(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = {dotted(name) for name in ast.walk(node.type)} if node.type else {"BaseException"}
            broad = caught & {"Exception", "BaseException"}
            assert not broad or any(isinstance(inner, ast.Raise) for inner in ast.walk(node)), f"line {node.lineno}"


def test_nothing_is_pickled() -> None:
    for name in ("cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.save"):
        assert not mentions(name), name
    for path in FILES:
        used = {dotted(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
        pickle = {name for name in used | imported(path) if name.startswith("pickle.")}
        assert pickle <= {"pickle.UnpicklingError"}, path  # what a foreign file may raise
        for call in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert keywords.get("allow_pickle", "False") == "False", f"{path}: line {call.lineno}"
            if dotted(call.func) == "torch.load":
                assert keywords.get("weights_only") == "True", f"{path}: line {call.lineno}"


def test_no_state_is_global() -> None:
    found = [str(path) for path in FILES if any(isinstance(node, ast.Global) for node in ast.walk(tree(path)))]
    assert not found


@pytest.mark.slow
def test_types_hold() -> None:
    """A test, so that its minute goes by beside the others."""
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
