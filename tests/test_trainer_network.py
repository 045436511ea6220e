"""The network check: which links are measured, what is blamed, and real ranks with planted faults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import nodes, ranks
from trainer.links import measure, report
from trainer.links.measure import COLLECTIVES, Group, Timing, link_bytes
from trainer.links.report import Place, Results
from trainer.links.routes import Route, crosses, rounds, routes
from trainer.links.slow import blame
from trainer.links.wires import ETHERNET, NVLINK, Wire, looks_like, wire_of_gpu, wire_of_interfaces, wire_of_ports
from trainer.ranks.world import World

pytestmark = pytest.mark.slow

SCRIPT = "tests/helpers/network_on_ranks.py"


# ---- which links ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hosts", [["a"] * 2, list("abc"), ["a"] * 4 + ["b"] * 4, ["a"] * 12, [f"n{i // 2}" for i in range(24)], list("aab")]
)
def test_each_link_is_measured_once_and_alone(hosts: list[str]) -> None:
    links = routes(hosts)
    order = rounds(links, hosts)
    assert sorted(link for each in order for link in each) == sorted(links) and len(set(links)) == len(links)
    for each in order:
        ends = [rank for link in each for rank in link]
        leaving = [hosts[rank] for link in each if crosses(link, hosts) for rank in link]
        assert len(set(ends)) == len(ends) and len(set(leaving)) == len(leaving)


def test_every_rank_sends_inside_its_node_and_to_another() -> None:
    hosts = [f"node-{rank // 4}" for rank in range(64)]
    links = routes(hosts)
    assert len(links) == 16 * 12 + 4 * 32  # all pairs of each node; both directions around the ring of nodes
    for rank in range(64):
        kinds = {crosses(link, hosts) for link in links if link.sender == rank}
        assert kinds == {False, True}
    assert len(rounds(links, hosts)) < 40  # does not grow with the number of nodes


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert [Timing(name, 1, 1.0).bus_rate(2) for name in COLLECTIVES] == [1, 0.5, 0.5]
    assert [Timing(name, 1, 1.0).bus_rate(8) for name in COLLECTIVES] == [1.75, 0.875, 0.875]
    assert Timing("all-reduce", 1 << 20, 0.001).bus_rate(8) == pytest.approx(1.75 * 2**20 * 1000)


def test_a_message_fits_the_time() -> None:
    assert link_bytes(1e9, 6, 4.0) == 1 << 25  # 36 MiB fit
    assert (link_bytes(1e6, 6, 4.0), link_bytes(1e12, 1, 60.0)) == (1 << 20, 1 << 28)


# ---- what is blamed ------------------------------------------------------------------------------------------


def rates(hosts: int, slow: Mapping[tuple[int | None, int | None], float]) -> dict[Route, float]:
    """A rate of about 10 for each link between hosts, except the slow ones: (sender, receiver), None for any."""
    links = routes([f"node-{host}" for host in range(hosts)])
    found = {link: 10 + 0.1 * (link.sender + link.receiver) for link in links}
    for (sender, receiver), rate in slow.items():
        found |= {a: rate for a in links if sender in (None, a.sender) and receiver in (None, a.receiver)}
    return found


@pytest.mark.parametrize("hosts", [3, 4, 8, 12])
def test_a_slow_rank_is_blamed_for_its_links(hosts: int) -> None:
    found = blame(rates(hosts, {(1, None): 2}))
    assert (found.senders, found.receivers, found.links) == ({1: 2}, {}, {})
    found = blame(rates(hosts, {(None, 2): 2}))
    assert (found.senders, found.receivers, found.links) == ({}, {2: 2}, {})
    found = blame(rates(hosts, {(1, None): 2, (None, 1): 3}))
    assert (found.senders, found.receivers, found.links) == ({1: 2}, {1: 3}, {})
    assert 10 < found.typical < 13


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 12])
def test_a_slow_link_is_blamed_alone(hosts: int) -> None:
    found = blame(rates(hosts, {(1, 0): 2}))
    assert (found.senders, found.receivers, found.links) == ({}, {}, {Route(1, 0): 2})


def test_a_slow_rank_hides_no_slow_link() -> None:
    found = blame(rates(8, {(1, None): 2, (3, 4): 1}))
    assert (found.senders, found.receivers, found.links) == ({1: 2}, {}, {Route(3, 4): 1})


def test_nothing_is_blamed_for_being_a_little_slower() -> None:
    assert not blame(rates(4, {(1, None): 6})) and not blame(rates(2, {(0, 1): 6}))


# ---- computing -----------------------------------------------------------------------------------------------


class Alone(Group):
    """A rank that meets nobody."""

    def meet(self) -> None:
        """Wait for nobody."""

    def gather(self, values: Sequence[float]) -> Tensor:
        """Return this rank's values as those of all ranks."""
        return torch.tensor([values], dtype=torch.float64)


