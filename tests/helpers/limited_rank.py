"""Runs a rank with few file descriptors: ``limited_rank.py DESCRIPTORS SCRIPT ARGUMENTS…``."""

from __future__ import annotations

import resource
import runpy
import sys

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
