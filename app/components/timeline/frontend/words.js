// What an event is, in words; the same in tooltips, in the details and for screen readers.

import { durationText, timeText } from "./time_axis.js";

/** Stage and micro-batch of an action, of both sides of a pair. */
export function which(step, action) {
  const { kind, stages, microbatches } = step.actions;
  const sides = step.names[kind[action]].name.split("&");
  return sides
    .map((side) => {
      const at = side === "F" ? 0 : 1;
      return `${side} of stage ${stages[at][action]}, micro-batch ${microbatches[at][action]}`;
    })
    .join("; ");
}

/** The name of an event. */
export function title(step, row, index) {
  return step.names[row.name[index]].words;
}

/** Where an event is: rank, stage, micro-batch, block. */
export function place(step, row, index) {
  const action = row.action[index];
  const rank = row.ranks ? row.ranks[index] : row.rank;
  if (step.sides.length) {
    const layer = row.block[index] < 0 ? [] : [`layer ${row.block[index]}`];
    return [step.sides[rank], row.title, step.names[row.name[index]].name, ...layer].filter(Boolean).join(", ");
  }
  const parts = [`pipeline rank ${rank}`];
  if (row.member && row.member[index] > 0) parts.push(`GPU ${row.member[index]} of its group`);
  if (action >= 0) {
    if (row.block[index] >= 0) parts.push(`block ${row.block[index]}`);
    parts.push(sideText(step, step.names[row.name[index]].name, action) ?? which(step, action));
  }
  return parts.join(", ");
}

/** Stage and micro-batch of the side of an action that a phase belongs to; null for both. */
function sideText(step, name, action) {
  const side = name.slice(-2);
  const { kind, stages, microbatches } = step.actions;
  if (!/^ [FBIW]$/.test(side) || !step.names[kind[action]].name.includes("&")) return null;
  const at = side === " F" ? 0 : 1;
  return `stage ${stages[at][action]}, micro-batch ${microbatches[at][action]}`;
}

/** Duration with begin and end. */
export function times(row, index) {
  const begin = row.begin[index], end = row.end[index];
  return `${durationText(end - begin)} long, from ${timeText(begin)} to ${timeText(end)}`;
}

/** What communication costs inside an action. */
export function communication(step, action) {
  const hidden = step.actions.hidden[action], exposed = step.actions.exposed[action];
  if (hidden + exposed <= 0) return "no communication";
  const share = Math.round((100 * hidden) / (hidden + exposed));
  return `${durationText(hidden)} hidden (${share} %), ${durationText(exposed)} exposed`;
}
