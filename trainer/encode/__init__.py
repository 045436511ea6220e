"""Encode texts as vectors: ``python -m trainer.encode``."""
