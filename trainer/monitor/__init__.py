"""A run's reporting: metrics, the metrics log, the Prometheus exporter, TensorBoard files, and summaries of a run."""
