"""The rules of the layout: which way imports point, how long files and functions may be, and what is never done.

Each rule is a function that takes the checkout's files and yields a line for each place that breaks it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tests.helpers.ranks import ROOT
from trainer.engine.private_names import NAMES

PACKAGES = ("data_prep", "kernels", "trainer")
FOLDERS = (*PACKAGES, "deploy", "docker", "tests")
# The modules of data_prep that the trainer may import: the contract of a data set and its masks, what a remote
# server of one may do, and the code for metrics, log lines and text that both share.
CONTRACT = "atomic draws encoding endpoint errors json_text manifest masking options shards stock streams tokenizer"
DATA_SET = {*CONTRACT.split(), "addresses", "downloads", "retries", "servers"}
STOCK = ("data_prep/stock.py",)  # imports webdataset, inside the functions that use it: the library imports torch
# The folders of the trainer: each may import from those before it, and from the files that every part uses. The
# commands at the top import from all of them.
_LATER_ROOMS = "finetune encode plan profile bench runs track"
ROOMS = f"model ranks data store engine checkpoint monitor links convert run {_LATER_ROOMS}".split()
SHARED = ("bounds", "console", "errors", "exits", "options", "strict_yaml")
LOOP = "trainer/run/train.py"
PRIVATE_NAMES = "trainer/engine/private_names.py"
# What DeepSpeed documents of its engine, which is called ``_deepspeed``; ``zero`` is the optimizer that it returns.
DOCUMENTED = set("backward destroy empty_partition_cache module set_gradient_accumulation_boundary step".split())
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_KERNEL = 400, 60, 110
# Words that no docstring begins with: its first line would have no subject.
NOT_FIRST = set(
    "of over by in with for from to at on as into under out without like also or and but behind beside".split()
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True)
class Source:
    """A Python file: its path in the checkout, and its text."""

    path: str
    text: str

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.removesuffix(".py").split("/"))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, self.path)))

    @cached_property
    def imports(self) -> set[str]:
        """Every module that the file imports, anywhere in it, with all its dots; a relative import as ``.``."""
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = "." if node.level or node.module is None else node.module
                names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        return names

    @property
    def packages(self) -> set[str]:
        """The top-level packages that the file imports, without the standard library."""
        return {name.split(".")[0] or "." for name in self.imports} - sys.stdlib_module_names - {"__future__"}

    @property
    def used(self) -> set[str]:
        """The attributes that the file uses and the modules it imports, as ``a.b.c``."""
        return {dotted(node) for node in self.nodes if isinstance(node, ast.Attribute)} | self.imports

    @property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]


def dotted(node: ast.AST) -> str:
    """An attribute or a name as it is written: ``a.b.c``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


