// The timeline of a step: what is shown, what is selected, and what happens when somebody acts.

import { decode } from "./decode.js";
import { insideTitle, isAction, listPhases, showDetails, showLegend, showTip, spoken } from "./details.js";
import { firstAbove } from "./detail_level.js";
import { listenToKeys } from "./keyboard.js";
import { everyLane, insideLanes, ofAction, onPath, rankLanes, SCHEDULE, sideLanes, streamsOf } from "./layout.js";
import { Overview } from "./overview.js";
import { palette } from "./palette.js";
import { Pane, RULER } from "./pane.js";
import { listenToPointer } from "./pointer.js";
import { search } from "./search.js";
import { listen, setHeight, setValue, shareFonts } from "./streamlit_messages.js";
import { exposedEvents, Tables, totals } from "./tables.js";
import { durationText } from "./time_axis.js";

const HIGHEST = { ranks: 420, every: 560 };
/** Height of the upper part, at most, in pixels. */
const SAY_AFTER_MS = 250;
/** The page learns of an opened action when it has stayed open for so long. */
const MARGIN = 0.02;

const by = (id) => document.getElementById(id);
const upper = new Pane(by("step")), lower = new Pane(by("inside"));
const tables = new Tables(by("table"), by("table-body"), by("table-head"), by("table-note"));
const overview = new Overview(by("overview"), upper, () => changed(upper));
const shown = {
  step: null, digest: null, theme: undefined, colours: null,
  every: false, critical: false, found: null, at: -1, table: null, both: new Map(),
  selected: null, hovered: null, opened: -1, asked: null, own: () => null, active: upper,
};
const dirty = new Set();
let frame = 0, saying = 0;

function changed(...panes) {
  for (const pane of panes.length ? panes : [upper, lower]) dirty.add(pane);
  frame ||= requestAnimationFrame(draw);
}

function draw() {
  frame = 0;
  const { step, colours, selected, hovered, critical } = shown;
  if (!step || !upper.width) return;
  const underlined = (row) => lit(row) !== null;
  if (dirty.has(upper)) {
    const laneOf = (rank) => upper.lanes.find(({ row }) => row.rank === rank && row.stream === SCHEDULE);
    const hops = critical ? { path: step.path, laneOf } : null;
    upper.draw(colours, { lit, underlined, selected, hovered, hops });
    overview.draw(colours);
    Object.assign(upper.canvas.dataset, { fromMs: upper.from, toMs: upper.to });
  }
  if (dirty.has(lower)) {
    const inside = (row) => lit(row) ?? shown.own(row);
    const { begin, end } = step.actions, shade = { from: begin[shown.opened], to: end[shown.opened] };
    lower.draw(colours, { lit: inside, underlined, selected, hovered, shade: shown.opened < 0 ? null : shade });
    Object.assign(lower.canvas.dataset, { fromMs: lower.from, toMs: lower.to });
  }
  dirty.clear();
}

/** What is lit in a row: what was found, what is on the critical path, or what is both. */
function lit(row) {
  const found = shown.found?.masks.get(row) ?? null, path = shown.critical ? onPath(row) : null;
  if (!found || !path) return found ?? path;
  if (!shown.both.has(row)) shown.both.set(row, found.map((one, i) => one && path[i]));
  return shown.both.get(row);
}

