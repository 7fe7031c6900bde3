// One window of time over rows of events: where things are, and how they are drawn.

import { firstAbove } from "./detail_level.js";
import { Strips } from "./strips.js";
import { durationText, tickText, ticks } from "./time_axis.js";

export const RULER = 24;
const LABEL_ROOM = 24;
/** Least width of a bar, in CSS pixels, that gets a label; and of one that gets an edge. */
const EDGE_ROOM = 4;
const SHORTEST_MS = 1e-5;
/** The closest that one can look: ten nanoseconds. */

/** The words of a phase for a narrow bar. */
function shortened(words) {
  return words.replace(/^(wait|prepare|send) .*/, "$1").replace("dispatch", "disp").replace("combine", "comb");
}

export class Pane {
  /** `lanes`: {row, label, height, indent, strong}; heights in CSS pixels. */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.strips = new Strips();
    this.lanes = [];
    this.from = 0;
    this.to = 1;
    this.least = 0;
    this.most = 1;
    this.scroll = 0;
    this.pointer = this.measured = null;
    this.texts = new Map();
  }

  /** The rows, and the limits of the time that can be looked at. */
  fill(step, lanes, least, most) {
    Object.assign(this, { step, lanes, least, most });
    let y = 0;
    for (const lane of lanes) {
      lane.y = y;
      y += lane.height;
    }
    this.rowsHeight = y;
    this.scrollTo(this.scroll);
  }

  /** Give the canvas a size in CSS pixels. */
  resize(width, height, ratio) {
    if (this.width === width && this.height === height && this.ratio === ratio) return;
    Object.assign(this, { width, height, ratio, gutter: width < 560 ? 46 : 158 });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.scrollTo(this.scroll);
  }

  get plot() {
    return Math.max(1, this.width - this.gutter);
  }

  get span() {
    return this.to - this.from;
  }

  look(from, to) {
    const room = this.most - this.least;
    const span = Math.min(room, Math.max(SHORTEST_MS, to - from));
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(middle - span / 2, this.least), this.most - span);
    this.to = this.from + span;
  }

  pan(ms) {
    this.look(this.from + ms, this.to + ms);
  }

  zoom(factor, x) {
    const at = this.timeAt(x ?? this.gutter + this.plot / 2);
    const span = Math.min(this.most - this.least, Math.max(SHORTEST_MS, this.span * factor));
    const from = at - ((at - this.from) / this.span) * span;
    this.look(from, from + span);
  }

  scrollTo(y) {
    const most = Math.max(0, (this.rowsHeight ?? 0) + RULER - (this.height ?? 0));
    this.scroll = Math.min(Math.max(y, 0), most);
  }

  timeAt(x) {
    return this.from + ((x - this.gutter) / this.plot) * this.span;
  }

  xOf(ms) {
    return this.gutter + ((ms - this.from) / this.span) * this.plot;
  }

  laneAt(y) {
    const at = y - RULER + this.scroll;
    return y < RULER ? undefined : this.lanes.find((lane) => at >= lane.y && at < lane.y + lane.height);
  }

  /** The event at a point; within three pixels of a short one. */
  eventAt(x, y) {
    const lane = x < this.gutter ? undefined : this.laneAt(y);
    if (!lane) return null;
    const { row } = lane, time = this.timeAt(x), near = (3 / this.plot) * this.span;
    const index = firstAbove(row.end, time);
    if (index < row.count && row.begin[index] <= time) return { row, index };
    const gapAfter = index < row.count ? row.begin[index] - time : Infinity;
    const gapBefore = index > 0 ? time - row.end[index - 1] : Infinity;
    if (Math.min(gapAfter, gapBefore) > near) return null;
    return { row, index: gapAfter < gapBefore ? index : index - 1 };
  }

  /** Draw everything; `marks`: {lit(row), underlined(row), selected, hovered, shade, hops}. */
  draw(colours, marks) {
    const { context, ratio } = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colours.background;
    context.fillRect(0, 0, this.width, this.height);
    const shown = this.lanes.filter(
      (lane) => lane.y + lane.height > this.scroll && lane.y < this.scroll + this.height - RULER,
    );
    this.drawBack(colours, shown, marks);
    this.drawStrips(colours, shown, marks);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.save();
    context.beginPath();
    context.rect(this.gutter, RULER, this.plot, this.height - RULER);
    context.clip();
    for (const lane of shown) this.drawBars(colours, lane, marks);
    if (marks.hops) this.drawHops(colours, marks.hops);
    for (const event of [marks.hovered, marks.selected]) if (event) this.drawOutline(colours, event, marks);
    context.restore();
    this.drawLabels(colours, shown);
    this.drawRuler(colours);
    if (this.measured) this.drawMeasured(colours, this.measured);
  }

  top(lane) {
    return RULER + lane.y - this.scroll;
  }

  drawBack(colours, shown, { shade }) {
    const { context } = this;
    if (shade) {
      const a = Math.max(this.gutter, this.xOf(shade.from)), b = Math.min(this.width, this.xOf(shade.to));
      context.fillStyle = colours.band;
      if (b > a) context.fillRect(a, RULER, b - a, this.height - RULER);
    }
    context.fillStyle = colours.faint;
    for (const time of ticks(this.from, this.to, this.plot).ticks) {
      context.fillRect(Math.round(this.xOf(time)), RULER, 1, this.height - RULER);
    }
    context.fillStyle = colours.line;
    for (const lane of shown) if (lane.strong && lane.y > 0) {
      context.fillRect(0, Math.round(this.top(lane)), this.width, 1);
    }
  }

  drawStrips(colours, shown, { lit }) {
    const { context, ratio } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.save();
    context.beginPath();
    context.rect(0, RULER * ratio, this.width * ratio, (this.height - RULER) * ratio);
    context.clip();
    const places = shown.map((lane) => ({
      row: lane.row,
      lit: lit(lane.row),
      y: Math.round((this.top(lane) + 1) * ratio),
      height: Math.round((lane.height - 2) * ratio),
    }));
    const x = Math.round(this.gutter * ratio), width = Math.round(this.plot * ratio);
    this.strips.draw(context, places, this.from, this.to, x, width, colours);
    context.restore();
  }

  /** Edges and labels of the bars that have room for them. */
  drawBars(colours, lane, { lit, underlined }) {
    const { context, step } = this, { row } = lane;
    const long = (EDGE_ROOM / this.plot) * this.span, labelled = (LABEL_ROOM / this.plot) * this.span;
    const first = firstAbove(row.end, this.from), last = firstAbove(row.begin, this.to);
    if (last - first > 4 * this.plot) return; // hardly one of them is that wide
    const top = this.top(lane) + 1, height = lane.height - 2, mask = lit(row), lines = underlined(row);
    context.textBaseline = "middle";
    context.font = `${Math.min(12, height - 3)}px ${colours.font}`;
    for (let i = first; i < last; i++) {
      const length = row.end[i] - row.begin[i];
      if (length < long) continue;
      const b = this.xOf(row.end[i]);
      context.fillStyle = colours.background;
      context.fillRect(b - 1, top, 1, height);
      if (lines && mask?.[i] && height > 8) {
        const x = Math.max(this.gutter, this.xOf(row.begin[i]));
        context.fillStyle = colours.text;
        context.fillRect(x, top + height - 2, b - 1 - x, 2);
      }
      if (length < labelled || height < 11) continue;
      const a = Math.max(this.gutter, this.xOf(row.begin[i])), end = Math.min(this.width, b);
      const text = this.fitting(this.labels(row, i), end - a - 5);
      if (!text) continue;
      context.fillStyle = mask && !mask[i] ? colours.muted : colours.labels[row.name[i]];
      context.fillText(text, a + 3, top + height / 2 + 0.5);
    }
  }

  /** The texts that a bar may have, the longest first. */
  labels(row, index) {
    const { names, actions } = this.step, name = names[row.name[index]], action = row.action[index];
    if (this.step.sides.length) return [name.words, name.name];
    if (row.stream !== 0 || action < 0) return [name.words, shortened(name.name), name.name];
    const numbers = actions.microbatches.map((side) => side[action]).filter((n) => n >= 0).join(" / ");
    return [`${name.words} ${numbers}`, `${name.name} ${numbers}`, name.name];
  }

  fitting(texts, room) {
    for (const text of texts) {
      const key = `${this.context.font}|${text}`;
      let width = this.texts.get(key);
      if (width === undefined) {
        width = this.context.measureText(text).width;
        if (this.texts.size > 20000) this.texts.clear();
        this.texts.set(key, width);
      }
      if (width <= room) return text;
    }
    return "";
  }

  /** Lines where the critical path goes from one rank to another. */
  drawHops(colours, { path, laneOf }) {
    const { context } = this;
    context.strokeStyle = colours.text;
    context.lineWidth = 1.5;
    context.beginPath();
    let before = -9;
    const last = firstAbove(path.begin, this.to);
    for (let i = Math.max(1, firstAbove(path.end, this.from)); i < last; i++) {
      if (path.ranks[i] === path.ranks[i - 1]) continue;
      const x = Math.round(this.xOf(path.begin[i])) + 0.5;
      const [a, b] = [laneOf(path.ranks[i - 1]), laneOf(path.ranks[i])];
      if (!a || !b || x - before < 2) continue;
      before = x;
      context.moveTo(x, this.top(a) + a.height / 2);
      context.lineTo(x, this.top(b) + b.height / 2);
    }
    context.stroke();
  }

  drawOutline(colours, event, { selected }) {
    const lane = this.lanes.find((one) => one.row === event.row);
    if (!lane) return;
    const { context } = this;
    const a = this.xOf(event.row.begin[event.index]), b = this.xOf(event.row.end[event.index]);
    context.strokeStyle = event === selected ? colours.text : colours.muted;
    context.lineWidth = event === selected ? 2.5 : 1.5;
    context.strokeRect(a - 0.5, this.top(lane) + 0.5, Math.max(3, b - a), lane.height - 1);
  }

  drawLabels(colours, shown) {
    const { context } = this, narrow = this.gutter < 100;
    context.textBaseline = "middle";
    for (const lane of shown) {
      if (lane.height < 9) continue;
      context.font = `${lane.strong ? "600 " : ""}${Math.min(12, lane.height - 2)}px ${colours.font}`;
      context.fillStyle = lane.strong ? colours.text : colours.muted;
      const text = this.fitting([...(narrow ? [] : [lane.label]), lane.short, lane.short.slice(0, 4)],
        this.gutter - 8 - (lane.indent && !narrow ? 10 : 0));
      context.fillText(text, lane.indent && !narrow ? 12 : 2, this.top(lane) + lane.height / 2 + 0.5);
    }
  }

  drawRuler(colours) {
    const { context } = this;
    context.fillStyle = colours.background;
    context.fillRect(0, 0, this.width, RULER);
    context.fillStyle = colours.line;
    context.fillRect(0, RULER - 1, this.width, 1);
    const { step, ticks: times } = ticks(this.from, this.to, this.plot, this.width < 560 ? 90 : 120);
    context.textBaseline = "middle";
    context.font = `12px ${colours.font}`;
    let before = this.gutter - 6;
    for (const time of times) {
      const x = this.xOf(time), text = tickText(time, step), width = context.measureText(text).width;
      context.fillStyle = colours.line;
      context.fillRect(Math.round(x), RULER - 6, 1, 6);
      const left = Math.min(Math.max(x - width / 2, this.gutter), this.width - width);
      if (left < before + 6) continue;
      before = left + width;
      context.fillStyle = colours.muted;
      context.fillText(text, left, 9);
    }
  }

  drawMeasured(colours, { from, to }) {
    const { context } = this, a = this.xOf(Math.min(from, to)), b = this.xOf(Math.max(from, to));
    context.globalAlpha = 0.14;
    context.fillStyle = colours.accent;
    context.fillRect(a, RULER, b - a, this.height - RULER);
    context.globalAlpha = 1;
    context.fillStyle = colours.accent;
    context.fillRect(a, RULER, 1, this.height - RULER);
    context.fillRect(b, RULER, 1, this.height - RULER);
    const text = durationText(Math.abs(to - from));
    context.font = `600 12px ${colours.font}`;
    const width = context.measureText(text).width + 12, x = Math.min(Math.max((a + b - width) / 2, 0), this.width - width);
    context.fillStyle = colours.text;
    context.fillRect(x, RULER + 2, width, 18);
    context.fillStyle = colours.background;
    context.fillText(text, x + 6, RULER + 11.5);
  }
}
