"""Tries the page of runs in a headless Chromium, measures it, and takes its pictures.

    python -m tests.tools.runs_page try
    python -m tests.tools.runs_page measure [--runs 20] [--steps 10000]
    python -m tests.tools.runs_page pictures FOLDER RUN OUT

``try`` uses every part of the page as a person would, on a run with a hostile name, too. ``measure`` invents runs,
serves them, and prints how long the browser takes for the list, and for all runs laid over one another: when they are
opened for the first time, again, and only drawn. ``pictures`` serves the runs below a folder of the current directory,
and takes pictures of the list, of one run and of all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.journals import PHASES, begun, journal, step, write
from tests.tools.browser import Browser
from trainer.report import main as report
from trainer.run.stop_request import STOP_FILE

DRAWN = "shown && shown.charts && document.querySelectorAll('canvas').length > 2"
REPEATS = 5


@contextlib.contextmanager
def served(folder: Path, *more: str) -> Iterator[str]:
    """Serve the runs below a folder from a process of its own; its address."""
    command = [sys.executable, "-m", "trainer.runs", str(folder), "--serve", "127.0.0.1:0", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


def invent(folder: Path, number: int, steps: int) -> None:
    """Write the journal of a run on two GPUs with a plausible curve: all of a step's numbers, ranks, evaluations."""
    rng = random.Random(number)
    speed, scale, taken = rng.uniform(0.7, 1.3), 2.0**16, []
    begun: dict[str, Any] = {"event": "start", "time": 0.0, "run": f"run-{number}", "ranks": "2", "device": "cuda"}
    records = [{"event": "attempt", "time": 0.0, "restarts": 0}, begun]
    for at in range(1, steps + 1):
        loss = 2 + 6 * math.exp(-speed * at / steps * 5) + rng.gauss(0, 0.1)
        known = {"flops": 1e12, "mlm_accuracy": math.exp(-loss / 2), "nsp_accuracy": 0.9, "loss_scale": scale}
        more = {"learning_rate": 1e-3 * (1 - at / steps), "gradient_norm": rng.lognormvariate(0, 0.3), "clipped": False}
        trust = {"trust_min": 0.1, "trust_mean": rng.uniform(0.9, 1.1), "trust_max": 4.0, "token_variance": 0.8}
        seconds = rng.uniform(0.4, 0.6)
        records.append(step(at, at / 2, mlm_loss=loss, seconds=seconds, unigram_loss=7.0, **known, **more, **trust))
        taken.append(seconds)
        if at % 10 == 0:
            parts = {"data": 0.01, "forward": 0.15, "backward": 0.25, "reduce": 0.05, "optimizer": 0.04}
            ranks = {"compute": [0.40, 0.42, 0.45 + rng.random() / 20], "slowest": rng.randint(0, 1), "parts": parts}
            records.append({"event": "ranks", "time": at / 2, "step": at, "memory_peak_bytes": 3e9, **ranks})
            spent = {"productive": sum(taken), "start": 20.0}
            records.append({"event": "time", "time": at / 2, "step": at, "spent": spent})
        if at % 500 == 0:
            records.append({"event": "heldout", "time": at / 2, "step": at, "mlm_loss": loss, "mlm_accuracy": 0.5})
            scale *= rng.choice((1, 2))
    write(folder / f"run-{number}", records, {"run": {"name": f"run-{number}", "seed": number}, "phases": PHASES})


# ---- a person's visit ----------------------------------------------------------------------------------------

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>" + "-and-long" * 15
TOKEN = "the-token-of-this-visit"
PLOT = "shown.charts.drawn[0].plot.over.getBoundingClientRect()"


def visit() -> None:
    """Use every part of the page. Raises AssertionError for what does not work."""
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        top = Path(name, "runs")
        for number in range(2):
            invent(top, number, 2000)
        config = {"run": {HOSTILE: HOSTILE}, "phases": PHASES}
        live = write(top / "live", begun(top, 40, time.time(), run=HOSTILE), config)
        Path(name, "token").write_text(TOKEN)
        with served(top, "--token-file", f"{name}/token", "--price", "2") as address:
            _see_list(browser, address)
            _keep_place(browser, address, live)
            found = {each["name"]: each["id"] for each in browser.value("list.runs")}
            _use_run(browser, f"{address}#runs={found['run-0']}")
            _compare_runs(browser, f"{address}#runs={','.join(found.values())}")
            _stop_run(browser, f"{address}#runs={found[HOSTILE]}", live)
            report([str(live), "--html", f"{name}/run.html"])
            browser.open(f"file://{name}/run.html")
            browser.wait(DRAWN)
            assert browser.value("document.title") == HOSTILE
            assert not browser.problems, browser.problems
    print("everything on the page works")


