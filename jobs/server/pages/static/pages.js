// What moves on the pages. Without it they are read as they are, and loaded again by hand.
"use strict";

// A part of the page that says how often, in seconds, it is to be fetched again; not while nobody sees it.
function keepLive() {
  const part = document.querySelector("[data-live]");
  if (!part) return;
  const seconds = Number(part.dataset.live);
  const look = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch(part.dataset.go || location.href, { headers: { "X-Live": "1" } });
        if (answer.redirected) return location.assign(answer.url);
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const fresh = page.getElementById(part.id);
        if (answer.ok && fresh) {
          part.replaceChildren(...fresh.childNodes);
          part.dataset.fetched = String(Number(part.dataset.fetched || 0) + 1);
          if (!fresh.dataset.live) return location.reload();
        }
      } catch { /* the server is away: what is shown stays, and it is asked again */ }
    }
    setTimeout(look, 1000 * seconds);
  };
  setTimeout(look, 1000 * seconds);
}

// A text that is being generated. The browser connects again by itself, and says how far it has come.
function keepStream() {
  const place = document.querySelector("[data-stream]");
  if (!place) return;
  const source = new EventSource(place.dataset.stream);
  source.onmessage = (message) => {
    const said = JSON.parse(message.data);
    if (typeof said.t === "string") {
      const atEnd = place.scrollTop + place.clientHeight >= place.scrollHeight - 8;
      place.append(said.t);
      if (atEnd) place.scrollTop = place.scrollHeight;
    } else {
      source.close();
      if (said.over) location.reload();
    }
  };
}

keepLive();
keepStream();
