"""Vectors of texts: ``python -m trainer.encode``."""
