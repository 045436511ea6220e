"""Profile a run: where the time of its steps goes, on the host and on the device."""
