// The last rows of the log. The server sends them as HTML, with all text escaped. Rows that the level or the text of
// the search leaves out are hidden. Both are kept in the address, for a link.

const MAX_ROWS = 2000; // as many as the cluster keeps
const AT_END_PIXELS = 8;
const LEVELS = ["debug", "info", "warning", "error"]; // the class of a row
const DEFAULT_LEVEL = "info";

export class Log {
  constructor() {
    this.list = document.getElementById("log");
    this.level = document.getElementById("log-level");
    this.search = document.getElementById("log-search");
    this.count = document.getElementById("log-count");
    const address = new URLSearchParams(location.search);
    this.search.value = address.get("log") ?? "";
    this.level.value = LEVELS.includes(address.get("level")) ? address.get("level") : DEFAULT_LEVEL;
    this.isLinked = this.search.value !== ""; // the log is scrolled to when its first rows have come
    this.level.addEventListener("change", () => this.choose());
    this.search.addEventListener("input", () => this.choose());
  }

  choose() {
    this.keep();
    this.show(this.list.children);
    this.list.scrollTop = this.list.scrollHeight;
  }

  clear() {
    this.list.replaceChildren();
  }

  add(rows) {
    const list = this.list;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < AT_END_PIXELS;
    const before = list.childElementCount;
    list.insertAdjacentHTML("beforeend", rows);
    const added = [...list.children].slice(before);
    while (list.childElementCount > MAX_ROWS) {
      // The row of the first error, which has an id, is never removed.
      const oldest = list.firstElementChild;
      (oldest.id ? oldest.nextElementSibling : oldest).remove();
    }
    this.show(added);
    if (atEnd) list.scrollTop = list.scrollHeight;
    if (this.isLinked) list.scrollIntoView({ block: "center" });
    this.isLinked = false;
  }

  /** Shows or hides these rows, and the number of all that are shown. */
  show(rows) {
    const least = LEVELS.indexOf(this.level.value);
    const text = this.search.value.toLowerCase();
    for (const row of rows) {
      row.hidden = LEVELS.indexOf(row.classList[0]) < least || !row.textContent.toLowerCase().includes(text);
    }
    const found = this.list.querySelectorAll("li:not([hidden])").length;
    const total = this.list.childElementCount.toLocaleString("en");
    this.count.textContent = text ? `${found.toLocaleString("en")} of ${total} lines` : "";
  }

  keep() {
    const address = new URLSearchParams();
    if (this.search.value) address.set("log", this.search.value);
    if (this.level.value !== DEFAULT_LEVEL) address.set("level", this.level.value);
    const query = address.size ? `?${address}` : "";
    history.replaceState(null, "", `${location.pathname}${query}${location.hash}`);
  }
}