/** Lay the rows out again: after a change of what is shown, of the theme or of the size. */
function arrange() {
  const { step } = shown;
  if (!step) return;
  shown.colours = palette(shown.theme, step.names);
  const { style } = document.documentElement;
  for (const [name, key] of [["back", "background"], ["text", "text"], ["accent", "accent"], ["font", "font"]]) {
    style.setProperty(`--${name}`, shown.colours[key]);
  }
  const width = by("app").clientWidth - 4, ratio = window.devicePixelRatio || 1;
  if (width < 50) return;
  const lanes = step.sides.length ? sideLanes(step) : shown.every ? everyLane(step) : rankLanes(step);
  upper.fill(step, lanes, 0, step.endMs);
  upper.resize(width, Math.min(shown.every ? HIGHEST.every : HIGHEST.ranks, RULER + upper.rowsHeight + 2), ratio);
  arrangeInside(width, ratio);
  const ranks = step.rows.filter((row) => step.sides.length || row.stream === SCHEDULE);
  showLegend(step, upper.lanes.map(({ row }) => row).filter((row) => row.stream >= 0), sought);
  overview.prepare(step, ranks, width, ratio, shown.colours, lit);
  upper.canvas.dataset.lanes = upper.lanes.map(({ short, y, height }) => `${short}:${RULER + y}:${height}`).join("|");
  changed();
}

function arrangeInside(width, ratio) {
  const { step, opened } = shown, rank = opened < 0 ? -1 : step.actions.rank[opened];
  lower.fill(step, opened < 0 ? [] : insideLanes(step, rank, opened), 0, step.endMs);
  lower.resize(width, RULER + Math.max(lower.rowsHeight, 24) + 2, ratio);
  lower.canvas.dataset.lanes = lower.lanes.map(({ short, y, height }) => `${short}:${RULER + y}:${height}`).join("|");
}

/** Open an action: its phases below, in the box and in the table. */
function open(action, told = true) {
  const { step } = shown;
  if (action === shown.opened) return;
  Object.assign(shown, { opened: action, own: ofAction(action) });
  by("inside-title").textContent = lower.canvas.ariaLabel = insideTitle(step, action);
  listPhases(step, action < 0 ? [] : streamsOf(step, step.actions.rank[action]), action);
  arrangeInside(upper.width, upper.ratio);
  fitAction();
  if (!told) return;
  clearTimeout(saying);
  const value = { action, digest: shown.digest, at: Date.now() };
  saying = setTimeout(() => setValue(value), SAY_AFTER_MS);
}

function fitAction() {
  const { begin, end } = shown.step.actions, action = shown.opened;
  if (action < 0) return;
  const margin = (end[action] - begin[action]) * MARGIN;
  lower.look(begin[action] - margin, end[action] + margin);
  changed(lower);
}

/** Select an event, open its action, and bring both into sight. */
function select(event, aloud = true) {
  if (!event) return;
  const { step } = shown, action = event.row.action[event.index];
  shown.selected = event;
  if (action >= 0) open(action);
  by("chosen").hidden = false;
  showDetails(step, event);
  if (aloud) by("said").textContent = spoken(step, event);
  for (const pane of [upper, lower]) reveal(pane, event);
  changed();
}

/** Scroll and pan until an event that the pane has a row for can be seen. */
function reveal(pane, { row, index }) {
  const action = row.action[index];
  const lane = pane.lanes.find((one) => one.row === row)
    ?? pane.lanes.find((one) => one.row.stream === SCHEDULE && action >= 0 && one.row.rank === shown.step.actions.rank[action]);
  if (!lane) return;
  const begin = row.begin[index], end = row.end[index];
  if (end < pane.from || begin > pane.to) pane.look((begin + end - pane.span) / 2, (begin + end + pane.span) / 2);
  const top = lane.y - pane.scroll, room = pane.height - RULER - lane.height;
  if (top < 0 || top > room) pane.scrollTo(lane.y - room / 2);
}

function fit(event, pane = shown.active) {
  const { row, index } = event ?? shown.selected ?? {};
  if (!row) return;
  const begin = row.begin[index], end = row.end[index], margin = (end - begin) * 0.1;
  pane.look(begin - margin, end + margin);
  changed(pane);
}

function reset() {
  upper.measured = lower.measured = null;
  if (shown.active === lower) return fitAction();
  upper.look(0, shown.step.endMs);
  changed(upper);
}

