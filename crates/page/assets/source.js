// Sources of windows: the recording in the page itself, or the daemon by server-sent events.

const SHAPE = 2;

function embedded(id) {
  const element = document.getElementById(id);
  return element ? JSON.parse(element.textContent) : null;
}

// The recording in the page; null if there is none.
export function embeddedRecording() {
  const head = embedded("head");
  return head ? { head, windows: embedded("windows") } : null;
}

// The token of the fragment, which no server sees and which leaves the address bar at once.
export function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) history.replaceState(null, "", location.pathname);
  return token;
}

// Exchanges the token for a cookie that scripts cannot read.
export async function login(token) {
  const answer = await fetch("enter", { headers: { Authorization: "Bearer " + token }, cache: "no-store" });
  return answer.status;
}

export class Events {
  constructor(handlers) {
    this.handlers = handlers;
    this.wait = 500;
    this.open();
  }

  open() {
    const source = new EventSource("events");
    this.source = source;
    source.addEventListener("open", () => {
      this.wait = 500;
      this.handlers.state("live");
    });
    source.addEventListener("head", (event) => {
      const head = JSON.parse(event.data);
      if (head.shape !== SHAPE) {
        source.close();
        this.handlers.state("the daemon has another version than this page; reload it");
        return;
      }
      this.handlers.head(head);
    });
    source.addEventListener("so-far", (event) => this.handlers.soFar(JSON.parse(event.data)));
    source.addEventListener("window", (event) => this.handlers.window(JSON.parse(event.data)));
    source.addEventListener("error", () => this.lost(source));
  }

  // A browser gives up if the response is no stream; this finds out why and retries with growing delays.
  async lost(source) {
    this.handlers.state("no answer from the daemon; trying again");
    if (source.readyState !== EventSource.CLOSED) return;
    const status = await fetch("enter", { cache: "no-store" }).then((answer) => answer.status, () => 0);
    if (status === 401) {
      this.handlers.locked();
      return;
    }
    if (status === 200) this.handlers.state("the maximum number of viewers is connected; trying again");
    this.wait = Math.min(10000, this.wait * 2);
    setTimeout(() => this.open(), this.wait);
  }
}
