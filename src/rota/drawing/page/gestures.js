// Wheel, drag, click and keys on the lanes.

const WHEEL = 0.0018; // how much a wheel's unit zooms

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
    else page.drawMarks();
  });
  stage.addEventListener("pointerup", () => {
    if (drag && !drag.moved) pick(page, view.pointed?.op ? { section: view.pointed.section, op: view.pointed.op } : null);
    drag = null;
    stage.classList.remove("dragged");
  });
  stage.addEventListener("pointerleave", () => {
    view.pointed = null;
    page.drawMarks();
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
  page.view.scroll = Math.max(0, Math.min(page.layout.mostScroll, page.view.scroll + pixels));
}

/** Picks an op, or none; `batch` follows a micro-batch too. */
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

/** The op before or after the picked one, or the one at the same time on the next rank. */
function step(page, along, across) {
  const { view, sections } = page;
  const from = view.picked ?? firstInSight(page);
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

function firstInSight({ view, sections }) {
  const { timeline, index } = sections[0];
  const lane = timeline.lanes.find(({ n }) => n);
  return lane && { section: index, op: opOf(timeline, lane, Math.max(0, lastUpTo(lane.start, lane.n, view.t0))) };
}

/** Scrolls until a row is in sight. */
function showRow(page, section, rank) {
  const { layout, view } = page;
  const y = rowTop(layout, view, section, rank);
  if (y < AXIS) scrollBy(page, y - AXIS);
  else if (y + layout.row > layout.height) scrollBy(page, y + layout.row - layout.height);
}
