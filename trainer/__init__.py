"""Training: config → shards → engine → checkpoints and metrics; see trainer/train.py for the sentence."""
