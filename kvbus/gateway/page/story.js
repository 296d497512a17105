// One transfer's story: how it ended, how its time was spent, and who did what, in four lanes.

import { count, duration, size, words } from "./format.js";
import { element } from "./rows.js";
import { MARKS } from "./tables.js";

const LANES = ["requester", "destination", "source", "data plane"];
const AGAIN_MS = 1000;
const AGAIN_MAX_MS = 30000; // each reading costs the gateway thousands of messages: a tab that was left behind reads few
const AGAIN_GROWTH = 1.5;
const GAP_SHARE = 0.15; // a pause of this share of the whole is drawn as one

export class Story {
  constructor(dialog, now) {
    this.dialog = dialog;
    this.now = now;
    this.wanted = "";
    this.timer = 0;
    this.pause = AGAIN_MS;
    this.before = "";
    this.dialog.addEventListener("close", () => this.closed());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
    addEventListener("hashchange", () => this.fromAddress());
    this.fromAddress();
  }

  fromAddress() {
    const found = /^#transfer=(.+)$/.exec(location.hash);
    if (found) this.open(decoded(found[1]));
    else if (this.dialog.open && location.hash === "") this.dialog.close();
  }

  open(transfer) {
    if (!transfer || (this.dialog.open && this.wanted === transfer)) return;
    this.wanted = transfer;
    this.before = "";
    history.replaceState(null, "", `#transfer=${encodeURIComponent(transfer)}`);
    this.show(this.frame(`Transfer ${transfer}`, element("p", { class: "wait" }, "Reading the logs …")));
    if (!this.dialog.open) this.dialog.showModal();
    this.read();
  }

  closed() {
    this.wanted = "";
    clearTimeout(this.timer);
    history.replaceState(null, "", location.pathname);
  }

  async read() {
    clearTimeout(this.timer);
    const wanted = this.wanted;
    let told;
    let found = false;
    let heard = false;
    try {
      const answer = await fetch(`/v1/transfers/${encodeURIComponent(wanted)}/story`);
      told = await answer.json();
      found = answer.ok;
      heard = true;
    } catch {
      told = { error: "the gateway does not answer; trying again" };
    }
    if (wanted !== this.wanted || !wanted) return;
    const place = this.dialog.scrollTop;
    this.show(found ? this.told(told) : this.frame(`No story of ${wanted}`, element("p", { class: "wait" }, told.error)));
    this.dialog.scrollTop = place;
    // What runs goes on, and a log that could not be read may be readable soon. What stays as it is is read less often.
    const now = found ? JSON.stringify(told) : "none";
    this.pause = heard && now === this.before ? Math.min(this.pause * AGAIN_GROWTH, AGAIN_MAX_MS) : AGAIN_MS;
    this.before = now;
    if (!found || !told.outcome) this.timer = setTimeout(() => this.read(), this.pause);
  }

  show(parts) {
    const focused = this.dialog.contains(document.activeElement) && document.activeElement.className;
    this.dialog.replaceChildren(...parts);
    if (focused) this.dialog.querySelector(".close")?.focus();
  }

  frame(title, ...parts) {
    const close = element("button", { class: "close", type: "button", "aria-label": "Close the story" }, "Esc ✕");
    close.addEventListener("click", () => this.dialog.close());
    return [element("header", {}, element("h2", { id: "story-title" }, title), close), ...parts];
  }

  told(story) {
    const word = story.outcome?.outcome ?? "running";
    const badge = element("b", { class: "badge", "data-word": word }, `${MARKS[word] ?? "▸"} ${word === "running" ? "in flight" : word}`);
    const title = element("span", {}, `${story.source || "…"} → ${story.destination || "…"} `, element("small", {}, story.transfer));
    return [
      ...this.frame(title),
      element("div", { class: "verdict" }, badge, element("p", {}, story.outcome ? story.summary : inFlight(story))),
      spent(story.outcome),
      faults(story),
      lanes(story),
      leases(story.leases),
      names(story),
    ].filter(Boolean);
  }
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return ""; // an address that somebody broke names no transfer
  }
}

function inFlight(story) {
  const last = story.events.at(-1);
  return last ? `It runs. The last that is recorded: ${last.text}.` : "It runs.";
}

// ------------------------------------------------------------------------------------------------ how time was spent

