// The strip above the step: all ranks at a glance, with the window that is looked at.

import { Strips } from "./strips.js";

export const OVERVIEW_HEIGHT = 38;

export class Overview {
  /** `pane`: whose window it shows and moves; `changed()`: called when it has moved it. */
  constructor(canvas, pane, changed) {
    Object.assign(this, { canvas, pane, changed, context: canvas.getContext("2d"), strips: new Strips() });
    this.picture = document.createElement("canvas");
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (this.held = null));
  }

  /** Draw the ranks once, for as long as neither they nor the size nor what is lit changes. */
  prepare(step, rows, width, ratio, colours, lit) {
    Object.assign(this, { step, width, ratio });
    const wide = Math.round(width * ratio), high = Math.round(OVERVIEW_HEIGHT * ratio);
    for (const canvas of [this.canvas, this.picture]) Object.assign(canvas, { width: wide, height: high });
    this.canvas.style.height = `${OVERVIEW_HEIGHT}px`;
    const each = high / Math.max(rows.length, 1), gutter = Math.round(this.pane.gutter * ratio);
    const places = rows.map((row, number) => ({
      row, lit: lit(row), y: Math.floor(number * each), height: Math.max(1, Math.floor(each)),
    }));
    this.strips.draw(this.picture.getContext("2d"), places, 0, step.endMs, gutter, wide - gutter, colours);
  }

  draw(colours) {
    const { context, pane, canvas, ratio } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = colours.band;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(this.picture, 0, 0);
    const scale = pane.plot / this.step.endMs;
    const a = (pane.gutter + pane.from * scale) * ratio, b = (pane.gutter + pane.to * scale) * ratio;
    context.globalAlpha = 0.72;
    context.fillStyle = colours.background;
    context.fillRect(pane.gutter * ratio, 0, a - pane.gutter * ratio, canvas.height);
    context.fillRect(b, 0, canvas.width - b, canvas.height);
    context.globalAlpha = 1;
    context.strokeStyle = colours.text;
    context.lineWidth = 1.5 * ratio;
    context.strokeRect(a, 0.75 * ratio, Math.max(2 * ratio, b - a), canvas.height - 1.5 * ratio);
    context.fillStyle = colours.muted;
    context.font = `${12 * ratio}px ${colours.font}`;
    context.textBaseline = "middle";
    if (pane.gutter > 100) context.fillText(this.step.span, 2 * ratio, canvas.height / 2);
  }

  timeAt(event) {
    return ((event.offsetX - this.pane.gutter) / this.pane.plot) * this.step.endMs;
  }

  grab(event) {
    const time = this.timeAt(event), { pane } = this;
    this.canvas.setPointerCapture(event.pointerId);
    if (time < pane.from || time > pane.to) pane.look(time - pane.span / 2, time + pane.span / 2);
    this.held = { time, from: pane.from, to: pane.to };
    this.changed();
  }

  drag(event) {
    if (!this.held) return;
    const moved = this.timeAt(event) - this.held.time;
    this.pane.look(this.held.from + moved, this.held.to + moved);
    this.changed();
  }
}
