"use strict";
// Builds elements. What a run has written is only ever set as text, so it can never become markup.

function build(tag, settings, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(settings || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style")
      Object.entries(value).forEach(([key, own]) => element.style.setProperty(key, own));
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

function state(run) {
  return build("span", { class: `state ${run.state}` }, run.state);
}

// A table of texts below a line of names; columns that are named in `numbers` are aligned to the right.
function table(names, rows, numbers = []) {
  const aligned = (name) => ({ class: numbers.includes(name) ? "number" : false });
  return build(
    "div",
    { class: "scroll" },
    build(
      "table",
      {},
      names.some(Boolean)
        ? build(
            "thead",
            {},
            build(
              "tr",
              {},
              names.map((name) => build("th", aligned(name), name)),
            ),
          )
        : null,
      build(
        "tbody",
        {},
        rows.map((row) =>
          build(
            "tr",
            {},
            row.map((cell, at) => build("td", aligned(names[at]), cell)),
          ),
        ),
      ),
    ),
  );
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
