"""Exports: transformers loads them with nothing missing, equal to the trained model; they are whole or absent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from torch import Tensor
from transformers import AutoTokenizer, BertForPreTraining
from transformers.activations import ACT2FN

from data_prep.tokenizer import load_tokenizer
from kernels.bias_gelu import bias_gelu
from tests.helpers.unnoticed import unnoticed
from trainer.convert import folder as hf_folder
from trainer.convert.hugging_face import class_name, from_hugging_face, missing_heads, to_hugging_face
from trainer.convert.weights import load_bert
from trainer.errors import TrainerError
from trainer.fill_mask import fill_masks
from trainer.fill_mask import main as fill_main
from trainer.model.bert import Bert, ModelConfig

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(65))]
TINY = ModelConfig(layers=1, hidden=16, heads=2, intermediate=40, max_positions=24, vocab_size=len(WORDS))

PRE_LN = replace(TINY, layers=2, layer_norm="before")
BOTH = pytest.mark.parametrize("model", [TINY, PRE_LN], ids=["post-LN", "pre-LN"])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder as ``data_prep`` writes it."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    model = Tokenizer(WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    model.normalizer, model.pre_tokenizer = BertNormalizer(lowercase=False), BertPreTokenizer()
    model.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizerFast", "do_lower_case": False, "model_max_length": 24}
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special))
    return folder


def trained(model: ModelConfig = TINY) -> dict[str, Tensor]:
    """Weights as training leaves them: no bias is zero, no LayerNorm is one."""
    generator = torch.Generator().manual_seed(1)
    weights = Bert(model, seed=2).state_dict()
    return {name: w + 0.2 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def written(tokenizer: Path, model: ModelConfig = TINY) -> Path:
    out = tokenizer.parent / f"export-{model.gelu}"
    hf_folder.write_folder(trained(model), model, tokenizer, out)
    return out


@BOTH
@pytest.mark.parametrize("gelu", ["none", "tanh"])
def test_transformers_logits_are_the_trained_models(model: ModelConfig, gelu: str, tokenizer: Path) -> None:
    model = replace(model, gelu=gelu)
    folder = written(tokenizer, model)
    parity = hf_folder.check(folder, trained(model), model, load_tokenizer(tokenizer))
    assert 0 < max(parity.mlm, parity.nsp) <= hf_folder.LOGIT_TOLERANCE


@pytest.mark.parametrize("gelu", ["none", "tanh"])
def test_the_config_names_the_function_in_fact_used(gelu: str, tokenizer: Path) -> None:
    folder = written(tokenizer, replace(TINY, gelu=gelu))
    named = ACT2FN[json.loads((folder / "config.json").read_text())["hidden_act"]]
    sweep = torch.linspace(-6, 6, 1201)[:, None]
    assert float((named(sweep) - bias_gelu(sweep, torch.zeros(1), gelu)).abs().max()) < 1e-6


HEADS = {  # class: what only its task's training will bring, and what of the export it has no place for
    "BertForPreTraining": ("", ()),
    "BertForMaskedLM": ("", ("bert.pooler.", "cls.seq_relationship.")),
    "BertModel": ("", ("cls.",)),
    "BertForSequenceClassification": ("classifier", ("cls.",)),
    "BertForTokenClassification": ("classifier", ("bert.pooler.", "cls.")),
    "BertForQuestionAnswering": ("qa_outputs", ("bert.pooler.", "cls.")),
    "BertForMultipleChoice": ("classifier", ("cls.",)),
}


@BOTH
@pytest.mark.parametrize("kind", HEADS)
def test_every_class_loads_it_and_only_a_new_head_is_missing(model: ModelConfig, kind: str, tokenizer: Path) -> None:
    folder, weights = written(tokenizer, model), trained(model)
    theirs = getattr(transformers, class_name(kind, model))
    (new, unused), (loaded, info) = HEADS[kind], theirs.from_pretrained(folder, output_loading_info=True)
    assert sorted(info["missing_keys"]) == ([f"{new}.bias", f"{new}.weight"] if new else [])
    written_names = load_file(folder / "model.safetensors").keys()
    assert info["unexpected_keys"] == {name for name in written_names if unused and name.startswith(unused)}
    assert not info["mismatched_keys"]
    encoder = getattr(loaded, "bert", loaded)
    assert torch.equal(encoder.embeddings.word_embeddings.weight, weights["token_table"][: TINY.vocab_size])
    queries = encoder.encoder.layer[0].attention.self.query.weight
    assert torch.equal(queries, weights["layers.0.qkv_weight"][: TINY.hidden])
    if model is PRE_LN:
        first = encoder.encoder.layer[0].attention.ln.weight, encoder.encoder.layer[0].ln.weight
        assert torch.equal(first[0], weights["embedding_norm_weight"])
        assert torch.equal(first[1], weights["layers.0.attention_norm_weight"])
        assert torch.equal(encoder.encoder.ln.bias, weights["layers.1.mlp_norm_bias"])
    if "bert.pooler." not in unused:
        assert torch.equal(encoder.pooler.dense.weight, weights["pooler_weight"])


@BOTH
def test_the_decoder_stays_tied_and_keeps_its_bias_through_a_step_and_another_export(
    model: ModelConfig, tokenizer: Path
) -> None:
    folder, weights = written(tokenizer, model), trained(model)
    for round_ in ("first", "again"):
        theirs: Any = getattr(transformers, class_name("BertForPreTraining", model)).from_pretrained(folder)
        decoder, table = theirs.cls.predictions.decoder, theirs.bert.embeddings.word_embeddings
        assert decoder.weight.data_ptr() == table.weight.data_ptr()
        assert torch.equal(table.weight, weights["token_table"][: TINY.vocab_size])
        assert torch.equal(decoder.bias, weights["decoder_bias"][: TINY.vocab_size]) and decoder.bias.abs().min() > 0
        tokens = torch.tensor([[2, 7, 4, 9, 3]])
        loss = theirs(tokens, labels=tokens, next_sentence_label=torch.tensor([0])).loss
        loss.backward()
        torch.optim.SGD(theirs.parameters(), lr=0.1).step()
        theirs.save_pretrained(tokenizer.parent / round_)
        torch.save(theirs.state_dict(), tokenizer.parent / round_ / "pytorch_model.bin")  # with both names of the table
        weights, read, _ = hf_folder.read_folder(tokenizer.parent / round_)
        assert read == model
        assert not torch.equal(weights["token_table"][7], trained(model)["token_table"][7])
        (tokenizer.parent / round_ / "model.safetensors").unlink()
        pickled, _, _ = hf_folder.read_folder(tokenizer.parent / round_)
        assert all(torch.equal(pickled[name], tensor) for name, tensor in weights.items())
        folder = tokenizer.parent / f"out-{round_}"
        assert hf_folder.write_folder(weights, read, tokenizer, folder, proven=True) is not None


def test_the_file_holds_every_parameter_in_fp32(tokenizer: Path) -> None:
    folder = tokenizer.parent / "half"
    hf_folder.write_folder({name: w.half() for name, w in trained().items()}, TINY, tokenizer, folder)
    tensors = load_file(folder / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    with torch.device("meta"):
        count = sum(p.numel() for p in Bert(replace(TINY, vocab_size=64)).parameters())
    count += (TINY.vocab_size - 64) * (TINY.hidden + 1)
    assert sum(t.numel() for t in tensors.values()) == count
    assert (folder / "model.safetensors").stat().st_size >= 4 * count


@BOTH
def test_what_is_read_back_is_what_was_written(model: ModelConfig, tokenizer: Path) -> None:
    model = replace(model, gelu="tanh")
    weights, read, _ = hf_folder.read_folder(written(tokenizer, model))
    assert read == model
    expected = trained(model)
    for name in ("token_table", "decoder_bias"):
        expected[name][TINY.vocab_size :] = 0
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_the_tokenizer_keeps_its_own_settings(tokenizer: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(written(tokenizer))
    assert loaded.convert_ids_to_tokens(loaded("w3 w64 W3").input_ids)[1:-1] == ["w3", "w64", "[UNK]"]
    assert loaded.model_max_length == 24 and loaded.mask_token_id == 4


@BOTH
def test_masks_are_filled_as_transformers_fills_them(
    model: ModelConfig, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, texts = written(tokenizer, model), ["w1 [MASK] w2 [MASK]", "[MASK]"]
    ours, own, _ = load_bert(folder)
    answers = fill_masks(ours, load_tokenizer(own), texts, top=3)
    theirs = hf_folder.load_transformers(folder, class_name("BertForPreTraining", model))
    reader = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text, masks in zip(texts, answers, strict=True):
        given = reader(text, return_tensors="pt")
        with torch.no_grad():
            logits = theirs(**given).prediction_logits[given["input_ids"] == reader.mask_token_id]
        best = logits.softmax(-1).topk(3)
        assert [[token for token, _ in mask] for mask in masks] == [
            reader.convert_ids_to_tokens(row) for row in best.indices.tolist()
        ]
        assert [share for mask in masks for _, share in mask] == pytest.approx(best.values.flatten().tolist(), rel=1e-4)
    assert fill_main(["--model", str(folder), "--top", "2", *texts]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    for text, said in (("w1", "no [MASK] in 'w1'"), ("[MASK] \udcff", r"'[MASK] \udcff' is not UTF-8 text")):
        assert fill_main(["--model", str(folder), "[MASK]", text]) == 2
        assert capsys.readouterr().err.startswith(f"trainer.fill_mask: error: {said}")
    assert fill_main(["--model", str(folder), "a [MASK] " + "w1 " * 300 + "[MASK]"]) == 2
    shown = "'a [MASK] " + "w1 " * 16 + "…'"
    error = (
        f"trainer.fill_mask: error: 1 of 2 [MASK] are beyond the model's limit of 24 tokens in {shown}: shorten it\n"
    )
    assert capsys.readouterr() == ("", error)


def test_a_folder_that_is_not_the_trained_model_fails_the_check(tokenizer: Path) -> None:
    folder, weights = written(tokenizer), trained()
    weights["layers.0.mlp_in_bias"][3] += 0.01
    with pytest.raises(TrainerError, match="logits differ"):
        hf_folder.check(folder, weights, TINY, load_tokenizer(tokenizer))


def tokenizer_of(folder: Path, pieces: list[str]) -> Path:
    """A folder as ``data_prep`` writes it."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    load_tokenizer(folder).save(folder)
    return folder


