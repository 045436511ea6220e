"""Benchmarks: ``python -m trainer.bench`` for the model, ``.engine`` for the step, ``.overhead`` for metrics."""
