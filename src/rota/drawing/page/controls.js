// Buttons, menus and keys, and the bars of idle time below the lanes.

const KEYS = {
  ArrowLeft: (page) => pan(page, -80),
  ArrowRight: (page) => pan(page, 80),
  ArrowUp: (page) => scrollBy(page, -60),
  ArrowDown: (page) => scrollBy(page, 60),
  "+": (page) => zoomHere(page, 1.5),
  "=": (page) => zoomHere(page, 1.5),
  "-": (page) => zoomHere(page, 1 / 1.5),
  0: ({ view }) => moveTo(view, 0, view.full),
  j: (page) => step(page, 1, 0),
  k: (page) => step(page, -1, 0),
  n: (page) => step(page, 0, 1),
  p: (page) => step(page, 0, -1),
  f: (page) => follow(page, page.view.picked ? page.view.picked.op.batch : 0),
  "]": (page) => follow(page, (page.view.batch ?? -1) + 1),
  "[": (page) => follow(page, (page.view.batch ?? page.numMicrobatches) - 1),
  c: (page) => flip(page, "critical"),
  m: (page) => flip(page, "memory"),
  t: (page) => flip(page, "transfers"),
  i: (page) => flip(page, "causes"),
  d: (page) => setDark(page, !page.dark),
  "?": ({ help }) => (help.open ? help.close() : help.showModal()),
  Escape: (page) => clearAll(page),
};

function listenToKeys(page) {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input, select") && event.key !== "Escape";
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    if (page.help.open && event.key !== "?") return; // the dialog closes itself by Escape
    event.preventDefault();
    KEYS[event.key](page);
    page.changed();
  });
}

function zoomHere(page, factor) {
  const { view } = page;
  zoom(view, factor, view.pointed?.time ?? (view.t0 + view.t1) / 2);
}

/** Follows a micro-batch, and moves to it if none of its ops is visible. */
function follow(page, batch) {
  const { view, sections } = page;
  view.batch = batch === null ? null : Math.max(0, Math.min(page.numMicrobatches - 1, batch));
  if (view.batch === null) return;
  const ops = sections.flatMap(({ timeline }) => opsOfBatch(timeline, view.batch));
  const visible = ops.some(({ start, end }) => start < view.t1 && end > view.t0);
  if (!visible && ops.length) reveal(view, ops[0]);
}

function flip({ view }, name) {
  view.show[name] = !view.show[name];
}

function clearAll({ view }) {
  Object.assign(view, { batch: null, stage: null, cause: null, picked: null });
  view.hidden.clear();
}

function setDark(page, dark) {
  page.dark = dark;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  page.theme = readTheme();
}

/** Fills the bar above the lanes with buttons, menus and the legend. */
function makeControls(page) {
  const { view, looks, sections } = page;
  const kinds = Object.keys(looks).filter((key) =>
    sections.some(({ timeline }) => timeline.tasks.some(([, kind]) => kind === key)),
  );
  const chips = kinds.map((kind) => chipOf(page, kind));
  document.getElementById("kinds").append(...chips);
  const ends = Object.keys(looks).filter((key) =>
    sections.some(({ timeline }) => timeline.stepEnds.some(([, , what]) => what === key)),
  );
  document.getElementById("kinds").append(...ends.map((key) => legendOf(looks[key])));
  const manyStages = sections.some((section) => section.manyStages);
  if (manyStages) document.getElementById("kinds").append(noteOf("paler: a later stage"));
  const stages = [...new Set(sections.flatMap(({ timeline }) => timeline.tasks.map(([stage]) => stage)))];
  const stageMenu = document.getElementById("stage-filter");
  stageMenu.append(...stages.sort((a, b) => a - b).map((stage) => new Option(`stage ${stage}`, stage)));
  listen(page, stageMenu, "change", () => (view.stage = stageMenu.value === "" ? null : Number(stageMenu.value)));
  const batch = document.getElementById("follow");
  batch.max = page.numMicrobatches - 1;
  listen(page, batch, "input", () => follow(page, batch.value === "" ? null : Math.trunc(Number(batch.value))));
  for (const name of SWITCHES) listen(page, document.getElementById(`show-${name}`), "click", () => flip(page, name));
  const hasTransfers = sections.some(({ timeline }) => timeline.transfers.n);
  document.getElementById("show-transfers").hidden = !hasTransfers;
  document.getElementById("show-memory").hidden = !sections.some(({ timeline }) => timeline.hasMemory);
  listen(page, document.getElementById("zoom-in"), "click", () => zoomHere(page, 2));
  listen(page, document.getElementById("zoom-out"), "click", () => zoomHere(page, 0.5));
  listen(page, document.getElementById("zoom-all"), "click", () => moveTo(view, 0, view.full));
  listen(page, document.getElementById("dark"), "click", () => setDark(page, !page.dark));
  const definitions = document.getElementById("causes");
  for (const { word, text } of page.causes) {
    const [term, definition] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, definition.textContent] = [word, text];
    definitions.append(term, definition);
  }
  document.getElementById("help-button").addEventListener("click", () => page.help.showModal());
}

