// Draws rows of events as strips of pixels: one pass over the events and one copy of an image a row.

import { pixelRow, pixels } from "./detail_level.js";

const FAINTEST = 0.3;
/** Least part of a kind's colour in a pixel that has any of it, so that short events stay visible. */
const DIMMED = 0.2;
/** Part of its colour that an event keeps while others are lit. */

/** An image with one line of pixels for every row that is drawn. */
export class Strips {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
    this.width = this.rows = 0;
  }

  /** Make room; sizes are in the pixels of the screen. */
  room(width, rows, kinds) {
    if (width === this.width && rows <= this.rows && kinds === this.kinds) return;
    this.width = width;
    this.rows = Math.max(rows, this.rows, 1);
    this.kinds = kinds;
    this.canvas.width = width;
    this.canvas.height = this.rows;
    this.image = this.context.createImageData(width, this.rows);
    this.words = new Uint32Array(this.image.data.buffer);
    this.line = pixelRow(width, kinds);
  }

  /**
   * Draw rows into `target`. `places`: {row, lit, y, height} in pixels of the screen; `x` where they begin.
   */
  draw(target, places, fromMs, toMs, x, width, colours) {
    if (width < 1 || !places.length) return;
    this.room(width, places.length, colours.kinds.length);
    places.forEach(({ row, lit }, number) => {
      pixels(row, fromMs, toMs, width, lit ?? null, this.line);
      this.fill(number * this.width, width, colours);
    });
    this.context.putImageData(this.image, 0, 0, 0, 0, width, places.length);
    target.imageSmoothingEnabled = false;
    places.forEach(({ y, height }, number) => {
      target.drawImage(this.canvas, 0, number, width, 1, x, y, width, height);
    });
  }

  fill(at, width, { packed }) {
    const { kind, share, lit } = this.line, words = this.words;
    for (let p = 0; p < width; p++) {
      const name = kind[p];
      if (name < 0) {
        words[at + p] = 0;
        continue;
      }
      const part = (FAINTEST + (1 - FAINTEST) * share[p]) * (DIMMED + (1 - DIMMED) * lit[p]);
      words[at + p] = (((part * 255) | 0) << 24) | packed[name];
    }
  }
}
