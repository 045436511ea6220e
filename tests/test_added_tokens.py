"""Tokens that users add to a Hugging Face BERT keep their ids wherever its folder is read or written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AddedToken, AutoTokenizer, BertForPreTraining, BertForSequenceClassification

from data_prep.__main__ import main as data_prep
from data_prep.errors import DataError
from data_prep.tokenizer import Tokenizer, load_tokenizer
from tests.helpers import ranks
from tests.helpers.finetune_inputs import PIECES, TINY, bert_folder, sentences, tokenizer_folder
from trainer import fill_mask
from trainer.convert import folder as hf_folder
from trainer.convert.weights import fitting, load_bert
from trainer.encode import __main__ as encode
from trainer.encode.vectors import Text
from trainer.errors import TrainerError
from trainer.finetune.pretrained import read_pretrained

pytestmark = pytest.mark.slow

MARKERS = ["[E1]", "[/E1]"]
TEXTS = [
    "[E1] bame bames [/E1] deni.",
    "bame[E1]deni[/e1]",
    "[ E1 ] Bame",
    "[E1]",
    "<SEP2> bame<sep2>",
    "[MASK] covid19 bame",
]


def with_tokens(folder: Path, tokens: list[Any], special: bool = False) -> Path:
    """Write a BERT with added tokens, as transformers saves it."""
    source, out = bert_folder(folder), folder / "added"
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    tokenizer.add_tokens(tokens, special_tokens=special)
    model = BertForPreTraining.from_pretrained(source, local_files_only=True)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def same_ids(ours: Tokenizer, folder: Path, texts: list[str] = TEXTS) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in texts:
        if "[MASK]" not in text:  # here it is a few pieces like any other
            assert theirs(text).input_ids[1:-1] == next(ours.encode([text])), text
    assert len(theirs) == ours.vocab_size


@pytest.mark.parametrize(
    ("tokens", "special"),
    [
        (MARKERS, False),
        (MARKERS, True),
        (["covid19", "<sep2>"], False),
        ([AddedToken("deni", single_word=True, normalized=False), AddedToken("<sep2>", lstrip=True)], False),
    ],
    ids=["markers", "special", "words", "flags"],
)
def test_ids_are_those_of_transformers_and_stay_so_when_saved(tokens: list[Any], special: bool, tmp_path: Path) -> None:
    folder = with_tokens(tmp_path, tokens, special)
    ours = load_tokenizer(folder)
    same_ids(ours, folder)
    ours.save(tmp_path / "saved")
    same_ids(load_tokenizer(tmp_path / "saved"), tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").sha256() == ours.sha256()
    assert load_tokenizer(tmp_path / "bert").sha256() != ours.sha256()


def slow(folder: Path, settings: dict[str, Any], **files: Any) -> Path:
    """A folder that an older transformers wrote: a vocab.txt and JSON files next to it."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    for name, content in {"tokenizer_config": {"do_lower_case": True} | settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


DECODER = {str(len(PIECES) + n): {"content": name, "normalized": False} for n, name in enumerate(MARKERS)}


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({}, {"added_tokens": {name: len(PIECES) + n for n, name in enumerate(MARKERS)}}),
        ({"added_tokens_decoder": DECODER}, {}),
        ({"additional_special_tokens": MARKERS}, {}),
        (
            {},
            {
                "special_tokens_map": {"additional_special_tokens": MARKERS},
                "added_tokens": {name: len(PIECES) + n for n, name in enumerate(MARKERS)},
            },
        ),
    ],
    ids=["added_tokens.json", "added_tokens_decoder", "special names", "special_tokens_map.json"],
)
def test_folders_of_older_versions(config: dict[str, Any], files: dict[str, Any], tmp_path: Path) -> None:
    ours = load_tokenizer(slow(tmp_path / "slow", config, **files))
    assert ours.pieces[-2:] == MARKERS
    assert next(ours.encode(["[E1]bame[/E1]"])) == [len(PIECES), 5, len(PIECES) + 1]
    ours.save(tmp_path / "saved")
    same_ids(ours, tmp_path / "saved")


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        ({}, {"added_tokens": {"[E1]": 30}}, r"the added token '\[E1\]' has id 30, which is not its id"),
        ({}, {"added_tokens": {"[E1]": 20, "[E2]": 20}}, "the added token .* has id 20, which is not its id"),
        ({}, {"added_tokens": {"bame": 20}}, "the added token 'bame' has id 20"),
        ({}, {"added_tokens": {"[E1]": "x"}}, "added tokens cannot be read"),
        ({"added_tokens_decoder": {"20": 3}}, {}, "added tokens cannot be read"),
        ({"tokenizer_class": "BertJapaneseTokenizer"}, {}, "tokenizer_class is BertJapaneseTokenizer"),
        ({}, {"config": {"tokenizer_class": "BertJapaneseTokenizer"}}, "tokenizer_class is BertJapaneseTokenizer"),
        ({"never_split": ["bames"]}, {}, r"never_split is \['bames'\]; only \[\] is supported"),
        ({"do_basic_tokenize": False}, {}, "do_basic_tokenize is False; only True"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    config: dict[str, Any], files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"tokenizer in {tmp_path / 'slow'}: .*{message}"):
        load_tokenizer(slow(tmp_path / "slow", config, **files))


