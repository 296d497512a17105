// What each table shows of its rows.

import { age, clock, count, duration, named, short, size, words } from "./format.js";
import { attribute, element, Rows, text } from "./rows.js";

export const MARKS = { settled: "✓", partial: "◐", failed: "✕", cancelled: "⊘" };

function cells(row, names) {
  return names.map((name) => {
    const cell = element("td", { class: name });
    row.append(cell);
    return cell;
  });
}

function opening(key) {
  return element("tr", { tabindex: "-1", "data-opens": key, "aria-haspopup": "dialog" });
}

function way(source, destination) {
  return `${source || "…"} → ${destination}`;
}

export function flightRows(body, source) {
  const make = (key) => {
    const row = opening(key);
    const [id, way, step, pages] = cells(row, ["id", "way", "step", "pages n", "age n"]);
    id.textContent = short(key);
    id.title = key;
    way.append("");
    step.append(element("b"), " ", element("span"));
    pages.append(element("span", { class: "bar", "aria-hidden": "true" }, element("i")), element("span", { class: "of" }));
    return row;
  };
  const fill = (row, told) => {
    const [, wayCell, step, pages, old] = row.children;
    text(wayCell, way(told.source, told.destination));
    text(step.firstChild, words(told.step));
    text(step.lastChild, told.text);
    attribute(step, "title", told.text);
    const share = told.pages_asked ? told.pages_moved / told.pages_asked : 0;
    pages.firstChild.firstChild.style.width = `${Math.round(100 * share)}%`;
    attribute(pages.firstChild, "data-waits", String(!told.pages_moved));
    text(pages.lastChild, told.pages_asked ? `${count(told.pages_moved)} / ${count(told.pages_asked)}` : "–");
    text(old, age(source.now() - told.began_ms));
    attribute(row, "aria-label", `Transfer ${told.transfer}, ${way(told.source, told.destination)}, ${words(told.step)}`);
  };
  return new Rows(body, make, fill);
}

export function endedRows(body) {
  const make = (key) => {
    const row = opening(key);
    const [id, , outcome] = cells(row, ["id", "way", "outcome", "pages n", "size n", "took n", "when n"]);
    id.textContent = short(key);
    id.title = key;
    outcome.append(element("b", { class: "badge" }), " ", element("span"));
    return row;
  };
  const fill = (row, told) => {
    const [, wayCell, outcome, pages, bytes, took, when] = row.children;
    text(wayCell, way(told.source, told.destination));
    text(outcome.firstChild, `${MARKS[told.outcome] ?? "•"} ${told.outcome}`);
    attribute(outcome.firstChild, "data-word", told.outcome);
    const why = [words(told.failure), told.reason].filter(Boolean).join(": ");
    text(outcome.lastChild, why);
    attribute(outcome, "title", why);
    text(pages, came(told));
    attribute(pages, "title", told.pages_held ? `${count(told.pages_moved)} moved, ${count(told.pages_held)} were there already` : "");
    text(bytes, told.length_bytes ? size(told.length_bytes) : "–");
    text(took, duration(told.total_s));
    text(when, clock(told.ended_ms));
    attribute(row, "aria-label", `Transfer ${told.transfer}, ${way(told.source, told.destination)}, ${told.outcome}`);
  };
  return new Rows(body, make, fill);
}

function came({ pages_moved: moved, pages_held: held, pages_wanted: wanted }) {
  if (held && held === wanted) return `${count(held)} were there`;
  return `${count(moved)}${held ? ` + ${count(held)} there` : ""} of ${count(wanted)}`;
}

export function leaseRows(body, source) {
  const make = (key) => {
    const row = element("tr", { tabindex: "-1" });
    cells(row, ["id", "for", "pages n", "age n"]);
    row.children[0].append(element("b"), " ", element("span"));
    row.children[1].append(element("b"), " ", element("span"));
    attribute(row, "data-key", key);
    return row;
  };
  const fill = (row, told) => {
    const [id, purpose, pages, old] = row.children;
    row.dataset.opens = told.transfer;
    attribute(row, "aria-haspopup", "dialog");
    text(id.firstChild, `T${told.ticket}`);
    text(id.lastChild, named(told.instance, told.member));
    const joint = told.direction === "write" ? "from" : "by";
    text(purpose.firstChild, `${told.direction || "lease"}${told.peer ? ` ${joint} ${told.peer}` : ""}`);
    text(purpose.lastChild, told.stage);
    text(pages, told.pages ? count(told.pages) : "–");
    text(old, `${told.since_known ? "" : "> "}${age(source.now() - told.since_ms)}`);
    attribute(row, "aria-label", `Lease T${told.ticket} of ${told.instance}, ${told.direction}, ${told.stage}`);
  };
  return new Rows(body, make, fill);
}

