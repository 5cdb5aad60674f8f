// Timelines as the page draws them: lanes of ops, idle pieces, transfers, memory levels.

/** From a timeline's head and its columns, in the order in which `packing.py` wrote them. */
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

/** `lanes[rank]` has columns `start`, `end`, `slot`, `batch`; op `i` of a lane is op `lane.first + i` of the timeline. */
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

/** The op with a number, as {lane, i, stage, kind, batch, start, end}. */
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

/** The stages that a rank works on. */
function stagesOf({ slots, tasks }, rank) {
  return new Set(slots.filter((slot) => slot[1] === rank).map(([task]) => tasks[task][0]));
}

/** The op of a name such as 2F0 (on the first rank that does it), or null. */
function opNamed(timeline, name) {
  const match = /^(\d+)([A-Z])(\d+)$/.exec(name);
  if (!match || Number(match[3]) >= timeline.numMicrobatches) return null;
  const [stage, kind, batch] = [Number(match[1]), match[2], Number(match[3])];
  const task = timeline.tasks.findIndex((each) => each[0] === stage && each[1] === kind);
  const slot = timeline.slots.findIndex((each) => each[0] === task);
  const number = slot < 0 ? -1 : timeline.opAt[slot * timeline.numMicrobatches + batch];
  return number < 0 ? null : opNumber(timeline, number);
}

/** All ops of a micro-batch by start. */
function opsOfBatch(timeline, batch) {
  const ops = [];
  if (batch >= timeline.numMicrobatches) return ops; // it is the other timeline's
  for (let slot = 0; slot < timeline.slots.length; slot++) {
    const number = timeline.opAt[slot * timeline.numMicrobatches + batch];
    if (number >= 0) ops.push(opNumber(timeline, number));
  }
  return ops.sort((a, b) => a.start - b.start || a.end - b.end);
}

/** Times are told against the producer's end and the transfer's own start. */
function makeTransfers(timeline, late, flight) {
  const { routes, numMicrobatches, numStreams } = timeline;
  const sent = new Float64Array(late.length);
  const arrived = new Float64Array(late.length);
  const route = new Int32Array(late.length);
  const batch = new Int32Array(late.length);
  timeline.routeFirst = [];
  let at = 0;
  routes.forEach(([source, , sender, , , stream], r) => {
    timeline.routeFirst.push(at);
    const slot = timeline.slotOf.get(`${source} ${sender}`);
    const { first, end } = timeline.lanes[sender];
    for (let m = stream; m < numMicrobatches; m += numStreams, at++) {
      sent[at] = end[timeline.opAt[slot * numMicrobatches + m] - first] + late[at];
      arrived[at] = sent[at] + flight[at];
      [route[at], batch[at]] = [r, m];
    }
  });
  timeline.transfers = { n: at, sent, arrived, route, batch };
}

/** Where no op of a lane runs: [start, end, start, end, …]. */
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

/** `lane.idle` has columns `start`, `end`, `cause`, `piece`. A length of 0 says: up to the gap's end. */
function makeIdle(timeline, counts, causes, lengths, [waitsFor, waitBatches, ready, readyBatches]) {
  timeline.waits = { code: waitsFor, batch: summed(waitBatches) };
  timeline.ready = { code: ready, batch: summed(readyBatches) };
  let piece = 0;
  timeline.lanes.forEach((lane, rank) => {
    const n = counts[rank];
    const idle = { n, start: new Float64Array(n), end: new Float64Array(n), cause: causes.subarray(piece, piece + n) };
    idle.first = piece;
    for (let i = 0, gap = 0, time = lane.gaps[0]; i < n; i++, piece++) {
      idle.start[i] = time;
      time = idle.end[i] = lengths[piece] ? time + lengths[piece] : lane.gaps[gap + 1];
      if (time === lane.gaps[gap + 1]) time = lane.gaps[(gap += 2)];
    }
    lane.idle = idle;
  });
}

/** Idle time by cause: of each rank, and of all. */
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

/** The index of the last entry that is not above `value`, or -1; entries rise. */
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
