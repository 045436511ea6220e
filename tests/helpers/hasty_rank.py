"""Runs the trainer with short waits for an object store: test_trainer_address.py runs it on each rank.

python tests/helpers/hasty_rank.py TRAINER-ARGUMENTS…
"""

from __future__ import annotations

import trainer.__main__ as program
from trainer.store import lease, mirror, objects


def main() -> None:
    lease.RENEW_SECONDS, lease.LEASE_SECONDS, lease.POLL_SECONDS = 0.3, 1.5, 0.1
    mirror.PUSH_SECONDS, mirror.RATE = 0.3, 10**9
    objects.WAITS = (0.1,)  # type: ignore[assignment]
    program.main()


if __name__ == "__main__":
    main()
