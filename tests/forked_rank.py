"""Imported once by the server that ``ranks.fork`` forks ranks from; everything that a rank imports is here already."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read as DeepSpeed is imported

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401  # DeepSpeed and PyTorch import both
import torch._dynamo  # noqa: E402, F401                               # only as an engine is made

import trainer.__main__  # noqa: E402, F401