@pytest.mark.parametrize("place", [1, 12, 69])
def test_the_padding_token_is_the_tokenizers_wherever_it_stands(place: int, tmp_path: Path) -> None:
    pieces = WORDS[1:]
    pieces.insert(place, "[PAD]")
    folder, weights = tmp_path / "out", trained()
    hf_folder.write_folder(weights, TINY, tokenizer_of(tmp_path / "own", pieces), folder, proven=True)
    theirs = BertForPreTraining.from_pretrained(folder)
    tokens = torch.arange(TINY.vocab_size).view(-1, 10)
    theirs(tokens).seq_relationship_logits.sum().backward()
    gradient = theirs.bert.embeddings.word_embeddings.weight.grad
    assert isinstance(gradient, Tensor) and gradient.abs().sum(1).eq(0).nonzero().tolist() == [[place]]


@BOTH
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_the_proof_notices_a_wrong_value_of_every_field(model: ModelConfig, name: str, tokenizer: Path) -> None:
    folder, own = written(tokenizer, model), load_tokenizer(tokenizer)
    assert unnoticed(folder / name, lambda: hf_folder.check(folder, trained(model), model, own)) == []


# ---- refusals -------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_an_empty_one_is_not(tokenizer: Path) -> None:
    out = tokenizer.parent / "out"
    out.mkdir()
    hf_folder.write_folder(trained(), TINY, tokenizer, out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(TrainerError, match="already exists"):
        hf_folder.write_folder(trained(), TINY, tokenizer, out)
    assert (out / "model.safetensors").read_bytes() == before


def test_what_a_killed_export_left_is_no_hindrance(tokenizer: Path) -> None:
    left = tokenizer.parent / ".export-none.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half of it")
    hf_folder.read_folder(written(tokenizer))
    assert not left.exists()


