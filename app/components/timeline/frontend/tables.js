// Tables of events: the exposed communication of all ranks, the longest first, and totals by kind.

import { EXPOSED, PATH, SCHEDULE } from "./layout.js";
import { place, title } from "./words.js";

const MOST_RANKED = 200;

/**
 * Exposed communication of every rank, the longest first: {row, index, ms} with the event to open. Where only
 * one rank's phases are here, the actions of all ranks by what each exposes.
 */
export function exposedEvents(step) {
  const found = [];
  for (const row of step.rows) {
    if (step.whole ? row.stream !== EXPOSED : row.stream !== SCHEDULE) continue;
    for (let i = 0; i < row.count; i++) {
      const action = row.action[i];
      const ms = step.whole ? row.end[i] - row.begin[i] : action < 0 ? 0 : step.actions.exposed[action];
      if (ms > 0) found.push({ row, index: i, ms });
    }
  }
  return found.sort((a, b) => b.ms - a.ms || a.row.begin[a.index] - b.row.begin[b.index]).slice(0, MOST_RANKED);
}

/** Count, total, mean, least and most milliseconds by kind of the events that begin in a window, as Perfetto has them. */
export function totals(step, rows, from, to, lit) {
  const kinds = new Map();
  for (const row of rows) {
    if (row.stream === PATH) continue;
    const mask = lit(row);
    for (let i = 0; i < row.count; i++) {
      if (row.begin[i] < from || row.begin[i] > to || (mask && !mask[i])) continue;
      const ms = row.end[i] - row.begin[i], words = title(step, row, i);
      const one = kinds.get(words) ?? { words, count: 0, total: 0, least: Infinity, most: 0 };
      one.count += 1;
      one.total += ms;
      one.least = Math.min(one.least, ms);
      one.most = Math.max(one.most, ms);
      kinds.set(words, one);
    }
  }
  return [...kinds.values()].map((one) => ({ ...one, mean: one.total / one.count })).sort((a, b) => b.total - a.total);
}

const ms = (value) => value.toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 });

/** The columns of a table: heading, value to sort by, and text; text columns sort from A to Z. */
const RANKED = (step) => [
  ["Exposed communication", ({ row, index }) => title(step, row, index)],
  ["Duration (ms)", (one) => one.ms, ms],
  ["Begin (ms)", ({ row, index }) => row.begin[index], ms],
  ["Where", ({ row, index }) => place(step, row, index)],
];
const TOTALS = [
  ["Kind", (one) => one.words],
  ["Count", (one) => one.count, (value) => value.toLocaleString("en-US")],
  ["Total (ms)", (one) => one.total, ms],
  ["Mean (ms)", (one) => one.mean, ms],
  ["Least (ms)", (one) => one.least, ms],
  ["Most (ms)", (one) => one.most, ms],
];

/** The panel of one table at a time; a click on a heading sorts, one on a row acts. */
export class Tables {
  constructor(root, body, head, note) {
    Object.assign(this, { root, body, head, note, sorted: 1, down: true });
  }

  /** Show a kind of table ("exposed" or "totals"), or hide the panel with null. */
  show(kind, step, found, note, act) {
    if (kind !== this.kind) Object.assign(this, { sorted: kind === "totals" ? 2 : 1, down: true });
    Object.assign(this, { kind, step, found, act });
    this.root.hidden = kind === null;
    this.note.textContent = note;
    if (kind !== null) this.draw();
  }

  draw() {
    const columns = this.kind === "totals" ? TOTALS : RANKED(this.step), [, value] = columns[this.sorted];
    const order = (a, b) => {
      const x = value(a), y = value(b), by = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
      return this.down ? -by : by;
    };
    this.head.replaceChildren(...columns.map(([words, , number], at) => {
      const cell = document.createElement("th"), button = document.createElement("button");
      button.type = "button";
      button.textContent = `${words}${at === this.sorted ? (this.down ? " ▾" : " ▴") : ""}`;
      button.onclick = () => {
        Object.assign(this, { down: at === this.sorted ? !this.down : Boolean(number), sorted: at });
        this.draw();
      };
      cell.ariaSort = at === this.sorted ? (this.down ? "descending" : "ascending") : "none";
      cell.append(button);
      return cell;
    }));
    this.body.replaceChildren(...[...this.found].sort(order).map((one) => {
      const line = document.createElement("tr");
      columns.forEach(([, read, text], at) => {
        const cell = document.createElement("td"), words = text ? text(read(one)) : String(read(one));
        if (at === 0) {
          const button = document.createElement("button");
          Object.assign(button, { type: "button", textContent: words });
          cell.append(button);
        } else cell.textContent = words;
        line.append(cell);
      });
      line.onclick = () => this.act(one);
      return line;
    }));
  }
}
