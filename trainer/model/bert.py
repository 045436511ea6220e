"""BERT (Devlin et al., 2019) over unpadded micro-batches: embeddings, encoder, MLM and NSP heads.

One row of T tokens goes through the whole model. Only attention looks across tokens, and it keeps sequences separate.
The MLM head sees only the P masked positions, and the pooler only the first token of each sequence.

A sum is the embeddings or a sublayer's output added to the residual. With ``layer_norm: after`` (post-LN), the next
sublayer gets LayerNorm(sum), and adds its output to that. With ``before`` (pre-LN; Xiong et al., "On Layer
Normalization in the Transformer Architecture", 2020, figure 1), it adds its output to the sum itself, and the last sum
is normalized as well. So both have the same parameters and the same kernels, but a checkpoint of one is no model of the
other. A pre-LN sum is rounded to the model's dtype after each sublayer, by at most 2^-11 of its value in fp16 and 2^-8
in bf16. These errors add up over the 2 * layers sublayers, and nothing bounds the sum itself: fp16 ends at 65,504.

A module owns the parameters that its ``forward`` uses directly, without submodules, so that ZeRO-3 gathers and frees a
whole layer at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_prep.json_text import shown
from data_prep.tokenizer import MOST_PIECES
from kernels.attention import attention
from kernels.bias_gelu import APPROXIMATIONS, bias_gelu
from kernels.cross_entropy import cross_entropy
from kernels.embedding import embed, embed_sum
from kernels.layer_norm import dropout_add_layer_norm, layer_norm
from trainer.bounds import ABOVE_0, outside
from trainer.model.batch import IGNORED, GlobalCounts, MicroBatch, Rows
from trainer.model.checkpointing import Checkpointing, forgetting, recomputed
from trainer.model.variance import token_moments

MOST_PARAMETERS = 10**11  # their training state takes more than a terabyte
VOCAB_MULTIPLE = 64  # table rows are padded to a multiple of this for fast matrix products; exports drop the padding

Judge = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

# Dropout sites: 0 for the embeddings; those of layer i start at SITES * (i + 1).
SITES = 4
ATTENTION, ATTENTION_OUT, MLP_OUT = 0, 1, 2


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape and regularization. The default is BERT-Base."""

    layers: int = 12  # encoder layers
    hidden: int = 768  # width of the hidden states; a multiple of heads
    heads: int = 12  # attention heads
    intermediate: int = 3072  # width of each layer's MLP
    max_positions: int = 512  # longest sequence, in tokens
    vocab_size: int = 30522  # size of the shards' vocabulary
    segments: int = 2  # segment ids; a pair needs two
    dropout: float = 0.1  # dropout of the embeddings and of each sublayer's output
    attention_dropout: float = 0.1  # dropout of the attention weights
    layer_norm_eps: float = 1e-12  # added to the variance in LayerNorm
    # after: a sublayer normalizes the sum of its output and the residual (post-LN, BERT);
    # before: it normalizes its input (pre-LN, exported as MegatronBert)
    layer_norm: Literal["after", "before"] = "after"
    gelu: str = "none"  # none: the exact GELU; tanh: its approximation
    initializer_range: float = 0.02  # standard deviation of the initial weights
    # initial bias of the MLM decoder; unigram: the log of each token's frequency in the first phase's shards, so that
    # the encoder need not learn frequencies; zero: as in the original BERT. A run that resumes, or starts from
    # run.weights, keeps the bias it has
    decoder_prior: Literal["unigram", "zero"] = "unigram"

    @property
    def vocab_rows(self) -> int:
        """The number of rows in the token table: the vocabulary plus padding."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def problems(self) -> list[str]:
        """Every invalid setting, with what to change."""
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
            layer_norm_eps=(1e-30, 1),  # anything smaller is 0 in fp32
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
            found.append(f"gelu is {shown(self.gelu)}; it must be one of {', '.join(APPROXIMATIONS)}")
        return found


class Output(NamedTuple):
    """Sums over one micro-batch, to be divided by the counts of the global batch.

    It is a tuple because DeepSpeed hooks the tensors that it finds in tuples.
    """

    mlm_loss: Tensor  # () fp32, summed over the labelled masked positions
    nsp_loss: Tensor  # () fp32, summed over the labelled pairs
    mlm_correct: Tensor  # () int64
    nsp_correct: Tensor  # () int64
    moments: Tensor  # (D + 2,) fp32, of the last layer's output; see `token_moments`

    def mean(self, counts: GlobalCounts) -> Tensor:
        """This micro-batch's share of the global batch's weighted loss, () fp32."""
        mlm = counts.mlm_weight * self.mlm_loss / max(counts.targets, 1)
        return mlm + counts.nsp_weight * self.nsp_loss / max(counts.pairs, 1)


class Layer(nn.Module):
    """One encoder layer: self-attention and a two-layer MLP, each followed by dropout, residual and LayerNorm.

    In a pre-LN encoder, that LayerNorm belongs to the next sublayer. It is here because it is fused with the residual.
    """

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

    def forward(
        self, x: Tensor, residual: Tensor, batch: Rows, keys: Tensor | None, checkpointing: Checkpointing = "none"
    ) -> tuple[Tensor, Tensor]:
        """Apply the layer to (T, D). ``keys``: (T, 2) int32, or None for no dropout.

        ``x`` and ``residual`` have separate gradients, and so do the two results. In a post-LN encoder both have the
        same values; in a pre-LN encoder, ``x`` is LayerNorm(residual).
        """
        if checkpointing == "full":  # this method and not the module, whose hooks have gathered the weights already
            return recomputed(self.forward, x, residual, batch, keys)  # type: ignore[no-any-return]
        model, site, before = self.model, self.site, self.model.layer_norm == "before"
        forget = forgetting if checkpointing == "cheap" else lambda value, again: nullcontext()
        add = partial(
            dropout_add_layer_norm,
            eps=model.layer_norm_eps,
            dropout_p=model.dropout,
            keys=keys,
            return_sum=before,
        )
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
        normalize = partial(add, y, residual, *norm, x_bias=self.attention_out_bias, site=site + ATTENTION_OUT)
        x, residual = normalize()
        if before:
            normalize = partial(dropout_add_layer_norm, residual, None, *norm, model.layer_norm_eps)
        x_again = cache(lambda: normalize()[0])  # backward asks twice in a post-LN layer
        with forget(x, x_again):
            u = F.linear(x, self.mlp_in_weight)  # (T, F)
        gelu = partial(bias_gelu, u, self.mlp_in_bias, model.gelu)
        y = gelu()  # (T, F)
        with forget(y, gelu):
            y = F.linear(y, self.mlp_out_weight)  # (T, D)
        norm = self.mlp_norm_weight, self.mlp_norm_bias
        with forget(x, x_again):
            return add(y, residual, *norm, x_bias=self.mlp_out_bias, site=site + MLP_OUT)


class Encoder(nn.Module):
    """Embeddings and layers. A subclass adds the parameters of its heads, then calls ``initialise``."""

    def __init__(self, model: ModelConfig) -> None:
        """Leaves parameters uninitialized. Raises ValueError for an invalid configuration."""
        super().__init__()
        if problems := model.problems():
            raise ValueError("; ".join(problems))
        self.model = model
        self.checkpointing: Checkpointing = "none"  # the engine sets it
        hidden = model.hidden
        self.token_table = parameter(model.vocab_rows, hidden)
        self.segment_table = parameter(model.segments, hidden)
        self.position_table = parameter(model.max_positions, hidden)
        self.embedding_norm_weight = parameter(hidden)
        self.embedding_norm_bias = parameter(hidden)
        self.layers = nn.ModuleList(Layer(model, number) for number in range(model.layers))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set normal weights and tables (``initializer_range``), zero biases, and LayerNorm weights of one.

        Each parameter has its own generator, seeded with (seed, name), so its values do not depend on the other
        parameters.
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
        """The last layer's output (T, D). Raises ValueError if a sequence is longer than the position table."""
        model = self.model
        if batch.max_seqlen > model.max_positions:
            seen = f"max_seqlen is {batch.max_seqlen}"
            raise ValueError(f"{seen}; the model has {model.max_positions} positions")
        indices = batch.tokens, batch.segments, batch.positions
        tables = self.token_table, self.segment_table, self.position_table
        norm = self.embedding_norm_weight, self.embedding_norm_bias, model.layer_norm_eps
        if model.layer_norm == "before":
            z = embed_sum(indices, tables)  # (T, D)
            x, residual = dropout_add_layer_norm(z, None, *norm, dropout_p=model.dropout, keys=keys, return_sum=True)
        else:
            x = residual = embed(*indices, *tables, *norm, dropout_p=model.dropout, keys=keys)  # (T, D)
        for layer in self.layers:
            x, residual = layer(x, residual, batch, keys, self.checkpointing)
        return x


