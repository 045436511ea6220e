"""How a rank ends, in a number that launchers, schedulers and pods can read. Imports nothing: it is needed at once."""

from __future__ import annotations

DONE = 0
FAILED = 1  # an error nobody foresaw, with a traceback; or a resource ran out, with a line: starting again may help
REFUSED = 2  # something that a user can mend: starting it again would end the same way
LOST = 3  # another rank, whose own end says why
STOPPED = 75  # it was asked to stop, has saved, and can go on: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # Ctrl-C
