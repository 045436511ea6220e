"use strict";
// The parts of a run's page, and of a comparison, other than the curves.

const SHARE_COLORS = {
  productive: "green",
  rework: "rework",
  skipped: "red",
  data: "orange",
  evaluation: "blue",
  checkpoint: "sky",
  start: "start",
  down: "down",
  forward: "blue",
  backward: "sky",
  optimizer: "green",
  reduce: "rose",
};

function section(title, ...children) {
  return build("section", {}, build("h2", {}, title), ...children);
}

function numbers(run) {
  const one = ([name, text]) => build("div", {}, build("dt", {}, name), build("dd", {}, text));
  return build("dl", { class: "numbers" }, Object.entries(run.numbers).map(one));
}

// One bar of shares. Each share: its name, from 0 to 1, and how long it was.
function bar(shares) {
  const own = (name) => `var(--${SHARE_COLORS[name] || "start"})`;
  const part = ([name, share, text]) =>
    build("span", { title: `${name} ${text}`, style: { width: `${100 * share}%`, background: own(name) } });
  return build(
    "div",
    { class: "bar", role: "img", "aria-label": shares.map(([name, , text]) => `${name} ${text}`).join(", ") },
    shares.map(part),
  );
}

function shareLegend(shares) {
  const percent = (share) => `${(100 * share).toFixed(1)}%`;
  return build(
    "ul",
    { class: "shares" },
    shares.map(([name, share, text]) =>
      build(
        "li",
        { style: { "--own": `var(--${SHARE_COLORS[name] || "start"})` } },
        `${name} `,
        build("span", { class: "faint" }, `${text} · ${percent(share)}`),
      ),
    ),
  );
}

function whereTimeWent(run) {
  if (!run.time.length || !run.wall) return null;
  return section(`Where ${run.wall} went`, bar(run.time), shareLegend(run.time));
}

function ranks(run) {
  if (!run.step_time.length) return null;
  const often = run.slowest.map(([rank, share]) => [rank, `${(100 * share).toFixed(0)}%`]);
  const many = run.facts.ranks && run.facts.ranks !== "1";
  return build(
    "div",
    { class: "two" },
    section("A step's time, mean of the ranks", bar(run.step_time), shareLegend(run.step_time)),
    many
      ? section(
          `The slowest of ${run.facts.ranks} ranks`,
          table(["rank", "was the slowest"], often, ["rank", "was the slowest"]),
        )
      : null,
  );
}

function events(run) {
  const rows = run.events
    .toReversed()
    .map(([step, kind, text]) => [
      step.toLocaleString("en"),
      build("span", { class: ["alarm", "rollback"].includes(kind) ? "red" : false }, kind),
      text,
    ]);
  const more = run.events_left_out
    ? build(
        "p",
        { class: "faint" },
        `${run.events_left_out.toLocaleString("en")} earlier events are not shown`,
      )
    : null;
  return section(
    "Events",
    build("div", { class: "events" }, table(["step", "event", ""], rows, ["step"])),
    more,
  );
}

function facts(run) {
  return build(
    "div",
    { class: "two" },
    section("Summary", table(["", ""], Object.entries(run.summary))),
    section("Ran with", table(["", ""], Object.entries(run.facts))),
  );
}

function settings(run) {
  if (!run.settings.length)
    return section("Configuration", build("p", { class: "faint" }, "no readable config.yaml"));
  const box = build("div", { class: "settings" });
  const show = (text) =>
    box.replaceChildren(
      table(
        ["", ""],
        run.settings.filter(([key]) => key.includes(text)),
      ),
    );
  show("");
  const search = build("input", {
    type: "search",
    placeholder: "find a setting",
    "aria-label": "find a setting",
    oninput: () => show(search.value),
  });
  return section("Configuration", search, box);
}

// What differs between several runs, and where the time of each went.
function comparison(data) {
  const labels = data.runs.map((run) => run.label);
  const found = Object.entries(data.tables).map(([name, rows]) => {
    const lines = Object.entries(rows).map(([key, values]) => [key, ...values]);
    const title = name[0].toUpperCase() + name.slice(1);
    return section(
      title === "Settings" ? "Settings that differ" : title,
      lines.length
        ? table(["", ...labels], lines, name === "results" ? labels : [])
        : build("p", { class: "faint" }, "no difference"),
    );
  });
  const timed = data.runs.filter((run) => run.time.length && run.wall);
  if (!timed.length) return found;
  const all = timed.map((run) =>
    build(
      "tr",
      {},
      build("th", {}, run.label),
      build("td", { style: { width: "100%" } }, bar(run.time)),
      build("td", { class: "number" }, run.wall),
    ),
  );
  const used = [...new Set(timed.flatMap((run) => run.time.map(([name]) => name)))];
  const legend = build(
    "ul",
    { class: "shares" },
    used.map((name) => build("li", { style: { "--own": `var(--${SHARE_COLORS[name] || "start"})` } }, name)),
  );
  return [
    section("Where the time went", build("table", { style: { width: "100%" } }, all), legend),
    ...found,
  ];
}