function spent(outcome) {
  if (!outcome) return null;
  const told = [["queue", outcome.queue_s], ["grant", outcome.grant_s], ["move", outcome.move_s]];
  const rest = outcome.total_s - outcome.grant_s - outcome.move_s; // the whole begins when the queue has ended
  const all = [...told, ["rest", Math.max(0, rest)]].filter(([, seconds]) => seconds > 0);
  if (!all.length) return null;
  const whole = all.reduce((sum, [, seconds]) => sum + seconds, 0);
  const bar = element("div", { class: "spent", role: "img", "aria-label": all.map(([word, seconds]) => `${word} ${duration(seconds)}`).join(", ") });
  const legend = element("ul", { class: "legend" });
  for (const [word, seconds] of all) {
    const part = element("i", { "data-part": word });
    part.style.flexGrow = String(Math.max(seconds / whole, 0.004));
    bar.append(part);
    legend.append(element("li", { "data-part": word }, `${word} `, element("b", {}, duration(seconds))));
  }
  if (outcome.pages_moved) legend.append(element("li", { class: "of" }, `${count(outcome.pages_moved)} of ${count(outcome.pages_wanted)} blocks, ${size(outcome.length_bytes)}`));
  return element("div", {}, bar, legend);
}

function faults(story) {
  const said = [
    ...story.contradictions.map((text) => ["Contradiction", text]),
    ...(story.outcome ? story.missing.map((text) => ["Not recorded", text]) : []),
    ...(story.note ? [["Note", story.note]] : []),
    ...(story.cut ? [["Note", "more was recorded around it than is read for one story: kvbus story tells all of it"]] : []),
  ];
  if (!said.length) return null;
  return element("ul", { class: "faults" }, ...said.map(([what, text]) => element("li", {}, element("b", {}, what), ` ${text}`)));
}

// ----------------------------------------------------------------------------------------------------------- lanes

function lanes(story) {
  const list = element("ol", { class: "lanes", "aria-label": "What happened, in order" });
  const title = { requester: "requester", destination: `destination ${story.destination}`, source: `source ${story.source}`, "data plane": "data plane" };
  list.append(element("li", { class: "heads", "aria-hidden": "true" }, element("span", { class: "at" }, "ms"), ...LANES.map((lane) => element("span", { "data-lane": lane }, title[lane]))));
  const whole = story.events.at(-1)?.after_ms ?? 0;
  let before = 0;
  for (const event of story.events) {
    const pause = event.after_ms - before;
    if (whole && pause > GAP_SHARE * whole && pause >= 1) {
      list.append(element("li", { class: "pause" }, element("span", {}, `${duration(pause / 1000)} later`)));
    }
    before = event.after_ms;
    list.append(line(event));
  }
  return list;
}

function line(event) {
  const at = element("span", { class: "at" }, event.after_ms.toFixed(1));
  const rails = LANES.map((lane) => element("i", { "data-lane": lane, class: lane === event.lane ? "here" : "" }));
  const told = element(
    "p",
    { "data-lane": event.lane },
    element("span", { class: "hidden" }, `${event.lane}: `),
    event.subject === "transfer" ? null : element("b", {}, `${event.subject} `),
    event.text,
  );
  return element("li", { "data-lane": event.lane, "data-tone": event.tone, title: `${event.kind} ${event.id}` }, at, ...rails, told);
}

// ---------------------------------------------------------------------------------------------- leases, and its names

function leases(told) {
  if (!told.length) return null;
  const head = ["Lease", "For", "Pages", "Access ended by", "Returned"];
  const rows = told.map((one) =>
    element(
      "tr",
      {},
      element("td", {}, element("b", {}, `T${one.ticket}`), ` ${one.instance}`),
      element("td", {}, one.direction ? `${one.direction}${one.peer ? `, ${one.peer}` : ""}` : "–"),
      element("td", { class: "n" }, count(one.pages.length)),
      element("td", {}, one.evidence.map(words).join(", ") || "nothing yet"),
      element("td", { class: one.returned ? "" : "open" }, one.returned ? "✓ once" : `✕ ${one.why_not || "no"}`),
    ),
  );
  return element(
    "div",
    { class: "scroll" },
    element("table", { class: "rows told" }, element("thead", {}, element("tr", {}, ...head.map((word) => element("th", { scope: "col", class: word === "Pages" ? "n" : "" }, word)))), element("tbody", {}, ...rows)),
  );
}

function names(story) {
  const known = [["transfer", story.transfer], ["request hash", story.request_hash], ["request", story.request_id]].filter(([, name]) => name);
  return element("dl", { class: "names" }, ...known.flatMap(([what, name]) => [element("dt", {}, what), element("dd", {}, element("code", {}, name))]));
}