def test_the_multiplied_numbers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU draws less power on equal numbers, so one that overheats would not be slower than the others."""
    factors = []
    monkeypatch.setattr(torch, "mm", lambda a, b: factors.append(a))
    group = Alone(World(0, 1, 0, 1, torch.device("cpu")), 1.0)
    assert len(measure.time_products(group)) == 1
    assert factors[0].unique().numel() > factors[0].numel() / 2


# ---- what the hardware should give ---------------------------------------------------------------------------


def test_hardware_is_known_by_its_names(tmp_path: Path) -> None:
    assert (wire_of_gpu("NVIDIA H200"), wire_of_gpu("NVIDIA A100-SXM4-80GB")) == (NVLINK[1], NVLINK[0])
    assert wire_of_gpu("NVIDIA H100 PCIe") is None and wire_of_gpu("NVIDIA L40S") is None
    ports = ["mlx5_0:1 100 Gb/sec (4X EDR)", "mlx5_1:1 400 Gb/sec (4X NDR)"]
    assert wire_of_ports(ports) == Wire(ports[1], 50e9) and wire_of_ports([]) is None
    interfaces = ("eth0", 25000, "up"), ("eth1", 100000, "down"), ("veth", 50000, "up"), ("lo", -1, "up")
    for name, speed, state in interfaces:
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(f"{speed}\n")
        (tmp_path / name / "operstate").write_text(f"{state}\n")
        if name.startswith("eth"):
            (tmp_path / name / "device").mkdir()
    assert wire_of_interfaces(tmp_path) == Wire("eth0 25 GbE", 3.125e9)
    assert wire_of_interfaces(tmp_path / "none") is None


def test_a_rate_looks_like_the_slowest_hardware_that_can_give_it() -> None:
    found = [looks_like(rate, ETHERNET).name for rate in (0.11e9, 1.1e9, 2e9, 99e9)]
    assert found == ["1 GbE", "10 GbE", "25 GbE", "100 GbE"]


# ---- what is printed -----------------------------------------------------------------------------------------


def results(**changes: Any) -> Results:
    """A check of four GPUs on two nodes, in which everything is as it should be."""
    places = [Place(f"node-{rank // 2}", "NVIDIA H200", NVLINK[1], Wire("mlx5_0:1", 50e9)) for rank in range(4)]
    hosts = [place.host for place in places]
    links = {link: (45e9, 2e-5) if crosses(link, hosts) else (380e9, 1e-5) for link in routes(hosts)}
    timings = [Timing(name, size, size / 30e9) for name in COLLECTIVES for size in (16, 1 << 16, 1 << 28)]
    return replace(Results("nccl", places, timings, links, 1 << 28, [600e12] * 4), **changes)


def test_a_good_network_is_compared_with_its_hardware() -> None:
    found = results()
    said = "\n".join([*report.table(found), *report.summary(found)])
    assert "all-reduce        reduce-scatter            all-gather" in said
    assert "256 MiB 8.95 ms 45 GB/s 8.95 ms 22.5 GB/s 8.95 ms 22.5 GB/s" in " ".join(said.split())
    assert "4 links inside a node, 256 MiB at a time: median 380 GB/s" in said and "84% of NVLink 4, 450 GB/s" in said
    assert "latency 20 µs; 90% of mlx5_0:1, 50 GB/s" in said
    assert not report.problems(found) and not report.warnings(found)
    slow = json.loads(json.dumps(report.tree(found)))["slow"]
    assert slow == {"computing": [], "sending": [], "receiving": [], "links": []}


def test_a_slow_rank_is_named_with_what_to_check() -> None:
    found = results(products=[600e12, 200e12, 600e12, 600e12])
    [line] = report.problems(found)
    assert line.startswith("rank 1 (node-0) computes at 200 TFLOP/s; the median is 600: check its GPU's clocks")
    links = results().links | {Route(0, 2): (5e9, 1e-5)}
    [line] = report.problems(results(links=links))
    assert line.startswith(
        "the link from rank 0 (node-0) to rank 2 (node-1) gives 5 GB/s; the median rank reaches 45 GB/s between nodes: "
        "check NCCL_SOCKET_IFNAME, NCCL_IB_HCA"
    )


def test_a_network_that_is_slow_everywhere_is_warned_about() -> None:
    """No link differs from the others, but all are slower than the hardware: NCCL over TCP, for example."""
    links = {link: (rate / 10, latency) for link, (rate, latency) in results().links.items()}
    found = results(links=links)
    inside, between = report.warnings(found)
    assert inside.startswith("links inside a node give 38 GB/s, 8% of NVLink 4: check `nvidia-smi topo -m`")
    assert between.startswith("links between nodes give 4.5 GB/s, 9% of mlx5_0:1: check NCCL_SOCKET_IFNAME")
    assert not report.problems(found)
    unknown = [replace(place, between=None) for place in found.places]
    assert "the hardware is not known; looks like 100 GbE" in report.summary(replace(found, places=unknown))[1]


# ---- real ranks ----------------------------------------------------------------------------------------------


def checked(size: int, faults: Mapping[str, Any], *options: str) -> list[tuple[int, str]]:
    """(exit code, output) of each rank of a short check with planted faults."""
    return ranks.finish(ranks.fork(size, SCRIPT, json.dumps(faults), "--seconds", "1", *options))


def test_a_good_check_writes_both_files(tmp_path: Path) -> None:
    """The ranks get the option that deepspeed's launcher adds."""
    options = ["--network", "--seconds", "1", "--device", "cpu"]
    options += ["--json", str(tmp_path / "network.json"), "--picture", str(tmp_path / "network.png")]
    port = ranks.free_port()
    started = [
        ranks.fork_one(rank, 2, port, "trainer/preflight.py", f"--local_rank={rank}", *options) for rank in range(2)
    ]
    (code, said), (other, nothing) = ranks.finish(started)
    assert (code, other, nothing) == (0, 0, ""), (said, nothing)
    assert "lambert: 2 ranks on one node, over gloo" in said and "lambert: no rank or link is slow" in said
    tree = json.loads((tmp_path / "network.json").read_text())
    assert {each["collective"] for each in tree["collectives"]} == set(COLLECTIVES)
    assert [(each["sender"], each["receiver"]) for each in tree["links"]] == [(0, 1), (1, 0)]
    assert all(each["bus_bytes_per_second"] > 0 for each in tree["collectives"])
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")


