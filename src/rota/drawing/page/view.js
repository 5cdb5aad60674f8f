// What is shown of the timelines: an interval of time, filters, choices. The URL's hash has it, so it can be shared.

const LEAST_US = 4; // the narrowest view: times are whole microseconds

function makeView(makespan, hasMemory) {
  const full = Math.max(makespan, LEAST_US);
  return {
    full,
    t0: 0,
    t1: full,
    scroll: 0, // of the lanes, in CSS pixels
    hidden: new Set(), // kinds
    stage: null,
    batch: null, // the micro-batch that is followed
    cause: null,
    picked: null, // {section, op}: what a click or a key chose
    pointed: null, // {section, rank, time, x, y, op, idle}: what the pointer is on
    show: { critical: false, memory: hasMemory, transfers: false, causes: true },
  };
}

/** Zooms so that `time` stays where it is; `factor` above 1 shows less. */
function zoom(view, factor, time) {
  const width = Math.min(view.full, Math.max(LEAST_US, (view.t1 - view.t0) / factor));
  const share = (time - view.t0) / (view.t1 - view.t0);
  moveTo(view, time - share * width, width);
}

/** Shows `width` µs from `t0` on, or as close to that as the timelines allow. */
function moveTo(view, t0, width) {
  view.t0 = Math.max(0, Math.min(t0, view.full - width));
  view.t1 = view.t0 + width;
}

/** Moves, and zooms out if necessary, until an op is fully visible. */
function reveal(view, op) {
  const width = Math.max(view.t1 - view.t0, 1.2 * (op.end - op.start));
  const outside = op.start < view.t0 || op.end > view.t1;
  if (outside) moveTo(view, (op.start + op.end - width) / 2, Math.min(width, view.full));
}

const SWITCHES = ["critical", "memory", "transfers", "causes"];

/** Returns the hash of a view: what differs from the initial view. */
function toHash(view, initial) {
  const parts = new URLSearchParams();
  if (view.t0 > 0 || view.t1 < view.full) parts.set("t", `${round(view.t0)}-${round(view.t1)}`);
  if (view.scroll > 0) parts.set("y", Math.round(view.scroll));
  if (view.hidden.size) parts.set("hide", [...view.hidden].join(""));
  for (const name of ["stage", "batch", "cause"]) if (view[name] !== null) parts.set(name, view[name]);
  for (const name of SWITCHES) if (view.show[name] !== initial.show[name]) parts.set(name, Number(view.show[name]));
  if (view.picked) parts.set("op", `${nameOf(view.picked.op)}.${view.picked.section}`);
  return String(parts);
}

const round = (time) => Number(time.toFixed(2));

/** Applies a hash, and ignores whatever is not valid in it. */
function fromHash(view, initial, hash, sections, numCauses) {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  const whole = (name, limit) => {
    const text = parts.get(name) ?? "";
    return /^\d{1,9}$/.test(text) && Number(text) < limit ? Number(text) : null;
  };
  const [t0, t1] = (parts.get("t") ?? "").split("-").map(Number);
  if (t1 > t0 && t0 >= 0) moveTo(view, t0, Math.min(view.full, Math.max(LEAST_US, t1 - t0)));
  else moveTo(view, 0, view.full);
  view.scroll = whole("y", Infinity) ?? 0;
  const kinds = new Set(sections.flatMap(({ timeline }) => timeline.tasks.map(([, kind]) => kind)));
  view.hidden = new Set([...(parts.get("hide") ?? "")].filter((kind) => kinds.has(kind)));
  view.stage = whole("stage", Infinity);
  view.batch = whole("batch", Math.max(...sections.map(({ timeline }) => timeline.numMicrobatches)));
  view.cause = whole("cause", numCauses);
  for (const name of SWITCHES) view.show[name] = parts.has(name) ? parts.get(name) === "1" : initial.show[name];
  const [name, index] = (parts.get("op") ?? "").split(".");
  const section = sections[Number(index ?? 0)];
  const op = name && section ? opNamed(section.timeline, name) : null;
  view.picked = op && { section: section.index, op };
}
