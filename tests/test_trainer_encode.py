"""Vectors: equal to those of transformers, in the order of the texts, and written completely or not at all."""

from __future__ import annotations

import gc
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, BertModel

from data_prep.tokenizer import load_tokenizer
from data_prep.vocab import train_tokenizer
from kernels import backend
from trainer.convert import folder as hf_folder
from trainer.convert.weights import load_bert, read, write
from trainer.encode import __main__ as encode
from trainer.encode.__main__ import Pooling, main
from trainer.encode.vectors import EncodedPart, Text, write_npy
from trainer.errors import TrainerError
from trainer.finetune.classification import Columns
from trainer.finetune.save import write_model
from trainer.finetune.task import TaskModel, fit
from trainer.finetune.tasks import Wish, known
from trainer.model.bert import Bert, ModelConfig

pytestmark = pytest.mark.slow

TEXTS = ["the bank was closed", "he sat on the bank of the river", "the", "a river\tthe closed bank was old", "old"] * 3
LONGEST = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT of five layers in Hugging Face's format."""
    return made(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def pre_ln(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but pre-LN."""
    return made(tmp_path_factory.mktemp("pre-ln"), layer_norm="before")


def made(home: Path, **settings: Any) -> Path:
    train_tokenizer(["the bank was closed he sat on of river a old"], 60, cased=False).save(home / "tokenizer")
    size = load_tokenizer(home / "tokenizer").vocab_size
    model = ModelConfig(5, 16, 2, 32, LONGEST, size, initializer_range=0.3, **settings)
    weights = {name: w + 0.1 for name, w in Bert(model, seed=1).state_dict().items()}  # no bias is zero
    hf_folder.write_folder(weights, model, home / "tokenizer", home / "out")
    return home / "out"


@torch.no_grad()
def theirs(folder: Path) -> list[tuple[list[Tensor], Tensor, int]]:
    """Each text's hidden states (S, D) and pooled output, and the position of its pair's first [SEP]."""
    model, tokenizer = AutoModel.from_pretrained(folder), load_tokenizer(folder)
    cls, sep = tokenizer.specials.cls, tokenizer.specials.sep
    out = []
    for text in TEXTS:
        first, second = ([*tokenizer.encode([part])][0] if part else [] for part in (text + "\t").split("\t")[:2])
        ids = [cls, *first, sep, *([*second, sep] if second else [])]
        kinds = [0] * (len(first) + 2) + [1] * (len(ids) - len(first) - 2)
        given = model(torch.tensor([ids]), token_type_ids=torch.tensor([kinds]), output_hidden_states=True)
        out.append(([h[0] for h in given.hidden_states], given.pooler_output[0], len(first) + 1))
    return out


def ordinary(hidden: Tensor, sep: int) -> Tensor:
    """The tokens without [CLS] and [SEP]."""
    return torch.cat([hidden[1:sep], hidden[sep + 1 : -1]])


def run(folder: Path, out: Path, *options: str) -> Any:
    assert main(["--model", str(folder), "--out", str(out), *options]) == 0
    return np.load(out) if out.suffix == ".npy" else pq.read_table(out)


def near(ours: NDArray[np.float32], expected: list[Tensor]) -> bool:
    wanted = torch.stack(expected).numpy()
    return bool(ours.shape == wanted.shape and np.abs(ours - wanted).max() <= 1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["folder", "pre_ln"])
def test_every_pooling_is_of_transformers_hidden_states(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(kind)
    known = theirs(folder)
    expected = {
        ("mean", "last"): [ordinary(h[-1], sep).mean(0) for h, _, sep in known],
        ("max", "last"): [ordinary(h[-1], sep).max(0).values for h, _, sep in known],
        ("cls", "last"): [h[-1][0] for h, _, _ in known],
        ("pooler", "last"): [pooled for _, pooled, _ in known],
        ("mean", "mean4"): [ordinary(sum(h[-4:]) / 4, sep).mean(0) for h, _, sep in known],  # type: ignore[arg-type]
        ("cls", "concat4"): [torch.cat([layer[0] for layer in h[-4:]]) for h, _, _ in known],
    }
    for (pool, layers), wanted in expected.items():
        ours = run(folder, tmp_path / f"{pool}-{layers}.npy", "--pool", pool, "--layers", layers, *TEXTS)
        assert near(ours, wanted), (pool, layers)


def test_one_word_in_two_contexts_has_two_vectors(folder: Path, tmp_path: Path) -> None:
    marked = ["the [[bank]] was closed", "he sat on the [[bank]] of the river"]
    table = run(folder, tmp_path / "marked.parquet", "--marked", *marked)
    known, pieces = theirs(folder), load_tokenizer(folder).pieces
    rows = table.drop(["vector"]).to_pylist()
    assert [row["number"] for row in rows] == [0] * (len(rows) // 2) + [1] * (len(rows) // 2)
    assert "".join(row["token"].removeprefix("##") for row in rows) == "bank" * 2
    ours = np.stack(table["vector"].to_numpy())
    assert near(ours, [known[row["number"]][0][-1][row["position"]] for row in rows])
    assert np.abs(ours[0] - ours[len(rows) // 2]).max() > 1e-3

    table = run(folder, tmp_path / "all.parquet", "--tokens", *TEXTS)
    everything = torch.cat([ordinary(h[-1], sep) for h, _, sep in known])
    assert near(np.stack(table["vector"].to_numpy()), list(everything))
    assert set(table["token"].to_pylist()) <= set(pieces) - {"[CLS]", "[SEP]"}


def test_batches_and_parts_do_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = run(folder, tmp_path / "whole.npy", *TEXTS)
    monkeypatch.setattr(encode, "_BATCH", 9)
    monkeypatch.setattr(encode, "_TEXTS", 4)
    assert np.abs(run(folder, tmp_path / "parts.npy", *TEXTS) - whole).max() <= 1e-6 * np.abs(whole).max()
    monkeypatch.setattr(encode, "_LETTERS", 40)
    assert run(folder, tmp_path / "more.parquet", *TEXTS)["number"].to_pylist() == list(range(len(TEXTS)))


def test_lines_objects_and_the_standard_input_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "texts.tsv").write_text("\n".join(TEXTS) + "\n")
    expected = run(folder, tmp_path / "given.npy", *TEXTS)
    assert (run(folder, tmp_path / "lines.npy", "--input", str(tmp_path / "texts.tsv")) == expected).all()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode())))
    assert (run(folder, tmp_path / "stdin.npy", "--input", "-") == expected).all()
    records = [{"id": number, "a": "a river", "b": "the closed bank was old"} for number in (7, 8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = run(folder, tmp_path / "pairs.parquet", "--input", str(tmp_path / "pairs.jsonl"), "--json", "a,b")
    assert table.select(["id", "text", "pair"]).to_pylist()[1] == {
        **{"id": "8", "text": "a river", "pair": "the closed bank was old"}
    }
    assert (np.stack(table["vector"].to_numpy())[0] == expected[3]).all()


def test_a_line_ends_at_a_line_feed_and_a_byte_order_mark_is_no_text(folder: Path, tmp_path: Path) -> None:
    expected = run(folder, tmp_path / "given.npy", "the bank", "old")
    path = tmp_path / "texts"
    for number, content in enumerate((b"the\rbank\r\nold\r\n", b"\xef\xbb\xbfthe bank\nold")):
        path.write_bytes(content)
        assert (run(folder, tmp_path / f"{number}.npy", "--input", str(path)) == expected).all()
    path.write_bytes(b'\xef\xbb\xbf{"a": "the\\rbank"}\r\n{"a": "old"}\n')
    assert (run(folder, tmp_path / "json.npy", "--input", str(path), "--json", "a") == expected).all()


@pytest.mark.parametrize("content", ["the\nbank".encode("utf-16"), "a\n".encode("utf-16-le"), b"the \xff\nbank\n"])
def test_what_is_not_utf_8_is_named_by_its_line(
    folder: Path, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts"
    for place, start in (("line 1", b""), ("line 3", b"the\nold\n")):
        path.write_bytes(start + content)
        assert main(["--model", str(folder), "--out", str(tmp_path / "no.npy"), "--input", str(path)]) == 2
        error = f"trainer.encode: error: {path}, {place}: not UTF-8 text; save it as UTF-8\n"
        assert capsys.readouterr().err == error and os.listdir(tmp_path) == ["texts"]
    assert (
        main(["--model", str(folder), "--out", str(tmp_path / "no.npy"), "the", "\udcff"]) == 2
    )  # a byte as Python reads it
    assert "text 2: not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["the", " "], "text 2: no text, an empty one"),
        (["a\tb\tc"], "text 1: no text, an empty one, or more than two"),
        (["the", "\u200b"], r"text 2: no token in"),
        (["--marked", "[[bank]]", "the bank"], "text 2: no token between [[ and ]]"),
        (["--input", "nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
        (["--json", "a,b", "the"], "text 1: not a JSON object with a and b"),
        (["the", "bank " * 30], "text 2: "),
        (["--pool", "pooler", "--layers", "mean4", "the"], "the pooler reads only the last layer"),
        (["--input", "."], "--input . is a folder"),
    ],
)
def test_what_cannot_be_is_one_line_and_no_file(
    folder: Path, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.parquet"
    assert main(["--model", str(folder), "--out", str(out), *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer.encode: error: ") and said in line
    assert not list(tmp_path.iterdir())
    if "bank " * 30 in options:
        assert "tokens more than the model's 12 positions: shorten the text, or truncate" in line


def test_long_texts_are_cut_and_counted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = run(folder, tmp_path / "cut.npy", "--cut", "the", "the " * 30, "a river\t" + "the " * 30, "the " * 10)
    assert "trainer.encode: 2 of 4 texts were truncated to 12 tokens" in capsys.readouterr().err
    assert (vectors[1] == vectors[3]).all()  # ten words and two control tokens
    for sizes, kept in (((3, 20), (3, 6)), ((20, 3), (6, 3)), ((20, 20), (5, 4)), ((4, 20), (4, 5))):
        assert fit(*sizes, 9) == kept
    assert main(["--model", str(folder), "--out", str(tmp_path / "cut.npy"), "the"]) == 2
    assert "cut.npy already exists" in capsys.readouterr().err


def test_a_model_without_a_pooler_has_none(folder: Path, tmp_path: Path) -> None:
    model, tokenizer, missing = load_bert(folder)
    assert (tokenizer, missing) == (folder, [])
    weights = {f"bert.{n}": w for n, w in BertModel(BertModel.from_pretrained(folder).config).state_dict().items()}
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in folder.iterdir():
        (bare / path.name).write_bytes(path.read_bytes())
    save_file({n: w for n, w in weights.items() if "pooler" not in n}, bare / "model.safetensors")
    assert load_bert(bare)[2] == ["pooler", "MLM head", "NSP head"]
    assert main(["--model", str(bare), "--out", str(tmp_path / "out.npy"), "--pool", "pooler", "the"]) == 2
    assert run(bare, tmp_path / "out.npy", "the").shape == (1, model.model.hidden)
    with pytest.raises(TrainerError, match=f"{tmp_path} contains neither the config.json of a Hugging Face BERT nor a"):
        load_bert(tmp_path)


def test_a_vocabulary_of_another_size_is_refused(folder: Path, tmp_path: Path) -> None:
    """Its last pieces would be read from the rows that pad the table."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "vocab.txt").write_text((folder / "vocab.txt").read_text() + "more\n")
    with pytest.raises(TrainerError, match="pieces, but the model in .* only"):
        load_bert(tmp_path)


def test_half_a_character_and_a_text_that_fails_late_are_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", odd.append)
    monkeypatch.setattr(encode, "_TEXTS", 1)
    lines = ['{"a": "the \\ud83d\\ude00"}', '{"a": "the \\ud83d"}']  # two halves are one
    assert main(["--model", str(folder), "--out", str(tmp_path / "out.parquet"), "--json", "a", *lines]) == 2
    assert "text 2: not a JSON object with a" in capsys.readouterr().err
    gc.collect()
    assert not odd and not list(tmp_path.iterdir())  # the writer of the first text was closed before its file


def test_any_number_of_rows_has_the_header_that_numpy_reads(tmp_path: Path) -> None:
    for rows, width in ((1, 1), (123_456, 1), (2, 4096)):
        block = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
        part = EncodedPart(0, [Text("here", "text")], [], [block])
        with (tmp_path / "x.npy").open("wb") as file:
            write_npy(file, [part, replace(part, start=1)])
        assert (np.load(tmp_path / "x.npy") == np.concatenate([block, block])).all()
    assert Pooling() == Pooling("mean", "last")


def test_files_and_kernels_are_looked_at_before_the_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        assert main(["--model", str(tmp_path / "no model"), *arguments]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line.removeprefix("trainer.encode: error: ")

    missing = tmp_path / "missing"
    assert said("--out", str(missing / "x.npy"), "the").startswith(f"{missing}, the folder of x.npy, does not exist: ")
    assert said("--out", str(tmp_path / "x.npy"), "--input", str(tmp_path)).startswith(
        f"--input {tmp_path} is a folder"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "TRITON_MISSING", "ImportError: no module")
    line = said("--out", str(tmp_path / "x.npy"), "the")
    assert line.startswith("the kernels need Triton on a GPU (ImportError: no module)") and "set --kernels to" in line


def test_two_mistakes_are_two_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, name, other in ((["--out", "e.csv"], "--out", "--json"), (["--json", "a,b,c"], "--json", "--out")):
        with pytest.raises(SystemExit) as end:
            main(["--model", "m", "--out", "e.npy", *arguments, "the"])
        [line] = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and f"error: {name} is {arguments[1]}: must" in line and other not in line


def test_a_pooler_that_nobody_asked_for_is_not_spoken_of(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Bert(replace(load_bert(folder)[0].model, layers=1))
    monkeypatch.setattr(encode, "load_bert", lambda path, tell: (small, folder, []))
    arguments = ["--model", "m", "--out", str(tmp_path / "x.npy"), "--pool", "cls", "--layers", "concat4", "the"]
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("--layers concat4: needs 4 layers, but the model has 1: use --layers last")


def test_a_fine_tuned_model_without_a_class_of_transformers_is_read(folder: Path, tmp_path: Path) -> None:
    """The folder that a head with a hidden layer leaves: the encoder's and pooler's vectors are what they were."""
    columns = Columns(("a",), "label")
    (tmp_path / "train.tsv").write_text("a\tlabel\nthe\tno\nold\tyes\n")
    task = known("sentence").make(Wish(tmp_path / "train.tsv", columns, False, None, True), lambda text: None)
    bert = load_bert(folder)[0]
    tuned = TaskModel(bert.model, task, 0)
    tuned.load_state_dict(bert.state_dict(), strict=False)
    write_model(tmp_path / "model", tuned.state_dict(), bert.model, task, load_tokenizer(folder), lambda text: None)
    assert sorted(os.listdir(tmp_path / "model"))[-1] == "weights.safetensors"
    for pool in ("mean", "pooler"):
        ours, theirs = (
            run(path, tmp_path / f"{path.name}-{pool}.npy", "--pool", pool, *TEXTS)
            for path in (tmp_path / "model", folder)
        )
        assert (ours == theirs).all()
    assert load_bert(tmp_path / "model")[2] == ["MLM head", "NSP head"]
    given = read(tmp_path / "model", pytest.fail)
    assert "head_weight" not in given.tensors
    assert given.unused == ["head_bias", "head_in_bias", "head_in_weight", "head_weight"]

    tensors = {name: w for name, w in tuned.state_dict().items() if name != "layers.4.mlp_in_bias"}
    (tmp_path / "model" / "weights.safetensors").unlink()
    write(tensors, bert.model, tmp_path / "model" / "weights.safetensors")
    with pytest.raises(TrainerError, match=r"1 parameters differ, first layers.4.mlp_in_bias \(absent there"):
        load_bert(tmp_path / "model")