Sources = Sequence[Source]
Rule = Callable[[Sources], Iterator[str]]
SOURCES = [
    Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def under(sources: Sources, *folders: str) -> list[Source]:
    """The sources in some of the top-level folders."""
    return [source for source in sources if source.parts[0] in folders]


# ---- imports -------------------------------------------------------------------------------------------------


def imports_point_one_way(sources: Sources) -> Iterator[str]:
    """trainer imports kernels and the contract of data_prep; these two import neither each other nor the trainer."""
    for source in under(sources, *PACKAGES):
        found, own = source.packages, source.parts[0]
        bad = found & {"tests", "deploy", "docker", "apex", "pytest", "."}
        if own == "data_prep":
            bad |= found & {"torch", "transformers", "deepspeed", "kernels", "trainer"}
            bad |= found & ({"webdataset"} if source.path not in STOCK else set())
        if own == "kernels":
            bad |= found - {"torch", "triton", "kernels"}
        if own == "trainer":
            used = {name for name in source.imports if re.fullmatch(r"data_prep\.\w+", name)}
            bad |= used - {f"data_prep.{name}" for name in DATA_SET}
        if bad:
            yield f"{source.path}: imports {sorted(bad)}"


def two_packages_have_one_importer_each(sources: Sources) -> Iterator[str]:
    """deepspeed has one in all packages, and prometheus_client one outside data_prep, which has its own endpoint."""
    for name, only, folders in (
        ("deepspeed", "trainer/engine/engine.py", PACKAGES),
        ("prometheus_client", "trainer/monitor/exporter.py", ("kernels", "trainer")),
    ):
        importers = [source.path for source in under(sources, *folders) if name in source.packages]
        yield from (f"{path}: imports {name}" for path in importers if path != only)
        if only not in importers:
            yield f"{only}: does not import {name}"


def one_file_uses_private_names(sources: Sources) -> Iterator[str]:
    """DeepSpeed may rename whatever it does not document."""
    names = {private.name for private in NAMES}
    for source in under(sources, "kernels", "trainer"):
        texts = {node.value for node in source.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        pairs = {pair for used in source.used for pair in pairwise(used.split("."))}
        found = (names & texts) | {name for _, name in pairs if name in names}
        found |= {used.split(".")[1] for used in source.used if used.startswith("zero.")}
        found |= {name for owner, name in pairs if owner == "_deepspeed" and name not in DOCUMENTED}
        if found and source.path != PRIVATE_NAMES:
            yield f"{source.path}: uses {sorted(found)}"


def one_file_reads_the_environment(sources: Sources) -> Iterator[str]:
    for source in under(sources, "kernels", "trainer"):
        if source.used & {"os.environ", "os.getenv", "os.environb"} and source.path != "trainer/ranks/world.py":
            yield f"{source.path}: reads the environment"


def the_trainer_prints_in_one_file(sources: Sources) -> Iterator[str]:
    """A run's lines, its warnings, and a command's errors and results each have one form, in one function."""
    for source in under(sources, "trainer"):
        if source.path == "trainer/console.py":
            continue
        if any(isinstance(node, ast.Name) and node.id == "print" for node in source.nodes):
            yield f"{source.path}: prints"
        texts = [node.value for node in source.nodes if isinstance(node, ast.Constant)]
        if any(isinstance(text, str) and text.startswith("warning: ") for text in texts):
            yield f"{source.path}: writes the prefix of a warning"


def rooms_import_from_rooms_before_them(sources: Sources) -> Iterator[str]:
    for source in under(sources, "trainer"):
        if len(source.parts) < 3:
            continue
        room = source.parts[1]
        if room not in ROOMS:
            yield f"{source.path}: the folder {room} is not in ROOMS"
            continue
        used = {(name.split(".") + [""])[1] for name in source.imports if name.split(".")[0] == "trainer"}
        if bad := used - {*ROOMS[: ROOMS.index(room) + 1], *SHARED, ""}:
            yield f"{source.path}: imports from {sorted(bad)}"


def modules_import_one_another_without_a_circle(sources: Sources) -> Iterator[str]:
    modules = {".".join(source.parts): source for source in under(sources, "trainer")}
    left = {name: source.imports & set(modules) - {name} for name, source in modules.items()}
    while free := {name for name, needs in left.items() if not needs & set(left)}:
        left = {name: needs for name, needs in left.items() if name not in free}
    yield from (f"{modules[name].path}: in a circle of imports, or needs one that is" for name in sorted(left))


def the_top_of_the_trainer_is_what_a_user_can_run(sources: Sources) -> Iterator[str]:
    for source in under(sources, "trainer"):
        shared = len(source.parts) > 2 or source.parts[1] in (*SHARED, "__init__")
        if not shared and 'if __name__ == "__main__":' not in source.text:
            yield f"{source.path}: not a command"


def the_top_of_tests_holds_tests(sources: Sources) -> Iterator[str]:
    for source in under(sources, "tests"):
        if len(source.parts) == 2 and not re.match(r"test_|conftest$|__init__$", source.parts[1]):
            yield f"{source.path}: no test; it belongs in tests/helpers or tests/tools"


# ---- names and sizes -----------------------------------------------------------------------------------------


def file_names_are_clear(sources: Sources) -> Iterator[str]:
    """A file has no name of a standard module, and no name that fits any file."""
    for source in under(sources, *PACKAGES):
        if source.parts[-1] in sys.stdlib_module_names:
            yield f"{source.path}: hides a module of the standard library"
        if re.search(r"util|helper|common|manager|misc", source.parts[-1]):
            yield f"{source.path}: a vague name"


def files_and_functions_are_short(sources: Sources) -> Iterator[str]:
    for source in under(sources, *PACKAGES, "deploy", "docker"):
        if source.text.count("\n") > LONGEST_FILE:
            yield f"{source.path}: over {LONGEST_FILE} lines"
        for function in source.functions:
            kernel = any(dotted(decorator) == "triton.jit" for decorator in function.decorator_list)
            if length(function) > (limit := LONGEST_KERNEL if kernel else LONGEST_FUNCTION):
                yield f"{source.path}: {function.name} is over {limit} lines"


def length(function: Function) -> int:
    """The lines of a function, from ``def`` to its end."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def docstrings_open_with_a_subject(sources: Sources) -> Iterator[str]:
    """Every file outside tests has a docstring, and the first line of each docstring says what the thing is or does."""
    for source in sources:
        if source.parts[0] != "tests" and ast.get_docstring(ast.parse(source.text)) is None:
            yield f"{source.path}: no docstring"
        for node in source.nodes:
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                if text.split()[0].lower() in NOT_FIRST:
                    yield f"{source.path}: {getattr(node, 'name', 'the file')}: {text.splitlines()[0]}"


def the_train_loop_reads_as_one_piece(sources: Sources) -> Iterator[str]:
    """Its two functions decide nothing by step or rank, and wait for no tensor: each collaborator does that itself."""
    [source] = [source for source in sources if source.path == LOOP]
    loops = [function for function in source.functions if function.name in ("train", "_train")]
    inside = [node for loop in loops for node in ast.walk(loop)]
    if len(loops) != 2 or not any(isinstance(node, ast.While) for node in inside):
        yield f"{LOOP}: no loop in train and _train"
    if any(isinstance(node, ast.Mod) for node in inside):
        yield f"{LOOP}: the loop computes a remainder"
    names = {dotted(node) for node in inside if isinstance(node, ast.Attribute)}
    for name in sorted(name for name in names if name.endswith((".item", ".rank", ".is_main"))):
        yield f"{LOOP}: the loop uses {name}"


# ---- what is never done --------------------------------------------------------------------------------------


def no_failure_is_swallowed(sources: Sources) -> Iterator[str]:
    """A handler of every exception must raise one."""
    for source in under(sources, *PACKAGES, "deploy", "docker"):
        for node in source.nodes:
            if isinstance(node, ast.ExceptHandler):
                caught = {dotted(name) for name in ast.walk(node.type)} if node.type else {"BaseException"}
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            elif isinstance(node, ast.Call) and dotted(node.func).endswith("suppress"):
                caught, raises = {dotted(name) for name in node.args}, False
            else:
                continue
            if caught & {"Exception", "BaseException"} and not raises:
                yield f"{source.path}: line {node.lineno} catches everything and raises nothing"


def nothing_is_pickled(sources: Sources) -> Iterator[str]:
    """Code may only name the exception that reading a foreign file can raise."""
    for source in under(sources, *PACKAGES):
        picklers = {"cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.save"}
        pickle = {name for name in source.used if name.startswith("pickle.")} - {"pickle.UnpicklingError"}
        if bad := source.used & picklers | pickle:
            yield f"{source.path}: uses {sorted(bad)}"
        for call in (node for node in source.nodes if isinstance(node, ast.Call)):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            loads = dotted(call.func) == "torch.load" and given.get("weights_only") != "True"
            if loads or given.get("allow_pickle", "False") != "False":
                yield f"{source.path}: line {call.lineno} reads a pickle"


def no_state_is_global(sources: Sources) -> Iterator[str]:
    for source in under(sources, *PACKAGES):
        if any(isinstance(node, ast.Global) for node in source.nodes):
            yield f"{source.path}: changes a global"


RULES: tuple[Rule, ...] = (
    imports_point_one_way,
    two_packages_have_one_importer_each,
    one_file_uses_private_names,
    one_file_reads_the_environment,
    the_trainer_prints_in_one_file,
    rooms_import_from_rooms_before_them,
    modules_import_one_another_without_a_circle,
    the_top_of_tests_holds_tests,
    the_top_of_the_trainer_is_what_a_user_can_run,
    file_names_are_clear,
    files_and_functions_are_short,
    docstrings_open_with_a_subject,
    the_train_loop_reads_as_one_piece,
    no_failure_is_swallowed,
    nothing_is_pickled,
    no_state_is_global,
)
