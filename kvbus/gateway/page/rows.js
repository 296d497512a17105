// Rows kept by key, so that what stays the same keeps its place on the screen and under the keyboard.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function attribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export class Rows {
  // `make(key)` returns a row's element, `fill(element, row)` puts a row into it.
  constructor(body, make, fill) {
    this.body = body;
    this.make = make;
    this.fill = fill;
    this.kept = new Map();
  }

  show(entries) {
    const wanted = new Set(entries.map(([key]) => key));
    for (const [key, made] of this.kept) {
      if (!wanted.has(key)) this.drop(key, made);
    }
    let place = this.body.firstElementChild;
    for (const [key, row] of entries) {
      let made = this.kept.get(key);
      if (!made) {
        made = this.make(key);
        this.kept.set(key, made);
      }
      this.fill(made, row);
      if (made === place) place = place.nextElementSibling;
      else this.body.insertBefore(made, place);
    }
    this.reachable();
  }

  drop(key, made) {
    const held = made === document.activeElement;
    const next = made.nextElementSibling ?? made.previousElementSibling;
    made.remove();
    this.kept.delete(key);
    if (held && next) focusRow(next);
  }

  // One row of a table is reached by Tab, the others from there by the arrow keys.
  reachable() {
    const rows = [...this.body.children].filter((row) => row.dataset.opens);
    if (rows.length && !rows.some((row) => row.tabIndex === 0)) rows[0].tabIndex = 0;
  }
}

export function focusRow(row) {
  for (const other of row.parentElement.children) other.tabIndex = -1;
  row.tabIndex = 0;
  row.focus();
}

const STEPS = {
  ArrowDown: (row) => row.nextElementSibling,
  ArrowUp: (row) => row.previousElementSibling,
  Home: (row) => row.parentElement.firstElementChild,
  End: (row) => row.parentElement.lastElementChild,
};

export function navigable(body, open) {
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("[data-opens]");
    if (!row || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      open(row.dataset.opens);
    } else if (STEPS[event.key]) {
      event.preventDefault();
      const next = STEPS[event.key](row);
      if (next) focusRow(next);
    }
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("[data-opens]");
    if (!row || String(getSelection())) return;
    focusRow(row);
    open(row.dataset.opens);
  });
}
