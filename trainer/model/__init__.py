"""The BERT model over unpadded micro-batches, and its FLOP count."""
