// The curves of other jobs beside those of the page's own. The jobs are kept in the address, after "#", for a link.

const SEPARATOR = ",";

export class Comparison {
  constructor(curves) {
    this.curves = curves;
    this.choice = document.getElementById("curve-jobs");
    this.chosen = document.getElementById("curve-chosen");
    this.sources = new Map(); // by the name of the job
    this.choice.addEventListener("change", () => {
      if (this.choice.value) this.show(this.choice.value);
      this.choice.value = "";
    });
    const named = location.hash.slice(1).split(SEPARATOR).map(decodeURIComponent);
    for (const option of this.choice.options) if (option.value && named.includes(option.value)) this.show(option.value);
  }

  show(job) {
    if (this.sources.has(job)) return;
    const source = new EventSource(`/jobs/${encodeURIComponent(job)}/curves`);
    source.addEventListener("begin", () => this.curves.clear(job));
    source.addEventListener("scalars", (event) => this.curves.add(job, JSON.parse(event.data)));
    source.addEventListener("end", () => source.close());
    this.sources.set(job, source);
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${job} ×`;
    button.setAttribute("aria-label", `Remove ${job}`);
    button.addEventListener("click", () => {
      source.close();
      this.sources.delete(job);
      this.curves.clear(job);
      button.remove();
      this.keep();
    });
    this.chosen.append(button);
    this.keep();
  }

  keep() {
    const jobs = [...this.sources.keys()].map(encodeURIComponent).join(SEPARATOR);
    history.replaceState(null, "", `${location.pathname}${location.search}${jobs ? `#${jobs}` : ""}`);
    for (const option of this.choice.options) option.hidden = this.sources.has(option.value);
  }
}
