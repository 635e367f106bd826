// Keeps a page up to date by the events of its address (appliance/page/streams.py says which there are).

/* global Idiomorph */

const AGAIN_MILLISECONDS = 2000;

function say(text, live) {
  const connection = document.getElementById("connection");
  connection.textContent = text;
  connection.classList.toggle("live", live);
}

function fill(regions) {
  for (const [id, html] of Object.entries(regions)) {
    Idiomorph.morph(document.getElementById(id), html, { morphStyle: "innerHTML" });
  }
}

/** handlers: functions by the names of events, called with their data; "regions" is done here. */
export function listen(handlers) {
  const source = new EventSource(document.body.dataset.events);
  const take = { regions: fill, ...handlers };
  for (const [name, handle] of Object.entries(take)) {
    source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  }
  source.addEventListener("open", () => say("live", true));
  source.addEventListener("end", () => {
    source.close();
    say("complete", false);
  });
  source.addEventListener("error", () => {
    say("connection lost, trying again", false);
    // The browser itself tries again, unless it was refused.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => listen(handlers), AGAIN_MILLISECONDS);
  });
}
