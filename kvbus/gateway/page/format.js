// Numbers and times as people read them. Decimal units, as `kvbus story` uses them.

const LARGER = ["kB", "MB", "GB", "TB", "PB"];
const WHOLE = new Intl.NumberFormat("en-GB");

export function count(number) {
  return number === null || number === undefined ? "–" : WHOLE.format(number);
}

export function size(bytes) {
  let value = bytes;
  let unit = "B";
  for (const larger of LARGER) {
    if (value < 1000) break;
    value /= 1000;
    unit = larger;
  }
  return unit === "B" ? `${Math.round(value)} B` : `${value.toFixed(value < 100 ? 1 : 0)} ${unit}`;
}

// A measured span, exact enough to compare: 0.4 ms, 12.3 ms, 4.21 s.
export function duration(seconds) {
  if (seconds >= 60) return age(seconds * 1000);
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(seconds * 1000).toFixed(1)} ms`;
}

// How long ago, which needs no more than two units: 4 s, 3 m 20 s, 2 h 5 m.
export function age(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} m ${seconds % 60} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} m`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

// Both ends of a long id, since its last signs tell it from its neighbours; all of it stands in title and story.
export function short(id) {
  return id.length > 14 ? `${id.slice(0, 6)}…${id.slice(-7)}` : id;
}

// Members are called after their instance; an only member's name goes without saying.
export function named(instance, member) {
  return member === "m0" || !member ? instance : `${instance}/${member}`;
}

export function words(step) {
  return step.replaceAll("_", " ");
}
