"use strict";
// The two views: the list, and one run or several.

const main = document.getElementById("main");
const embedded = document.getElementById("data"); // a page that is a file has its data in it
const chosen = new Set(); // the runs that are selected in the list
const hidden = new Set(); // the runs that are not drawn
const MOST_COMPARED = 50; // the server's MOST_RUNS
const MOST_ROWS = 500; // of the list, which a browser draws in time
let list = null; // the last list
let shown = null; // the runs that are shown, and their charts; null: the list

// What identifies a link, a button or a field within its view.
function signature(one) {
  const label = one.getAttribute("aria-label") || one.id || one.textContent;
  return [one.tagName, one.getAttribute("href"), one.getAttribute("value"), label].join();
}

// Fills the page. If the view is the same as before, it stays where it was scrolled to, and keeps the focus.
function fill(same, children) {
  const [focused, place] = [document.activeElement, scrollY];
  const [sought, caret] = [signature(focused), focused.type === "search" ? focused.selectionStart : null];
  const boxes = () => [...main.querySelectorAll(".scroll, .events, .settings")];
  const places = same ? boxes().map((box) => [box.scrollLeft, box.scrollTop]) : [];
  const within = main.contains(focused);
  main.replaceChildren(...children.flat().filter((child) => child != null));
  const controls = [...main.querySelectorAll("a, button, input, select")];
  const again = same && within && controls.find((one) => signature(one) === sought);
  if (again) again.focus({ preventScroll: true });
  if (again && caret !== null) again.setSelectionRange(caret, caret);
  boxes().forEach((box, at) => places[at] && box.scrollTo(...places[at]));
  return () => scrollTo(0, same ? place : 0); // once the charts are drawn
}

function backLink() {
  return build("a", { href: "#" }, "← All runs");
}

// ---- the list ----

function showList() {
  document.title = "Runs";
  const search = main.querySelector("#search");
  const typed = search ? search.value : "";
  const found = list.runs.filter((run) => `${run.name} ${run.folder}`.includes(typed));
  const runs = found.slice(0, MOST_ROWS);
  const there = new Set(list.runs.map((run) => run.id));
  chosen.forEach((identifier) => there.has(identifier) || chosen.delete(identifier));
  const running = list.runs.filter((run) => run.state === "running").length;
  const compare = build("button", { id: "compare", onclick: () => go({ runs: [...chosen] }) });
  const choose = (identifier) => {
    if (!chosen.delete(identifier)) chosen.add(identifier);
    compareText();
  };
  const compareText = () => {
    compare.disabled = chosen.size < 2 || chosen.size > MOST_COMPARED;
    compare.textContent = chosen.size < 2 ? "Compare" : `Compare ${chosen.size} runs`;
    if (chosen.size > MOST_COMPARED) compare.textContent = `Compare at most ${MOST_COMPARED} runs`;
  };
  compareText();
  const field = build("input", {
    type: "search",
    id: "search",
    placeholder: "find a run",
    "aria-label": "find a run",
    oninput: showList,
  });
  field.value = typed;
  if (shown && shown.charts) shown.charts.close();
  const same = shown === null;
  shown = null;
  const settle = fill(same, [
    build(
      "div",
      { class: "row" },
      build("h1", {}, "Runs"),
      build("span", { class: "faint" }, `${running} of ${list.runs.length.toLocaleString("en")} running`),
      build("span", { class: "row push" }, field, compare),
    ),
    runs.length
      ? listTable(runs, chosen, choose)
      : build("p", { class: "faint" }, typed ? "no run has this in its name or folder" : "no runs here yet"),
    found.length > runs.length
      ? build(
          "p",
          { class: "faint" },
          `${(found.length - runs.length).toLocaleString("en")} more: find one by its name`,
        )
      : null,
  ]);
  settle();
}

// ---- one run, or several ----

function showRuns(data) {
  const over = pickedAxis(data);
  const waiting = (data.waiting || []).map((run) =>
    build(
      "p",
      {},
      build("strong", {}, run.name),
      " ",
      state(run),
      " ",
      build("span", { class: "faint" }, run.reason || "no step yet"),
    ),
  );
  const alone = data.runs.length === 1;
  const charts = build("div", { class: "charts" });
  data.runs.forEach((run, number) => {
    run.style = runStyle(number);
  });
  document.title = [...data.runs, ...(data.waiting || [])].map((run) => run.name).join(", ");
  const names = data.runs.map((run) => run.id).join();
  const same = shown !== null && shown.names === names;
  if (!same) hidden.clear();
  const configuration = alone && (same ? shown.configuration : settings(data.runs[0])); // keeps what was typed
  const below = alone
    ? [...[whereTimeWent, ranks, events, facts].map((part) => part(data.runs[0])), configuration]
    : comparison(data);
  if (shown && shown.charts) shown.charts.close();
  const settle = fill(same, [
    heading(data),
    waiting,
    alone ? numbers(data.runs[0]) : null,
    data.runs.length ? axisChoice(data, over) : null,
    alone ? null : legend(data),
    charts,
    alone ? build("p", { class: "faint" }, meaning(data.runs[0])) : null,
    data.runs.length ? below : null,
  ]);
  const seen = same && shown.over === over ? shown.seen : null;
  shown = { data, over, names, configuration, parent: charts };
  if (data.runs.length) zoom(seen);
  settle();
}