function listen(page, element, event, action) {
  element.addEventListener(event, () => {
    action();
    page.changed();
  });
}

/** Returns the button of a kind, which is also its legend. */
function chipOf(page, kind) {
  const { view, looks } = page;
  const chip = document.createElement("button");
  chip.className = "chip";
  chip.dataset.kind = kind;
  chip.append(swatchOf(looks[kind]), `${kind} ${looks[kind].word}`);
  chip.title = `show ${looks[kind].word}, or make it pale`;
  listen(page, chip, "click", () => (view.hidden.has(kind) ? view.hidden.delete(kind) : view.hidden.add(kind)));
  return chip;
}

function legendOf(look) {
  const entry = noteOf(look.word);
  entry.prepend(swatchOf(look));
  return entry;
}

function noteOf(text) {
  const note = document.createElement("span");
  note.className = "entry";
  note.textContent = text;
  return note;
}

/** Returns a small picture of a bar, with its marks. */
function swatchOf({ color, mark }) {
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.background = color;
  for (const place of mark) {
    const bar = document.createElement("i");
    bar.className = place;
    swatch.append(bar);
  }
  return swatch;
}

/** Sets buttons and menus to the view's state. */
function updateControls(page) {
  const { view } = page;
  for (const chip of document.querySelectorAll("[data-kind]")) {
    chip.ariaPressed = !view.hidden.has(chip.dataset.kind);
  }
  for (const name of SWITCHES) document.getElementById(`show-${name}`).ariaPressed = view.show[name];
  document.getElementById("stage-filter").value = view.stage ?? "";
  const batch = document.getElementById("follow");
  if (batch !== document.activeElement || view.batch !== null) batch.value = view.batch ?? "";
  for (const entry of document.querySelectorAll("[data-cause]")) {
    entry.ariaPressed = view.cause === Number(entry.dataset.cause);
  }
}

/** Fills the footer: each timeline's idle time by cause, largest first; a click highlights a cause in the lanes. */
function makeIdleBars(page) {
  const { sections, causes } = page;
  const rows = sections.map(({ timeline, totals, title }) => {
    const row = document.createElement("div");
    row.className = "causes";
    const step = timeline.makespan * timeline.numRanks || 1;
    const head = document.createElement("span");
    head.className = "head";
    head.textContent = `${sections.length > 1 ? `${title}: ` : ""}idle, of the step`;
    row.append(head);
    const order = causes.map((_, cause) => cause).filter((cause) => totals.all[cause] * 2000 >= step); // less is 0.0%
    order.sort((a, b) => totals.all[b] - totals.all[a]);
    for (const cause of order) {
      row.append(causeOf(page, cause, totals.all[cause] / step, totals.all[cause]));
    }
    if (!order.length) row.append("no rank is idle");
    return row;
  });
  document.getElementById("idle").replaceChildren(...rows);
}

function causeOf(page, cause, share, time) {
  const look = page.causes[cause];
  const entry = document.createElement("button");
  entry.className = "cause";
  entry.dataset.cause = cause;
  entry.title = `${look.text}: ${shortTime(time)} over all ranks, ${percent(share)} of their time in the step`;
  const bar = document.createElement("span");
  bar.className = "bar";
  const filled = document.createElement("i");
  filled.style.width = `${100 * share}%`;
  filled.style.background = look.color;
  bar.append(filled);
  const word = document.createElement("span");
  word.textContent = look.word;
  const number = document.createElement("b");
  number.textContent = percent(share);
  entry.append(word, number, bar);
  listen(page, entry, "click", () => (page.view.cause = page.view.cause === cause ? null : cause));
  return entry;
}
