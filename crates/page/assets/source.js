// Sources of windows: the recording in the page itself, or the daemon by server-sent events.

const SHAPE = 4;

function embedded(id) {
  const element = document.getElementById(id);
  return element ? JSON.parse(element.textContent) : null;
}

// Windows are compressed, because an hour of them has tens of megabytes.
async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// The recording in the page; null if there is none.
export async function embeddedRecording() {
  const head = embedded("head");
  return head ? { head, windows: await unpack("windows") } : null;
}

// The token of the fragment, which no server sees and which leaves the address bar at once.
export function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) history.replaceState(null, "", location.pathname);
  return token;
}

// The token is part of the path, because a browser sends a cookie to every port of this host and a path to this one only.
// It stays in this tab's storage, which pages of other ports cannot read, so that a reload needs no token.
const STORED = "cachemate-token";

function path(name) {
  const token = sessionStorage.getItem(STORED);
  return token ? encodeURIComponent(token) + "/" + name : name;
}

// The status of a request with this token; a right one is stored.
export async function login(token) {
  const answer = await fetch("enter", { headers: { Authorization: "Bearer " + token }, cache: "no-store" });
  if (answer.status === 200) sessionStorage.setItem(STORED, token);
  return answer.status;
}

export class Events {
  constructor(handlers) {
    this.handlers = handlers;
    this.wait = 500;
    this.open();
  }

  open() {
    const source = new EventSource(path("events"));
    this.source = source;
    source.addEventListener("open", () => {
      this.wait = 500;
      this.answered();
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

  answered() {
    clearTimeout(this.absence);
    this.absence = null;
  }

  // A browser gives up if the response is no stream; this finds out why and retries with growing delays.
  async lost(source) {
    // The daemon ends every connection after a while, and the browser comes back at once.
    this.absence = this.absence || setTimeout(() => this.handlers.state("no answer from the daemon; trying again"), 2000);
    if (source.readyState !== EventSource.CLOSED) return;
    const status = await fetch(path("enter"), { cache: "no-store" }).then((answer) => answer.status, () => 0);
    if (status !== 0) this.answered();
    if (status === 401) {
      this.handlers.locked();
      return;
    }
    if (status === 200) this.handlers.state("the maximum number of viewers is connected; trying again");
    this.wait = Math.min(10000, this.wait * 2);
    setTimeout(() => this.open(), this.wait);
  }
}
