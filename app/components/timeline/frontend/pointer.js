// Pointer and wheel on a pane: the wheel zooms time, a drag pans, a click selects, shift and a drag measure.

const CLICK_ROOM = 4;
/** Pixels that the pointer may move within a click. */
const WHEEL = 0.0016;

/**
 * `react`: {changed, clicked(event), fitted(event), hovered(event, x, y), active(pane)}; events as
 * `pane.eventAt` gives them.
 */
export function listenToPointer(pane, react) {
  const { canvas } = pane, held = new Map();
  let began = null;
  const at = (event) => [event.offsetX, event.offsetY];

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 33 : 1;
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pane.pan((sideways * lines * pane.span) / pane.plot);
    } else pane.zoom(Math.exp(event.deltaY * lines * WHEEL), event.offsetX);
    react.changed();
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, at(event));
    const [x, y] = at(event);
    began = { x, y, from: pane.from, to: pane.to, scroll: pane.scroll, moved: false, measures: event.shiftKey };
    if (held.size === 2) began.pinch = spread(held);
    react.active(pane);
  });

  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    pane.pointer = x;
    if (!held.has(event.pointerId)) {
      react.hovered(pane.eventAt(x, y), event.clientX, event.clientY);
      return;
    }
    held.set(event.pointerId, [x, y]);
    if (began.pinch) {
      pane.look(began.from, began.to);
      pane.zoom(began.pinch / Math.max(8, spread(held)), x);
    } else {
      began.moved ||= Math.hypot(x - began.x, y - began.y) > CLICK_ROOM;
      if (!began.moved) return;
      if (began.measures) pane.measured = { from: pane.timeAt(began.x), to: pane.timeAt(x) };
      else {
        const moved = ((began.x - x) / pane.plot) * (began.to - began.from);
        pane.look(began.from + moved, began.to + moved);
        if (event.pointerType === "mouse") pane.scrollTo(began.scroll + began.y - y);
      }
    }
    canvas.classList.toggle("dragged", !began.measures);
    react.hovered(null);
    react.changed();
  });

  const released = (event) => {
    if (!held.delete(event.pointerId)) return;
    canvas.classList.remove("dragged");
    if (event.type === "pointerup" && !began.moved && !began.pinch) {
      pane.measured = null;
      react.clicked(pane.eventAt(...at(event)));
    }
    if (held.size === 0) began = null;
  };
  canvas.addEventListener("pointerup", released);
  canvas.addEventListener("pointercancel", released);
  canvas.addEventListener("pointerleave", () => {
    pane.pointer = null;
    react.hovered(null);
  });
  canvas.addEventListener("dblclick", (event) => react.fitted(pane.eventAt(...at(event))));
  canvas.addEventListener("focus", () => react.active(pane));
}

function spread(held) {
  const [[a, b], [c, d]] = [...held.values()];
  return Math.hypot(a - c, b - d);
}
