// The live page: hears the cluster, and draws what it heard, at most once for each frame of the screen.

import { age, clock, count, size } from "./format.js";
import { element, navigable, text } from "./rows.js";
import { Source } from "./source.js";
import { Story } from "./story.js";
import { endedRows, flightRows, isolatedRows, leaseRows, memberRows, outRows } from "./tables.js";

const byId = (id) => document.getElementById(id);
const FLIGHT_MAX = 25;
const ENDED_MAX = 40;
const SIDE_MAX = 25;
const PACE_S = 60;

let drawn = true;
const source = new Source(() => {
  if (!drawn) return;
  drawn = false;
  requestAnimationFrame(draw);
});
const story = new Story(byId("story"), () => source.now());

const flight = flightRows(byId("flight").tBodies[0], source);
const ended = endedRows(byId("ended").tBodies[0]);
const leases = leaseRows(byId("leases").tBodies[0], source);
const members = memberRows(byId("members"), source);
const out = outRows(byId("out"), source);
const isolated = isolatedRows(byId("isolated"), source);
for (const body of [flight.body, ended.body, leases.body, out.body]) navigable(body, (transfer) => story.open(transfer));

function sorted(rows, key) {
  return Object.entries(rows).sort(([first, one], [second, other]) => key(one) - key(other) || (first < second ? -1 : 1));
}

function draw() {
  drawn = true;
  drawState();
  if (!source.head) return;
  const { tables, head } = source;
  drawFigures(head);
  pace(head);
  text(byId("lost"), head.lost ? `The log had lost what followed, ${count(head.lost)} times: the members were asked what they hold.` : "");

  const flying = sorted(tables.transfers, (row) => row.began_ms).slice(0, FLIGHT_MAX);
  flight.show(flying);
  section("flight", flying.length, rest(head.transfers_count, flying.length, "longest"), flightHint());

  if (!reading(ended.body)) ended.show(sorted(tables.ended, (row) => -row.ended_ms).slice(0, ENDED_MAX));
  section("ended", ended.kept.size, endedNote(), ["Nothing has ended since this gateway listens. The log of the last hour: ", "kvbus watch"]);

  const known = Object.entries(tables.members).sort();
  members.show(known);
  section("members", known.length, "", ["No instance is registered. Two on this host, with a broker: ", "kvbus up", ". One: ", "kvbus worker --instance a"]);

  const held = sorted(tables.leases, (row) => row.since_ms).slice(0, SIDE_MAX);
  leases.show(held);
  section("leases", held.length, leasesNote(head, held.length), ["No lease is held for a transfer."]);

  out.show(sorted(tables.out_of_use, (row) => row.since_ms).slice(0, SIDE_MAX));
  section("out", out.kept.size, out.kept.size ? `${count(head.out_of_use_pages)} pages` : "", ["None: access to all lent pages is accounted for."]);
  isolated.show(sorted(tables.isolated, (row) => -row.since_ms).slice(0, SIDE_MAX));
  section("isolated", isolated.kept.size, "", ["None."]);
}

// ---------------------------------------------------------------------------------------------- is this the present?

function drawState() {
  const [state, words, notice] = present();
  const mark = byId("state");
  if (mark.dataset.state !== state) mark.dataset.state = state;
  text(byId("state-text"), words);
  document.body.classList.toggle("stale", state === "broker" || state === "gateway");
  const box = byId("notice");
  box.hidden = !notice;
  if (!notice) text(box, "");
  else if (!box.firstElementChild) box.append(element("b"), " ", element("span"));
  if (notice) {
    text(box.firstElementChild, notice[0]);
    text(box.lastElementChild, notice[1]);
  }
}

function present() {
  const { bus, lostAt, head } = source;
  if (lostAt) {
    const told = source.heardAt ? `Shown is what it said last, at ${clock(source.asOf)}. ` : "";
    return ["gateway", "Stale", ["The gateway does not answer", `since ${since(lostAt, Date.now())}. ${told}This page tries again each second.`]];
  }
  if (!head) return ["starting", "Connecting", null];
  if (bus.state === "away") {
    const told = "Shown is what was heard before; transfers and leases go on without it, and are told when it is back.";
    return ["broker", "Stale", ["The broker is away", `since ${since(bus.since_ms, source.now())}. ${told}`]];
  }
  if (bus.state === "starting") return ["starting", "Reading the log", null];
  return ["live", "Live", null];
}

