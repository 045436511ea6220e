"use strict";
// Draws the curves of one or several runs, with one horizontal axis for all charts.

const HEIGHT = 230; // pixels
const RUN_COLORS = ["blue", "orange", "green", "violet", "rose", "sky"];
const DASHES = [[], [8, 4], [2, 3]]; // for more runs than there are colors
const DASH_NAMES = ["", "dash", "dot"];

function runStyle(number) {
  const dash = Math.floor(number / RUN_COLORS.length) % DASHES.length;
  return { color: RUN_COLORS[number % RUN_COLORS.length], dash: DASHES[dash], dashName: DASH_NAMES[dash] };
}

// The lines of one chart: those of each run, faint ones first.
function seriesOf(chart, runs, over, curves) {
  const found = [];
  for (const run of runs) {
    const own = curves[run.id][chart.name] || {};
    const main = own.mean ? "mean" : "line";
    for (const kind of ["baseline", "line", "mean", "dots"]) {
      if (!own[kind] || !run.places[over]) continue;
      const xs = moved(own[kind][0], run.places.step, run.places[over]);
      found.push({ run, kind, xs, ys: own[kind][1], bold: kind !== "line" || kind === main });
    }
  }
  return found;
}

// The circles of held-out values.
function dots(plot, number) {
  return uPlot.orient(plot, number, (series, xs, ys, scaleX, scaleY, toX, toY, left, top, width, height) => {
    const path = new Path2D();
    const radius = (xs.length > 60 ? 2.5 : 3.5) * devicePixelRatio;
    xs.forEach((x, at) => {
      const [across, down] = [toX(x, scaleX, width, left), toY(ys[at], scaleY, height, top)];
      path.moveTo(across + radius, down);
      path.arc(across, down, radius, 0, 2 * Math.PI);
    });
    return { fill: path, stroke: path, flags: 0 };
  });
}

function lineOptions({ run, kind, bold, xs }, chart, alone) {
  const own = color(alone && chart.name.startsWith("NSP") ? "violet" : run.style.color);
  const facets = [
    { scale: "x", auto: false },
    { scale: "y", auto: false },
  ];
  const common = { facets, spanGaps: true, pxAlign: 0, points: { show: false } };
  if (kind === "dots") return { ...common, stroke: color("ink"), fill: own, width: 1, paths: dots };
  if (xs.length === 1) return { ...common, stroke: own, fill: own, width: 1, paths: dots }; // no line yet
  if (kind === "baseline")
    return { ...common, stroke: color("faint"), width: 1.2, dash: [5, 4], paths: uPlot.paths.linear() };
  const paths = chart.logarithm === 2 ? uPlot.paths.stepped({ align: -1 }) : uPlot.paths.linear();
  return { ...common, stroke: bold ? own : `${own}48`, width: bold ? 1.8 : 0.8, dash: run.style.dash, paths };
}