def _see_list(browser: Browser, address: str) -> None:
    browser.open(address)
    for width in (390, 800, 1280):
        browser.look(width, 844)
        browser.wait("document.querySelectorAll('#list tbody tr').length === 3")
        _fits(browser)
    browser.value("document.querySelectorAll('#list input').forEach((box) => box.click())")
    browser.value("document.querySelector('#compare').click()")
    browser.wait(f"location.hash.split(',').length === 3 && {DRAWN}")


def _keep_place(browser: Browser, address: str, folder: Path) -> None:
    """The keyboard's place, and the caret in a field, stay while the list changes."""
    browser.open(address)
    for number, (place, kept) in enumerate({"a.name": "href", "#search": "selectionStart"}.items(), 41):
        browser.wait("document.querySelector('#list a.name')")
        browser.value(f"document.querySelector('{place}').focus()")
        if place == "#search":
            browser.call("Input.insertText", text="alert(1)")
            browser.value("document.activeElement.setSelectionRange(3, 3)")
        before = browser.value(f"document.activeElement.{kept}")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(journal([step(number, time.time())]))
        browser.wait(f"document.querySelector('#list .steps').textContent === '{number}/200'")
        assert before == browser.value(f"document.activeElement.{kept}") and before


def _use_run(browser: Browser, address: str) -> None:
    """Read a value, zoom in and out, and change the axis."""
    for width in (390, 1280):
        browser.look(width, 844)
        browser.open(address)
        browser.wait(DRAWN)
        _fits(browser)
    box = browser.value(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({PLOT})")
    left, middle, right = (box["x"] + box["width"] * share for share in (0.2, 0.5, 0.8))
    down = box["y"] + box["height"] / 2
    browser.mouse("mouseMoved", middle, down)
    browser.wait("/ at (1,00\\d|99\\d)$/.test(document.querySelector('.chart .value').textContent)")
    browser.mouse("mousePressed", left, down)
    browser.mouse("mouseMoved", right, down)
    browser.mouse("mouseReleased", right, down)
    browser.wait("shown.seen && Math.abs(shown.charts.drawn[3].plot.scales.x.min - 400) < 10")
    time.sleep(0.5)  # until the server has sent more points, and the charts were drawn again
    for clicks in (1, 2):
        browser.mouse("mousePressed", middle, down, clicks)
        browser.mouse("mouseReleased", middle, down, clicks)
    browser.wait("!shown.seen && shown.charts.drawn[3].plot.scales.x.min === 0")
    for name in ("tokens", "cost"):
        browser.press(name)
        browser.wait(f"shown.over === '{name}'")
    assert browser.value("shown.charts.drawn[0].plot.scales.x.max > 1")


def _compare_runs(browser: Browser, address: str) -> None:
    """Hide a run, and see that the page keeps the others; on a phone, too."""
    for width in (390, 1280):
        browser.look(width, 844, dark=True)
        browser.open(address)
        browser.wait(f"{DRAWN} && shown.charts.runs.length === 3")
        _fits(browser)
    browser.value("document.querySelector('.legend button').click()")
    browser.wait("shown.charts.runs.length === 2")
    assert "run.seed" in browser.value("document.querySelector('main').innerText")
    browser.value("location.hash = '#runs=' + shown.data.runs[0].id")  # the hidden one, alone
    browser.wait(f"shown.data.runs.length === 1 && {DRAWN}")


def _stop_run(browser: Browser, address: str, folder: Path) -> None:
    """See a step that is added, then stop the run: with a wrong token, and with the right one."""
    browser.look(1280, 900)
    browser.open(address)
    browser.wait(DRAWN)
    assert browser.value("document.title") == HOSTILE and not browser.value("document.images.length")
    browser.value("document.querySelector('[type=search]').focus()")
    browser.call("Input.insertText", text="phases.1")
    place = browser.value("scrollTo(0, 150), scrollY")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(journal([step(43, time.time())]))
    browser.wait("document.querySelector('.numbers dd').textContent === '43'")
    kept = "[document.activeElement.value, document.querySelectorAll('.settings tr').length > 3, scrollY]"
    assert browser.value(kept) == ["phases.1", True, place] and place
    browser.press("Stop…")
    for given, said in (("wrong", "this is not the token"), (TOKEN, "asked ")):
        browser.value(f"document.querySelector('#token').value = '{given}'")
        browser.press(f"Stop {HOSTILE}")
        browser.wait(f"document.querySelector('dialog [role=status]').textContent.startsWith('{said}')")
        assert (folder / STOP_FILE).exists() == (given == TOKEN)
    browser.problems = [each for each in browser.problems if "403" not in each]  # the wrong token


def _fits(browser: Browser) -> None:
    """No page is wider than its window."""
    assert browser.value("document.documentElement.scrollWidth <= innerWidth"), browser.value("location.hash")


# ---- times and pictures --------------------------------------------------------------------------------------


def measure(runs: int, steps: int) -> None:
    """Print the times, in milliseconds."""
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        for number in range(runs):
            invent(Path(name), number, steps)
        size = sum(path.stat().st_size for path in Path(name).rglob("metrics.jsonl"))
        print(f"{runs} runs of {steps:,} steps, {size / 1e6:.0f} MB of journals")
        with served(Path(name)) as address:
            browser.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
            browser.look(1280, 900)
            began = time.perf_counter()
            browser.open(address)
            browser.wait("document.querySelector('#list')")
            print(f"the list, first: {1000 * (time.perf_counter() - began):,.0f} ms")
            every = address + "#runs=" + ",".join(browser.value("list.runs.map((run) => run.id)"))
            opened = [opening(browser, every) for _ in range(REPEATS + 1)]
            print(f"all runs, first, with reading: {opened[0]:,.0f} ms")
            print(f"all runs, opened again: {statistics.median(opened[1:]):,.0f} ms (median of {REPEATS})")
            for over in ("step", "tokens", "hours", "cost"):
                drawn = [browser.value(DRAWING.format(over=over)) for _ in range(REPEATS)]
                print(f"drawn over {over}: {statistics.median(drawn):,.0f} ms (median of {REPEATS})")
            assert not browser.problems, browser.problems


# Runs in each new page: notes the page's age, in milliseconds, at the first frame with charts.
WATCH = """(function watch() {
  if (document.querySelectorAll("canvas").length < 4) return setTimeout(watch, 2);
  requestAnimationFrame(() => setTimeout(() => { window.drawnAt = performance.now(); }));
})()"""
# The page's own functions, from the data to the next frame
DRAWING = """(async () => {{
  history.replaceState(null, "", location.hash.replace(/&over=.*/, "") + "&over={over}");
  const began = performance.now();
  showRuns(shown.data);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - began;
}})()"""


def opening(browser: Browser, address: str) -> float:
    """Milliseconds from the start of the navigation until all charts are drawn, by the page's own clock."""
    browser.open(address)
    browser.wait("window.drawnAt")
    return float(browser.value("drawnAt"))


def pictures(folder: Path, run: str, out: Path) -> None:
    """Write the pictures of docs/runs.md."""
    with served(folder) as address, Browser() as browser:
        browser.look(1280, 420)
        browser.open(address)
        browser.wait("document.querySelector('#list')")
        _picture(browser, out / "runs_list.png")
        found = {each["name"]: each["id"] for each in browser.value("list.runs")}
        for name, runs, width, height, dark in (
            ("runs_page", [found[run]], 1280, 1560, False),
            ("runs_compared", list(found.values()), 1280, 700, True),
            ("runs_phone", [found[run]], 390, 844, False),
        ):
            browser.look(width, height, dark)
            browser.open(address + "#runs=" + ",".join(runs))
            browser.wait(DRAWN)
            time.sleep(0.3)  # for the fonts
            _picture(browser, out / f"{name}.png")
        assert not browser.problems, browser.problems


def _picture(browser: Browser, path: Path) -> None:
    """Take a picture, and write it in 128 colors, which makes its file a third as large.

    Each color is the one that is farthest from all before it, weighted by the root of its number of pixels.
    """
    browser.picture(path)
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    colors, places, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    chosen, far = [int(counts.argmax())], np.full(len(colors), np.inf)
    while len(chosen) < min(128, len(colors)):
        far = np.minimum(far, ((colors - colors[chosen[-1]]) ** 2).sum(1))
        chosen.append(int((far * np.sqrt(counts)).argmax()))
    nearest = ((colors[:, None] - colors[chosen]) ** 2).sum(2).argmin(1)
    picture = Image.fromarray(nearest[places.ravel()].reshape(pixels.shape[:2]).astype(np.uint8), "P")
    picture.putpalette(colors[chosen].ravel().tolist())
    picture.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("try")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--runs", type=int, default=20)
    measuring.add_argument("--steps", type=int, default=10_000)
    drawing = commands.add_parser("pictures")
    drawing.add_argument("folder", type=Path)
    drawing.add_argument("run", help="the name of the run that has pictures of its own")
    drawing.add_argument("out", type=Path)
    given = parser.parse_args()
    if given.command == "try":
        visit()
    elif given.command == "measure":
        measure(given.runs, given.steps)
    else:
        pictures(given.folder, given.run, given.out)


if __name__ == "__main__":
    main()