def test_a_slow_node_is_named_although_all_wait_for_it(tmp_path: Path) -> None:
    with nodes.cluster(3) as hosts:
        shaped = nodes.limit(hosts[1], "400mbit")
        if not shaped:
            pytest.skip("no tbf here to slow a node down with: `tc` of iproute2, and the kernel's sch_tbf")
        faults = {"namespaces": [host.namespace for host in hosts], "address": hosts[0].address}
        (code, said), *_ = checked(3, faults, "--json", str(tmp_path / "network.json"))
    assert code == 2 and "rank 1 (node-1) sends between nodes at 0.0" in said, said
    tree = json.loads((tmp_path / "network.json").read_text())
    slow = tree["slow"]
    assert (slow["sending"], slow["receiving"], slow["links"]) == ([1], [], []), said
    measured = [each["bytes_per_second"] for each in tree["links"] if each["sender"] == 1]
    # 50 MB/s, and a little in one burst
    assert len(measured) == 2 and all(5e6 < rate < 60e6 for rate in measured), measured


def test_a_slow_link_and_a_rank_that_computes_slowly_are_named(tmp_path: Path) -> None:
    ended = checked(3, {"sends": [0, 1], "computes": 2}, "--json", str(tmp_path / "network.json"))
    assert [code for code, _ in ended] == [2, 2, 2], ended
    slow = json.loads((tmp_path / "network.json").read_text())["slow"]
    # a busy machine may make others slow as well
    assert 2 in slow["computing"] and [0, 1] in slow["links"] and slow["sending"] == slow["receiving"] == [], slow
    said = ended[0][1]
    assert "slow rank(s) or link(s)\n  - rank " in said and "  - the link from rank 0 (" in said, said
    assert "no rank or link is slow" not in said and ended[1][1] == ended[2][1] == ""


def test_a_wrong_sum_is_refused_with_its_rank() -> None:
    ended = checked(2, {"sums": 1})
    assert [code for code, _ in ended] == [2, 2], ended
    assert "error: all-reduce of 65,536 bytes: wrong result on rank 1: a link or a GPU is broken" in ended[0][1]


def test_a_rank_that_is_stuck_ends_the_check_in_one_line() -> None:
    forked = ranks.fork(2, SCRIPT, json.dumps({"sleeps": 1}), "--timeout", "2")
    forked[0].process.join(60)
    forked[1].kill()
    (code, said), _ = ranks.finish(forked)
    assert code == 3 and "trainer: rank 0: lost contact with another rank" in said.splitlines()[-1], said


def test_a_rank_that_does_not_come_ends_the_check_in_one_line() -> None:
    [(code, said)] = ranks.finish([ranks.fork_one(0, 2, ranks.free_port(), SCRIPT, "{}", "--timeout", "1")])
    assert code == 3 and "rank 1 of 2 have not come to" in said and said.endswith("or raise --timeout\n"), said


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (1, [], "trainer: error: one rank has no network: start two or more, with the run's launcher"),
        (2, ["--seconds", "0"], "trainer.preflight: error: argument --seconds: 0 must be more than 0 and at most 3600"),
        (2, ["--timeout", "9999"], "trainer.preflight: error: argument --timeout: 9999 must be between 1 and 3600"),
        (2, ["--timeout", "1e9"], "trainer.preflight: error: argument --timeout: invalid int value: '1e9'"),
        (2, ["--json", "/nowhere/a.json"], "--json /nowhere/a.json: no file can be created in the folder /nowhere"),
        (2, ["--picture", "a.txt"], "--picture a.txt: wanted a file whose name ends in .png"),
        (2, ["--config", "run.yaml"], "trainer.preflight: error: unrecognized arguments: --config run.yaml"),
    ],
)
def test_bad_input_costs_one_line(size: int, options: list[str], message: str) -> None:
    ended = ranks.finish(ranks.fork(size, "trainer/preflight.py", "--network", *options))
    assert {code for code, _ in ended} == {2}
    assert message in ended[0][1] and ended[0][1].count("\n") == 1, ended