const POOL = ["free", "held", "quarantined"];

function pool(told) {
  const { pages, pages_free: free, pages_quarantined: quarantined } = told;
  if (!pages || free === null) return null;
  return { free, held: Math.max(0, pages - free - (quarantined ?? 0)), quarantined: quarantined ?? 0 };
}

export function memberRows(body, source) {
  const make = () => {
    const parts = POOL.map((word) => element("i", { "data-word": word }));
    const counts = POOL.map((word) => element("li", { "data-word": word }, element("b"), ` ${word}`));
    const title = element("p", { class: "who" }, element("b"), element("span", { class: "drains" }), element("span", { class: "epoch" }), element("span", { class: "gone" }));
    return element(
      "li",
      {},
      title,
      element("p", { class: "what" }),
      element("div", { class: "pool", role: "img" }, ...parts),
      element("ul", { class: "counts" }, ...counts),
      element("p", { class: "does" }),
    );
  };
  const fill = (made, told) => {
    const [title, what, bar, counts, does] = made.children;
    const [name, drains, epoch, gone] = title.children;
    text(drains, told.state ? `◌ ${told.state}` : "");
    text(name, named(told.instance, told.member));
    text(epoch, told.epoch ? `epoch ${told.epoch}` : "");
    attribute(epoch, "title", "Which run of its worker: how often it was started, and four signs of a random number");
    text(gone, told.registered ? "" : `✕ not registered${told.heard_ms ? `, heard ${age(source.now() - told.heard_ms)} ago` : ""}`);
    made.classList.toggle("absent", !told.registered);
    const engine = told.model && told.model !== told.engine ? `${told.engine} · ${told.model}` : told.engine;
    const bytes = told.pages && told.page_bytes ? `${count(told.pages)} pages, ${size(told.pages * told.page_bytes)}` : "";
    text(what, [engine, bytes].filter(Boolean).join(" · "));
    const states = pool(told);
    bar.hidden = counts.hidden = !states;
    POOL.forEach((word, place) => {
      const pages = states ? states[word] : 0;
      bar.children[place].style.flexGrow = String(pages);
      bar.children[place].hidden = !pages;
      text(counts.children[place].firstChild, count(pages));
    });
    if (states) attribute(bar, "aria-label", POOL.map((word) => `${states[word]} ${word}`).join(", "));
    text(does, doing(told));
  };
  return new Rows(body, make, fill);
}

function doing(told) {
  const said = [
    [told.pages_cached, "cached"],
    [told.pages_lent, "lent"],
    [told.leases_held, told.leases_held === 1 ? "lease" : "leases"],
    [told.transfers_running, told.transfers_running === 1 ? "transfer runs" : "transfers run"],
  ];
  return said.filter(([number]) => number !== null).map(([number, what]) => `${count(number)} ${what}`).join(" · ");
}

export function outRows(body, source) {
  return factRows(body, (told) => ({
    what: `${count(told.pages)} ${told.pages === 1 ? "page" : "pages"} of ${named(told.instance, told.member)}${told.ticket ? `, lease T${told.ticket}` : ""}`,
    why: told.why,
    since: told.since_ms ? age(source.now() - told.since_ms) : "",
    opens: told.transfer,
  }));
}

export function isolatedRows(body, source) {
  return factRows(body, (told) => ({
    what: `${told.peer}, by ${named(told.instance, told.member)}`,
    why: told.runs_anew ? `${told.why}. It runs anew since, and is accepted when it is next needed` : told.why,
    since: age(source.now() - told.since_ms),
    opens: "",
  }));
}

function factRows(body, say) {
  const make = () => element("li", {}, element("b"), element("time"), element("p"));
  const fill = (made, row) => {
    const { what, why, since, opens } = say(row);
    text(made.children[0], what);
    text(made.children[1], since);
    text(made.children[2], why);
    if (opens && made.dataset.opens !== opens) {
      made.dataset.opens = opens;
      made.tabIndex = -1;
      attribute(made, "role", "button");
    }
  };
  return new Rows(body, make, fill);
}
