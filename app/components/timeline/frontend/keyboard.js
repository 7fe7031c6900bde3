// Keys of the whole frame. W, A, S and D act for as long as they are held, as in Perfetto.

const MOVES = { KeyW: [0, -1], KeyS: [0, 1], KeyA: [-1, 0], KeyD: [1, 0] };
const PAN_PER_S = 1.1;
/** Windows per second while A or D is held. */
const ZOOM_PER_S = 2.6;
/** Exponent per second while W or S is held. */

/** `acts`: functions by key, and pane(), changed(), searches(). */
export function listenToKeys(acts) {
  const held = new Set();
  let last = 0;

  const move = (now) => {
    if (!held.size) return;
    const seconds = Math.min(0.05, (now - last) / 1000), pane = acts.pane();
    last = now;
    for (const code of held) {
      const [along, closer] = MOVES[code];
      if (along) pane.pan(along * PAN_PER_S * seconds * pane.span);
      else pane.zoom(Math.exp(closer * ZOOM_PER_S * seconds), pane.pointer);
    }
    acts.changed();
    requestAnimationFrame(move);
  };

  window.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const ctrl = event.ctrlKey || event.metaKey;
    if ((ctrl && event.code === "KeyF") || (event.key === "/" && event.target.tagName !== "INPUT")) {
      event.preventDefault();
      acts.searches();
      return;
    }
    if (ctrl || event.altKey || event.target.closest("input, summary, .scroll")) return;
    if (MOVES[event.code]) {
      event.preventDefault();
      if (!held.size) {
        last = performance.now() - 16;
        requestAnimationFrame(move);
      }
      held.add(event.code);
      return;
    }
    if (event.key === "Enter" && event.target.closest("button")) return;
    const act = acts[event.key] ?? acts[event.key.toLowerCase()];
    if (typeof act !== "function" || ["pane", "changed", "searches"].includes(event.key)) return;
    event.preventDefault();
    act(event);
  });
  window.addEventListener("keyup", (event) => held.delete(event.code));
  window.addEventListener("blur", () => held.clear());
}
