"use strict";
// Numbers as people read them, ticks of axes, and places on the horizontal axis.

const UNITS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

function short(value) {
  const [size, unit] = UNITS.find(([size]) => Math.abs(value) >= size) || [1, ""];
  return `${Number((value / size).toPrecision(3))}${unit && ` ${unit}`}`;
}

// A number of any size, with so many digits.
function plain(value, digits) {
  const size = Math.abs(value);
  if (size && (size >= 1e5 || size < 1e-4))
    return value
      .toExponential(2)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

const FORMS = {
  loss: (value) => value.toFixed(3),
  share: (value) => `${(100 * value).toFixed(1)}%`,
  count: short,
  number: (value) => plain(value, 3),
};
const TICKS = {
  ...FORMS,
  loss: (value) => plain(value, 5),
  share: (value) => `${Number((100 * value).toPrecision(4))}%`,
};

const whole = (value) => Math.round(value).toLocaleString("en");
const time = (value) => (value < 1 ? `${plain(60 * value, 3)} min` : `${plain(value, 3)} h`);

// The horizontal axes: the name on the button, how a place is written, and a tick.
const OVER = {
  step: ["steps", whole, (value) => (value < 1e5 ? whole(value) : short(value))],
  samples: ["samples", short, short],
  tokens: ["tokens", short, short],
  hours: ["time", time, time],
  "GPU-hours": ["GPU-hours", short, short],
  cost: ["cost", short, short],
};

const DECIMALS = (powers) => powers.flatMap((power) => [1, 2, 5].map((digit) => Number(`${digit}e${power}`)));
const WHOLE = DECIMALS([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
const FINE = DECIMALS([-6, -5, -4, -3, -2, -1]);
// Distances between ticks of an axis that does not count in tens, or has nothing between whole numbers.
const DISTANCES = {
  step: WHOLE,
  hours: [
    ...[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30].map((minutes) => minutes / 60),
    ...[1, 2, 3, 6, 12, 24, 48],
    ...WHOLE.filter((hours) => hours >= 100),
  ],
};

// At most so many ticks, apart by the shortest of the distances that is long enough.
function evenTicks(distances, low, high, most) {
  const apart = distances.find((one) => (high - low) / one <= most) || (high - low) / most;
  const found = [];
  for (let at = Math.ceil(low / apart); at * apart <= high && found.length <= most; at += 1)
    found.push(at * apart);
  return found;
}

// Moves sorted values from one scale to another by linear interpolation between known places.
function moved(values, from, to) {
  let at = 1;
  const last = from.length - 1;
  return values.map((value) => {
    while (at < last && from[at] < value) at += 1;
    if (!last) return to[0];
    const share = (value - from[at - 1]) / (from[at] - from[at - 1]);
    return to[at - 1] + Math.min(1, Math.max(share, at === 1 ? -1 : 0)) * (to[at] - to[at - 1]);
  });
}

// The index of the nearest of some sorted values.
function nearest(values, wanted) {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - values[low] < values[high] - wanted ? low : high;
}

// The vertical range of what is seen: all of bold lines and dots, and nearly all of faint lines, which have spikes.
function range(chart, series, [left, right]) {
  let [low, high] = [Infinity, -Infinity];
  for (const { xs, ys, bold } of series) {
    const seen = ys.filter((y, at) => xs[at] >= left && xs[at] <= right);
    if (!bold) seen.sort((one, other) => one - other);
    const cut = bold ? 0 : Math.round(0.01 * seen.length);
    for (const y of seen.slice(cut, seen.length - cut)) {
      if (y < low) low = y;
      if (y > high) high = y;
    }
  }
  if (low > high) return [chart.logarithm ? 1 : 0, 2];
  if (chart.logarithm && low > 0) {
    const room = chart.logarithm === 2 ? 4 : Math.max(1.1, (high / low) ** 0.06);
    return [low / room, high * room];
  }
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  return [chart.zero ? 0 : low - room, high + room];
}

// Ticks of a logarithmic axis: within a decade, too, if there are few decades, and even ones in a part of a decade.
function logarithmicTicks(base, low, high) {
  const first = Math.floor(Math.log(low) / Math.log(base));
  const last = Math.ceil(Math.log(high) / Math.log(base));
  const decades = Math.log10(high / low);
  const within = base === 2 ? [1] : decades < 1 ? [1, 1.5, 2, 3, 4, 5, 7] : decades < 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((last - first) / 7));
  const found = [];
  for (let power = first; power <= last; power += every)
    within.forEach((factor) => found.push(factor * base ** power));
  const seen = found.filter((value) => value >= low && value <= high);
  return seen.length > 2 ? seen : evenTicks([...FINE, ...WHOLE], low, high, 6);
}
