// Memory levels of each rank, from the ops and transfers: the same events in the same order as in rota/memory.py.

const [TRANSFER_ENDS, OP_ENDS, TRANSFER_STARTS, OP] = [0, 1, 2, 3]; // of what happens at one instant

/** `lane.levels`: from `time[i]` on the rank holds `bytes[i]`. `timeline.peaks`: the most that each rank holds.
 *  Both are made when they are first looked at: the first picture often goes without. */
function makeLevels(timeline) {
  const { slots, routes } = timeline;
  const changes = [...slots.map(([, , atStart]) => atStart), ...routes.map(([, , , , size]) => size), ...timeline.static];
  timeline.hasMemory = changes.some((bytes) => bytes > 0);
  timeline.lanes.forEach((lane, rank) => {
    lazily(lane, "levels", () => {
      const streams = [opEvents(timeline, lane), ...transferEvents(timeline, rank)];
      while (streams.length > 1) streams.push(merged(streams.shift(), streams.shift()));
      return levelsOf(streams[0], timeline.static[rank]);
    });
  });
  lazily(timeline, "peaks", () => timeline.lanes.map(({ levels }) => levels.peak));
}

/** A property that is made when it is first read. */
function lazily(object, name, make) {
  Object.defineProperty(object, name, {
    configurable: true,
    get() {
      const value = make();
      Object.defineProperty(object, name, { value });
      return value;
    },
  });
}

function levelsOf(events, staticBytes) {
  const time = new Float64Array(events.n + 1);
  const bytes = new Float64Array(events.n + 1);
  let [n, level, peak] = [1, staticBytes, staticBytes];
  bytes[0] = staticBytes;
  for (let i = 0; i < events.n; i++) {
    level += events.change[i];
    peak = Math.max(peak, level);
    const at = Math.floor(events.key[i] / 4);
    if (at !== time[n - 1]) time[n++] = at;
    bytes[n - 1] = level;
  }
  return { n, time: time.slice(0, n), bytes: bytes.slice(0, n), peak };
}

/** Keys are 4 × time + what happens. */
function opEvents(timeline, lane) {
  const events = { n: 2 * lane.n, key: new Float64Array(2 * lane.n), change: new Float64Array(2 * lane.n) };
  for (let i = 0; i < lane.n; i++) {
    const [, , atStart, atEnd] = timeline.slots[lane.slot[i]];
    events.key[2 * i] = 4 * lane.start[i] + OP;
    events.change[2 * i] = atStart;
    events.key[2 * i + 1] = 4 * lane.end[i] + (lane.end[i] > lane.start[i] ? OP_ENDS : OP);
    events.change[2 * i + 1] = atEnd;
  }
  return events;
}

/** One list for the starts of each route that begins or ends here, one for the ends of each that begins here. */
function transferEvents(timeline, rank) {
  const { transfers, routes, routeFirst } = timeline;
  const lists = [];
  routes.forEach(([, , sender, receiver, size], r) => {
    if (!size || (rank !== sender && rank !== receiver)) return;
    const span = [routeFirst[r], routeFirst[r + 1] ?? transfers.n];
    lists.push(listOf(transfers.sent.slice(...span), TRANSFER_STARTS, size));
    if (rank === sender) lists.push(listOf(transfers.arrived.slice(...span), TRANSFER_ENDS, -size));
  });
  return lists;
}

function listOf(times, what, change) {
  const key = times.sort().map((time) => 4 * time + what);
  return { n: key.length, key, change: new Float64Array(key.length).fill(change) };
}

/** Two lists of events as one; where keys are equal those of `a` come first. */
function merged(a, b) {
  const n = a.n + b.n;
  const events = { n, key: new Float64Array(n), change: new Float64Array(n) };
  for (let i = 0, j = 0, to = 0; to < n; to++) {
    const from = j >= b.n || (i < a.n && a.key[i] <= b.key[j]) ? a : b;
    const k = from === a ? i++ : j++;
    events.key[to] = from.key[k];
    events.change[to] = from.change[k];
  }
  return events;
}

/** The level at a time; of one instant the last. */
function bytesAt(levels, time) {
  return levels.bytes[Math.max(0, lastUpTo(levels.time, levels.n, time))];
}

/** The most that is held from `start` to before `end`. */
function mostBytes(levels, start, end) {
  let i = Math.max(0, lastUpTo(levels.time, levels.n, start));
  let most = levels.bytes[i];
  while (++i < levels.n && levels.time[i] < end) most = Math.max(most, levels.bytes[i]);
  return most;
}
