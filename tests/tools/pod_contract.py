"""Injects faults into a run's pods under each kind of the chart, without a cluster, and prints how they end.

    python -m tests.tools.pod_contract [--only WORDS] [--keep FOLDER]

Prints Markdown. Needs root and Helm; each case has its own pods. WORDS select the cases that begin
with them. FOLDER gets each pod's output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.build import build
from data_prep.settings import make_settings
from tests.helpers.corpora import write_corpus
from tests.helpers.pods import KINDS, POD_PATIENCE_SECONDS, SIZE, Gang, Pod, contract, gang
from tests.helpers.sshd import wait_for
from trainer.exits import DONE, LOST, REFUSED, STOPPED

STEPS, EVERY = 60, 10
LATE = 15.0  # seconds
KILLED = 128 + signal.SIGKILL


def undisturbed(run: Gang) -> str:
    assert codes(run.start_all()) == [DONE] * SIZE, run.output()
    return "0, 0"


def stop(run: Gang) -> str:
    """Send SIGTERM to one pod, as the kubelet does; the others stop by agreement. Then all start again."""
    pods = begin(run)
    pods[1].send(signal.SIGTERM)
    assert codes(pods) == [STOPPED] * SIZE, run.output()
    said = json.loads((run.run / "ended.json").read_text())
    assert said["how"] == "stopped" and saved(run) == said["step"] < STEPS, run.output()
    assert all("stopped at" in pod.reason and len(pod.reason.splitlines()) == 1 for pod in pods), run.output()
    go_on(run)
    return f"75, 75; saved at step {said['step']}; again: 0, 0"


def kill(run: Gang) -> str:
    """Kill all processes of one pod at once. The others notice, and all start again from the newest checkpoint."""
    pods = begin(run)
    hit = time.monotonic()
    pods[1].send(signal.SIGKILL)
    assert codes(pods) == [LOST, KILLED], run.output()
    seconds = time.monotonic() - hit
    assert "lost contact with another rank" in pods[0].reason, run.output()
    step = saved(run)
    assert EVERY <= step < STEPS and step % EVERY == 0
    go_on(run)
    return f"3, 137 within {seconds:.0f} s; resumed at step {step}: 0, 0"


def late_pod(run: Gang) -> str:
    first = run.start(0)
    linger(run, first)
    assert codes([first, run.start(1)]) == [DONE] * SIZE, run.output()
    return f"0, 0, {LATE:.0f} s later"


def late_names(run: Gang) -> str:
    """Start pods that cannot resolve node 0's name yet, node 0's own pod included."""
    pods = [run.start(index, known=False) for index in range(SIZE)]
    linger(run, pods[0])
    for pod in pods:
        run.tell(pod)
    assert codes(pods) == [DONE] * SIZE, run.output()
    return f"0, 0, {LATE:.0f} s later"


def first_pod_is_new(run: Gang) -> str:
    """Replace pod 0 on another node while the old pod 1 hangs; the new pod 1 comes when the old one is gone."""
    return one_by_one(run, 0)


def other_pod_is_new(run: Gang) -> str:
    """Replace pod 1 while the old pod 0 hangs and still holds the meeting place; then pod 0 is replaced, too."""
    return one_by_one(run, 1)


def one_by_one(run: Gang, hit: int) -> str:
    pods = begin(run)
    old = pods[1 - hit]
    [rank] = old.ranks()
    os.kill(rank, signal.SIGSTOP)
    pods[hit].send(signal.SIGKILL)
    assert pods[hit].end() == KILLED
    new = run.start(hit)
    linger(run, new)
    os.kill(rank, signal.SIGCONT)
    assert old.end() == LOST, run.output()
    step = saved(run)
    finish(run, [new, run.start(1 - hit)], step)
    return f"pod {hit}: 137, pod {1 - hit}: 3 {LATE:.0f} s after the new one came; resumed at step {step}: 0, 0"


def refused(run: Gang) -> str:
    """Start pods whose shards are missing: the run is refused."""
    pods = run.start_all()
    assert codes(pods) == [REFUSED] * SIZE, run.output()
    said = "absent holds no manifest.json"
    assert all(pod.reason.startswith("trainer: error: ") and pod.reason.count(said) == 1 for pod in pods), run.output()
    return "2, 2; both termination logs name the folder"


CASES: dict[str, Callable[[Gang], str]] = {
    "nothing": undisturbed,  # twice for a Job: all other cases must have its losses
    "SIGTERM to pod 1, all start again": stop,
    "SIGKILL of pod 1, all start again": kill,
    f"pod 1 comes {LATE:.0f} s late": late_pod,
    f"DNS has no name for {LATE:.0f} s, pod 0's own neither": late_names,
    "pod 0 killed, and new while the old pod 1 still runs": first_pod_is_new,
    "pod 1 killed, and new while the old pod 0 still runs": other_pod_is_new,
    "a configuration that is refused": refused,
}
ALL_KINDS = (undisturbed, stop, kill)


def begin(run: Gang) -> list[Pod]:
    """Start all pods, and run some steps beyond the first checkpoint."""
    pods = run.start_all()
    assert wait_for(lambda: run.trained(EVERY + 2) and saved(run) >= EVERY, POD_PATIENCE_SECONDS), run.output()
    return pods


def linger(run: Gang, pod: Pod) -> None:
    """Let it wait alone at the meeting place for a while. No pod may give up."""
    before = [each.code for each in run.pods]
    assert wait_for(pod.meets, POD_PATIENCE_SECONDS), run.output()
    time.sleep(LATE)
    assert [each.code for each in run.pods] == before, run.output()


def go_on(run: Gang) -> None:
    """Start all pods again, from the newest checkpoint to the end."""
    finish(run, run.start_all(), saved(run))


def finish(run: Gang, pods: list[Pod], step: int) -> None:
    """Assert that the restarted pods ended well and did resume; a fresh start would have the same losses."""
    assert codes(pods) == [DONE] * SIZE, run.output()
    said = f"lambert: resumed from {run.run}/step-{step:08} at step {step}\n"
    assert said in "".join(pod.output for pod in pods), run.output()


def codes(pods: list[Pod]) -> list[int]:
    return [pod.end() for pod in pods]


def saved(run: Gang) -> int:
    """The newest checkpoint's step."""
    return max((int(path.parent.name.split("-")[1]) for path in run.run.glob("step-*/checkpoint.json")), default=0)


