"""Scripts that a person runs: they draw the pictures and fill the tables of the docs."""
