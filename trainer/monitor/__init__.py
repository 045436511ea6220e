"""A run's reporting: metrics, the metrics log, the Prometheus exporter, trackers, and summaries of a run."""