def execute(kind: str, case: Callable[[Gang], str], folder: Path, shards: Path) -> tuple[str, dict[int, Any]]:
    """Run a case; returns its row's text and the losses. Raises AssertionError with the output of all pods."""
    folder.mkdir()
    place = shards if case is not refused else shards.parent / "absent"
    with gang(contract(kind, folder, shards, place, STEPS, EVERY), folder) as run:
        story = case(run)
        return story, run.losses()


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute the table of pods.")
    parser.add_argument("--only", default="", help="cases that begin with this, such as jobset: SIG")
    parser.add_argument("--keep", type=Path, help="a folder for what each pod said")
    options = parser.parse_args()
    print("| kind | what happens | exit codes of pods 0 and 1 | losses | seconds |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="pods-") as folder:
        text, tokenizer = write_corpus(Path(folder), [18] * 36, 8, different=100)
        shards = Path(folder, "data", "shards")
        with contextlib.redirect_stdout(None):
            build([text], tokenizer, shards, make_settings(32, samples_per_shard=64), processes=1)
        _, expected = execute("job", undisturbed, Path(folder, "expected"), shards)
        cases = [(kind, name) for kind in KINDS for name in CASES if kind == "job" or CASES[name] in ALL_KINDS]
        for number, case in enumerate(cases):
            if ": ".join(case).startswith(options.only):
                print(row(*case, Path(folder, str(number)), shards, expected, options.keep), flush=True)


def row(kind: str, name: str, folder: Path, shards: Path, expected: dict[int, Any], keep: Path | None) -> str:
    """A row of a Markdown table."""
    began = time.monotonic()
    try:
        story, losses = execute(kind, CASES[name], folder, shards)
        same = "the same" if losses == expected else "none" if not losses else "DIFFER"
    except AssertionError as error:
        story, same = f"FAILED: {str(error).splitlines()[:1]}", "?"
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("pod-*/log"):
            said = log.read_text(errors="replace") + (log.parent / "termination-log").read_text()
            (keep / f"{kind}, {name.partition(',')[0]}, {log.parent.name}.log").write_text(said)
    return f"| {kind} | {name} | {story} | {same} | {time.monotonic() - began:.0f} |"


if __name__ == "__main__":
    main()
