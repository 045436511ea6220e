"""An object store as the place of a run: whole files at an address, a lease on it, and a mirror of rank 0's files."""
