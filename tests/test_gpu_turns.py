"""Turns on a GPU: a large test runs alone, others run together, and none is put off for ever."""

from __future__ import annotations

import ast
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest

from tests.helpers.gpu_turns import turn
from tests.helpers.layout_rules import SOURCES, Source, under

LARGE = re.compile("two_to_the_31")  # in the name of a test that allocates so many elements
SECONDS = 0.1  # for a thread that is let in too early


def unmarked(source: Source) -> list[str]:
    """The large tests of a file that do not have the GPU to themselves."""
    tests = [function for function in source.functions if LARGE.search(function.name)]
    return [test.name for test in tests if "whole_gpu" not in " ".join(map(ast.unparse, test.decorator_list))]


def test_small_tests_run_at_the_same_time(tmp_path: Path) -> None:
    both = Barrier(2)

    def take() -> None:
        with turn(tmp_path, alone=False):
            both.wait(timeout=10)

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(take), pool.submit(take)]:
            done.result()


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_a_large_test_runs_alone(tmp_path: Path, first: bool, second: bool) -> None:
    entered = Event()

    def take() -> None:
        with turn(tmp_path, second):
            entered.set()

    with ThreadPoolExecutor() as pool:
        with turn(tmp_path, first):
            done = pool.submit(take)
            assert not entered.wait(SECONDS)
        done.result(timeout=10)
    assert entered.is_set()


def test_a_large_test_that_waits_lets_no_other_in(tmp_path: Path) -> None:
    order, waiting = list[str](), list[Future[None]]()

    def take(name: str, alone: bool) -> None:
        with turn(tmp_path, alone):
            order.append(name)

    with ThreadPoolExecutor() as pool:
        with turn(tmp_path, alone=False):
            for name, alone in (("large", True), ("small", False)):
                waiting.append(pool.submit(take, name, alone))
                assert not Event().wait(SECONDS) and order == []
        for done in waiting:
            done.result(timeout=10)
    assert order == ["large", "small"]


def test_every_test_of_that_many_elements_runs_alone() -> None:
    assert {source.path: unmarked(source) for source in under(SOURCES, "tests") if unmarked(source)} == {}
    assert sum(bool(LARGE.search(f.name)) for source in under(SOURCES, "tests") for f in source.functions) > 5
    assert unmarked(Source("new.py", "@pytest.mark.gpu\ndef test_two_to_the_31(): pass")) == ["test_two_to_the_31"]