/** The next event of the row, or the one nearest in time on the row above or below. */
function step(along, down) {
  const pane = shown.active, { selected } = shown;
  const at = pane.lanes.findIndex(({ row }) => row === selected?.row);
  if (at < 0) {
    const lane = pane.lanes.find(({ row }) => row.stream >= 0) ?? pane.lanes[0];
    if (lane?.row.count) select({ row: lane.row, index: Math.min(firstAbove(lane.row.end, pane.from), lane.row.count - 1) });
    return;
  }
  if (along) {
    const index = Math.min(Math.max(selected.index + along, 0), selected.row.count - 1);
    return select({ row: selected.row, index });
  }
  const middle = (selected.row.begin[selected.index] + selected.row.end[selected.index]) / 2;
  const { row } = pane.lanes[at + down] ?? pane.lanes[at];
  if (row !== selected.row && row.count) select({ row, index: Math.min(firstAbove(row.end, middle), row.count - 1) });
}

/** Show or hide a table; `kind`: "exposed", "totals", or null for the one that is shown, drawn anew. */
function table(kind) {
  const { step } = shown;
  if (kind !== null) shown.table = shown.table === kind ? null : kind;
  for (const id of ["exposed", "totals"]) by(id).setAttribute("aria-pressed", String(shown.table === id));
  if (shown.table === "exposed") {
    const found = exposedEvents(step), whole = "Time in which a GPU communicates and computes nothing";
    const note = `${whole}, of all ${step.ranks} pipeline ranks, the longest ${found.length} first. Click one to open it.`;
    tables.show("exposed", step, found, step.whole ? note : `Actions of all ranks by exposed communication. ${note}`, select);
  } else if (shown.table === "totals") {
    const rows = upper.lanes.map(({ row }) => row), found = totals(step, rows, upper.from, upper.to, lit);
    const what = shown.found || shown.critical ? "lit events" : "events", span = durationText(upper.span);
    const note = `All ${what} of the rows above that begin in the ${span} shown. Click one to find it.`;
    tables.show("totals", step, found, note, ({ words }) => sought(`"${words}"`));
  } else tables.show(null, step, [], "", null);
}

/** Search for one kind, or for nothing where that kind is sought already. */
function sought(text) {
  const box = by("search");
  box.value = box.value === text ? "" : text;
  look(box.value);
}

function look(text) {
  const { step } = shown;
  const result = text.trim() ? search(step, [step.path, ...step.rows], text) : null;
  shown.found = result;
  shown.at = -1;
  shown.both.clear();
  say();
  arrange();
  table(null);
}

/** Say how many events were found, and how many of them are on the critical path where that is lit. */
function say() {
  const found = shown.found?.found, count = (many) => many.toLocaleString("en-US");
  const known = found?.some(({ row }) => onPath(row));  // not of exposed and hidden communication
  const both = shown.critical && known ? `, ${count(reachable().length)} on path` : "";
  by("found").textContent = found ? `${count(found.length)} found${both}` : "";
}

/** The found events that are lit: with the critical path those on it. */
function reachable() {
  const found = shown.found?.found ?? [];
  return shown.critical ? found.filter(({ row, index }) => lit(row)?.[index]) : found;
}

function goTo(along) {
  const found = reachable();
  if (!found.length) return;
  shown.at = (shown.at + along + found.length) % found.length;
  by("found").textContent = `${(shown.at + 1).toLocaleString("en-US")} of ${found.length.toLocaleString("en-US")}`;
  select(found[shown.at]);
}

function toggle(what, id) {
  shown[what] = !shown[what];
  by(id).setAttribute("aria-pressed", String(shown[what]));
  shown.at = -1;
  say();
  arrange();
  table(null);
}

function help() {
  by("help").showModal();
}

