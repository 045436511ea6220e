"""Runs whose folder is an address, with ranks that share no disk: saved, killed and resumed through an S3 server."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import yaml

import trainer.runs.__main__ as runs
from data_prep.tokenizer import load_tokenizer
from tests.helpers import ranks
from tests.helpers.runs import kept_steps, lines, wait_for, write_config
from tests.helpers.s3 import Fault, FaultyS3, faulty, sign_in
from trainer import export, report, weights
from trainer.checkpoint.fetched import fetched
from trainer.convert.weights import load_bert
from trainer.exits import FAILED, REFUSED, STOPPED
from trainer.monitor.metrics_log import METRICS_LOG
from trainer.run.lock import hold
from trainer.store.address import local_folder
from trainer.store.objects import Objects

ADDRESS = "s3://bucket/runs/first"
PREFIX = "runs/first/"
NUMBERS = ("loss", "mlm_loss", "gradient_norm", "learning_rate", "position", "tokens", "samples")
pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A server with an empty bucket."""
    with faulty() as found:
        sign_in(found.address, monkeypatch)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield found


@pytest.fixture
def config(tiny_shards: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path, tiny_shards, 25, engine={"zero_stage": 1})


def objects() -> dict[str, bytes]:
    """The files at the address."""
    client, found = boto3.client("s3"), {}
    for each in client.list_objects_v2(Bucket="bucket", Prefix=PREFIX).get("Contents", []):
        with suppress(client.exceptions.NoSuchKey):  # it has just been removed
            content = client.get_object(Bucket="bucket", Key=each["Key"])["Body"].read()
            found[each["Key"].removeprefix(PREFIX)] = content
    return found


def start(config: Path, *homes: Path, more: tuple[str, ...] = ()) -> list[ranks.Forked]:
    """Start a rank with each of the homes, each on a node of its own."""
    port = ranks.free_port()
    given = ("--config", str(config), "--set", f"run.folder={ADDRESS}", *more)
    started = []
    for rank, home in enumerate(homes):
        home.mkdir(exist_ok=True)
        node: dict[str, Any] = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "HOME": str(home)}
        started.append(ranks.fork_one(rank, len(homes), port, "tests/helpers/hasty_rank.py", *given, **node))
    return started


def journal(folder: Path) -> Path:
    """The folder with the journal from the address."""
    folder.mkdir(exist_ok=True)
    (folder / METRICS_LOG).write_bytes(objects()[METRICS_LOG])
    return folder


def numbers(folder: Path) -> dict[int, list[float]]:
    return {step["step"]: [step[name] for name in NUMBERS] for step in kept_steps(folder)}


def test_ranks_without_a_common_disk_are_killed_in_mid_upload_and_go_on_bit_for_bit_from_empty_disks(
    config: Path, tmp_path: Path, server: FaultyS3
) -> None:
    straight = ranks.finish(ranks.fork(2, "trainer/__main__.py", "--config", str(config)))
    assert [code for code, _ in straight] == [0, 0], straight
    server.faults = [Fault("PUT", "step-00000020/part-00001", "hang")]
    first = start(config, tmp_path / "a", tmp_path / "b")
    wait_for(lambda: server.faults[0].met, *first)
    for rank in first:
        rank.kill()
    ranks.finish(first)
    there = objects()
    assert "step-00000010/checkpoint.json" in there and not any(key.startswith("step-00000020/ch") for key in there)
    assert "ended.json" not in there
    server.faults = []

    ended = ranks.finish(start(config, tmp_path / "c", tmp_path / "d"))
    assert [code for code, _ in ended] == [0, 0], ended
    assert f"resumed from {ADDRESS}/step-00000010 at step 10" in ended[0][1], ended[0][1]
    assert "is being written by process" in ended[0][1]  # until the killed run's lease had ended
    there = objects()
    run = tmp_path / "run"
    assert numbers(journal(tmp_path / "there")) == numbers(run) and len(numbers(run)) == 25
    for name in ("step-00000010", "step-00000020", "step-00000025"):
        own = {path.name: path.read_bytes() for path in (run / name).iterdir()}
        assert {key for key in there if key.startswith(name)} == {f"{name}/{each}" for each in own}
        assert all(there[f"{name}/{each}"] == content for each, content in own.items() if each.startswith("part"))
    assert json.loads(there["ended.json"]) == {"how": "done", "step": 25} and there["latest"] == b"step-00000025\n"
    assert {"config.yaml", "tokenizer/vocab.txt"} < there.keys()
    for home, files in ((tmp_path / "d", [".lock"]), (tmp_path / "c", [".lock", *sorted(place_files(run))])):
        folder = local_folder(ADDRESS, str(home / ".cache/lambert"))
        assert sorted(path.name for path in folder.iterdir()) == sorted(files)


