"""Training: config → shards → engine → checkpoints and metrics; see trainer/run/train.py for the sentence."""
