"""Checkpoints: saving, reading, proving, and what else belongs to them."""