def place_files(run: Path) -> set[str]:
    """The files that a run leaves in its folder besides checkpoints."""
    return {p.name for p in run.iterdir() if not p.name.startswith((".", "step-"))} - {"latest"}


def test_another_number_of_ranks_goes_on_and_a_request_at_the_address_stops_it(
    config: Path, tmp_path: Path, server: FaultyS3
) -> None:
    few = ("--set", "phases.0.steps=12", "--set", "checkpoint.keep=1")
    ended = ranks.finish(start(config, tmp_path / "a", tmp_path / "b", more=few))
    assert [code for code, _ in ended] == [0, 0], ended
    assert {key.split("/")[0] for key in objects() if key.startswith("step-")} == {"step-00000012"}
    before = objects()
    check = ("trainer/preflight.py", "--config", str(config), "--set", f"run.folder={ADDRESS}", *few)
    [(code, said)] = ranks.finish([ranks.fork_one(0, 1, ranks.free_port(), *check, HOME=str(tmp_path / "d"))])
    assert code == 0 and f"the run will continue from {ADDRESS}/step-00000012" in said and objects() == before, said
    more = ("--set", "phases.0.steps=4000", "--set", "checkpoint.keep=1", "--set", "checkpoint.every_steps=1000000")
    [one] = start(config, tmp_path / "c", more=more)
    client, own = boto3.client("s3"), {"Bucket": "bucket", "Key": f"{PREFIX}{METRICS_LOG}"}
    wait_for(lambda: b'"step": 20,' in client.get_object(**own)["Body"].read(), one)
    client.put_object(Bucket="bucket", Key=f"{PREFIX}stop-request", Body=b"")
    [(code, said)] = ranks.finish([one])
    assert code == STOPPED and f"resumed from {ADDRESS}/step-00000012" in said, said
    there = objects()
    assert "stop-request" not in there and json.loads(there["ended.json"])["how"] == "stopped"
    losses = [numbers(journal(tmp_path / "there"))[step][0] for step in range(1, 20)]
    assert np.all(np.diff(losses) != 0) and lines(tmp_path / "there", "changed")[0]["settings"]["ranks"] == [2, 1]


