// Which rows the parts of the timeline show, and what is lit in them.

export const PATH = -1, SCHEDULE = 0, HIDDEN = 6, EXPOSED = 7;
const ORDER = [1, 2, HIDDEN, EXPOSED, 3, 5, 4];
/** Streams from top to bottom; pipeline sends follow. */
const PATH_HEIGHT = 20, RANK_HEIGHTS = [22, 13], STREAM_HEIGHT = 14, INSIDE_HEIGHT = 22;
const RANKS_ROOM = 272;
/** Height that the rows of all ranks get together, if they stay readable in it. */

function inOrder(rows) {
  const place = ({ stream }) => (ORDER.includes(stream) ? ORDER.indexOf(stream) : ORDER.length + stream);
  return [...rows].sort((a, b) => place(a) - place(b));
}

function pathLane(step) {
  return { row: step.path, label: "critical path", short: "path", height: PATH_HEIGHT, strong: true };
}

/** The actions of every rank. */
export function rankLanes(step) {
  const rows = step.rows.filter((row) => row.stream === SCHEDULE);
  const [most, least] = RANK_HEIGHTS;
  const height = Math.min(most, Math.max(least, Math.floor(RANKS_ROOM / Math.max(rows.length, 1))));
  const lanes = rows.map((row) => ({ row, label: `pipeline rank ${row.rank}`, short: String(row.rank), height }));
  return [pathLane(step), ...lanes];
}

/** Every row of every rank. */
export function everyLane(step) {
  const lanes = [pathLane(step)];
  for (const schedule of step.rows.filter((row) => row.stream === SCHEDULE)) {
    const label = `pipeline rank ${schedule.rank}`;
    lanes.push({ row: schedule, label, short: String(schedule.rank), height: 18, strong: true });
    for (const row of streamsOf(step, schedule.rank)) {
      lanes.push({ row, label: row.title, short: initials(row.title), height: STREAM_HEIGHT, indent: true });
    }
  }
  return lanes;
}

/** The streams of one traced step, or of two below each other. */
export function sideLanes(step) {
  return step.rows.map((row, number) => {
    const first = row.rank !== step.rows[number - 1]?.rank, height = RANK_HEIGHTS[0];
    const side = first && step.sides[row.rank], label = side ? `${side}: ${row.title}` : row.title;
    return { row, label, short: row.title.replace("stream ", "").slice(0, 5), height, strong: first, indent: !first };
  });
}

/** The streams of one rank, for what is inside an action; those without an event in it are left out. */
export function insideLanes(step, rank, action) {
  return streamsOf(step, rank)
    .filter((row) => row.stream < 3 || row.stream === HIDDEN || row.stream === EXPOSED || row.action.includes(action))
    .map((row) => ({ row, label: row.title, short: initials(row.title), height: INSIDE_HEIGHT }));
}

export function streamsOf(step, rank) {
  return inOrder(step.rows.filter((row) => row.rank === rank && row.stream !== SCHEDULE));
}

function initials(title) {
  return { "compute stream": "comp", "communication stream": "comm", "hidden communication": "hid",
    "exposed communication": "exp" }[title] ?? title.replace("pipeline send", "send").slice(0, 6);
}

/** The events of each row that belong to an action, as masks made when they are asked for. */
export function ofAction(action) {
  const masks = new Map();
  return (row) => {
    if (!masks.has(row)) masks.set(row, Uint8Array.from(row.action, (own) => (own === action ? 1 : 0)));
    return masks.get(row);
  };
}

/** The events on the critical path; rows that are not made of what runs stay as they are. */
export function onPath(row) {
  return [PATH, HIDDEN, EXPOSED].includes(row.stream) ? null : row.critical;
}