class Bert(Encoder):
    """BERT with both pre-training heads; the MLM decoder is the token table itself."""

    def __init__(self, model: ModelConfig, seed: int = 0, fillers: int = 0) -> None:
        """Initialize parameters by ``initialise(seed)``, with zeros in table rows that belong to no token.

        ``fillers``: number of pieces at the end of the vocabulary that only fill it up and are never predicted.
        Raises ValueError for an invalid configuration.
        """
        super().__init__(model)
        self.predicted = model.vocab_size - fillers  # the MLM head predicts ids below this
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
            with torch.no_grad():  # otherwise the padding would change LAMB's trust ratio of the table
                self.token_table[self.predicted :] = 0

    @torch.no_grad()
    def set_decoder_prior(self, counts: Tensor) -> None:
        """Initialize the MLM decoder's bias to :func:`log_unigrams` of ``counts`` (V,) int64, without fillers.

        Starting from zero, the bias can move by at most the sum of the learning rates, far less than the range of log
        frequencies. The model then learns word frequencies as one hidden vector that all tokens share, which flattens
        the encoder.
        """
        self.decoder_bias[: self.predicted] = log_unigrams(counts[: self.predicted]).to(self.decoder_bias)

    def forward(self, batch: MicroBatch, keys: Tensor | None = None, judge: Judge | None = None) -> Any:
        """The losses of a micro-batch as ``Output``. ``keys`` (T, 2) int32 enable dropout; None means evaluation.

        ``judge`` computes something else from the MLM logits (P, V with padding) and the NSP logits (B, 2). It is
        called here, inside ``forward``, so that DeepSpeed's hooks on calls of the model run.
        """
        x = self.encode(batch, keys)
        mlm_logits, nsp_logits = self._heads(x, batch)
        if judge is not None:
            return judge(mlm_logits, nsp_logits)
        mlm_loss, mlm_correct = cross_entropy(mlm_logits, batch.labels, self.predicted)
        nsp_loss, nsp_correct = cross_entropy(nsp_logits, nsp_classes(batch))
        return Output(mlm_loss, nsp_loss, mlm_correct, nsp_correct, token_moments(x))

    def logits(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """MLM logits (P, predicted), without fillers and padding, and NSP logits (B, 2), without dropout."""
        mlm_logits, nsp_logits = self._heads(self.encode(batch, None), batch)
        return mlm_logits[:, : self.predicted], nsp_logits

    def _heads(self, x: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """MLM logits (P, V with padding) and NSP logits (B, 2) from the encoder's output ``x`` (T, D)."""
        y = F.linear(x.index_select(0, batch.masked), self.mlm_weight)  # (P, D)
        y = bias_gelu(y, self.mlm_bias, self.model.gelu)
        y = layer_norm(y, self.mlm_norm_weight, self.mlm_norm_bias, self.model.layer_norm_eps)
        mlm_logits = F.linear(y, self.token_table, self.decoder_bias)  # (P, V)
        pooled = pool(x, batch, self.pooler_weight, self.pooler_bias)  # (B, D)
        return mlm_logits, F.linear(pooled, self.nsp_weight, self.nsp_bias)  # (P, V), (B, 2)


def log_unigrams(counts: Tensor) -> Tensor:
    """The log of the unigram distribution (V,) fp64, from ``counts`` (V,) int64 with one added to each count."""
    smoothed = counts.double() + 1
    return (smoothed / smoothed.sum()).log()


def nsp_classes(batch: MicroBatch) -> Tensor:
    """NSP targets (B,): class 0 means "B follows A", as in the published checkpoints; IGNORED if there is no B."""
    return torch.where(batch.is_next == IGNORED, IGNORED, 1 - batch.is_next)


def pool(x: Tensor, batch: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """BERT's pooled output (B, D): a tanh layer over the first token of each sequence in ``x`` (T, D)."""
    return torch.tanh(F.linear(x.index_select(0, batch.cu_seqlens[:-1]), weight, bias))


def parameter(*shape: int) -> nn.Parameter:
    """A parameter of this shape, to be initialized by ``Encoder.initialise``, which goes by its name."""
    return nn.Parameter(torch.empty(*shape))
