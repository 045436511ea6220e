"""Shards to micro-batches: the order of samples, the loader, and the cache of remote shards."""
