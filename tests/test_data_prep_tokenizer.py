"""The vocabulary is a function of its text, fits `transformers`, and keeps control tokens out of the text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.errors import DataError
from data_prep.tokenizer import SPECIALS, WORDPIECE_MODEL, load_tokenizer
from data_prep.vocab import learn_tokenizer, train_tokenizer
from tests.helpers.corpora import SPECIAL_IDS, contents, write_tokenizer

ROOT = Path(__file__).parent.parent
TEXT = ["The cat sat on the mat, the fat cat!", "I like playing soccer", "我喜欢踢足球", "Ça déjà vu — 9"] * 5


def test_vocabulary_is_the_same_for_any_hash_seed_and_threads(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(f"{line} {word}" for line in TEXT for word in dir(str)), "utf-8")
    command = [sys.executable, "-m", "data_prep", "vocab", "--input", str(corpus), "--size", "300", "--out"]
    made = []
    for turn in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": turn, "RAYON_NUM_THREADS": turn}
        subprocess.run([*command, str(tmp_path / turn)], cwd=ROOT, env=env, check=True, capture_output=True)
        made.append(contents(tmp_path / turn))
    assert made[0] == made[1]
    assert len(made[0]["vocab.txt"].splitlines()) == 300


def test_chinese_characters_are_one_piece_each() -> None:
    tokenizer = train_tokenizer(TEXT, 200, cased=False)
    english, chinese = tokenizer.encode(["I like playing soccer", "我喜欢踢足球"])
    assert [tokenizer.pieces[id] for id in chinese] == list("我喜欢踢足球")
    assert "".join(tokenizer.pieces[id].removeprefix("##") for id in english) == "ilikeplayingsoccer"


@pytest.mark.parametrize("cased", [False, True])
def test_control_tokens_in_the_text_stay_text(tmp_path: Path, cased: bool) -> None:
    text = [*TEXT, *SPECIALS, "mask cls pad sep MASK CLS [ ]"]
    train_tokenizer(text, 200, cased).save(tmp_path / "t")
    for ids in load_tokenizer(tmp_path / "t").encode([f"The {name} cat {name}" for name in SPECIALS]):
        assert ids and not SPECIAL_IDS.intersection(ids)


@pytest.mark.parametrize("cased", [False, True])
def test_transformers_loads_the_same_tokenizer(tmp_path: Path, cased: bool) -> None:
    transformers = pytest.importorskip("transformers")
    train_tokenizer(TEXT, 150, cased).save(tmp_path)
    ours = load_tokenizer(tmp_path)
    for cls in (transformers.AutoTokenizer, transformers.BertTokenizerFast):
        theirs = cls.from_pretrained(tmp_path)
        assert theirs.model_max_length == 512 and theirs.mask_token_id == 4 and len(theirs) == ours.vocab_size
        for text, ids in zip(TEXT, ours.encode(TEXT), strict=True):
            assert theirs(text)["input_ids"] == [2, *ids, 3]
        a, b = ours.encode(["The cat", "the mat"])
        pair = theirs("The cat", "the mat")
        assert pair["input_ids"] == [2, *a, 3, *b, 3]
        assert pair["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)


def test_casing_comes_from_tokenizer_json(tmp_path: Path) -> None:
    train_tokenizer(TEXT, 150, cased=True).save(tmp_path / "cased")
    (tmp_path / "cased" / "tokenizer_config.json").unlink()
    whole = tmp_path / "cased" / "tokenizer.json"
    parts = json.loads(whole.read_text())
    del parts["model"]["type"]  # as the first published BERTs have it
    whole.write_text(json.dumps(parts))
    load_tokenizer(tmp_path / "cased").save(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())["do_lower_case"] is False


def test_saving_keeps_ids_settings_and_hash(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "google", ["cat", "Cat"])
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false, "model_max_length": 128}')
    loaded = load_tokenizer(folder)
    loaded.save(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy")
    assert list(again.encode(["Cat cat"])) == [[6, 5]]
    assert (again.settings, again.sha256()) == (loaded.settings, loaded.sha256())
    swapped = load_tokenizer(write_tokenizer(tmp_path / "swapped", ["Cat", "cat"]))
    assert swapped.sha256() != loaded.sha256()


def test_a_published_tokenizer_is_used_as_it_is_until_a_build_adds_its_cleaning(tmp_path: Path) -> None:
    published = load_tokenizer(write_tokenizer(tmp_path / "google", ["glad", "world", "d"]))
    assert published.sha256() == "3726baf3bd04aa560ede1a6e5e6a32c0ee489ec18d3f2fc6eb34838f9bbcdaf0"
    assert list(published.encode(["glad\u200bworld d😊"])) == [[1, 1]]
    ours = published.with_cleaning()
    ours.save(tmp_path / "ours")
    again = load_tokenizer(tmp_path / "ours")
    assert list(again.encode(["glad\u200bworld d😊"])) == [[5, 6, 7, 1]]
    assert again.sha256() == ours.sha256() == again.with_cleaning().sha256() != published.sha256()
    assert again.settings == ours.settings


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "does not exist"),
        ({}, "holds neither tokenizer.json nor vocab.txt"),
        ({"vocab.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\ncat\n"}, "lacks [MASK]"),
        ({"vocab.txt": "\n".join([*SPECIALS, "a", "a"]).encode()}, "repeated"),
        ({"vocab.txt": b"[PAD]\n\xd7\n"}, "not UTF-8"),
        ({"tokenizer.json": b"{}"}, "is not a tokenizer"),
        ({"tokenizer.json": b'{"model": 1}'}, "is not a tokenizer"),
        (
            {"tokenizer.json": b'{"model": ' + json.dumps(WORDPIECE_MODEL).encode() + b"}"},
            "type BertNormalizer, BERT's own, found None",
        ),
        (
            {"tokenizer.json": json.dumps({"model": WORDPIECE_MODEL, "normalizer": {"type": "Sequence"}}).encode()},
            "type BertNormalizer, BERT's own, found Sequence",
        ),
        (
            {"tokenizer.json": json.dumps({"model": WORDPIECE_MODEL, "normalizer": []}).encode()},
            "type BertNormalizer, BERT's own, found None",
        ),
        (
            {"tokenizer.json": json.dumps({"model": WORDPIECE_MODEL | {"unk_token": "<unk>"}}).encode()},
            "unk_token [UNK], found <unk>",
        ),
        ({"vocab.txt": b"[PAD]", "tokenizer_config.json": b'{"do_lower_case": "yes"}'}, "a wrong setting"),
        ({"tokenizer.json": b'{"model": {"type": "BPE", "continuing_subword_prefix": null}}'}, "WordPiece"),
        ({"vocab.txt": b"", "tokenizer_config.json": b"["}, "not JSON"),
        ({"tokenizer.json": bytes(range(255, 0, -1))}, "tokenizer.json: not JSON"),
        (
            {"tokenizer.json": json.dumps({"model": WORDPIECE_MODEL, "normalizer": "BertNormalizer"}).encode()},
            "wanted a normalizer of type BertNormalizer",
        ),
        (
            {
                "tokenizer.json": json.dumps(
                    {"model": WORDPIECE_MODEL | {"vocab": [1]}, "normalizer": {"type": "BertNormalizer"}}
                    | {"pre_tokenizer": {"type": "BertPreTokenizer"}}
                ).encode()
            },
            "is not a tokenizer of the `tokenizers` library",
        ),
        ({"vocab.txt": b"", "tokenizer_config.json": b"[" * 100_000}, "not JSON (nested more than 64 levels deep)"),
        ({"tokenizer.json": b'{"model": ' * 100_000}, "not JSON (nested more than 64 levels deep)"),
        ({"tokenizer.json": b'{"model": ' + b"9" * 5000 + b"}"}, "not JSON"),
        (
            {"tokenizer.json": json.dumps({"model": WORDPIECE_MODEL, "normalizer": [1]}).encode()},
            "wanted a normalizer of type BertNormalizer, BERT's own, found None",
        ),
        (
            {"tokenizer.json": json.dumps({"model": WORDPIECE_MODEL | {"type": "x" * 10_000}}).encode()},
            "wanted a model of type WordPiece, found xxxx",
        ),
    ],
)
def test_bad_folders_are_refused(tmp_path: Path, files: dict[str, bytes] | None, message: str) -> None:
    folder = tmp_path / "t"
    for name, content in ({} if files is None else files).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    if files == {}:
        folder.mkdir()
    with pytest.raises(DataError) as error:
        load_tokenizer(folder)
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("number", [-1, 10**30, 2**31, True, 0.5])
def test_ids_that_cannot_be_are_refused(tmp_path: Path, number: float) -> None:
    write_tokenizer(tmp_path / "made", ["cat"])
    load_tokenizer(tmp_path / "made").save(tmp_path / "saved")
    path = tmp_path / "saved" / "tokenizer.json"
    parts = json.loads(path.read_text())
    parts["model"]["vocab"]["cat"] = number
    path.write_text(json.dumps(parts))
    with pytest.raises(DataError):
        load_tokenizer(tmp_path / "saved")


def test_a_size_below_the_alphabet_is_refused() -> None:
    with pytest.raises(DataError, match="--size 10 is too small"):
        train_tokenizer(TEXT, 10, cased=False)


def frequent_first(count: int, first: int) -> list[str]:
    """A text of ``count`` different characters, two a word; the k-th about 20,000 / k times, as in a language."""
    return [f"{chr(first + k) * 2} " * (10_000 // (k + 1) + 1) for k in range(count)]


CHINESE, KOREAN = 0x4E00, 0xAC00  # in Korean a character that goes on in a word takes a second piece


@pytest.mark.parametrize("first", [CHINESE, KOREAN])
def test_every_character_has_a_piece_if_the_size_allows(first: int) -> None:
    text = frequent_first(3000, first)
    learnt = learn_tokenizer(text, 12_000, cased=True)
    assert {chr(first + k) for k in range(3000)} <= set(learnt.tokenizer.pieces)
    assert (learnt.left_out, learnt.share, learnt.limit) == (0, 0.0, None)
    assert not any(1 in ids for ids in learnt.tokenizer.encode(text))


def test_the_size_bounds_the_characters_and_the_rarest_are_left_out() -> None:
    text = frequent_first(3000, CHINESE)
    learnt = learn_tokenizer(text, 2005, cased=False)
    assert set(learnt.tokenizer.pieces) == {*SPECIALS, *(chr(CHINESE + k) for k in range(2000))}
    assert learnt.left_out == 1000 and learnt.limit == "--size"
    assert learnt.share == sum(map(len, text[2000:])) / sum(map(len, text))


def test_rare_characters_do_not_displace_the_pieces_of_words() -> None:
    words = {f"{a}{b}{c}" for a in "bdfglmn" for b in "aeiou" for c in "prstvz"}
    text = [" ".join(sorted(words))] * 2000 + ["".join(chr(CHINESE + k) for k in range(1800))]
    learnt = learn_tokenizer(text, 1600, cased=False, coverage=0.99)  # which 18 letters cover: 1,000 are learnt
    assert words <= set(learnt.tokenizer.pieces) and learnt.tokenizer.vocab_size == 1600
    assert 300 < learnt.left_out < 800 and learnt.limit == "--character-coverage"
    greedy = learn_tokenizer(text, 1600, cased=False, coverage=1)
    assert not words <= set(greedy.tokenizer.pieces) and greedy.left_out < learnt.left_out
    assert greedy.limit == "--size"


def test_vocab_says_what_limited_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(frequent_first(3000, CHINESE)), "utf-8")
    command = ["vocab", "--input", str(text), "--out"]
    assert main([*command, str(tmp_path / "all"), "--size", "5000"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'all'}: 3,005 pieces, fewer than 5,000: the text has no more\n"
    assert main([*command, str(tmp_path / "some"), "--size", "2005"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path / 'some'}: 2,005 pieces; 1,000 rare characters (")
    assert said.endswith("% of the text) have none and become [UNK]: a larger --size takes more\n")
