// What the pointer is on, and the words beside it.

/** {section, rank, time, x, y, op, idle} at a point of the stage, or null outside of lanes and time. */
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

function spanAt(timeline, lane, time) {
  let i = lastUpTo(lane.start, lane.n, time);
  while (i > 0 && lane.end[i] === lane.start[i] && time > lane.end[i]) i--; // past ops that take no time
  if (i >= 0 && time < lane.end[i]) return { op: opOf(timeline, lane, i) };
  const { idle } = lane;
  const piece = lastUpTo(idle.start, idle.n, time);
  return { idle: piece >= 0 && time < idle.end[piece] ? piece : -1 };
}

/** The tip beside the pointer, or none. */
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
