"""Exit codes of a rank, for launchers, schedulers and pods. Imports nothing, because it is needed first."""

from __future__ import annotations

DONE = 0
FAILED = 1  # an unexpected error, with a traceback; or, with one line, a lack or an outage: starting again may help
REFUSED = 2  # the user must fix something: starting again unchanged would end the same way
LOST = 3  # lost another rank, whose own last line says why
STOPPED = 75  # stopped on request, saved, and can continue: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # Ctrl-C
