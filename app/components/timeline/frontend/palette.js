// The colours of the page's theme, and those of the kinds of events on it.

/** [red, green, blue] of "#rrggbb" or "rgb(r, g, b)". */
export function rgb(text) {
  const hex = /^#([0-9a-f]{6})/i.exec(text);
  if (hex) return [0, 2, 4].map((at) => parseInt(hex[1].slice(at, at + 2), 16));
  const parts = text.match(/[\d.]+/g);
  return parts ? parts.slice(0, 3).map(Number) : [128, 128, 128];
}

function mixed(a, b, share) {
  return a.map((value, i) => Math.round(value + (b[i] - value) * share));
}

function css(colour) {
  return `rgb(${colour.join(",")})`;
}

/** How much light a colour gives, from 0 to 1 (WCAG 2's relative luminance). */
function luminance(colour) {
  const [r, g, b] = colour.map((value) => {
    const part = value / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

const INK = "#0e1117", PAPER = "#ffffff";

/** Dark or white, whichever stands out more from a colour. */
function readableOn(colour) {
  const light = luminance(colour) + 0.05;
  return light / (luminance(rgb(INK)) + 0.05) > 1.05 / light ? INK : PAPER;
}

/** Colours to draw with, from the theme that the page gives; without one from what the browser asks for. */
export function palette(theme, names) {
  const dark = theme ? theme.base === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const back = rgb(theme?.backgroundColor ?? (dark ? "#0e1117" : "#ffffff"));
  const text = rgb(theme?.textColor ?? (dark ? "#fafafa" : "#0e1117"));
  const kinds = names.map(({ colour }) => rgb(colour));
  return {
    dark,
    back,
    background: css(back),
    band: css(mixed(back, text, 0.035)),
    line: css(mixed(back, text, 0.16)),
    faint: css(mixed(back, text, 0.08)),
    muted: css(mixed(back, text, 0.68)),
    text: css(text),
    accent: theme?.primaryColor ?? (dark ? "#56B4E9" : "#0072B2"),
    kinds,
    packed: Uint32Array.from(kinds, ([r, g, b]) => (b << 16) | (g << 8) | r),
    labels: kinds.map(readableOn),
    font: theme?.font ? `${theme.font}, system-ui, sans-serif` : "system-ui, sans-serif",
  };
}
