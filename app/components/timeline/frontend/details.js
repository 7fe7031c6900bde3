// The selected event in words: the box between the two parts, the table of phases, and the tooltip.

import { durationText, timeText } from "./time_axis.js";
import { communication, place, times, title, which } from "./words.js";

const by = (id) => document.getElementById(id);
const MOST_LISTED = 2000;
const GROUPED = /^(wait for|prepare)(?= (dispatch|combine|gather|scatter))/;
/** Kinds that the legend has once for all transfers. */

/** Whether an event is the bar of a whole action. */
export function isAction(step, row, index) {
  return row.stream === 0 && row.action[index] >= 0;
}

/** Fill the box for an event of an action, or of the end of the step. */
export function showDetails(step, { row, index }) {
  const action = row.action[index];
  by("name").textContent = title(step, row, index);
  by("where").textContent = row.stream > 0 && !step.sides.length ? `${place(step, row, index)}, ${row.title}` : place(step, row, index);
  by("chosen").style.setProperty("--kind", step.names[row.name[index]].colour);
  const begin = row.begin[index], end = row.end[index];
  const facts = [
    ["Duration", durationText(end - begin)],
    ["Begin", timeText(begin)],
    ["End", timeText(end)],
  ];
  if (action >= 0) {
    const { kind, critical } = step.actions;
    if (!isAction(step, row, index)) facts.push(["Inside", step.names[kind[action]].words]);
    facts.push([isAction(step, row, index) ? "Communication" : "Its communication", communication(step, action)]);
    facts.push(["Critical path", row.critical[index] ? "on it" : critical[action] ? "its action is on it" : "not on it"]);
  } else if (!step.sides.length) facts.push(["Critical path", row.critical[index] ? "on it" : "not on it"]);
  by("facts").replaceChildren(
    ...facts.map(([name, text]) => element("div", element("dt", name), element("dd", text))),
  );
}

/** What a screen reader says when an event is selected. */
export function spoken(step, { row, index }) {
  const critical = row.critical[index] ? "; on the critical path" : "";
  return `${title(step, row, index)}, ${place(step, row, index)}: ${times(row, index)}${critical}`;
}

/** Fill the table with the events of an action, by begin. */
export function listPhases(step, rows, action) {
  const found = [];
  for (const row of rows)
    for (let i = 0; i < row.count; i++) if (row.action[i] === action) found.push([row, i]);
  found.sort(([a, i], [b, k]) => a.begin[i] - b.begin[k]);
  by("phases").replaceChildren(
    ...found.slice(0, MOST_LISTED).map(([row, i]) => {
      const number = (ms) => ms.toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 });
      const cells = [
        row.title,
        title(step, row, i),
        row.block[i] < 0 ? "" : String(row.block[i]),
        number(row.begin[i]),
        number(row.end[i]),
        number(row.end[i] - row.begin[i]),
        row.critical[i] ? "yes" : "",
      ];
      return element("tr", ...cells.map((text) => element("td", text)));
    }),
  );
  by("listed").querySelector("summary").textContent =
    action < 0 ? "No action is open" : `The ${found.length} events of this action as a table`;
}

/** Show what lies under the pointer, or nothing. */
export function showTip(step, event, x, y) {
  const tip = by("tip");
  tip.hidden = !event;
  if (!event) return;
  const { row, index } = event, action = row.action[index];
  const lines = [place(step, row, index), times(row, index)];
  if (isAction(step, row, index)) lines.push(communication(step, action));
  if (row.critical[index]) lines.push("on the critical path");
  tip.replaceChildren(element("b", title(step, row, index)), ...lines.map((text) => element("div", text)));
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${y + 18 + height < innerHeight ? y + 18 : Math.max(4, y - height - 12)}px`;
}

/** Fill the legend with the kinds that some rows show; `chosen(text)` is called for one that is clicked. */
export function showLegend(step, rows, chosen) {
  const kinds = new Set(rows.flatMap((row) => [...new Set(row.name)]));
  const groups = new Map([...kinds].map((kind) => {
    const { name, words, colour } = step.names[kind], group = step.sides.length ? name : GROUPED.exec(words)?.[0];
    return [group ?? words, { words: group ?? words, colour, text: group ?? `"${words}"` }];
  }));
  const names = [...groups.values()];
  const key = [...groups.keys()].join("|");
  if (by("legend").dataset.kinds === key) return;
  by("legend").dataset.kinds = key;
  by("legend").replaceChildren(
    ...names.map(({ words, colour, text }) => {
      const swatch = element("i"), button = element("button", swatch, words);
      swatch.style.background = colour;
      Object.assign(button, { type: "button", title: `Find ${words}`, onclick: () => chosen(text) });
      return button;
    }),
  );
}

/** The heading of the lower part. */
export function insideTitle(step, action) {
  if (action < 0) return "No action is open";
  const { kind, rank } = step.actions;
  return `Inside ${step.names[kind[action]].words} of pipeline rank ${rank[action]}: ${which(step, action)}`;
}

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}