function drawCharts(curves) {
  const { data, over, parent } = shown;
  const runs = data.runs.filter((run) => !hidden.has(run.id));
  const own = curves || Object.fromEntries(runs.map((run) => [run.id, run.curves]));
  if (shown.charts) shown.charts.close();
  shown.charts = new Charts(parent, data, runs, over, own, shown.seen, zoom);
}

// Shows a part of the horizontal axis, of which the server sends more points; null: all of it.
function zoom(seen) {
  shown.seen = seen;
  drawCharts();
  if (seen && !embedded) refine(seen).catch(() => null); // without an answer, the points that are there stay
}

async function refine(seen) {
  const view = shown;
  const runs = view.data.runs.filter((run) => run.places[view.over]);
  const ends = runs.flatMap((run) => moved(seen, run.places[view.over], run.places.step));
  const range = `&from=${Math.floor(Math.min(...ends)) - 1}&to=${Math.ceil(Math.max(...ends)) + 1}`;
  const { curves } = await ask(runsQuery(runs.map((run) => run.id)) + range);
  if (shown === view && view.seen === seen && curves) drawCharts(curves);
}

function pickedAxis(data) {
  const { over } = address();
  return data.runs.some((run) => run.places[over]) ? over : "step";
}

function axisChoice(data, over) {
  const known = Object.keys(OVER).filter((name) => data.runs.some((run) => run.places[name]));
  const button = (name) =>
    build("button", { "aria-pressed": String(name === over), onclick: () => setAxis(name) }, OVER[name][0]);
  const lacking = data.runs.filter((run) => !run.places[over]).map((run) => run.label);
  return build(
    "div",
    { class: "row over" },
    build("span", { class: "choice" }, known.map(button)),
    build(
      "span",
      { class: "faint" },
      lacking.length ? `not known of ${lacking.join(", ")}` : "drag to zoom, double-click to go back",
    ),
  );
}

function setAxis(over) {
  if (embedded) {
    history.replaceState(null, "", `#over=${over}`);
    showRuns(shown.data);
  } else go({ over });
}

function meaning(run) {
  return [
    "faint line: every step",
    "line: mean over 2% of the steps",
    "dots: held out",
    run.restarts.length ? "dotted: a restart" : "",
    run.phases.length ? "shaded: a later phase" : "",
    (run.curves["MLM loss"] || {}).baseline ? "dashed: word frequencies alone" : "",
  ]
    .filter(Boolean)
    .join(" · ");
}

function heading(data) {
  const back = embedded ? null : backLink();
  const written = embedded
    ? build("span", { class: "faint" }, new Date(1000 * data.time).toLocaleString("en-GB"))
    : null;
  const [run] = data.runs.length ? data.runs : data.waiting;
  if (data.runs.length + (data.waiting || []).length > 1)
    return build("div", { class: "row" }, back, build("h1", {}, `${data.runs.length} runs`), written);
  const others = list ? list.runs.filter((other) => other.id !== run.id) : [];
  const compare = build(
    "select",
    { "aria-label": "compare with", onchange: () => go({ runs: [run.id, compare.value] }) },
    build("option", { value: "" }, "compare with"),
    others.map((other) => build("option", { value: other.id }, other.name)),
  );
  return build(
    "header",
    {},
    back,
    build(
      "div",
      { class: "row" },
      build("h1", {}, run.name),
      state(run),
      build(
        "span",
        { class: "faint" },
        [run.folder, run.cells["time left"] && `${run.cells["time left"]} left`, run.reason]
          .filter(Boolean)
          .join(" · "),
      ),
      written,
      build(
        "span",
        { class: "row push" },
        others.length ? compare : null,
        list && list.can_stop && run.live ? stopButton(run) : null,
      ),
    ),
  );
}

function legend(data) {
  const one = (run) =>
    build(
      "button",
      {
        "aria-pressed": String(!hidden.has(run.id)),
        onclick: () => {
          if (!hidden.delete(run.id)) hidden.add(run.id);
          showRuns(data);
        },
        onmouseenter: () => shown.charts.focus(run.id),
        onmouseleave: () => shown.charts.focus(null),
      },
      build("i", {
        class: `swatch ${run.style.dashName}`,
        style: { "border-color": `var(--${run.style.color})` },
      }),
      build("span", {}, run.label),
    );
  return build("div", { class: "legend", style: { margin: "0 0 14px" } }, data.runs.map(one));
}
