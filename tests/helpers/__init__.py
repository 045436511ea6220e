"""Code that tests import, or run as ranks and programs."""
