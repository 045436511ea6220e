"""BERT over unpadded micro-batches."""
