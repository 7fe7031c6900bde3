// Finds events by name, stage and micro-batch.

import { EXPOSED, HIDDEN, PATH, SCHEDULE } from "./layout.js";

const derived = (row) => [PATH, HIDDEN, EXPOSED].includes(row.stream);
/** Whether a row shows again what another row has; its events are lit and not counted. */

const WORDS = { stage: "stage", s: "stage", microbatch: "microbatch", mb: "microbatch", rank: "rank", r: "rank" };

const STREAMS = { exposed: EXPOSED, hidden: HIDDEN };
/** Words that ask for communication with nothing computed beside it, or with something. */

/**
 * The parts of a question: "dispatch f mb 12 stage 3" asks for the text and both numbers.
 * A number alone is a micro-batch; a text in quotes is the whole name.
 */
export function question(text) {
  const asked = { text: [], stage: null, microbatch: null, rank: null, exact: null, stream: null };
  const quoted = /^\s*"([^"]+)"?\s*$/.exec(text);
  if (quoted) return { ...asked, exact: quoted[1].toLowerCase() };
  const words = text.toLowerCase().replace(/micro-?batch/g, "mb").replace(/[,:=]/g, " ").split(/\s+/).filter(Boolean);
  for (let i = 0; i < words.length; i++) {
    const joined = /^([a-z]+)(\d+)$/.exec(words[i]);
    const [word, number] = joined ? [joined[1], joined[2]] : [words[i], words[i + 1]];
    const field = WORDS[word];
    if (field && /^\d+$/.test(number ?? "")) {
      asked[field] = Number(number);
      if (!joined) i++;
    } else if (STREAMS[words[i]] !== undefined) asked.stream = STREAMS[words[i]];
    else if (/^\d+$/.test(words[i])) asked.microbatch = Number(words[i]);
    else asked.text.push(words[i]);
  }
  return asked;
}

/** One byte an event of the given rows (1: found), each row's mask, and the events found in order of time. */
export function search(step, rows, text) {
  const asked = question(text);
  const empty = !asked.text.length && !asked.exact && asked.stream === null && [asked.stage, asked.microbatch, asked.rank].every((n) => n === null);
  const masks = new Map(), found = [];
  if (empty) return { masks, found };
  const named = step.names.map(({ name, words }) => {
    if (asked.exact) return words.toLowerCase() === asked.exact;
    const all = `${name} ${words}`.toLowerCase();
    return asked.text.every((part) => all.includes(part));
  });
  const sides = step.names.map(({ name }) => (/ F$/.test(name) ? 1 : / [BIW]$/.test(name) ? 2 : 3));
  const acts = actionsAsked(step, asked), holds = new Uint8Array(step.actions.count);
  for (const row of rows) {
    const mask = new Uint8Array(row.count);
    masks.set(row, mask);
    if (asked.stream !== null && row.stream !== asked.stream) continue;
    for (let i = 0; i < row.count; i++) {
      if (!named[row.name[i]]) continue;
      const rank = row.ranks ? row.ranks[i] : row.rank;
      if (asked.rank !== null && rank !== asked.rank) continue;
      if (acts !== null && (row.action[i] < 0 || !(acts[row.action[i]] & sides[row.name[i]]))) continue;
      mask[i] = 1;
      if (row.action[i] >= 0) holds[row.action[i]] = 1;
      if (asked.stream !== null || !derived(row)) found.push({ row, index: i });
    }
  }
  // An action is lit too where something inside it was found.
  for (const [row, mask] of masks)
    if (row.stream === SCHEDULE)
      for (let i = 0; i < row.count; i++) if (row.action[i] >= 0 && holds[row.action[i]]) mask[i] = 1;
  found.sort((a, b) => a.row.begin[a.index] - b.row.begin[b.index]);
  return { masks, found };
}

/** The sides (1 forward, 2 backward) of each action with the stage and micro-batch asked for; null for all. */
function actionsAsked(step, { stage, microbatch }) {
  if (stage === null && microbatch === null) return null;
  const { count, stages, microbatches } = step.actions;
  const wanted = new Uint8Array(count);
  for (let a = 0; a < count; a++)
    for (const side of [0, 1])
      if (
        stages[side][a] >= 0 &&
        (stage === null || stages[side][a] === stage) &&
        (microbatch === null || microbatches[side][a] === microbatch)
      )
        wanted[a] |= 1 << side;
  return wanted;
}
