"""Notices a run on the unigram plateau: it predicts word frequencies and nothing else.

The loss alone cannot tell: a healthy run with small batches may stay at the unigram loss for hundreds of steps. What
differs is the variance of the hidden states over tokens. In a healthy run it grows. In a collapsed run all tokens have
the same vector, and only dropout's noise is left, whose share of the mean square is at most the dropout rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from trainer.checkpoint.train_state import TrainState
from trainer.console import Tell, warn
from trainer.model.bert import ModelConfig, log_unigrams
from trainer.monitor.metrics_log import Record

BLOCK = 25  # steps that are judged together, by their medians, so that a spike of a few steps changes nothing
PATIENCE = {"collapsed": 8, "unigram": 40}  # blocks in a row that show the sign, before a warning
LEARNING = 4  # blocks in a row without a sign, after which the run has left the plateau
MLM_MARGIN = 0.15  # nats around the unigram loss
NSP_MARGIN = 0.02  # nats below ln 2
NOISE = 0.05  # variance share above the dropout rate that still counts as collapsed
PLATEAU_STEPS = BLOCK * max(PATIENCE.values())  # that a change can depend on
RUNBOOK = "docs/runbooks/LambertPlateau.md"


@dataclass(frozen=True)
class Baseline:
    """What the losses of one phase are compared with."""

    unigram_loss: float  # nats: the MLM loss of a model that predicts word frequencies
    warmup_steps: int  # steps of the phase that are not judged
    warmup_minutes: float = 0.0  # the same in minutes of training, for a phase that ends by time

    def warms_up(self, state: TrainState) -> bool:
        """Whether the step before this state belongs to the phase's warm-up."""
        return state.phase_step <= self.warmup_steps or state.milliseconds < 60_000 * self.warmup_minutes


def unigram_loss(counts: Tensor) -> float:
    """The MLM loss in nats of a model that predicts word frequencies, from ``counts`` (V,) int64: their entropy."""
    return float(-(counts * log_unigrams(counts)).sum() / counts.sum())


def signs(steps: list[Record], dropout: float) -> set[str]:
    """The signs of a plateau in the records of some steps, of those in PATIENCE; none if the run learns.

    Without pairs, the MLM loss alone decides.
    """
    above = median(step["mlm_loss"] - step["unigram_loss"] for step in steps)
    if above < -MLM_MARGIN:
        return set()
    pairs = [step["nsp_loss"] for step in steps if "nsp_loss" in step]
    guesses = not pairs or median(pairs) > math.log(2) - NSP_MARGIN
    shown = {
        "collapsed": median(step["token_variance"] for step in steps) <= dropout + NOISE,
        "unigram": above <= MLM_MARGIN and guesses,
    }
    return {sign for sign, seen in shown.items() if seen}


class Plateau:
    """Follows a run's steps, and says when it is on the plateau and when it has left it."""

    def __init__(self, dropout: float) -> None:
        self.on = False  # a resumed run sets what its metrics log says
        self._dropout = dropout
        self._steps: list[Record] = []
        self._shown = dict.fromkeys(PATIENCE, 0)  # blocks in a row, by sign
        self._learned = 0  # blocks in a row without a sign

    def resume(self, records: list[Record]) -> None:
        """Take the records of the steps before a resume. ``on`` stays as it is: the metrics log has its last change."""
        on = self.on
        self.events([record for record in records if "warming_up" in record])  # older versions wrote no such key
        self.on = on

    def events(self, records: list[Record]) -> list[Record]:
        """Take the records of the next steps. Returns an event for each change of ``on``; see `announce`."""
        judged = [record for record in records if record["applied"] and not record["warming_up"]]
        return [event for record in judged if (event := self.add(record)) is not None]

    def add(self, record: Record) -> Record | None:
        """Take the record of the next step that is judged. Returns an event if ``on`` changes."""
        self._steps.append(record)
        if len(self._steps) < BLOCK:
            return None
        steps, self._steps = self._steps, []
        found = signs(steps, self._dropout)
        self._shown = {sign: blocks + 1 if sign in found else 0 for sign, blocks in self._shown.items()}
        self._learned = 0 if found else self._learned + 1
        lasting = [sign for sign, blocks in self._shown.items() if blocks >= PATIENCE[sign]]
        changes = self._learned >= LEARNING if self.on else bool(lasting)
        if not changes:
            return None
        self.on = not self.on
        medians = {key: median(step[key] for step in steps) for key in ("mlm_loss", "unigram_loss", "token_variance")}
        at = {"time": record["time"], "step": record["step"]}
        return {"event": "plateau", **at, "on": self.on, "sign": lasting[0] if self.on else "", **medians}


def announce(event: Record, model: ModelConfig, clipping: float, tell: Tell) -> None:
    """Print the line about a plateau that begins, as a warning, or ends."""
    text = announcement(event, model, clipping)
    if event["on"]:
        warn(text, tell)
    else:
        tell(text)


def announcement(event: Record, model: ModelConfig, clipping: float) -> str:
    """One line about a plateau that begins or ends. Names the remedies that the run does not use yet."""
    losses = f"MLM loss {event['mlm_loss']:.2f}, word frequencies alone {event['unigram_loss']:.2f}"
    measured = f"{losses}, variance over tokens {event['token_variance']:.1%}"
    if not event["on"]:
        return f"left the unigram plateau ({measured})"
    steps = BLOCK * PATIENCE[event["sign"]]
    what = {
        "collapsed": "all tokens have had nearly the same hidden vector",
        "unigram": "the model has predicted no better than word frequencies",
    }[event["sign"]]
    prior = ["model.decoder_prior: unigram"] if model.decoder_prior == "zero" else []
    clip = [] if clipping else ["optimizer.gradient_clipping: 1.0"]
    remedies = ", ".join([*prior, "a lower learning_rate", *clip])
    return (
        f"on the unigram plateau: for {steps} steps {what} ({measured}); a collapsed run rarely recovers: "
        f"start again with {remedies} or another warm-up; see {RUNBOOK}"
    )
