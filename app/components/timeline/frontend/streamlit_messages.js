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

/** Use the fonts of the page around this frame, which it has loaded already; without them, the system's. */
export function shareFonts() {
  try {
    const rules = [...window.parent.document.styleSheets].flatMap((sheet) =>
      [...sheet.cssRules].filter((rule) => rule instanceof window.parent.CSSFontFaceRule)
        .map((rule) => absolute(rule.cssText, sheet.href ?? window.parent.document.baseURI)),
    );
    const style = document.createElement("style");
    style.textContent = rules.join("\n");
    document.head.append(style);
  } catch {
    // A page that does not let its frames look at it keeps its fonts.
  }
}

function absolute(text, base) {
  return text.replace(/url\("?([^")]+)"?\)/g, (_, address) => `url("${new URL(address, base)}")`);
}
