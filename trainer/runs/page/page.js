"use strict";
// Shows what the address names, the list or some runs, and keeps it current. The address: #runs=a,b&over=tokens

const LIST_PAUSE = 2000; // milliseconds between two looks at the list
const RUN_PAUSE = 5000; // and at the data of runs that are shown
const PRESSED_PAUSE = 200; // and while something is dragged

function address() {
  const query = new URLSearchParams(location.hash.slice(1));
  return { runs: (query.get("runs") || "").split(",").filter(Boolean), over: query.get("over") };
}

function go(changes) {
  const { runs, over } = { ...address(), ...changes };
  location.hash = new URLSearchParams({ runs: runs.join(","), ...(over ? { over } : {}) })
    .toString()
    .replaceAll("%2C", ",");
}

function notice(text) {
  const place = document.getElementById("notice");
  place.hidden = !text;
  place.textContent = text;
}

function reading(share) {
  notice(`Reading the journals: ${Math.round(100 * share)}%`);
}

async function ask(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

function runsQuery(identifiers) {
  return `runs?${identifiers.map((one) => `run=${encodeURIComponent(one)}`).join("&")}`;
}

let pressed = false; // a mouse button or a finger is down: what is under it stays
for (const name of ["pointerdown", "pointermove", "pointerup", "pointercancel"])
  addEventListener(name, (event) => (pressed = event.buttons > 0), true);

let asked = 0; // the number of the newest question: older answers are dropped
let timer = 0;

function later(milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(look, milliseconds);
}

// Asks for what the address names, shows it if it is new, and looks again later.
async function look() {
  const own = (asked += 1);
  const { runs } = address();
  try {
    const found = await ask("list");
    if (own !== asked) return;
    if (found.reading !== undefined) {
      reading(found.reading);
      return later(0);
    }
    if (pressed && list) return later(PRESSED_PAUSE);
    const news = JSON.stringify(found.runs) !== JSON.stringify(list && list.runs);
    list = found;
    if (runs.length) await lookAt(runs, own);
    else if (news || shown || !main.querySelector("h1")) showList();
    if (own === asked) {
      notice("");
      later(shown ? RUN_PAUSE : LIST_PAUSE);
    }
  } catch (error) {
    if (own !== asked) return;
    notice(error instanceof TypeError ? "The server does not answer. Trying again." : error.message);
    if (!main.querySelector("h1")) main.replaceChildren(backLink());
    later(RUN_PAUSE);
  }
}

async function lookAt(runs, own) {
  const stamp = JSON.stringify([
    address(),
    list.can_stop,
    list.runs.filter((run) => runs.includes(run.id)).map((run) => [run.last_time, run.state, run.reason]),
  ]);
  if (shown && shown.stamp === stamp) return;
  for (;;) {
    const data = await ask(runsQuery(runs));
    if (own !== asked) return;
    if (data.reading === undefined) {
      if (pressed && shown) return;
      showRuns(data);
      shown.stamp = stamp;
      return;
    }
    reading(data.reading);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener(
  "change",
  () => shown && shown.charts && zoom(shown.seen),
);
if (embedded) showRuns(JSON.parse(embedded.textContent));
else {
  addEventListener("hashchange", () => {
    if (shown) shown.stamp = null;
    look();
  });
  look();
}
