"""Training: config → shards → engine → checkpoints and metrics. The training loop is in trainer/run/train.py."""
