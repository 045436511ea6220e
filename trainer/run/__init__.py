"""A pre-training run: its configuration, its phases, its loop."""
