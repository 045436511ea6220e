"""A run's reporting: metrics, the journal, the Prometheus exporter, TensorBoard files, and summaries of a run."""
