// The last rows of the log. The server sends them as HTML, with all text escaped.

const MAX_ROWS = 1000;
const AT_END_PIXELS = 8;

export class Log {
  constructor() {
    this.list = document.getElementById("log");
    const level = document.getElementById("log-level");
    const show = () => {
      this.list.className = `least-${level.value}`;
      this.list.scrollTop = this.list.scrollHeight;
    };
    level.addEventListener("change", show);
    show(); // the browser may have restored an earlier choice
  }

  clear() {
    this.list.replaceChildren();
  }

  add(rows) {
    const list = this.list;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < AT_END_PIXELS;
    list.insertAdjacentHTML("beforeend", rows);
    while (list.childElementCount > MAX_ROWS) {
      // The row of the first error, which has an id, is never removed.
      const oldest = list.firstElementChild;
      (oldest.id ? oldest.nextElementSibling : oldest).remove();
    }
    if (atEnd) list.scrollTop = list.scrollHeight;
  }
}
