"""The tools that compare encoders by fine-tuning: task files, the table, a worker's run, and a peer's saved model."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ranks
from tests.helpers.finetune_command import Inputs, finetune, make_inputs
from tests.helpers.finetune_inputs import PIECES, bert_folder, write_numbers
from tests.tools import transfer
from tests.tools.task_files import chosen
from tests.tools.transfer import find_encoders, key_of, plan, table
from trainer.exits import DONE, REFUSED
from trainer.finetune.pretrained import needed_weights, read_pretrained
from trainer.finetune.tasks import Wish, known


def test_the_chosen_rows_are_fixed_and_in_order() -> None:
    lines = [b"sentence\tlabel\n", *(b"%d\t0\n" % number for number in range(100))]
    some = chosen(lines, True, [None, 10])
    assert some[0] == lines[0] and len(some) == 11
    assert [lines.index(line) for line in some] == sorted(lines.index(line) for line in some)
    assert some == chosen(lines, True, [10, 50]) and some[1:] != lines[1:11]
    assert chosen(lines, False, [None, None]) == lines


def line(encoder: str, seed: int, score: float | None) -> dict[str, Any]:
    made = {"encoder": encoder, "task": "rte", "seed": seed, "score": score, "measure": "accuracy"}
    return made | {"units": 2490, "inputs": ""}


def test_the_table_pairs_differences_by_seed() -> None:
    """Seed 3 of ours has no score, so its difference and its mean over tasks are left out, and each cell says so."""
    ours, random = (0.6, 0.8, None), (0.5, 0.6, 0.1)
    lines = [line("ours", seed, score) for seed, score in enumerate(ours, 1)]
    lines += [line("random", seed, score) for seed, score in enumerate(random, 1)]
    _, _, rte, mean = (
        [cell.strip() for cell in row.split("|")[1:-1]] for row in table(lines, ["ours", "random"]).split("\n")
    )
    two = ", 2 of 3 seeds"
    assert rte[:3] == ["rte", "accuracy", "2490"] and mean[:3] == ["mean", "", ""]
    assert rte[3:] == [f"0.7000 ± 0.1000{two}", "0.4000 ± 0.1528", f"0.1500 ± 0.0500 (+3.0){two}"]
    assert mean[3:] == [f"0.7000 ± 0.1000{two}", f"0.5500 ± 0.0500{two}", f"0.1500 ± 0.0500 (+3.0){two}"]


@pytest.mark.parametrize(
    ("tool", "words", "said"),
    [
        ("transfer", "out --encoders none --tasks none --beside 0", "transfer: error: --beside 0: wanted 1 or more"),
        ("transfer", "out --encoders none --tasks none --gpus -1", "transfer: error: --gpus -1: wanted 0 or more"),
        (
            "transfer",
            "out --encoders none --tasks none --dropout 1",
            "transfer: error: --dropout 1.0: wanted 0 or more, below 1",
        ),
        ("peer", "out --train none --heldout none", "peer: error: "),
    ],
)
def test_a_mistake_takes_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str, words: str, said: str
) -> None:
    from tests.tools import peer, transfer

    monkeypatch.setattr(sys, "argv", [tool, *words.split()])
    with pytest.raises(SystemExit) as ended:
        {"peer": peer, "transfer": transfer}[tool].main()
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == REFUSED and line.startswith(f"tests.tools.{said}")


@pytest.mark.slow
def test_a_worker_takes_the_steps_of_the_fine_tuning_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The task's scores are correlations of numbers, which show every difference."""
    inputs = Inputs(bert_folder(tmp_path / "encoders"), tmp_path / "stsb")
    inputs.data.mkdir()
    for part, first in (("train", 0), ("dev", 10_000)):
        write_numbers(inputs.data / f"{part}.tsv", 60, first)
    with tarfile.open(tmp_path / "tasks.tar", "w") as tar:
        tar.add(inputs.data, "tasks/stsb")
    words = (tmp_path / "out", "--encoders", tmp_path / "encoders", "--tasks", tmp_path / "tasks.tar")
    monkeypatch.setattr(sys, "argv", ["transfer", *map(str, words), "--only", "stsb", "--seeds", "2"])
    server = ranks.server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: server)  # its workers import nothing
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the tool changes it
    assert transfer.main() == 0
    found = {one["encoder"]: one for one in map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())}
    assert list(found) == ["bert", "random"]
    jobs = plan(find_encoders(tmp_path / "encoders"), tmp_path / "out/tasks", ["stsb"], [2])
    assert {job.key for job in jobs} == set(map(key_of, found.values()))  # a second command runs none
    others = plan(find_encoders(tmp_path / "encoders"), tmp_path / "out/tasks", ["stsb"], [2], dropout=0.0)
    assert not {job.key for job in others} & {job.key for job in jobs}
    recipe = ("--rates", "5e-5", "--batches", "32", "--epochs", "4", "--max-length", "40", "--clip", "1")
    [(code, said)] = finetune(inputs, tmp_path / "command", "--task", "stsb", *recipe, "--seeds", "2")
    assert code == DONE, said
    [result] = (json.loads(path.read_text()) for path in (tmp_path / "command").glob("rate-*/result.json"))
    assert result["evaluations"][-1]["figures"] == found["bert"]["metrics"] != found["random"]["metrics"]


@pytest.mark.slow
def test_a_peers_saved_model_can_be_fine_tuned(tmp_path: Path) -> None:
    """Its vocabulary is padded to 64 rows; the tokenizer has fewer pieces."""
    from tests.tools.peer import Peer, save

    inputs = make_inputs(tmp_path)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32}
    save(Peer({"vocab_size": 64, **shape}).bert, inputs.model, tmp_path / "peer")
    reported: list[str] = []
    given = read_pretrained(tmp_path / "peer", None, reported.append)
    task = known("sst2").make(Wish(inputs.data / "train.tsv"), reported.append)
    kept = needed_weights(given, task, reported.append)
    assert given.model.vocab_size == 64 and given.tokenizer.vocab_size == len(PIECES)
    assert all(name in kept for name in ("pooler_weight", "token_table"))
    assert "64: ids from" in reported[0] and reported[1:] == ["not used from the model: MLM head, NSP head"]
