"""The processes of a run: how they start, find each other, stop and end."""
