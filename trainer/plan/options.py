"""The options that describe a run's GPUs, and the data sets of its phases: what a plan is made from."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from data_prep.errors import DataError
from trainer.engine.schedule import batch_of, batch_problems, resolve
from trainer.errors import PassingError, TrainerError
from trainer.plan.cards import CARDS, Card, choose, read_rates
from trainer.plan.estimate import Hardware, Plan, make_plan, setting_of
from trainer.plan.lengths import Lengths, read_lengths
from trainer.plan.speed import assumed, read_network
from trainer.run.config import Config
from trainer.run.phases import misfits

LEAST, MOST = 1e-6, 1e9  # of a number in an option
UNITS = {"GiB": 1.0, "GB": 1e9 / 2**30, "MiB": 1 / 1024, "TiB": 1024.0}


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add the options for `hardware_of`."""
    parser.add_argument("--gpus", type=_count, required=True, metavar="N", help="GPUs of one node")
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="nodes (%(default)s)")
    parser.add_argument("--card", metavar="NAME", help="a card with measured rates, such as h100 or h200")
    parser.add_argument("--memory", type=_gib, metavar="SIZE", help="memory of a GPU, such as 80GiB")
    parser.add_argument("--tflops", type=_positive, metavar="X", help="TFLOP/s of forward and backward passes")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="more rates, from trainer.bench --write")
    parser.add_argument("--network", type=Path, metavar="FILE", help="from trainer.preflight --network --json")
    parser.add_argument("--price", type=_positive, metavar="X", help="price of one GPU for one hour")
    parser.add_argument("--failures", type=_positive, metavar="PER_GPU_DAY", help="failures per GPU and day")
    text = "time from a failure to the next step (%(default)g)"
    parser.add_argument("--restart", type=_positive, default=120.0, metavar="SECONDS", help=text)
    text = "rate at which all ranks together write a checkpoint (%(default)g)"
    parser.add_argument("--disk", type=_positive, default=1.0, metavar="GB/S", help=text)


def hardware_of(options: argparse.Namespace) -> Hardware:
    """The resources that the options describe. Raises TrainerError if they do not describe a card."""
    return Hardware(
        gpus=options.gpus,
        nodes=options.nodes,
        card=_card(options),
        network=assumed(options.gpus, options.nodes) if options.network is None else read_network(options.network),
        price=options.price,
        failures=options.failures,
        restart_seconds=options.restart,
        disk_bytes_per_second=1e9 * options.disk,
    )


def _card(options: argparse.Namespace) -> Card:
    """The card with measured rates, or the one that the options describe; they override what is measured."""
    if options.card is None:
        if options.memory is None or options.tflops is None:
            raise TrainerError("name a card with --card, or give both --memory and --tflops")
        if options.rates is not None:
            raise TrainerError("--rates is a table of cards: name one with --card")
        return Card(f"GPU of {options.tflops:g} TFLOP/s", options.memory, (), options.tflops)
    more = [] if options.rates is None else read_rates(options.rates)
    names = {row.card for row in more}  # measured rates of the user replace ours
    found = choose([row for row in read_rates(CARDS) if row.card not in names] + more, options.card)
    return Card(found.name, options.memory or found.memory_gib, found.rates, options.tflops)


def plan_of(config: Config, hardware: Hardware) -> Plan:
    """The plan of a run. Raises TrainerError if it cannot work, and PassingError if a server of shards fails."""
    setting = setting_of(config, hardware.ranks)
    if setting.precision == "fp32" and hardware.card.tflops is None:
        raise TrainerError("this run computes in fp32, and the measured rates are for fp16 and bf16: give --tflops")
    return make_plan(config, setting, data_of(config, setting.ranks), hardware)


def data_of(config: Config, ranks: int) -> list[Lengths]:
    """The lengths of each phase's samples. Raises TrainerError with every problem of the data sets and batches."""
    found, problems = [], []
    for number, phase in enumerate(config.phases):
        where = f"phases.{number}"
        try:
            lengths, manifest = read_lengths(phase.train, config.cache, config.run.timeout_seconds / 20)
        except PassingError:  # the rest would only wait for the same server
            raise
        except (DataError, TrainerError) as error:
            problems.append(f"{where}.train: {error}")
            continue
        problems += [f"{where}.train: {problem}" for problem in misfits(manifest, phase, config.model)]
        runs = resolve(phase, batch_of(phase, ranks)[0], lengths.samples)
        wrong = [*batch_problems(phase, ranks, lengths.samples), *runs.problems()]
        problems += [f"{where}.{problem}" for problem in wrong]
        found.append(lengths)
    if problems:
        raise TrainerError("; ".join(problems))
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 2**16:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number between 1 and {2**16:,}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LEAST <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text} must be a number between {LEAST:f} and {MOST:,.0f}")
    return value


def _gib(text: str) -> float:
    match = re.fullmatch(r"([\d.]+) ?(GiB|GB|MiB|TiB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} must be a size such as 80GiB")
    return _positive(match[1]) * UNITS[match[2]]
