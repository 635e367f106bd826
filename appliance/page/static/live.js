// Keeps a page up to date by the events of its address, which are described in appliance/page/streams.py.

/* global Idiomorph */

const RETRY_MILLISECONDS = 2000;

function showConnection(text, live) {
  const connection = document.getElementById("connection");
  connection.textContent = text;
  connection.classList.toggle("live", live);
}

function fill(regions) {
  for (const [id, html] of Object.entries(regions)) {
    // What the user has opened stays open.
    const callbacks = { beforeAttributeUpdated: (name) => name !== "open" };
    Idiomorph.morph(document.getElementById(id), html, { morphStyle: "innerHTML", callbacks });
  }
}

/** Subscribes to the events. handlers: by name of the event, a function of its data; "regions" is handled here. */
export function listen(handlers) {
  const source = new EventSource(document.body.dataset.events);
  const take = { regions: fill, ...handlers };
  for (const [name, handle] of Object.entries(take)) {
    source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  }
  source.addEventListener("open", () => showConnection("live", true));
  source.addEventListener("end", () => {
    source.close();
    showConnection("complete", false);
  });
  source.addEventListener("error", () => {
    showConnection("connection lost, trying again", false);
    // The browser reconnects by itself, unless the request was refused.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => listen(handlers), RETRY_MILLISECONDS);
  });
}
