"""BERT (Devlin et al., 2019) over unpadded micro-batches: embeddings, post-LN encoder, MLM and NSP heads.

One row of T tokens goes through the whole model; sequences meet only in attention, which keeps them
apart. The MLM head sees the P masked positions only, the pooler the first token of each sequence.

A module holds the parameters that its own ``forward`` uses, and no smaller modules for them: ZeRO-3
gathers and frees a whole layer at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_prep.tokenizer import MOST_PIECES
from kernels.attention import attention
from kernels.bias_gelu import APPROXIMATIONS, bias_gelu
from kernels.cross_entropy import cross_entropy
from kernels.embedding import embed
from kernels.layer_norm import dropout_add_layer_norm, layer_norm
from trainer.bounds import ABOVE_0, outside
from trainer.model.batch import IGNORED, GlobalCounts, MicroBatch, Rows

MOST_PARAMETERS = 10**11  # a training state of more than a terabyte
VOCAB_MULTIPLE = 64  # table rows are padded to it: matrix products want it, exports cut it off

Judge = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

# Dropout sites: the embeddings' is 0, layer i's are from SITES * (i + 1) on.
SITES = 4
ATTENTION, ATTENTION_OUT, MLP_OUT = 0, 1, 2


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape and its regularisation. BERT-Base by default."""

    layers: int = 12  # encoder layers
    hidden: int = 768  # width of the hidden states; a multiple of heads
    heads: int = 12  # attention heads
    intermediate: int = 3072  # width of each layer's perceptron
    max_positions: int = 512  # longest sequence, in tokens
    vocab_size: int = 30522  # entries of the shards' vocabulary
    segments: int = 2  # segment ids; a pair needs two
    dropout: float = 0.1  # of the embeddings and of what each sublayer adds
    attention_dropout: float = 0.1  # of the attention weights
    layer_norm_eps: float = 1e-12  # added to the variance in LayerNorm
    gelu: str = "none"  # "none" is the exact function, "tanh" its approximation
    initializer_range: float = 0.02  # standard deviation of the initial weights
    # where the MLM decoder's bias starts: zero, or the log of the unigram distribution of the first phase's shards
    decoder_prior: Literal["zero", "unigram"] = "zero"

    @property
    def vocab_rows(self) -> int:
        """Rows of the token table: the vocabulary and its padding."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def problems(self) -> list[str]:
        """All that is wrong with the configuration, a line each."""
        found = outside(
            self,
            layers=(1, 1000),
            hidden=(1, 2**16),
            heads=(1, 2**16),
            intermediate=(1, 2**18),
            max_positions=(1, 2**16),
            vocab_size=(1, MOST_PIECES),
            segments=(1, 1000),
            dropout=(0, 0.99),
            attention_dropout=(0, 0.99),
            layer_norm_eps=(1e-30, 1),  # in fp32, less is 0
            initializer_range=(ABOVE_0, 10),
        )
        size = self.layers * self.hidden * (4 * self.hidden + 2 * self.intermediate) + self.vocab_rows * self.hidden
        if not found and size > MOST_PARAMETERS:
            said = f"come to {size:,} parameters: must be {MOST_PARAMETERS:,} or fewer"
            found.append(f"layers, hidden, intermediate, vocab_size {said}")
        if self.segments == 1:
            found.append("segments is 1; a pair has two, so it must be at least 2")
        if self.heads > 0 and self.hidden % self.heads:
            found.append(f"hidden is {self.hidden}; it must be a multiple of heads, {self.heads}")
        if self.gelu not in APPROXIMATIONS:
            found.append(f"gelu is {self.gelu!r}; it must be one of {', '.join(APPROXIMATIONS)}")
        return found


class Output(NamedTuple):
    """Sums over one micro-batch, never means: the global batch's counts divide them.

    A tuple, because DeepSpeed hooks the tensors that it finds in tuples.
    """

    mlm_loss: Tensor  # () fp32, summed over the labelled masked positions
    nsp_loss: Tensor  # () fp32, summed over the labelled pairs
    mlm_correct: Tensor  # () int64
    nsp_correct: Tensor  # () int64

    def mean(self, counts: GlobalCounts) -> Tensor:
        """() fp32: this micro-batch's part of the global batch's loss."""
        return self.mlm_loss / max(counts.targets, 1) + self.nsp_loss / max(counts.pairs, 1)


class Layer(nn.Module):
    """One encoder layer: self-attention and a two-layer perceptron, each dropped, added and normalised."""

    def __init__(self, model: ModelConfig, number: int) -> None:
        super().__init__()
        self.model = model
        self.site = SITES * (number + 1)
        hidden, intermediate = model.hidden, model.intermediate
        self.qkv_weight = parameter(3 * hidden, hidden)
        self.qkv_bias = parameter(3 * hidden)
        self.attention_out_weight = parameter(hidden, hidden)
        self.attention_out_bias = parameter(hidden)
        self.attention_norm_weight = parameter(hidden)
        self.attention_norm_bias = parameter(hidden)
        self.mlp_in_weight = parameter(intermediate, hidden)
        self.mlp_in_bias = parameter(intermediate)
        self.mlp_out_weight = parameter(hidden, intermediate)
        self.mlp_out_bias = parameter(hidden)
        self.mlp_norm_weight = parameter(hidden)
        self.mlp_norm_bias = parameter(hidden)

    def forward(self, x: Tensor, residual: Tensor, batch: Rows, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """``x`` and ``residual`` are one (T, D), apart so that their gradients are; so are the two results.

        ``keys`` (T, 2) int32 or None.
        """
        model, site = self.model, self.site
        add = partial(dropout_add_layer_norm, eps=model.layer_norm_eps, dropout_p=model.dropout, keys=keys)
        qkv = F.linear(x, self.qkv_weight, self.qkv_bias)  # (T, 3D)
        qkv = qkv.view(-1, 3, model.heads, model.hidden // model.heads)  # (T, 3, N, H)
        mixed = attention(
            qkv,
            batch.cu_seqlens,
            batch.max_seqlen,
            dropout_p=model.attention_dropout,
            keys=keys,
            site=site + ATTENTION,
        )  # (T, N, H)
        y = F.linear(mixed.flatten(1), self.attention_out_weight)  # (T, D)
        norm = self.attention_norm_weight, self.attention_norm_bias
        x, residual = add(y, residual, *norm, x_bias=self.attention_out_bias, site=site + ATTENTION_OUT)
        y = bias_gelu(F.linear(x, self.mlp_in_weight), self.mlp_in_bias, model.gelu)  # (T, F)
        y = F.linear(y, self.mlp_out_weight)  # (T, D)
        norm = self.mlp_norm_weight, self.mlp_norm_bias
        return add(y, residual, *norm, x_bias=self.mlp_out_bias, site=site + MLP_OUT)


class Encoder(nn.Module):
    """Embeddings and layers. A model adds its heads' parameters, then calls ``initialise``."""

    def __init__(self, model: ModelConfig) -> None:
        """Parameters are not set. ValueError for an unsound configuration."""
        super().__init__()
        if problems := model.problems():
            raise ValueError("; ".join(problems))
        self.model = model
        hidden = model.hidden
        self.token_table = parameter(model.vocab_rows, hidden)
        self.segment_table = parameter(model.segments, hidden)
        self.position_table = parameter(model.max_positions, hidden)
        self.embedding_norm_weight = parameter(hidden)
        self.embedding_norm_bias = parameter(hidden)
        self.layers = nn.ModuleList(Layer(model, number) for number in range(model.layers))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal weights and tables (``initializer_range``), zero biases, LayerNorm weights of one.

        Each parameter has a generator of its own, seeded by (seed, name): its values do not depend on
        which other parameters there are.
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if name.endswith("_bias"):
                parameter.zero_()
            elif name.endswith("_norm_weight"):
                parameter.fill_(1.0)
            else:
                digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
                generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
                values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                parameter.copy_(values.normal_(0.0, self.model.initializer_range, generator=generator))

    def encode(self, batch: Rows, keys: Tensor | None = None) -> Tensor:
        """The last layer's output (T, D). ValueError for a sequence longer than the position table."""
        model = self.model
        if batch.max_seqlen > model.max_positions:
            seen = f"max_seqlen is {batch.max_seqlen}"
            raise ValueError(f"{seen}; the model has {model.max_positions} positions")
        x = residual = embed(
            batch.tokens,
            batch.segments,
            batch.positions,
            self.token_table,
            self.segment_table,
            self.position_table,
            self.embedding_norm_weight,
            self.embedding_norm_bias,
            model.layer_norm_eps,
            dropout_p=model.dropout,
            keys=keys,
        )  # (T, D)
        for layer in self.layers:
            x, residual = layer(x, residual, batch, keys)
        return x