function wire() {
  for (const pane of [upper, lower]) {
    listenToPointer(pane, {
      changed: () => changed(pane),
      active: (one) => (shown.active = one),
      clicked: select,
      fitted: (event) => fit(event, pane),
      hovered(event, x, y) {
        pane.canvas.classList.toggle("over", Boolean(event));
        showTip(shown.step, event, x, y);
        const before = shown.hovered;
        if (event?.row === before?.row && event?.index === before?.index) return;
        shown.hovered = event;
        changed(pane);
      },
    });
  }
  const scroll = (share) => () => {
    shown.active.scrollTo(shown.active.scroll + share * shown.active.height);
    changed(shown.active);
  };
  const zoomed = (factor) => () => {
    shown.active.zoom(factor);
    changed(shown.active);
  };
  const critical = () => toggle("critical", "path"), every = () => toggle("every", "every");
  listenToKeys({
    pane: () => shown.active, changed: () => changed(shown.active), searches: () => by("search").select(),
    f: () => fit(), 0: reset, escape: reset, "?": help, c: critical, e: every, enter: () => select(shown.selected),
    arrowleft: () => step(-1, 0), arrowright: () => step(1, 0), arrowup: () => step(0, -1), arrowdown: () => step(0, 1),
    pageup: scroll(-0.8), pagedown: scroll(0.8), "+": zoomed(0.6), "-": zoomed(1 / 0.6),
  });
  for (const [id, act] of Object.entries({
    path: critical, every, keys: help, exposed: () => table("exposed"), totals: () => table("totals"), closer: zoomed(0.6), wider: zoomed(1 / 0.6),
    whole: () => { shown.active = upper; reset(); },
  })) by(id).addEventListener("click", act);
  let typing = 0;
  const searchNow = () => { typing = void clearTimeout(typing); look(by("search").value); };
  by("search").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(searchNow, 120);
  });
  by("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && typing) searchNow();  // what was typed last, not what was found before
    if (event.key === "Enter") goTo(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") {
      event.target.value = "";
      look("");
      upper.canvas.focus();
    }
  });
  new ResizeObserver(() => setHeight(Math.ceil(by("app").getBoundingClientRect().height) + 4)).observe(by("app"));
  window.addEventListener("resize", arrange);
}

/** Take what the page gives: the packed step, which action to open, and the theme. */
function take({ data, digest, opened }, theme) {
  shown.theme = theme;
  by("app").hidden = false;
  if (digest !== shown.digest) {
    const before = shown.step;
    const found = decode(data instanceof Uint8Array ? data : new Uint8Array(data));
    Object.assign(shown, { step: found, digest, selected: null, hovered: null, found: null, opened: -2, table: null });
    shown.both.clear();
    table(null);
    const traced = found.sides.length > 0;
    by("whole").textContent = found.span.replace("w", "W");
    for (const id of ["path", "exposed", "inside-title", "inside", "listed", "chosen"]) by(id).hidden = traced;
    by("every").hidden = traced || !found.whole;
    shown.every &&= found.whole;
    if (before?.endMs !== found.endMs) upper.look(0, Object.assign(upper, { least: 0, most: found.endMs }).most);
    const sides = found.sides.join(" and "), traces = sides ? `Kernels of ${sides}` : "Phases of requests";
    const what = traced ? traces : `Actions of ${found.ranks} pipeline ranks`;
    upper.canvas.ariaLabel = `${what} over ${Math.round(found.endMs).toLocaleString("en-US")} ms`;
    upper.canvas.dataset.events = found.rows.reduce((sum, row) => sum + row.count, 0);
    arrange();
    if (by("search").value) look(by("search").value);
  }
  arrange();
  if (opened !== shown.asked || shown.opened === -2) openAsked(opened);
}

/** Open what the page asks for, as a link or Back does, and select it without a word. */
function openAsked(opened) {
  const { step } = shown, rank = opened < 0 ? 0 : step.actions.rank[opened];
  shown.asked = opened;
  open(opened, false);
  const row = step.rows.find((one) => one.rank === rank && one.stream === SCHEDULE);
  const index = row ? row.action.indexOf(opened) : -1;
  if (index >= 0) select({ row, index }, false);
}

wire();
shareFonts();
document.fonts.addEventListener("loadingdone", () => { upper.texts.clear(); lower.texts.clear(); changed(); });
listen(take);