def test_encode_and_fill_mask_read_them(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path, MARKERS)
    model, own, _ = load_bert(folder, pytest.fail)
    ours = load_tokenizer(own)
    ((example, _),) = encode.to_examples([Text("text 1", TEXTS[0], None, None)], ours, 40, False)
    theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert list(example.tokens) == theirs(TEXTS[0]).input_ids
    [[filled]] = fill_mask.fill_masks(model, ours, ["[E1] bame [/E1] [MASK]"], top=22)
    given = theirs("[E1] bame [/E1] [MASK]", return_tensors="pt")
    with torch.no_grad():
        logits = hf_folder.load_transformers(folder)(**given).prediction_logits[0, 4]
    shares = [share for _, share in sorted(filled, key=lambda pair: ours.pieces.index(pair[0]))]
    assert shares == pytest.approx(logits.softmax(-1).tolist(), rel=1e-4)


def test_fine_tuning_learns_from_them_and_exports_them(tmp_path: Path) -> None:
    """The classes differ only in the marker."""
    folder, data = with_tokens(tmp_path, MARKERS), tmp_path / "data"
    data.mkdir()
    for name, count, first in (("train", 64, 0), ("dev", 32, 1000)):
        rows = [f"{mark} {' '.join(w)}\t{n}" for w in sentences(count, first) for n, mark in enumerate(MARKERS)]
        (data / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    words = ["--task", "sentence", "--device", "cpu"]
    words += ["--model", str(folder), "--data", str(data), "--out", str(tmp_path / "out")]
    words += "--max-length 40 --epochs 5 --batches 16 --rates 1e-2 --seeds 1".split()
    [(code, said)] = ranks.finish(ranks.fork(1, "trainer/finetune/__main__.py", *words))
    assert code == 0, said
    made = tmp_path / "out" / "model"
    theirs: Any = AutoTokenizer.from_pretrained(made, local_files_only=True)
    model = BertForSequenceClassification.from_pretrained(made, local_files_only=True).eval()
    assert len(theirs) == model.config.vocab_size == len(PIECES) + 2
    answers = model(**theirs(["[E1] bame", "[/E1] bame"], return_tensors="pt")).logits.argmax(1)
    assert answers.tolist() == [0, 1]


def test_words_that_are_tagged_and_contexts_that_are_searched_hold_them(tmp_path: Path) -> None:
    """Both give the tokenizer's offsets and words a meaning."""
    ours = load_tokenizer(with_tokens(tmp_path, MARKERS)).encoder
    tagged = ours.encode(["[E1]", "bames", "[/E1]"], is_pretokenized=True, add_special_tokens=False)
    assert tagged.word_ids == [0, 1, 1, 2] and tagged.ids == [20, 5, 17, 21]
    context = "bame[E1] Deni"
    found = ours.encode(context, add_special_tokens=False)
    assert [context[low:high] for low, high in found.offsets] == ["bame", "[E1]", "Deni"]


def test_a_tokenizer_smaller_than_its_model_is_reported(tmp_path: Path) -> None:
    """The model was resized, but the tokenizer was not saved with it."""
    folder, reported = with_tokens(tmp_path, MARKERS), list[str]()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    load_tokenizer(tmp_path / "bert").save(folder)
    load_bert(folder, reported.append)
    read_pretrained(folder, None, reported.append)
    assert len(reported) == 2
    for line in reported:
        assert line.startswith(f"warning: {folder} has 20 pieces, but the model in {folder} has 22: ids from 20")
    with pytest.raises(TrainerError, match="has 20 tokens, but the model has 22"):
        weights, model, _ = hf_folder.read_folder(folder)
        hf_folder.write_folder(weights, model, folder, tmp_path / "out")


def test_pretraining_goes_on_only_with_the_same_added_tokens(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path, MARKERS)
    model = replace(TINY, vocab_size=22)
    weights, _, _ = hf_folder.read_folder(folder)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    assert fitting(folder, model, shapes, pytest.fail, folder).keys() == weights.keys()
    plain = tokenizer_folder(tmp_path / "plain")
    with pytest.raises(TrainerError, match=r"token 20 is '\[E1\]' there, absent in the shards"):
        fitting(folder, model, shapes, pytest.fail, plain)


def test_shards_are_not_built_without_them_silently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text, out = with_tokens(tmp_path, MARKERS), tmp_path / "text.txt", tmp_path / "shards"
    text.write_text("[E1] bame [/E1] deni.\nbames deni.\n\n" * 20)
    assert (
        data_prep(
            ["build", "--input", str(text), "--tokenizer", str(folder), "--out", str(out), "--sequence-length", "32"]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "2 token(s) were added to the vocabulary ([E1], [/E1])" in said
    assert not out.exists()