class Bert(Encoder):
    """BERT with both pre-training heads; the MLM decoder is the token table itself."""

    def __init__(self, model: ModelConfig, seed: int = 0, fillers: int = 0) -> None:
        """Parameters start as ``initialise(seed)`` leaves them, rows of no token as zeros.

        ``fillers``: pieces at the vocabulary's end that only fill it up; they are never predicted. ValueError for an
        unsound configuration.
        """
        super().__init__(model)
        self.predicted = model.vocab_size - fillers  # ids from 0 on that the MLM head chooses among
        hidden = model.hidden
        self.pooler_weight = parameter(hidden, hidden)
        self.pooler_bias = parameter(hidden)
        self.mlm_weight = parameter(hidden, hidden)
        self.mlm_bias = parameter(hidden)
        self.mlm_norm_weight = parameter(hidden)
        self.mlm_norm_bias = parameter(hidden)
        self.decoder_bias = parameter(model.vocab_rows)
        self.nsp_weight = parameter(2, hidden)
        self.nsp_bias = parameter(2)
        self.initialise(seed)
        if not self.token_table.is_meta:
            with torch.no_grad():  # else LAMB's trust ratio of the table would depend on its padding
                self.token_table[self.predicted :] = 0

    @torch.no_grad()
    def set_decoder_prior(self, counts: Tensor) -> None:
        """Start the MLM decoder's bias at :func:`log_unigrams` of ``counts`` (V,) int64, without fillers.

        From zero the bias moves by at most the sum of the learning rates, far less than the range of log frequencies.
        Word frequencies are then learned as one hidden vector that all tokens share, which flattens the encoder.
        """
        self.decoder_bias[: self.predicted] = log_unigrams(counts[: self.predicted]).to(self.decoder_bias)

    def forward(self, batch: MicroBatch, keys: Tensor | None = None, judge: Judge | None = None) -> Any:
        """The losses of a micro-batch, ``Output``; ``keys`` (T, 2) int32 switch dropout on, None is evaluation.

        ``judge`` makes something else of the logits, MLM's (P, V with padding) and NSP's (B, 2): in here, so that what
        is hooked to a call of the model is done.
        """
        mlm_logits, nsp_logits = self._heads(self.encode(batch, keys), batch)
        if judge is not None:
            return judge(mlm_logits, nsp_logits)
        mlm_loss, mlm_correct = cross_entropy(mlm_logits, batch.labels, self.predicted)
        nsp_loss, nsp_correct = cross_entropy(nsp_logits, nsp_classes(batch))
        return Output(mlm_loss, nsp_loss, mlm_correct, nsp_correct)

    def logits(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """MLM logits (P, predicted), without fillers and padding, and NSP logits (B, 2); no dropout."""
        mlm_logits, nsp_logits = self._heads(self.encode(batch, None), batch)
        return mlm_logits[:, : self.predicted], nsp_logits

    def _heads(self, x: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(T, D) -> MLM logits (P, V with padding), NSP logits (B, 2)."""
        y = F.linear(x.index_select(0, batch.masked), self.mlm_weight)  # (P, D)
        y = bias_gelu(y, self.mlm_bias, self.model.gelu)
        y = layer_norm(y, self.mlm_norm_weight, self.mlm_norm_bias, self.model.layer_norm_eps)
        mlm_logits = F.linear(y, self.token_table, self.decoder_bias)  # (P, V)
        pooled = pool(x, batch, self.pooler_weight, self.pooler_bias)  # (B, D)
        return mlm_logits, F.linear(pooled, self.nsp_weight, self.nsp_bias)  # (P, V), (B, 2)


def log_unigrams(counts: Tensor) -> Tensor:
    """The log of the unigram distribution (V,) fp64, from ``counts`` (V,) int64 with one added to each."""
    smoothed = counts.double() + 1
    return (smoothed / smoothed.sum()).log()


def nsp_classes(batch: MicroBatch) -> Tensor:
    """NSP's targets (B,): class 0 is "B follows A", as in the published checkpoints; IGNORED where there is no B."""
    return torch.where(batch.is_next == IGNORED, IGNORED, 1 - batch.is_next)


def pool(x: Tensor, batch: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """BERT's pooled output (B, D): a layer with tanh over each sequence's first token, of ``x`` (T, D)."""
    return torch.tanh(F.linear(x.index_select(0, batch.cu_seqlens[:-1]), weight, bias))


def parameter(*shape: int) -> nn.Parameter:
    """A parameter whose values ``Encoder.initialise`` sets by its name."""
    return nn.Parameter(torch.empty(*shape))
