"""What a run reports: metrics, journal, exporter, and pictures of them."""
