// What each pixel of a row shows: the kind that fills most of it, however many events lie in it.

/** Number of the first event of sorted times that is above a value. */
export function firstAbove(times, value) {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Room for the pixels of one row, to be filled again and again. */
export function pixelRow(width, kinds) {
  return {
    kind: new Int16Array(width),
    share: new Float32Array(width),
    lit: new Float32Array(width),
    timeOf: new Float64Array(kinds),
    touched: new Int32Array(kinds),
  };
}

/**
 * Fill `out` for a window of `fromMs` to `toMs` that is `width` pixels wide.
 *
 * kind: the name that fills most of the pixel, -1 where nothing runs. share: the part of the pixel in which
 * anything runs. lit: the part of that in which lit events run; `lit` has one entry an event, or is null.
 * One pass over the events of the window with everything in local variables: this runs in every frame.
 */
export function pixels(row, fromMs, toMs, width, lit, out) {
  const { begin, end, name } = row;
  const { kind, share, lit: bright, timeOf, touched } = out;
  const perMs = width / (toMs - fromMs), last = firstAbove(begin, toMs);
  kind.fill(-1, 0, width);
  share.fill(0, 0, width);
  bright.fill(0, 0, width);
  let pixel = -1, count = 0, busy = 0, shining = 0;
  for (let i = firstAbove(end, fromMs); i < last; i++) {
    let a = (begin[i] - fromMs) * perMs, b = (end[i] - fromMs) * perMs;
    if (a < 0) a = 0;
    if (b > width) b = width;
    const shines = lit === null ? 1 : lit[i], kindOf = name[i];
    let p = a | 0;
    while (p < b) {
      if (p !== pixel) {
        if (pixel >= 0) {
          kind[pixel] = longest(timeOf, touched, count);
          share[pixel] = busy < 1 ? busy : 1;
          if (busy > 0) bright[pixel] = shining / busy;
        }
        pixel = p;
        count = 0;
        busy = shining = 0;
      }
      const until = b < p + 1 ? b : p + 1, time = until - (a > p ? a : p);
      if (timeOf[kindOf] === 0) touched[count++] = kindOf;
      timeOf[kindOf] += time;
      busy += time;
      shining += shines * time;
      p++;
      const whole = b | 0;
      if (p < whole) {
        // What lies between the first and the last pixel of an event shows nothing else.
        kind.fill(kindOf, p, whole);
        share.fill(1, p, whole);
        bright.fill(shines, p, whole);
        p = whole;
      }
    }
  }
  if (pixel >= 0) {
    kind[pixel] = longest(timeOf, touched, count);
    share[pixel] = busy < 1 ? busy : 1;
    if (busy > 0) bright[pixel] = shining / busy;
  }
}

/** The kind that took most of a pixel; its times start again at 0. */
function longest(timeOf, touched, count) {
  let most = 0, found = -1;
  for (let k = 0; k < count; k++) {
    const one = touched[k];
    if (timeOf[one] > most) {
      most = timeOf[one];
      found = one;
    }
    timeOf[one] = 0;
  }
  return found;
}
