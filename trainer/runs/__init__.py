"""All runs below some folders: listed, stopped and compared. The command is ``python -m trainer.runs``."""
