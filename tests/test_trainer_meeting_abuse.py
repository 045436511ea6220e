"""Strangers at the ranks' meeting: they may reach the port and write to the store, but not end or steer a run."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers import ranks
from tests.helpers.runs import wait_for
from trainer.ranks.launchers import on_one_node
from trainer.ranks.meeting import StrangeError, read_account
from trainer.ranks.seal import LARGEST_TEXT_BYTES, seal, unseal

pytestmark = pytest.mark.slow

HEAR = 1  # seconds until a rank writes its account again
MEET = f"""
import sys, psutil, trainer.ranks.meeting
from trainer.ranks.world import from_launcher, join, leave
from trainer.errors import LostError, TrainerError
trainer.ranks.meeting.HEAR_SECONDS = {HEAR}
try:
    print(join(from_launcher("cpu"), int(sys.argv[1]), {{"torch": "1"}}), flush=True)
except TrainerError as error:
    print(f"error: {{error}}", flush=True)
    leave(3 if isinstance(error, LostError) else 2)
here = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
print("listens at", sorted(set(here)), flush=True)
leave(0)
"""
ACCOUNT: list[Any] = ["token", {"host": "h", "gpu": "", "facts": {"torch": "2"}, "settings": {}}]


@pytest.fixture
def port() -> int:
    return ranks.free_port()


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Callable[..., ranks.Forked]]:
    """Starts one of two ranks that meet each other; at the end, whatever is left of them is killed."""
    begun = list[ranks.Forked]()
    (tmp_path / "meet.py").write_text(MEET)

    def begin(rank: int, seconds: int = 60, size: int = 2, **settings: str) -> ranks.Forked:
        begun.append(ranks.fork_one(rank, size, port, str(tmp_path / "meet.py"), str(seconds), **settings))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()


class Stranger:
    """A client of the store that rank 0 opened."""

    def __init__(self, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
        self.store = dist.PrefixStore("lambert", store)
        self.opened = self.store.get("opened")[-32:].decode()

    def write(self, key: str, content: bytes, secret: str | None = None) -> None:
        """Put ``content`` under a key of the attempt; sealed if there is a secret, if only an empty one."""
        key = key if key == "opened" else f"{self.opened}/{key}"
        sealed = content if secret is None else seal(secret, key, content.decode()).encode()
        self.store.set(key, sealed)  # type: ignore[arg-type]  # its stub knows no bytes


def meets(*all_ranks: ranks.Forked) -> str:
    """Assert that all ranks end well and without a traceback; returns their output as one text."""
    ended = ranks.finish(all_ranks, timeout=60)
    said = "".join(output for _, output in ended)
    assert {code for code, _ in ended} == {0}, said
    assert "Traceback" not in said
    return said


def test_ranks_of_one_node_listen_to_that_node_alone(start: Callable[..., ranks.Forked]) -> None:
    """This also holds for a name of the node that the network knows."""
    for address in ("127.0.0.1", socket.gethostname()):
        said = meets(start(0, MASTER_ADDR=address), start(1, MASTER_ADDR=address))
        assert said.count("listens at ['127.0.0.1']") == 2, said


@pytest.mark.parametrize(
    ("environ", "sure"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-0"}, True),
        ({"LOCAL_SIZE": "4", "MASTER_ADDR": "node-0"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-0"}, False),
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "node-0"}, False),  # started by hand, perhaps on several
    ],
)
def test_one_node_is_what_the_launcher_says(environ: dict[str, str], sure: bool) -> None:
    assert on_one_node({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"} | environ) is sure


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"[]",
        b'["token", {"host": 1}]',
        b"[" * 100_000,
        bytes(2 * LARGEST_TEXT_BYTES),
        b"\x1b[31mred\nline",
    ],
    ids=["empty", "binary", "list", "types", "nested", "large", "escapes"],
)
@pytest.mark.parametrize("secret", [None, ""], ids=["bare", "sealed"])
def test_a_strangers_account_is_reported_and_passed_over(
    start: Callable[..., ranks.Forked], port: int, content: bytes, secret: str | None
) -> None:
    if secret is not None and (len(content) > LARGEST_TEXT_BYTES or b"\xff" in content):
        secret = None
    first = start(0)
    Stranger(port).write("account/1", content, secret)
    wait_for(lambda: "is ignored" in first.log.read_text(), first)
    [line] = first.log.read_text().strip().splitlines()
    assert line.startswith(f"lambert: at 127.0.0.1:{port}: ") and len(line) < 250 and line.isprintable()
    meets(first, start(1))


def test_a_rank_whose_account_was_overwritten_writes_it_again(start: Callable[..., ranks.Forked], port: int) -> None:
    first, second = start(0, size=3), start(1, size=3)
    stranger = Stranger(port)
    stranger.store.get(f"{stranger.opened}/account/1")
    stranger.write("account/0", b"?")
    stranger.write("account/1", b"?")
    said = meets(first, second, start(2, size=3))
    assert "'account/1' is a stranger's: no rank of this run wrote it; it is ignored" in said


def test_an_attempt_that_a_stranger_renamed_is_opened_again(start: Callable[..., ranks.Forked], port: int) -> None:
    first = start(0)
    stranger = Stranger(port)
    for content in (b"nonsense", b"\xff" * 100, seal("", "opened", "f" * 32).encode()):
        stranger.write("opened", content)
        time.sleep(0.5)
    wait_for(lambda: "'opened' is a stranger's" in first.log.read_text(), first)
    meets(first, start(1))


def test_with_a_secret_nobody_else_takes_part(start: Callable[..., ranks.Forked], port: int) -> None:
    """A stranger who knows our code leaves a good account, with a version that would end the run."""
    first = start(0, LAMBERT_SECRET="good")
    stranger = Stranger(port)
    stranger.write("account/1", json.dumps(ACCOUNT).encode(), "")
    wait_for(lambda: "it was not sealed with this rank's LAMBERT_SECRET; it is ignored" in first.log.read_text(), first)
    assert "good" not in meets(first, start(1, LAMBERT_SECRET="good"))


def test_ranks_with_different_secrets_do_not_meet(start: Callable[..., ranks.Forked]) -> None:
    (first, first_output), (second, said) = ranks.finish(
        [start(0, 4, LAMBERT_SECRET="a"), start(1, 4, LAMBERT_SECRET="b")]
    )
    assert (first, second) == (3, 3) and "Traceback" not in first_output + said
    assert "rank 1 of 2 have not come" in first_output
    assert "'opened' is a stranger's: it was not sealed with this rank's LAMBERT_SECRET; trying again" in said
    assert said.splitlines()[-1].startswith("error: rank 1 cannot meet the other ranks at 127.0.0.1:")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"tokens": 3, "refusal": []}', '{"tokens": [3], "refusal": ""}', "[" * 9999]
)
def test_a_verdict_that_is_none_ends_a_rank_by_one_line(
    start: Callable[..., ranks.Forked], port: int, content: str
) -> None:
    """A stranger holds the place before rank 0 does."""
    place = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    store = dist.PrefixStore("lambert", place)
    store.set("opened", seal("", "opened", "f" * 32))
    store.set(f"{'f' * 32}/verdict", seal("", f"{'f' * 32}/verdict", content))
    [(code, output)] = ranks.finish([start(1, 3)], timeout=60)
    assert code == 3 and "Traceback" not in output
    assert output.splitlines()[-1].startswith("error: rank 1 cannot meet the other ranks at 127.0.0.1:")


def test_what_speaks_another_language_at_the_port_does_no_harm(start: Callable[..., ranks.Forked], port: int) -> None:
    first = start(0)
    Stranger(port)
    held = list[socket.socket]()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 4096, b""):
        for _ in range(25):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            held[-1].sendall(words)
    time.sleep(0.5)
    meets(first, start(1))
    for connection in held:
        connection.close()


# ---- what is written -----------------------------------------------------------------------------------------


def test_a_seal_is_of_one_secret_key_and_text() -> None:
    sealed = seal("secret", "key", "a text, é").encode()
    assert unseal("secret", "key", sealed) == "a text, é"
    changed = [sealed[:-1], sealed + b"?", b"0" + sealed[1:], sealed[:10], b"", sealed + bytes(LARGEST_TEXT_BYTES)]
    assert [unseal("secret", "key", each) for each in changed] == [None] * len(changed)
    assert unseal("other", "key", sealed) is unseal("", "key", sealed) is unseal("secret", "other", sealed) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("gpu", 3), ("facts", []), ("facts", {"torch": 2}), ("settings", None), ("more", ""), ("host", ["h"])],
)
def test_an_account_is_read_strictly(field: str, value: Any) -> None:
    token, account = read_account(json.dumps(ACCOUNT))
    assert (token, account.facts) == ("token", {"torch": "2"})
    with pytest.raises(StrangeError, match="^an unreadable account: "):
        read_account(json.dumps(["token", ACCOUNT[1] | {field: value}]))
