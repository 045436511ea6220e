"""A connection between two launchers: one sealed JSON object per line.

Each line is sealed (:mod:`trainer.ranks.seal`) for this connection, its direction and its number, so that with a secret
no line can be forged, repeated, dropped or sent back. Nothing is unpickled, and what a stranger can make us keep is
bounded.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

from trainer.ranks.seal import seal, unseal

Message = dict[str, Any]
LONGEST_LINE = 4096  # bytes; ours have a few hundred
NONCE = re.compile(rb"[0-9a-f]{32}")


class Wire:
    """One end of a connection, which never blocks. ``answers``: this end accepted it."""

    def __init__(self, connection: socket.socket, secret: str, answers: bool) -> None:
        connection.setblocking(False)
        self.connection, self.heard = connection, time.monotonic()  # heard: when the last line arrived
        self._secret, self._answers = secret, answers
        self._nonces = [secrets.token_hex(16), ""]  # ours, theirs: make this connection's seals unlike any other's
        self._unsent: list[str] = []  # until their nonce is known
        self._numbers = [0, 0]  # lines sent, lines received
        self._rest = b""
        self._write(self._nonces[0])

    def send(self, message: Message) -> None:
        """Send a message, after the other end's first line has come. A failure shows in :meth:`receive`."""
        self._unsent.append(json.dumps(message))
        self._flush()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. Raises OSError if the other end is gone or is a stranger's."""
        try:
            found = self.connection.recv(LONGEST_LINE)
        except BlockingIOError:
            return []
        if not found:
            raise ConnectionError("it closed the connection")
        *lines, self._rest = (self._rest + found).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise ConnectionError("it sent a line that is too long")
        messages = []
        for line in lines:
            self.heard = time.monotonic()
            if self._nonces[1]:
                messages.append(self._unsealed(line))
            elif NONCE.fullmatch(line):
                self._nonces[1] = line.decode()
                self._flush()
            else:
                raise ConnectionError("it is no launcher of ours")
        return messages

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _unsealed(self, line: bytes) -> Message:
        text = unseal(self._secret, self._key(1), line)
        if text is None:
            raise ConnectionError("its line was not sealed with this node's LAMBERT_SECRET")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("it sent an unreadable line")
        return message

    def _key(self, direction: int) -> str:
        """The key of the next line that we send (0) or receive (1)."""
        number = self._numbers[direction]
        self._numbers[direction] += 1
        both = self._nonces if self._answers else self._nonces[::-1]
        return f"wire/{both[0]}/{both[1]}/{direction if self._answers else 1 - direction}/{number}"

    def _flush(self) -> None:
        while self._unsent and self._nonces[1]:
            self._write(seal(self._secret, self._key(0), self._unsent.pop(0)))

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        with suppress(OSError):
            if self.connection.send(data) < len(data):  # it has not read for a long time
                self.connection.shutdown(socket.SHUT_RDWR)
