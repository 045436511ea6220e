"""Text to shards: corpus -> sentences -> tokens in a store -> pairs -> masks -> shards and a manifest.

Every step is a pure function of its input and a key, so the same corpus, settings and seed give the same
bytes on any machine. The trainer reads `shards` and `manifest`; nothing here imports torch.
"""
