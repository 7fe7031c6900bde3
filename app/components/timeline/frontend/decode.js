// Reads the bytes that packing.py writes: a length, a JSON header, and columns of whole numbers.

const VERSION = 1;

/**
 * The step: {endMs, ranks, whole, rank, sides, span, names, rows, actions, path}; `sides` are the titles of traced
 * steps, which have rows by stream and no actions. Times are milliseconds from its start.
 *
 * A row is {rank, stream, title, count, first, begin, end, name, action, block, critical}, columns of equal
 * length; `first` is the number of its first event in the whole step. `actions` are columns by action.
 */
export function decode(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = view.getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  if (header.version !== VERSION) throw new Error(`unknown version of a packed step: ${header.version}`);
  const columns = {};
  let at = 4 + length;
  for (const { name, count, bytes: size } of header.columns) {
    columns[name] = numbers(bytes, at, count);
    at += size;
  }
  const step = {
    endMs: header.end_ns / 1e6,
    ranks: header.ranks,
    whole: header.whole,
    rank: header.rank,
    sides: header.sides,
    span: header.span,
    names: header.names,
    actions: actionsOf(columns),
    path: pathOf(columns),
  };
  step.rows = rowsOf(header.rows, columns);
  return step;
}

/** A column: seven bits a byte, the lowest first; up to 53 bits a number. */
export function numbers(bytes, at, count) {
  const found = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    let byte = bytes[at++];
    let value = byte & 0x7f;
    for (let scale = 128; byte & 0x80; scale *= 128) {
      byte = bytes[at++];
      value += (byte & 0x7f) * scale;
    }
    found[i] = value;
  }
  return found;
}

/** The number that was folded: 0, 1, 2, 3 are 0, -1, 1, -2. */
export function unfolded(value) {
  return value % 2 ? -(value + 1) / 2 : value / 2;
}

function running(column) {
  let total = 0;
  return column.map((value) => (total += unfolded(value)));
}

function rowsOf(described, columns) {
  const gaps = columns["event.gap"], lengths = columns["event.length"];
  const count = gaps.length;
  const begin = new Float64Array(count), end = new Float64Array(count);
  const name = Uint16Array.from(columns["event.name"]);
  const action = Int32Array.from(running(columns["event.action"]));
  const block = new Int16Array(count), critical = new Uint8Array(count);
  const rows = [];
  let first = 0;
  for (const { rank, stream, title, count: own } of described) {
    let timeNs = 0;
    for (let i = first; i < first + own; i++) {
      const packed = columns["event.block"][i];
      critical[i] = packed % 2;
      block[i] = Math.floor(packed / 2) - 1;
      timeNs += unfolded(gaps[i]);
      begin[i] = timeNs / 1e6;
      timeNs += lengths[i];
      end[i] = timeNs / 1e6;
    }
    const part = (column) => column.subarray(first, first + own);
    rows.push({
      rank, stream, title, count: own, first,
      begin: part(begin), end: part(end), name: part(name), action: part(action), block: part(block),
      critical: part(critical),
    });
    first += own;
  }
  return rows;
}

function actionsOf(columns) {
  const own = (name) => columns[`action.${name}`];
  const start = running(own("start"));
  return {
    count: start.length,
    kind: Uint16Array.from(own("kind")),
    rank: Uint16Array.from(own("rank")),
    begin: start.map((ns) => ns / 1e6),
    end: start.map((ns, i) => (ns + own("length")[i]) / 1e6),
    stages: [own("stage0").map((n) => n - 1), own("stage1").map((n) => n - 1)],
    microbatches: [own("microbatch0").map((n) => n - 1), own("microbatch1").map((n) => n - 1)],
    hidden: own("hidden").map((ns) => ns / 1e6),
    exposed: own("exposed").map((ns) => ns / 1e6),
    critical: Uint8Array.from(own("critical")),
  };
}

function pathOf(columns) {
  const own = (name) => columns[`path.${name}`];
  const count = own("gap").length;
  const begin = new Float64Array(count), end = new Float64Array(count);
  let timeNs = 0;
  for (let i = 0; i < count; i++) {
    timeNs += unfolded(own("gap")[i]);
    begin[i] = timeNs / 1e6;
    timeNs += own("length")[i];
    end[i] = timeNs / 1e6;
  }
  return {
    rank: -1, stream: -1, title: "critical path", count, first: -1, begin, end,
    name: Uint16Array.from(own("name")),
    action: Int32Array.from(running(own("action"))),
    block: new Int16Array(count).fill(-1),
    critical: new Uint8Array(count).fill(1),
    ranks: Uint16Array.from(own("rank")),
    member: Uint16Array.from(own("member")),
  };
}
