"""What tests import, or run as ranks and programs of their own."""
