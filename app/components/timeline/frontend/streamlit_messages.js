// The messages between this frame and the page around it.

function send(type, data) {
  window.parent.postMessage({ isStreamlitMessage: true, type: `streamlit:${type}`, ...data }, "*");
}

/** Call `show(args, theme)` whenever the page draws the component, and say that it may. */
export function listen(show) {
  window.addEventListener("message", ({ data, source }) => {
    if (source === window.parent && data.type === "streamlit:render") show(data.args, data.theme);
  });
  send("componentReady", { apiVersion: 1 });
}

/** Tell the page how high the component is, in pixels. */
export function setHeight(height) {
  send("setFrameHeight", { height });
}

/** Tell the page a value. */
export function setValue(value) {
  send("setComponentValue", { value, dataType: "json" });
}