function since(ms, now) {
  return `${clock(ms)} (${age(now - ms)})`;
}

// --------------------------------------------------------------------------------------------------------- in short

function drawFigures(head) {
  const { outcomes } = head;
  text(byId("n-flight"), count(head.transfers_count));
  document.title = head.transfers_count ? `${count(head.transfers_count)} in flight · kvbus` : "kvbus";
  for (const word of ["settled", "partial", "failed", "cancelled"]) {
    text(byId(`n-${word}`), count(outcomes[word] ?? 0));
    byId(`n-${word}`).parentElement.classList.toggle("none", !outcomes[word]);
  }
  text(byId("n-bytes"), size(head.length_bytes));
  text(byId("n-leases"), count(head.leases_count));
  text(byId("n-out"), count(head.out_of_use_pages));
  byId("n-out").parentElement.classList.toggle("none", !head.out_of_use_pages);
}

const samples = [];

// What ended in each of the last seconds, by the gateway's clock.
function pace(head) {
  const at = source.asOf / 1000;
  const last = samples.at(-1);
  if (!last || at - last.at >= 1) samples.push({ at, ended: head.ended, bytes: head.length_bytes });
  while (samples.length > PACE_S + 1) samples.shift();
  const newest = samples.at(-1);
  const from = samples.at(-4) ?? samples[0];
  const spent = newest.at - from.at;
  byId("pace").hidden = spent <= 0;
  if (spent <= 0) return;
  const rate = Math.max(0, newest.ended - from.ended) / spent;
  text(byId("rate"), rate >= 10 || rate === 0 ? count(Math.round(rate)) : rate.toFixed(1));
  text(byId("throughput"), size(Math.max(0, newest.bytes - from.bytes) / spent));
  spark();
}

function spark() {
  const steps = samples.slice(1).map((sample, place) => Math.max(0, sample.ended - samples[place].ended) / (sample.at - samples[place].at));
  const most = Math.max(1, ...steps);
  const right = 120;
  const points = steps.map((step, place) => {
    const x = right - ((steps.length - 1 - place) * right) / (PACE_S - 1);
    return `${x.toFixed(1)} ${(23 - (22 * step) / most).toFixed(1)}`;
  });
  byId("spark").firstElementChild.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
}

// ------------------------------------------------------------------------------------------------- notes and hints

function section(name, shown, note, hint) {
  const more = byId(`more-${name}`);
  if (more) text(more, note);
  const empty = byId(`empty-${name}`);
  const list = byId(name);
  list.hidden = !shown;
  empty.hidden = Boolean(shown);
  const said = hint.join("|");
  if (shown || empty.dataset.said === said) return;
  empty.dataset.said = said;
  // Every second part is what to type.
  empty.replaceChildren(...hint.map((part, place) => (place % 2 ? element("code", {}, part) : part)));
}

function rest(all, shown, which) {
  return all > shown ? `the ${count(shown)} ${which} of ${count(all)}` : "";
}

function flightHint() {
  const names = [...new Set(Object.values(source.tables.members).filter((row) => row.registered).map((row) => row.instance))].sort();
  const [first, second] = names.length > 1 ? names : ["a", "b"];
  return ["Nothing moves now. Stage a prompt: ", `kvbus stage --from ${first} --to ${second} "…"`];
}

function leasesNote(head, shown) {
  const local = head.leases_local ? `${count(head.leases_local)} more of the engines’ own` : "";
  return [rest(head.leases_count, shown, "oldest"), local].filter(Boolean).join(", ");
}

// A list that is read must not run away: while the pointer or the keyboard is in it, it stands still.
function reading(body) {
  return body.matches(":hover") || body.contains(document.activeElement);
}

function endedNote() {
  if (!reading(ended.body)) return "";
  const newer = Object.keys(source.tables.ended).filter((key) => !ended.kept.has(key)).length;
  return newer ? "held while you read; newer ones have come" : "";
}

// Tests and curious people look here; nothing depends on it.
globalThis.kvbusPage = { source, story };
