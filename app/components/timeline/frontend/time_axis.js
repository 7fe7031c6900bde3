// Ticks and texts of times; every time is milliseconds.

const STEPS = [1, 2, 5];

/** Round times between ticks, at most one tick every `room` pixels. */
export function tickStep(spanMs, width, room = 110) {
  const least = (spanMs * room) / Math.max(width, 1);
  const power = 10 ** Math.floor(Math.log10(least));
  for (const step of STEPS) if (step * power >= least) return step * power;
  return 10 * power;
}

/** The ticks of a window. */
export function ticks(fromMs, toMs, width, room) {
  const step = tickStep(toMs - fromMs, width, room);
  const found = [];
  for (let n = Math.ceil(fromMs / step); n * step <= toMs; n++) found.push(n * step);
  return { step, ticks: found };
}

/** The text of a tick, with as many decimals as its neighbours differ by. */
export function tickText(timeMs, step) {
  const decimals = Math.min(6, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  return `${grouped(timeMs, decimals)} ms`;
}

/** A time from the start of the step, to the microsecond. */
export function timeText(timeMs) {
  return `${grouped(timeMs, 3)} ms`;
}

/** A duration with four significant digits. */
export function durationText(ms) {
  const digits = ms > 0 ? Math.floor(Math.log10(ms)) + 1 : 1;
  return `${grouped(ms, Math.min(6, Math.max(0, 4 - digits)))} ms`;
}

function grouped(value, decimals) {
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}
