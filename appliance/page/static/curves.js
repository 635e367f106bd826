// The curves of the outputs, one for each output of each execution of each shown job, drawn by uPlot.

/* global uPlot */

const MAX_POINTS = 20000; // of a curve; beyond that, every other point is dropped
const COLOURS = 8; // --line0 .. --line7, defined by page.css
const FAINT = "50"; // the opacity of the points behind a smoothed curve, in hexadecimal
const SPREAD = 20; // curves whose sizes differ by more do not share an axis

function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

/** The text of a tick of an axis, in which there is place for a few digits. */
function tickText(tick) {
  const size = Math.abs(tick);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? Number(tick.toPrecision(3)).toExponential() : format(tick);
}

/** The ticks of a logarithmic axis: the powers of ten, and what is between them if they are few. */
function powers(plot, axis, least, most) {
  const [first, last] = [Math.floor(Math.log10(least)), Math.ceil(Math.log10(most))];
  const digits = last - first > 2 ? [1] : [1, 2, 5];
  const all = Array.from({ length: last - first + 1 }, (_, number) => digits.map((digit) => digit * 10 ** (first + number)));
  return all.flat().filter((tick) => tick >= least && tick <= most);
}

/** The exponential moving average, without the bias towards 0 of its first values. */
function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

class Curve {
  constructor(job, execution, name, number) {
    this.job = job;
    this.execution = execution;
    this.name = name;
    this.colour = `--line${number % COLOURS}`;
    this.steps = [];
    this.values = [];
    this.shown = true;
    this.axis = "y";
    this.notFiniteFrom = null;
    this.logarithms = 0; // the sum of those of the sizes of all values but 0
    this.counted = 0;
  }

  add(step, value) {
    if (value === null && this.notFiniteFrom === null) this.notFiniteFrom = step;
    if (value) {
      this.logarithms += Math.log(Math.abs(value));
      this.counted += 1;
    }
    this.steps.push(step);
    this.values.push(value);
    if (this.steps.length > MAX_POINTS) {
      this.steps = this.steps.filter((_, index) => index % 2 === 0);
      this.values = this.values.filter((_, index) => index % 2 === 0);
    }
  }

  /** The logarithm of the usual size of a value: an outlier hardly changes it. */
  size() {
    return this.counted ? this.logarithms / this.counted : null;
  }
}

export class Curves {
  constructor() {
    this.box = document.getElementById("curves");
    this.names = document.getElementById("curve-names");
    this.values = document.getElementById("curve-values");
    this.none = document.getElementById("no-curves");
    this.logarithmic = document.getElementById("curve-log");
    this.smoothing = document.getElementById("curve-smoothing");
    this.curves = new Map();
    this.hidden = new Set(); // curves that the user has hidden; kept over a reconnection
    this.plot = null;
    this.due = false;
    this.logarithmic.addEventListener("change", () => this.rebuild());
    this.smoothing.addEventListener("input", () => this.rebuild());
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
  }

  /** Drops the curves of a job. */
  clear(job) {
    for (const [key, curve] of this.curves) if (curve.job === job) this.curves.delete(key);
    this.rebuild();
  }

  /** Adds points of a job: [execution, name, step, value or null] each. */
  add(job, points) {
    const before = this.curves.size;
    for (const [execution, name, step, value] of points) {
      const key = `${job} ${execution} ${name}`;
      if (!this.curves.has(key)) this.curves.set(key, new Curve(job, execution, name, this.freeNumber()));
      this.curves.get(key).add(step, value);
    }
    if (this.curves.size !== before || this.setAxes()) this.rebuild();
    else this.draw();
  }

  /** The number of the colour that the fewest curves have. */
  freeNumber() {
    const uses = Array(COLOURS).fill(0);
    for (const curve of this.curves.values()) uses[Number(curve.colour.slice(6))] += 1;
    return uses.indexOf(Math.min(...uses));
  }

  size() {
    return { width: this.box.clientWidth, height: this.box.clientHeight };
  }

  label(curve) {
    const all = [...this.curves.values()];
    const executions = new Set(all.filter((other) => other.job === curve.job).map((other) => other.execution));
    const parts = [curve.name];
    if (executions.size > 1) parts.push(`execution ${curve.execution}`);
    if (new Set(all.map((other) => other.job)).size > 1) parts.push(curve.job);
    return parts.join(", ");
  }

  shown() {
    return [...this.curves.values()].filter((curve) => curve.shown);
  }

