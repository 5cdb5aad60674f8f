// The page's data, and timelines as the page draws them: lanes of ops, idle intervals, transfers.
//
// The data is a JSON head, and columns of numbers in one deflated block. A column is stored in planes (all lowest bytes,
// then all second ones, …), because that compresses well.

const COLUMN_TYPES = { b: Int8Array, h: Int16Array, i: Int32Array, d: Float64Array };

/** Returns the head, and a function that returns the next column. */
async function unpack() {
  const head = JSON.parse(document.getElementById("head").textContent);
  const bytes = await inflate(document.getElementById("data").textContent);
  let at = 0;
  let next = 0;
  const nextColumn = () => {
    const [code, length] = head.columns[next++];
    const type = COLUMN_TYPES[code];
    const size = type.BYTES_PER_ELEMENT;
    const joined = new Uint8Array(size * length);
    for (let plane = 0; plane < size; plane++) {
      for (let i = 0, to = plane; i < length; i++, to += size) joined[to] = bytes[at++];
    }
    return new type(joined.buffer);
  };
  return [head, nextColumn];
}

async function inflate(base64) {
  const text = atob(base64);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The running sums of `deltas`; as doubles, which hold whole numbers up to 2^53. */
function summed(deltas) {
  const sums = new Float64Array(deltas.length);
  for (let i = 0, sum = 0; i < deltas.length; i++) sums[i] = sum += deltas[i];
  return sums;
}

/** Makes a timeline from its head and its columns, in the order in which `packing.py` wrote them. */
function makeTimeline(head, column) {
  const timeline = { ...head, numRanks: head.limits.length };
  makeLanes(timeline, column(), column(), column(), column(), column());
  makeTransfers(timeline, column(), column());
  timeline.critical = column();
  for (const lane of timeline.lanes) lane.gaps = gapsOf(lane, timeline.makespan);
  makeIdle(timeline, column(), column(), column(), [column(), column(), column(), column()]);
  makeLevels(timeline);
  return timeline;
}

/**
 * `lanes[rank]` has the columns `start`, `end` (µs), `slot` and `batch` (micro-batch). Op `i` of a lane is op
 * `lane.first + i` of the timeline. A slot is a task on one of its ranks: `timeline.slots[slot]` is [task, rank, …].
 */
function makeLanes(timeline, counts, slots, batches, gaps, durations) {
  const { slots: table, numMicrobatches } = timeline;
  timeline.opAt = new Int32Array(table.length * numMicrobatches).fill(-1); // by slot and micro-batch
  const allBatches = summed(batches);
  let first = 0;
  timeline.lanes = Array.from(counts, (n, rank) => {
    const lane = { rank, n, first, start: new Float64Array(n), end: new Float64Array(n) };
    lane.slot = slots.subarray(first, first + n);
    lane.batch = allBatches.subarray(first, first + n);
    for (let i = 0, time = 0; i < n; i++) {
      time = lane.start[i] = time + gaps[first + i];
      time = lane.end[i] = time + durations[first + i];
      timeline.opAt[lane.slot[i] * numMicrobatches + lane.batch[i]] = first + i;
    }
    first += n;
    return lane;
  });
  timeline.numOps = first;
  timeline.slotOf = new Map(table.map(([task, rank], slot) => [`${task} ${rank}`, slot]));
}

/** Returns op `number` of the timeline, as {lane, i, stage, kind, batch, start, end}. */
function opNumber(timeline, number) {
  let rank = 0;
  while (rank + 1 < timeline.numRanks && timeline.lanes[rank + 1].first <= number) rank++;
  while (!timeline.lanes[rank].n) rank--;
  return opOf(timeline, timeline.lanes[rank], number - timeline.lanes[rank].first);
}

function opOf(timeline, lane, i) {
  const [stage, kind] = timeline.tasks[timeline.slots[lane.slot[i]][0]];
  return { lane, i, stage, kind, batch: lane.batch[i], start: lane.start[i], end: lane.end[i] };
}

const nameOf = (op) => `${op.stage}${op.kind}${op.batch}`;

/** Returns the stages of a rank. */
function stagesOf({ slots, tasks }, rank) {
  return new Set(slots.filter((slot) => slot[1] === rank).map(([task]) => tasks[task][0]));
}

/** Returns the op with a name such as 2F0, on the first of its ranks, or null. */
function opNamed(timeline, name) {
  const match = /^(\d+)([A-Z])(\d+)$/.exec(name);
  if (!match || Number(match[3]) >= timeline.numMicrobatches) return null;
  const [stage, kind, batch] = [Number(match[1]), match[2], Number(match[3])];
  const task = timeline.tasks.findIndex((other) => other[0] === stage && other[1] === kind);
  const slot = timeline.slots.findIndex((other) => other[0] === task);
  const number = slot < 0 ? -1 : timeline.opAt[slot * timeline.numMicrobatches + batch];
  return number < 0 ? null : opNumber(timeline, number);
}

/** Returns all ops of a micro-batch, by start. */
function opsOfBatch(timeline, batch) {
  const ops = [];
  if (batch >= timeline.numMicrobatches) return ops; // only the other timeline has it
  for (let slot = 0; slot < timeline.slots.length; slot++) {
    const number = timeline.opAt[slot * timeline.numMicrobatches + batch];
    if (number >= 0) ops.push(opNumber(timeline, number));
  }
  return ops.sort((a, b) => a.start - b.start || a.end - b.end);
}

/** Returns the ops and step ends of the critical path, from first to last. */
function criticalOps(timeline) {
  timeline.criticalOps ??= Array.from(timeline.critical, (number) => {
    if (number < timeline.numOps) return opNumber(timeline, number);
    const [rank, stage, what, start, end] = timeline.stepEnds[number - timeline.numOps];
    return { lane: timeline.lanes[rank], i: -1, stage, kind: what, batch: 0, start, end };
  });
  return timeline.criticalOps;
}

/** Returns a figure of a micro-batch: it is one number, or one per class of micro-batches. */
function figureOf({ classOf }, figure, batch) {
  return Array.isArray(figure) ? figure[classOf[batch]] : figure;
}

/**
 * `delays` are from the producer's end to the transfer's start; all times are in µs. A transfer waits for shared links
 * from `handedOver` to `sent`, and then occupies them until `served`.
 */
function makeTransfers(timeline, delays, durations) {
  const { routes, numMicrobatches, numComponents } = timeline;
  const sent = new Float64Array(delays.length);
  const arrived = new Float64Array(delays.length);
  const handedOver = new Float64Array(delays.length);
  const served = new Float64Array(delays.length);
  const route = new Int32Array(delays.length);
  const batch = new Int32Array(delays.length);
  timeline.routeFirst = [];
  let at = 0;
  routes.forEach(([source, , sender, , , component, service, links], r) => {
    timeline.routeFirst.push(at);
    const slot = timeline.slotOf.get(`${source} ${sender}`);
    const { first, end } = timeline.lanes[sender];
    for (let m = component; m < numMicrobatches; m += numComponents, at++) {
      sent[at] = end[timeline.opAt[slot * numMicrobatches + m] - first] + delays[at];
      arrived[at] = sent[at] + durations[at];
      handedOver[at] = links.length ? sent[at] - Math.max(0, delays[at]) : sent[at];
      served[at] = Math.min(sent[at] + figureOf(timeline, service, m), Math.max(sent[at], arrived[at]));
      [route[at], batch[at]] = [r, m];
    }
  });
  timeline.transfers = { n: at, sent, arrived, handedOver, served, route, batch };
}

/** Returns the gaps in which a lane runs no op: [start, end, start, end, …]. */
function gapsOf(lane, makespan) {
  const gaps = [];
  let time = 0;
  for (let i = 0; i < lane.n; i++) {
    if (lane.end[i] === lane.start[i]) continue;
    if (lane.start[i] > time) gaps.push(time, lane.start[i]);
    time = lane.end[i];
  }
  if (time < makespan) gaps.push(time, makespan);
  return gaps;
}

/**
 * `lane.idle` has the columns `start`, `end` and `cause`. Interval `i` of a lane is interval `lane.idle.first + i` of
 * the timeline. A duration of 0 means that the interval ends where the gap ends.
 */
function makeIdle(timeline, counts, causes, durations, [waitsFor, waitBatches, ready, readyBatches]) {
  timeline.waits = { code: waitsFor, batch: summed(waitBatches) };
  timeline.ready = { code: ready, batch: summed(readyBatches) };
  let number = 0;
  timeline.lanes.forEach((lane, rank) => {
    const n = counts[rank];
    const idle = { n, first: number, start: new Float64Array(n), end: new Float64Array(n) };
    idle.cause = causes.subarray(number, number + n);
    for (let i = 0, gap = 0, time = lane.gaps[0]; i < n; i++, number++) {
      idle.start[i] = time;
      time = idle.end[i] = durations[number] ? time + durations[number] : lane.gaps[gap + 1];
      if (time === lane.gaps[gap + 1]) time = lane.gaps[(gap += 2)];
    }
    lane.idle = idle;
  });
}

/** Returns idle time by cause: of each rank, and of all ranks together. */
function idleTotals(timeline, numCauses) {
  const ranks = timeline.lanes.map(({ idle }) => {
    const totals = new Float64Array(numCauses);
    for (let i = 0; i < idle.n; i++) totals[idle.cause[i]] += idle.end[i] - idle.start[i];
    return totals;
  });
  const all = new Float64Array(numCauses);
  for (const totals of ranks) totals.forEach((time, cause) => (all[cause] += time));
  return { ranks, all };
}

/** Returns the index of the last of `n` rising entries that is not above `value`, or -1. */
function lastUpTo(entries, n, value) {
  let low = -1;
  let high = n;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (entries[middle] <= value) low = middle;
    else high = middle;
  }
  return low;
}
