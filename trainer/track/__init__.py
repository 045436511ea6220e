"""Sends a run's metrics to the trackers that people already use; each reads only the run's journal."""
