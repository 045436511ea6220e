"""Parses commands with their programs' own parsers, without running them. Input and output are JSON.

Each command is a list of words: ``deepspeed …``, ``torchrun …``, or a module's name or a script's path and its
arguments. The output has a message for each command, empty if it is accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch


class ParsedError(BaseException):
    """Raised in place of the work that a command would do once its arguments are parsed."""


def parse(words: Sequence[str]) -> None:
    """Return if the words are accepted. Raises SystemExit, as argparse does, if not."""
    name, *arguments = words
    if name == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(arguments)
        parse([given.training_script, *given.training_script_args])
    elif name == "deepspeed":
        from deepspeed.launcher.runner import parse_args

        given = parse_args(arguments)
        parse([given.user_script, *given.user_args])
    elif name == "deploy.launch":
        from deploy.launch import LaunchParser, split

        own, rest = split(arguments)
        parse([LaunchParser().parse_args(own).module, *rest])
    else:
        run(name, arguments)


def run(name: str, arguments: Sequence[str]) -> None:
    """Start a program as Python does, up to the point where it has parsed its arguments."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *given: Any, **more: Any) -> None:
        original(self, *given, **more)
        raise ParsedError

    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        patch.object(sys, "argv", [name, *arguments]),
        contextlib.suppress(ParsedError),
    ):
        if name.endswith(".py"):
            runpy.run_path(name, run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)


def problem(words: Sequence[str]) -> str:
    """The program's complaint about its arguments; empty if it accepts them."""
    with tempfile.TemporaryFile("w+") as said:  # a real file: some programs ask for its number
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                parse(words)
        except SystemExit as end:
            said.seek(0)
            return (said.read().strip() or str(end.code)) if end.code else ""
        except ImportError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    found = [problem(words) for words in json.load(sys.stdin)]
    print("\n" + json.dumps(found))