// Shades later phases and marks restarts, for a run that is alone.
function marks(run, over) {
  const places = (steps) => moved(steps, run.places.step, run.places[over]);
  const [restarts, phases] = [places(run.restarts), places(run.phases)];
  return (plot) => {
    const { ctx, bbox } = plot;
    const across = (x) => Math.round(plot.valToPos(x, "x", true));
    const right = bbox.left + bbox.width;
    const inside = (x) => x > bbox.left && x < right;
    ctx.save();
    ctx.fillStyle = ctx.strokeStyle = color("ink");
    ctx.globalAlpha = 0.06;
    for (const x of phases.map(across).filter((x) => x < right)) {
      const left = Math.max(x, bbox.left);
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
    }
    ctx.globalAlpha = 1;
    ctx.setLineDash([1.5 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const x of restarts.map(across).filter(inside)) {
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };
}

function axisOptions(chart, over) {
  const common = {
    stroke: color("faint"),
    grid: { stroke: color("line"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui, sans-serif",
  };
  const horizontal = { ...common, space: 70, size: 26, values: (plot, ticks) => ticks.map(OVER[over][2]) };
  if (DISTANCES[over])
    horizontal.splits = (plot, axis, low, high) =>
      evenTicks(DISTANCES[over], low, high, plot.bbox.width / devicePixelRatio / 70);
  const vertical = { ...common, size: 58, values: (plot, ticks) => ticks.map(TICKS[chart.form]) };
  if (!chart.logarithm) return [horizontal, vertical];
  const splits = (plot, axis, low, high) => logarithmicTicks(chart.logarithm, low, high);
  return [horizontal, { ...vertical, splits, filter: (plot, ticks) => ticks }];
}

// One chart in `box`. `group` connects it to the others; `seen` is the horizontal range.
function drawChart(box, chart, series, group, seen) {
  const value = box.querySelector(".value");
  const [low, high] = range(chart, series, seen);
  const fixed = (plot, from, to) => [from, to];
  const logarithmic = chart.logarithm && low > 0;
  const plot = new uPlot(
    {
      mode: 2,
      width: box.clientWidth,
      height: HEIGHT,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        points: { show: false },
        dataIdx: () => null,
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => setTimeout(() => group.zoom(null)) },
      },
      scales: {
        x: { time: false, auto: false, min: seen[0], max: seen[1], range: fixed },
        y: {
          auto: false,
          min: low,
          max: high,
          range: fixed,
          ...(logarithmic ? { distr: 3, log: chart.logarithm } : {}),
        },
      },
      axes: axisOptions({ ...chart, logarithm: logarithmic ? chart.logarithm : 0 }, group.over),
      series: [{}, ...series.map((one) => lineOptions(one, chart, group.alone))],
      hooks: {
        drawClear: group.alone ? [marks(group.runs[0], group.over)] : [],
        setCursor: [(own) => group.point(own)],
        setSelect: [
          (own) => {
            const { left, width } = own.select;
            const range = [own.posToVal(left, "x"), own.posToVal(left + width, "x")];
            if (width > 4) setTimeout(() => group.zoom(range)); // once uPlot has seen the end of the drag
          },
        ],
      },
    },
    [null, ...series.map(({ xs, ys }) => [xs, ys])],
    box,
  );
  return { plot, series, chart, value };
}

// What is nearest to the cursor: a run's value, and where it is.
function readout({ plot, series, chart, value }, x, down) {
  const lines = series.filter(({ bold, kind }) => bold && kind !== "baseline");
  let best = null;
  for (const one of lines) {
    const at = nearest(one.xs, x);
    if (one.kind === "dots" && Math.abs(plot.valToPos(one.xs[at], "x") - plot.valToPos(x, "x")) > 6) continue;
    const distance = down == null ? 0 : Math.abs(plot.valToPos(one.ys[at], "y") - down);
    if (best === null || distance < best.distance) best = { one, at, distance };
  }
  value.replaceChildren();
  if (best === null) return null;
  const { one, at } = best;
  return {
    run: one.run,
    text: `${one.kind === "dots" ? "held out " : ""}${FORMS[chart.form](one.ys[at])}`,
    x: one.xs[at],
  };
}

// All charts of the runs in `data`. `parent` is filled; `zoomed` is called with a new horizontal range, or null.
class Charts {
  constructor(parent, data, runs, over, curves, seen, zoomed) {
    Object.assign(this, { parent, runs, over, alone: runs.length === 1, zoomed });
    this.charts = data.charts.filter(({ name }) => runs.some((run) => curves[run.id][name]));
    this.boxes = this.charts.map(({ name, unit }) =>
      build(
        "section",
        { class: "chart" },
        build("h3", {}, name, build("span", {}, unit), build("span", { class: "value" })),
      ),
    );
    parent.replaceChildren(...this.boxes);
    this.draw(curves, seen);
    this.observer = new ResizeObserver(() =>
      this.drawn.forEach(({ plot }, at) =>
        plot.setSize({ width: this.boxes[at].clientWidth, height: HEIGHT }),
      ),
    );
    this.observer.observe(parent);
  }

  draw(curves, seen) {
    (this.drawn || []).forEach(({ plot }) => plot.destroy());
    const ends = this.runs.flatMap((run) => run.places[this.over] || []);
    const whole = [this.over === "step" ? Math.max(0, Math.min(...ends) - 1) : 0, Math.max(...ends)];
    this.drawn = this.charts.map((chart, at) =>
      drawChart(this.boxes[at], chart, seriesOf(chart, this.runs, this.over, curves), this, seen || whole),
    );
  }

  zoom(seen) {
    this.zoomed(seen);
  }

  // Shows the values at the cursor's place in every chart.
  point(source) {
    if (this.pointing) return;
    this.pointing = true;
    const { left, top } = source.cursor;
    const x = source.posToVal(left, "x");
    for (const drawn of this.drawn) {
      if (drawn.plot !== source)
        drawn.plot.setCursor({ left: left < 0 ? -10 : drawn.plot.valToPos(x, "x"), top: -10 });
      const found = left < 0 ? null : readout(drawn, x, drawn.plot === source ? top : null);
      if (!found) drawn.value.replaceChildren();
      else if (this.alone) drawn.value.replaceChildren(`${found.text} at ${OVER[this.over][1](found.x)}`);
      else if (drawn.plot === source) drawn.value.replaceChildren(`${found.run.label} ${found.text}`);
    }
    this.pointing = false;
  }

  // Makes all runs but one faint; null: none.
  focus(identifier) {
    for (const { plot, series } of this.drawn) {
      series.forEach(({ run }, at) => {
        plot.series[at + 1].alpha = identifier && run.id !== identifier ? 0.12 : 1;
      });
      plot.redraw(false, false);
    }
  }

  close() {
    this.observer.disconnect();
    this.drawn.forEach(({ plot }) => plot.destroy());
  }
}