def test_a_full_bucket_costs_checkpoints_but_no_training_and_commands_read_what_is_there(
    config: Path, tmp_path: Path, server: FaultyS3, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.faults = [Fault("PUT", "step-00000010/part", "full"), Fault("PUT", "step-00000025/check", "full")]
    [(code, said)] = ranks.finish(start(config, tmp_path / "a", more=("--set", "checkpoint.every_steps=5")))
    assert code == FAILED, said
    lost = [line for line in said.splitlines() if "no checkpoint: " in line]
    place = f"rank 0: {ADDRESS}/step-00000010/part-00000-of-00001.safetensors"
    assert len(lost) == 2 and place in lost[0] and "full" in lost[0] and lost[0].endswith("and the network")
    assert "the last checkpoint, of step 25, could not be saved" in said and "Traceback" not in said
    there = objects()
    whole = {key.split("/")[0] for key in there if key.endswith("/checkpoint.json")}
    assert whole == {"step-00000005", "step-00000015", "step-00000020"}
    assert not any(key.startswith("step-00000010") for key in there)
    assert len(numbers(journal(tmp_path / "there"))) == 25

    server.faults = []
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    shards = yaml.safe_load(config.read_text())["phases"][0]["train"]

    def run(command: Any, *words: str) -> str:
        assert command.main([*words]) == 0, capsys.readouterr()
        return capsys.readouterr().out

    given = ("--checkpoint", ADDRESS, "--heldout", shards, "--train", shards)
    ended = ranks.finish(ranks.fork(2, "trainer/evaluate.py", *given))
    assert [code for code, _ in ended] == [0, 0] and "weights: step 20 of " in ended[0][1], ended
    average = ("--average", "2", "--no-check", "--out", "s3://bucket/models/first")
    assert "the mean of steps 15 and 20" in run(export, "--checkpoint", ADDRESS, *average)
    exported = fetched("s3://bucket/models/first", print)
    assert load_tokenizer(exported).vocab_size and not load_bert(exported, print)[2]
    assert export.main(["--checkpoint", ADDRESS, *average]) == REFUSED and "is not empty" in capsys.readouterr().err
    at_address = Objects(ADDRESS)
    part = "step-00000020/part-00000-of-00001.safetensors"
    at_address.write(part, bytes(at_address.list()[part]))
    shutil.rmtree(tmp_path / "b")
    assert "step-00000015" in run(weights, ADDRESS, str(tmp_path / "weights.safetensors"))  # the newest is damaged now
    assert "report.png" in run(report, ADDRESS) and "report.png" in objects()
    listed = json.loads(run(runs, "s3://bucket/runs", "--json"))["runs"]
    assert [(each["folder"], each["state"], each["step"]) for each in listed] == [(ADDRESS, "failed", 25)]
    assert runs.main(["stop", ADDRESS]) == REFUSED and "its state is failed" in capsys.readouterr().err
    for gone in ("s3://bucket/none", f"{ADDRESS}/step-00000011"):
        assert weights.main([gone, str(tmp_path / "x")]) == REFUSED
        assert gone.rpartition("/")[0] in capsys.readouterr().err


def test_a_read_only_bucket_and_a_second_run_are_refused(config: Path, tmp_path: Path, server: FaultyS3) -> None:
    server.faults = [Fault("PUT", PREFIX, "forbidden")]
    [(code, said)] = ranks.finish(start(config, tmp_path / "a"))
    assert code == REFUSED and f"error: {ADDRESS}/lease-00000000.json: PermissionError: " in said, said
    server.faults = []
    more = ("--set", "phases.0.steps=100000", "--set", "run.timeout_seconds=2")
    folder = local_folder(ADDRESS, str(tmp_path / "a/.cache/lambert"))
    lock = hold(folder, 0, print)
    assert lock is not None
    (folder / METRICS_LOG).write_text("of an attempt that was here before\n")
    [(code, said)] = ranks.finish(start(config, tmp_path / "a", more=more))
    assert code == REFUSED and f"error: {folder} is being written by process" in said and len(objects()) == 1, said
    lock.close()
    server.faults = [Fault("PUT", METRICS_LOG, "slow 0")]
    [one] = start(config, tmp_path / "b", more=more)
    wait_for(lambda: server.faults[0].met, one)
    began = time.monotonic()
    [(code, said)] = ranks.finish(start(config, tmp_path / "c", more=more))
    assert code == REFUSED and f"error: {ADDRESS} is being written by process {one.pid} of " in said, said
    assert 1 <= time.monotonic() - began < 60 and one.returncode is None
    client = boto3.client("s3")
    client.put_object(Bucket="bucket", Key=f"{PREFIX}lease-00000009.json", Body=b'{"holder": "process 1 of b"}')
    [(code, said)] = ranks.finish([one])
    assert code == FAILED and f"{ADDRESS} has been taken by another run (process 1 of b): stopping" in said, said
    assert "could not be saved (rank 0: " in said.splitlines()[-1]
