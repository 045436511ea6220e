"""Checkpoints: saving, reading, verifying, and the state and tokenizer that go with them."""