def test_an_export_that_fails_leaves_nothing(tokenizer: Path) -> None:
    def fail(folder: Path) -> None:
        raise TrainerError(f"{len(list(folder.iterdir()))} files")

    before, out = sorted(tokenizer.parent.iterdir()), tokenizer.parent / "failed"
    with pytest.raises(TrainerError, match="5 files"):
        hf_folder.write_folder(trained(), TINY, tokenizer, out, finish=fail)
    assert sorted(tokenizer.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooler_bias": torch.empty(0)}, "pooler_bias is empty"),
        ({"nsp_weight": torch.zeros(3, 16)}, r"nsp_weight is \(3, 16\); the model's is \(2, 16\)"),
        ({"module.nsp_weight": torch.zeros(2, 16)}, "unknown tensors, module.nsp_weight first"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str, tokenizer: Path) -> None:
    out = tokenizer.parent / "out"
    with pytest.raises(TrainerError, match=message):
        hf_folder.write_folder(trained() | change, TINY, tokenizer, out)
    assert not out.exists()
    weights = trained()
    del weights["mlm_bias"]
    with pytest.raises(TrainerError, match="lack 1 tensors, mlm_bias"):
        to_hugging_face(weights, TINY)


def test_another_tokenizer_is_refused(tokenizer: Path) -> None:
    model = replace(TINY, vocab_size=71)
    with pytest.raises(TrainerError, match="has 70 tokens, but the model has 71"):
        hf_folder.write_folder(trained(model), model, tokenizer, tokenizer.parent / "out")
    (tokenizer / "tokenizer.json").unlink()
    with pytest.raises(TrainerError, match="lacks tokenizer.json"):
        written(tokenizer)


# ---- imports --------------------------------------------------------------------------------------------


def test_old_names_and_saved_positions_are_understood() -> None:
    tensors = to_hugging_face(trained(), TINY)
    old = {}
    for name, tensor in tensors.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[name] = tensor
    old["bert.embeddings.position_ids"] = torch.arange(24)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    weights = from_hugging_face(old, TINY)
    assert torch.equal(weights["layers.0.mlp_norm_weight"], trained()["layers.0.mlp_norm_weight"])


def test_a_model_without_heads_is_imported_and_said() -> None:
    tensors = to_hugging_face(trained(), TINY)
    encoder = {name: tensor for name, tensor in tensors.items() if name.startswith("bert.e")}
    bare = {name.removeprefix("bert."): tensor for name, tensor in encoder.items()}
    weights = from_hugging_face(bare, TINY)
    assert missing_heads(weights, TINY) == ["pooler", "MLM head", "NSP head"]
    assert torch.equal(weights["layers.0.qkv_weight"], trained()["layers.0.qkv_weight"])


def test_foreign_tensors_are_refused() -> None:
    tensors = to_hugging_face(trained(), TINY)
    with pytest.raises(TrainerError, match="no tensor bert.embeddings.word_embeddings.weight"):
        from_hugging_face({f"module.{name}": tensor for name, tensor in tensors.items()}, TINY)
    with pytest.raises(TrainerError, match="ties the two"):
        from_hugging_face(tensors | {"cls.predictions.decoder.weight": torch.zeros(70, 16)}, TINY)
    with pytest.raises(TrainerError, match=r"\(70, 16\), but the model's is \(192, 16\)"):
        from_hugging_face(tensors, replace(TINY, vocab_size=150))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "'roberta'; Lambert supports only bert, megatron-bert"),
        ({"model_type": ["bert"]}, "'bert'"),
        ({"model_type": "megatron-bert"}, "no tensor bert.encoder.layer.0.attention.ln.weight"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"position_embedding_type": "relative_key"}, "'relative_key'"),
        ({"num_attention_heads": 3}, "must be a multiple of heads, 3"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "16"}, "hidden_size is '16'; it must be a whole number"),
        ({"vocab_size": 150.0}, "vocab_size is 150.0; it must be a whole number"),
        ({"layer_norm_eps": []}, r"layer_norm_eps is \[\]; it must be a number"),
    ],
)
def test_a_model_that_lambert_cannot_compute_is_refused(
    change: dict[str, object], message: str, tokenizer: Path
) -> None:
    folder = written(tokenizer)
    config = json.loads((folder / "config.json").read_text()) | change
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrainerError, match=message):
        hf_folder.read_folder(folder)


