// The pointer on the lanes: wheel, drag and click, what it is on, and the tip beside it.

const WHEEL = 0.0018; // zoom per unit of the wheel

function listenToPointer(page) {
  const { stage, view } = page;
  let drag = null;
  stage.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      const x = event.offsetX;
      if (x < GUTTER || event.altKey) scrollBy(page, event.deltaY);
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(page, sideways);
      else zoom(view, Math.exp(-event.deltaY * WHEEL), timeAt(page.layout, view, x));
      view.pointed = pointAt(page, x, event.offsetY);
      page.draw();
    },
    { passive: false },
  );
  stage.addEventListener("pointerdown", (event) => {
    drag = { x: event.offsetX, y: event.offsetY, moved: false };
    stage.setPointerCapture(event.pointerId);
  });
  stage.addEventListener("pointermove", (event) => {
    const [x, y] = [event.offsetX, event.offsetY];
    if (drag && (drag.moved || Math.hypot(x - drag.x, y - drag.y) > 3)) {
      pan(page, drag.x - x);
      scrollBy(page, drag.y - y);
      drag = { x, y, moved: true };
      stage.classList.add("dragged");
    }
    view.pointed = pointAt(page, x, y);
    if (drag?.moved) page.draw();
    else page.drawOverlays();
  });
  stage.addEventListener("pointerup", () => {
    if (drag && !drag.moved) pick(page, view.pointed?.op ? { section: view.pointed.section, op: view.pointed.op } : null);
    drag = null;
    stage.classList.remove("dragged");
  });
  stage.addEventListener("pointerleave", () => {
    view.pointed = null;
    page.drawOverlays();
  });
  stage.addEventListener("dblclick", () => {
    if (view.picked) pick(page, view.picked, view.picked.op.batch);
  });
}

function pan(page, pixels) {
  const { view, layout } = page;
  const width = view.t1 - view.t0;
  moveTo(view, view.t0 + (pixels * width) / layout.plot, width);
}

function scrollBy(page, pixels) {
  page.view.scroll = Math.max(0, Math.min(page.layout.maxScroll, page.view.scroll + pixels));
}

/** Picks an op, or none; with `batch`, also follows that micro-batch. */
function pick(page, picked, batch) {
  const { view } = page;
  view.picked = picked;
  if (batch !== undefined) {
    view.batch = batch;
    page.recolor();
  }
  page.said.textContent = picked ? linesOfOp(page, picked).join(", ") : "";
  page.draw();
}

/** Picks the op `along` places after the picked one, or the op at the same time `across` ranks below it. */
function step(page, along, across) {
  const { view, sections } = page;
  const from = view.picked ?? firstVisible(page);
  if (!from) return;
  const { timeline } = sections[from.section];
  const lane = timeline.lanes[Math.max(0, Math.min(timeline.numRanks - 1, from.op.lane.rank + across))];
  if (!lane.n) return;
  const at = across ? lastUpTo(lane.start, lane.n, (from.op.start + from.op.end) / 2) : from.op.i;
  const i = view.picked ? Math.max(0, Math.min(lane.n - 1, at + along)) : at;
  const op = opOf(timeline, lane, Math.max(0, i));
  reveal(view, op);
  showRow(page, from.section, lane.rank);
  pick(page, { section: from.section, op });
}

function firstVisible({ view, sections }) {
  const { timeline, index } = sections[0];
  const lane = timeline.lanes.find(({ n }) => n);
  return lane && { section: index, op: opOf(timeline, lane, Math.max(0, lastUpTo(lane.start, lane.n, view.t0))) };
}

/** Scrolls until a row is visible. */
function showRow(page, section, rank) {
  const { layout, view } = page;
  const y = rowTop(layout, view, section, rank);
  if (y < AXIS) scrollBy(page, y - AXIS);
  else if (y + layout.row > layout.height) scrollBy(page, y + layout.row - layout.height);
}

/** Returns {section, rank, time, x, y, op, idle} at a point of the stage, or null left and right of the lanes. */
function pointAt(page, x, y) {
  const { layout, view, sections } = page;
  const row = rowAt(layout, view, sections, y);
  if (x < GUTTER || x > GUTTER + layout.plot) return null;
  const time = timeAt(layout, view, x);
  const found = { section: null, rank: null, time, x, y, op: null, idle: -1 };
  if (!row) return found;
  const { timeline } = sections[row.section];
  const lane = timeline.lanes[row.rank];
  return { ...found, ...row, ...spanAt(timeline, lane, time) };
}

/** Returns the op of a lane at a time, or the index of its idle interval. */
function spanAt(timeline, lane, time) {
  let i = lastUpTo(lane.start, lane.n, time);
  while (i > 0 && lane.end[i] === lane.start[i] && time > lane.end[i]) i--; // skip ops without a duration
  if (i >= 0 && time < lane.end[i]) return { op: opOf(timeline, lane, i) };
  const { idle } = lane;
  const interval = lastUpTo(idle.start, idle.n, time);
  return { idle: interval >= 0 && time < idle.end[interval] ? interval : -1 };
}

/** Shows the tip beside the pointer, or hides it. */
function showTip(page) {
  const { tip, view, layout } = page;
  const lines = tipLines(page);
  tip.hidden = !lines.length;
  if (!lines.length) return;
  tip.replaceChildren(
    ...lines.map((text, i) => {
      const row = document.createElement("div");
      if (!i) row.className = "first";
      row.textContent = text;
      return row;
    }),
  );
  const { x, y } = view.pointed;
  const left = x + 16 + tip.offsetWidth > layout.width ? x - 16 - tip.offsetWidth : x + 16;
  const top = Math.min(y + 16, layout.height - tip.offsetHeight - 4);
  tip.style.transform = `translate(${Math.max(0, left)}px, ${Math.max(0, top)}px)`;
}

function tipLines(page) {
  const { pointed } = page.view;
  if (!pointed || pointed.section === null) return [];
  if (pointed.op) return [...linesOfOp(page, pointed), ...linesOfCrowd(page, pointed)];
  if (pointed.idle >= 0) return [...linesOfIdle(page, pointed), ...linesOfCrowd(page, pointed)];
  return [];
}
