// Times and sizes as text, and the lines that describe a point of the picture.

const TIME_UNITS = [[1e6, "s"], [1e3, "ms"], [1, "µs"]];
const SIZE_UNITS = [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];

const unitOf = (value, units) => units.find(([length]) => Math.abs(value) >= length) ?? units[units.length - 1];

/** Returns a time in the unit of `largest`, with enough digits to distinguish times that are `step` apart. */
function timeText(time, largest, step) {
  const [length, name] = unitOf(largest, TIME_UNITS);
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / length) - 1e-9)));
  return `${(time / length).toFixed(Math.min(digits, Math.round(Math.log10(length))))} ${name}`;
}

/** Returns a value with three significant digits and its unit. */
function short(value, units) {
  const rounded = Number(value.toPrecision(3));
  const [length, name] = unitOf(rounded, units);
  return `${Number((rounded / length).toPrecision(3))} ${name}`;
}

const shortTime = (time) => short(time, TIME_UNITS);
const shortSize = (bytes) => short(bytes, SIZE_UNITS);
const percent = (share) => `${(100 * share).toFixed(1)}%`;
/** Returns a time to the µs, in the unit of the axis that ends at `largest`. */
const exactTime = (time, largest) => timeText(Math.round(time), largest, 1);
const signed = (time, largest) => `${time < 0 ? "−" : "+"}${exactTime(Math.abs(time), largest)}`;

/** Returns the lines that describe an op; the first is its name. */
function linesOfOp(page, { section, op }) {
  const { timeline } = page.sections[section];
  const { lane, stage, kind, batch, start, end } = op;
  const exact = (time) => exactTime(time, page.view.t1);
  const lines = [`${nameOf(op)}  ${page.looks[kind].word} of stage ${stage}, micro-batch ${batch}`];
  const chunks = timeline.chunks.find((row) => row.includes(batch));
  if (chunks) lines.push(`chunk ${chunks.indexOf(batch) + 1} of ${chunks.length} of its sample`);
  lines.push(`rank ${lane.rank} · ${exact(end - start)}`, `from ${exact(start)} to ${exact(end)}`);
  if (timeline.hasMemory) lines.push(memoryLine(timeline, lane, start, end));
  const other = page.sections.find(({ index }) => index !== section);
  const same = other && opNamed(other.timeline, nameOf(op));
  if (same) {
    const [later, longer] = [start - same.start, end - start - (same.end - same.start)];
    lines.push(`${other.title}: ${exact(same.end - same.start)} from ${exact(same.start)}`);
    lines.push(`here ${signed(later, page.view.t1)} in start, ${signed(longer, page.view.t1)} in length`);
  }
  return lines;
}

function memoryLine(timeline, lane, start, end) {
  const limit = timeline.limits[lane.rank];
  const of = limit === null ? "" : ` of ${shortSize(limit)}`;
  return `memory: up to ${shortSize(mostBytes(lane.levels, start, Math.max(end, start + 1)))}${of}`;
}

/** Returns the lines that describe an idle interval: how long, and why. */
function linesOfIdle(page, { section, rank, idle: interval, time }) {
  const { timeline } = page.sections[section];
  const lane = timeline.lanes[rank];
  const [start, end] = [lane.idle.start[interval], lane.idle.end[interval]];
  const cause = page.causes[lane.idle.cause[interval]];
  const exact = (moment) => exactTime(moment, page.view.t1);
  const lines = [`idle  ${cause.word}`, cause.text, `rank ${rank} · ${exact(end - start)}`];
  lines.push(`from ${exact(start)} to ${exact(end)}`);
  const number = lane.idle.first + interval;
  const [waits, ready] = [timeline.waits, timeline.ready].map(({ code, batch }) =>
    workNamed(timeline, code[number], batch[number]),
  );
  if (waits) lines.push(`waits for ${waits}`);
  if (ready) lines.push(`ready meanwhile: ${ready}`);
  if (timeline.hasMemory) lines.push(`memory: ${shortSize(bytesAt(lane.levels, time))}`);
  return lines;
}

/** Returns an op, transfer or step end in words: "2B0 of rank 2". Codes: tasks, routes, step ends; "" for -1. */
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

/** Returns a line if ops are narrower than pixels: how many share this pixel, and how busy it is. */
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

/** Returns the words of the causes with their widths, and their colours on the idle intervals. */
function causeWords(context, causes, view, theme) {
  return causes.map((look, cause) => {
    const color = mutedOn(idleColor(look, cause, view, theme), theme);
    return { word: look.word, width: context.measureText(look.word).width + 8, color: cssOf(color) };
  });
}