def test_damaged_and_missing_files_are_one_line(tokenizer: Path) -> None:
    folder = written(tokenizer)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(TrainerError, match=r"model.safetensors cannot be read: [^\n]*$"):
        hf_folder.read_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(TrainerError, match="neither model.safetensors nor pytorch_model.bin"):
        hf_folder.read_folder(folder)
    for content in (weights, b"", [torch.zeros(2)], {"step": 1}):
        if isinstance(content, bytes):
            (folder / "pytorch_model.bin").write_bytes(content)
        else:
            torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(TrainerError, match=r"pytorch_model.bin cannot be read: (not a plain|it contains) [^\n]*$"):
            hf_folder.read_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(TrainerError, match="is not a JSON object"):
        hf_folder.read_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(TrainerError, match="config.json cannot be read: .*; download or export it again"):
        hf_folder.read_folder(folder)


def test_a_pickled_state_dict_is_read_without_running_code(tokenizer: Path) -> None:
    folder = written(tokenizer)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    expected, _, _ = hf_folder.read_folder(folder)
    (folder / "model.safetensors").unlink()
    weights, _, _ = hf_folder.read_folder(folder)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_the_tokenizer_stops_where_the_models_positions_end(tokenizer: Path) -> None:
    """A longer text is cut, not an index error inside the model."""
    folder = written(tokenizer)
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert loaded.model_max_length == TINY.max_positions
    model, own, _ = load_bert(folder)
    assert fill_masks(model, load_tokenizer(own), ["[MASK] " + "w1 " * 1000], top=1)
    [[_, _]] = fill_masks(
        model, load_tokenizer(own), ["[MASK] " + "w1 " * 20 + "[MASK]"], top=1
    )  # 24 with [CLS], [SEP]
    with pytest.raises(TrainerError, match=r"1 of 2 \[MASK\] are beyond the model's limit of 24 tokens"):
        fill_masks(model, load_tokenizer(own), ["[MASK] " + "w1 " * 21 + "[MASK]"])
