// Times, sizes, and what a point of the picture is, in words.

const TIME_UNITS = [[1e6, "s"], [1e3, "ms"], [1, "µs"]];
const SIZE_UNITS = [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];

const unitOf = (value, units) => units.find(([length]) => Math.abs(value) >= length) ?? units[units.length - 1];

/** In the unit of `largest`, with the digits that tell times `step` apart. */
function timeText(time, largest, step) {
  const [length, name] = unitOf(largest, TIME_UNITS);
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / length) - 1e-9)));
  return `${(time / length).toFixed(Math.min(digits, Math.round(Math.log10(length))))} ${name}`;
}

/** With three significant digits. */
function short(value, units) {
  const rounded = Number(value.toPrecision(3));
  const [length, name] = unitOf(rounded, units);
  return `${Number((rounded / length).toPrecision(3))} ${name}`;
}

const shortTime = (time) => short(time, TIME_UNITS);
const shortSize = (bytes) => short(bytes, SIZE_UNITS);
const exactTime = (time) => `${String(Math.round(time)).replace(/\B(?=(\d{3})+$)/g, " ")} µs`;
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const signed = (time) => `${time < 0 ? "−" : "+"}${exactTime(Math.abs(time))}`;

/** Lines about an op; the first is its name. */
function linesOfOp(page, { section, op }) {
  const { timeline } = page.sections[section];
  const { lane, stage, kind, batch, start, end } = op;
  const lines = [`${nameOf(op)}  ${page.looks[kind].word} of stage ${stage}, micro-batch ${batch}`];
  lines.push(`rank ${lane.rank} · ${exactTime(end - start)}`, `from ${exactTime(start)} to ${exactTime(end)}`);
  if (timeline.hasMemory) lines.push(memoryLine(timeline, lane, start, end));
  const other = page.sections.find(({ index }) => index !== section);
  const same = other && opNamed(other.timeline, nameOf(op));
  if (same) {
    lines.push(`${other.title}: ${exactTime(same.end - same.start)} from ${exactTime(same.start)}`);
    lines.push(`here ${signed(start - same.start)} in start, ${signed(end - start - (same.end - same.start))} in length`);
  }
  return lines;
}

function memoryLine(timeline, lane, start, end) {
  const limit = timeline.limits[lane.rank];
  const of = limit === null ? "" : ` of ${shortSize(limit)}`;
  return `memory: up to ${shortSize(mostBytes(lane.levels, start, Math.max(end, start + 1)))}${of}`;
}

/** Lines about an idle piece: how long, and why. */
function linesOfIdle(page, { section, rank, idle: piece, time }) {
  const { timeline } = page.sections[section];
  const lane = timeline.lanes[rank];
  const [start, end] = [lane.idle.start[piece], lane.idle.end[piece]];
  const cause = page.causes[lane.idle.cause[piece]];
  const lines = [`idle  ${cause.word}`, `rank ${rank} · ${exactTime(end - start)}`];
  lines.push(`from ${exactTime(start)} to ${exactTime(end)}`);
  const told = ({ code, batch }) => workNamed(timeline, code[lane.idle.first + piece], batch[lane.idle.first + piece]);
  const [waits, ready] = [told(timeline.waits), told(timeline.ready)];
  if (waits) lines.push(`waits for ${waits}`);
  if (ready) lines.push(`ready meanwhile: ${ready}`);
  if (timeline.hasMemory) lines.push(`memory: ${shortSize(bytesAt(lane.levels, time))}`);
  return lines;
}

/** What an idle piece waits for: "2B0 of rank 2". Codes: tasks first, then routes, then step ends; "" for none. */
function workNamed({ tasks, routes, slots, stepEnds }, code, batch) {
  const named = ([stage, kind]) => `${stage}${kind}${batch}`;
  if (code < 0) return "";
  if (code < tasks.length) {
    const ranks = slots.filter(([task]) => task === code).map(([, rank]) => rank);
    return `${named(tasks[code])} of rank ${ranks.join(", ")}`;
  }
  if (code < tasks.length + routes.length) {
    const [source, target, sender, receiver] = routes[code - tasks.length];
    return `${named(tasks[source])} → ${named(tasks[target])}, from rank ${sender} to rank ${receiver}`;
  }
  const [rank, stage, what] = stepEnds[code - tasks.length - routes.length];
  return `${what} of stage ${stage} on rank ${rank}`;
}

/** Where ops are narrower than pixels: how many share this one, and how busy it is. */
function linesOfCrowd(page, { section, rank, time }) {
  const { layout, view } = page;
  const lane = page.sections[section].timeline.lanes[rank];
  const half = (view.t1 - view.t0) / layout.plot / 2;
  const [t0, t1] = [Math.max(0, time - half), time + half];
  const first = Math.max(0, lastUpTo(lane.start, lane.n, t0));
  const last = lastUpTo(lane.start, lane.n, t1);
  if (last - first < 3) return [];
  let busy = 0;
  for (let i = first; i <= last; i++) busy += Math.max(0, Math.min(t1, lane.end[i]) - Math.max(t0, lane.start[i]));
  return [`one of ${last - first + 1} ops in this pixel, which is ${percent(busy / (t1 - t0))} busy`];
}
