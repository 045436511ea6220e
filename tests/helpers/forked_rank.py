"""Imports everything that a rank needs, once, in the server from which ``ranks.fork`` forks the ranks."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401  # DeepSpeed and PyTorch import both
import torch._dynamo  # noqa: E402, F401                               # only when an engine is created

import trainer.__main__  # noqa: E402, F401
