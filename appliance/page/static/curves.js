// The curves of the outputs, one for each output of each execution, drawn by uPlot.

/* global uPlot */

const MAX_POINTS = 20000; // of a curve; beyond that, every other point is dropped
const COLOURS = 8; // --line0 .. --line7, defined by page.css

function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

class Curve {
  constructor(execution, name, number) {
    this.execution = execution;
    this.name = name;
    this.colour = `--line${number % COLOURS}`;
    this.steps = [];
    this.values = [];
    this.shown = true;
    this.notFiniteFrom = null;
  }

  add(step, value) {
    if (value === null && this.notFiniteFrom === null) this.notFiniteFrom = step;
    this.steps.push(step);
    this.values.push(value);
    if (this.steps.length > MAX_POINTS) {
      this.steps = this.steps.filter((_, index) => index % 2 === 0);
      this.values = this.values.filter((_, index) => index % 2 === 0);
    }
  }
}

export class Curves {
  constructor() {
    this.box = document.getElementById("curves");
    this.names = document.getElementById("curve-names");
    this.values = document.getElementById("curve-values");
    this.none = document.getElementById("no-curves");
    this.curves = new Map();
    this.hidden = new Set(); // curves that the user has hidden; kept over a reconnection
    this.plot = null;
    this.due = false;
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
  }

  clear() {
    this.curves.clear();
    this.rebuild();
  }

  /** Adds points: [execution, name, step, value or null] each. */
  add(points) {
    const before = this.curves.size;
    for (const [execution, name, step, value] of points) {
      const key = `${execution} ${name}`;
      if (!this.curves.has(key)) this.curves.set(key, new Curve(execution, name, this.curves.size));
      this.curves.get(key).add(step, value);
    }
    if (this.curves.size !== before) this.rebuild();
    else this.draw();
  }

  size() {
    return { width: this.box.clientWidth, height: this.box.clientHeight };
  }

  label(curve) {
    const executions = new Set([...this.curves.values()].map((other) => other.execution));
    return executions.size > 1 ? `${curve.name}, execution ${curve.execution}` : curve.name;
  }

  /** Makes the choice of curves and the plot anew, after their number or the colours have changed. */
  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    const boxes = [];
    for (const [key, curve] of this.curves) {
      const box = document.createElement("input");
      box.type = "checkbox";
      box.checked = curve.shown = !this.hidden.has(key);
      box.addEventListener("change", () => {
        curve.shown = box.checked;
        if (box.checked) this.hidden.delete(key);
        else this.hidden.add(key);
        this.rebuild();
        this.names.querySelectorAll("input")[[...this.curves.keys()].indexOf(key)].focus();
      });
      const swatch = document.createElement("i");
      swatch.className = curve.colour.slice(2);
      const label = document.createElement("label");
      label.append(box, swatch, this.label(curve));
      boxes.push(label);
    }
    this.names.replaceChildren(this.names.firstElementChild, ...(boxes.length ? boxes : [this.none]));
    if (this.shown().length) this.plot = new uPlot(this.options(), this.data(), this.box);
    this.showValues();
  }

  shown() {
    return [...this.curves.values()].filter((curve) => curve.shown);
  }

  options() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false } };
    return {
      ...this.size(),
      scales: { x: { time: false } },
      axes: [{ ...axis, size: 30 }, { ...axis, size: 56, values: (_, ticks) => ticks.map(format) }],
      cursor: { y: false },
      legend: { show: false },
      hooks: { setCursor: [() => this.showValues()] },
      series: [
        {},
        ...this.shown().map((curve) => ({
          label: this.label(curve),
          stroke: colour(curve.colour),
          width: 2,
          points: { show: curve.steps.length < 2 },
        })),
      ],
    };
  }

  data() {
    const tables = this.shown().map((curve) => [curve.steps, curve.values]);
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
    const texts = this.shown().map((curve, number) => {
      const value = step === null ? curve.values.at(-1) : this.plot.data[number + 1][index];
      const at = step === null ? curve.steps.at(-1) : step;
      const broken = curve.notFiniteFrom === null ? "" : `, not finite at step ${curve.notFiniteFrom}`;
      return `${this.label(curve)} ${format(value)} at step ${at.toLocaleString("en")}${broken}`;
    });
    this.values.textContent = texts.join(" · ");
  }
}
