"use strict";
// The list of runs.

const LEFT = ["phase", "folder"];

// `chosen`: the identifiers of the runs to compare; `choose` is called with a run's identifier.
function listTable(runs, chosen, choose) {
  const columns = Object.keys(runs[0].cells).filter(
    (name) => !["run", "state", "step"].includes(name) && runs.some((run) => run.cells[name]),
  );
  const align = (name) => (LEFT.includes(name) ? false : "number");
  const names = columns.map((name) => build("th", { class: align(name) }, name));
  const row = (run) =>
    build(
      "tr",
      {},
      build(
        "td",
        {},
        build("input", {
          type: "checkbox",
          value: run.id,
          checked: chosen.has(run.id),
          onchange: () => choose(run.id),
          "aria-label": `compare ${run.name}`,
        }),
      ),
      build(
        "td",
        { class: "title" },
        build("a", { class: "name", href: `#runs=${run.id}` }, run.name),
        run.reason ? build("span", { class: "note" }, run.reason) : null,
      ),
      build("td", {}, state(run)),
      build("td", { class: "number steps" }, run.cells.step, progress(run)),
      columns.map((name) => build("td", { class: align(name), "data-name": name }, run.cells[name])),
    );
  const first = [
    build("th"),
    build("th", {}, "run"),
    build("th", {}, "state"),
    build("th", { class: "number" }, "step"),
  ];
  const head = build("thead", {}, build("tr", {}, first, names));
  return build(
    "div",
    { class: "scroll" },
    build("table", { id: "list" }, head, build("tbody", {}, runs.map(row))),
  );
}

function progress(run) {
  if (!run.target_steps) return null;
  const share = Math.min(1, run.step / run.target_steps);
  return build("span", { class: "progress" }, build("span", { style: { width: `${100 * share}%` } }));
}
