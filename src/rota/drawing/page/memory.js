// Memory levels of each rank, from the ops and transfers: the same events in the same order as in rota/memory.py.

const [TRANSFER_ENDS, OP_ENDS, TRANSFER_STARTS, OP] = [0, 1, 2, 3]; // the order of events at the same time

/**
 * Adds `lane.levels`: from `time[i]` on, the rank holds `bytes[i]`; and `timeline.peaks`: the maximum of each rank.
 * Both are computed when they are first read, because the first picture often does not need them.
 */
function makeLevels(timeline) {
  const { slots, routes } = timeline;
  const changes = [...slots.map(([, , atStart]) => atStart), ...routes.map(([, , , , size]) => size), ...timeline.static].flat();
  timeline.hasMemory = changes.some((bytes) => bytes > 0);
  timeline.lanes.forEach((lane, rank) => {
    lazily(lane, "levels", () => {
      const lists = [opEvents(timeline, lane), ...transferEvents(timeline, rank)];
      while (lists.length > 1) lists.push(merged(lists.shift(), lists.shift()));
      return levelsOf(lists[0], timeline.static[rank]);
    });
  });
  lazily(timeline, "peaks", () => timeline.lanes.map(({ levels }) => levels.peak));
}

/** Defines a property that is computed when it is first read. */
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

/** Returns the rank's memory over time: events by rising key, added up. */
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

/** Returns a lane's events by key; a key is 4 × time + the kind of event. */
function opEvents(timeline, lane) {
  const events = { n: 2 * lane.n, key: new Float64Array(2 * lane.n), change: new Float64Array(2 * lane.n) };
  for (let i = 0; i < lane.n; i++) {
    const [, , atStart, atEnd] = timeline.slots[lane.slot[i]];
    events.key[2 * i] = 4 * lane.start[i] + OP;
    events.change[2 * i] = figureOf(timeline, atStart, lane.batch[i]);
    events.key[2 * i + 1] = 4 * lane.end[i] + (lane.end[i] > lane.start[i] ? OP_ENDS : OP);
    events.change[2 * i + 1] = figureOf(timeline, atEnd, lane.batch[i]);
  }
  return events;
}

/** Returns a list of starts for each route that this rank sends or receives, and one of ends for each that it sends. */
function transferEvents(timeline, rank) {
  const { transfers, routes, routeFirst } = timeline;
  const lists = [];
  routes.forEach(([, , sender, receiver, size], r) => {
    if (!size || (rank !== sender && rank !== receiver)) return;
    const span = [routeFirst[r], routeFirst[r + 1] ?? transfers.n];
    const starts = rank === sender ? transfers.handedOver : transfers.sent; // the sender holds what waits for a link
    const sizes = Float64Array.from(transfers.batch.slice(...span), (batch) => figureOf(timeline, size, batch));
    lists.push(eventList(starts.slice(...span), TRANSFER_STARTS, sizes));
    if (rank === sender) lists.push(eventList(transfers.arrived.slice(...span), TRANSFER_ENDS, sizes.map((bytes) => -bytes)));
  });
  return lists;
}

function eventList(times, what, changes) {
  const order = Uint32Array.from(times.keys()).sort((a, b) => times[a] - times[b]);
  return {
    n: order.length,
    key: Float64Array.from(order, (k) => 4 * times[k] + what),
    change: Float64Array.from(order, (k) => changes[k]),
  };
}

/** Merges two lists of events; if keys are equal, those of `a` come first. */
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

/** Returns the level at a time, after all events of that time. */
function bytesAt(levels, time) {
  return levels.bytes[Math.max(0, lastUpTo(levels.time, levels.n, time))];
}

/** Returns the maximum from `start` to before `end`. */
function mostBytes(levels, start, end) {
  let i = Math.max(0, lastUpTo(levels.time, levels.n, start));
  let most = levels.bytes[i];
  while (++i < levels.n && levels.time[i] < end) most = Math.max(most, levels.bytes[i]);
  return most;
}