  /** Gives small curves an axis of their own, on the right, if others are much larger. Returns whether one changed. */
  setAxes() {
    const shown = this.shown();
    const before = shown.map((curve) => curve.axis).join();
    const sized = shown.filter((curve) => curve.size() !== null).sort((one, other) => one.size() - other.size());
    const gaps = sized.slice(1).map((curve, number) => curve.size() - sized[number].size());
    const widest = Math.max(0, ...gaps);
    const isSplit = !this.logarithmic.checked && widest > Math.log(SPREAD);
    const small = new Set(isSplit ? sized.slice(0, gaps.indexOf(widest) + 1) : []);
    for (const curve of shown) curve.axis = small.has(curve) ? "right" : "y";
    return shown.map((curve) => curve.axis).join() !== before;
  }

  /** Makes the choice of curves and the plot anew, after their number, their axes or the colours have changed. */
  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    const boxes = [];
    for (const [key, curve] of this.curves) curve.shown = !this.hidden.has(key);
    this.setAxes();
    for (const [key, curve] of this.curves) {
      const box = document.createElement("input");
      box.type = "checkbox";
      box.checked = curve.shown;
      box.addEventListener("change", () => {
        if (box.checked) this.hidden.delete(key);
        else this.hidden.add(key);
        this.rebuild();
        this.names.querySelectorAll("input")[[...this.curves.keys()].indexOf(key)].focus();
      });
      const swatch = document.createElement("i");
      swatch.className = curve.colour.slice(2);
      const label = document.createElement("label");
      label.append(box, swatch, this.label(curve));
      if (curve.shown && curve.axis === "right") {
        const axis = document.createElement("span");
        axis.className = "soft";
        axis.textContent = "right axis";
        label.append(axis);
      }
      boxes.push(label);
    }
    this.names.replaceChildren(this.names.firstElementChild, ...(boxes.length ? boxes : [this.none]));
    if (this.shown().length) this.plot = new uPlot(this.options(), this.data(), this.box);
    this.showValues();
  }

  options() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false } };
    const ticks = this.logarithmic.checked ? { splits: powers, filter: (_, splits) => splits } : {};
    const values = { ...axis, ...ticks, size: 56, values: (_, splits) => splits.map(tickText) };
    const scale = { distr: this.logarithmic.checked ? 3 : 1 };
    const series = { width: 2, spanGaps: false };
    const smooth = this.weight() > 0;
    const hasRight = this.shown().some((curve) => curve.axis === "right");
    return {
      ...this.size(),
      scales: { x: { time: false }, y: scale, ...(hasRight ? { right: scale } : {}) },
      axes: [
        { ...axis, size: 30 },
        values,
        ...(hasRight ? [{ ...values, scale: "right", side: 1, grid: { show: false } }] : []),
      ],
      cursor: { y: false },
      legend: { show: false },
      hooks: { setCursor: [() => this.showValues()] },
      series: [
        {},
        ...this.shown().flatMap((curve) => {
          const line = { ...series, label: this.label(curve), scale: curve.axis, stroke: colour(curve.colour) };
          const points = { ...line, points: { show: curve.steps.length < 2 } };
          if (!smooth) return [points];
          return [{ ...points, stroke: line.stroke + FAINT, width: 1 }, { ...line, points: { show: false } }];
        }),
      ],
    };
  }

  /** The weight of what came before in a smoothed curve; 0: curves are not smoothed. */
  weight() {
    return Number(this.smoothing.value);
  }

  data() {
    const weight = this.weight();
    // A logarithmic axis has no place for 0 and below.
    const drawn = (values) => (this.logarithmic.checked ? values.map((value) => (value > 0 ? value : null)) : values);
    const tables = this.shown().map((curve) => {
      const lines = weight > 0 ? [curve.values, smoothed(curve.values, weight)] : [curve.values];
      return [curve.steps, ...lines.map(drawn)];
    });
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }

  /** Draws once for all points that were added within a frame. */
  draw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      if (this.plot) this.plot.setData(this.data());
      this.showValues();
    });
  }

  /** Shows the values under the cursor, or the last ones, as text. */
  showValues() {
    const index = this.plot?.cursor?.idx;
    const step = index === null || index === undefined ? null : this.plot.data[0][index];
    const texts = this.shown().map((curve) => {
      const place = step === null ? curve.steps.length - 1 : curve.steps.indexOf(step);
      const at = step === null ? curve.steps.at(-1) : step;
      const broken = curve.notFiniteFrom === null ? "" : `, not finite at step ${curve.notFiniteFrom}`;
      return `${this.label(curve)} ${format(curve.values[place])} at step ${at.toLocaleString("en")}${broken}`;
    });
    this.values.textContent = texts.join(" · ");
  }
}
