// What is drawn over the lanes: axis, names, labels of ops and causes, transfers, paths, the cursor.

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
const MAX_LABELS = 1500;
const MAX_TRANSFERS = 3000; // more lines than that hide the ops they join

function paintOverlays(canvas, page) {
  const { layout, view, sections } = page;
  const context = canvas.getContext("2d");
  context.setTransform(layout.ratio, 0, 0, layout.ratio, 0, 0);
  context.clearRect(0, 0, layout.width, layout.height);
  context.textBaseline = "middle";
  paintAxis(context, page);
  within(context, [0, AXIS, layout.width, layout.height - AXIS], () => {
    for (const section of sections) paintNames(context, page, section);
    for (const section of sections) paintSide(context, page, section);
    for (const section of sections) paintLinks(context, page, section);
  });
  within(context, [GUTTER, AXIS, layout.plot, layout.height - AXIS], () => {
    for (const section of sections) {
      if (layout.memory && section.timeline.hasMemory) paintLimits(context, page, section);
      paintCauses(context, page, section);
      paintLabels(context, page, section);
      if (view.show.transfers) paintTransfers(context, page, section);
      if (view.show.critical) paintPath(context, page, section, criticalOps(section.timeline), 2);
      if (view.batch !== null) paintPath(context, page, section, opsOfBatch(section.timeline, view.batch), 1.2);
      paintPicked(context, page, section);
    }
  });
  paintCursor(context, page);
}

/** Calls `draw` with all drawing clipped to a box. */
function within(context, box, draw) {
  context.save();
  context.beginPath();
  context.rect(...box);
  context.clip();
  draw();
  context.restore();
}

/** Returns the step between ticks: 1, 2 or 5 times a power of ten, at least 90 pixels. */
function tickStep(microseconds, pixels) {
  const least = (microseconds * 90) / pixels;
  const power = 10 ** Math.floor(Math.log10(least));
  return Math.max(1, [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least));
}

function paintAxis(context, { layout, view, theme }) {
  const step = tickStep(view.t1 - view.t0, layout.plot);
  context.font = `11px ${FONT}`;
  context.fillStyle = cssOf(theme.muted);
  context.strokeStyle = cssOf(theme.line);
  context.lineWidth = 1;
  for (let time = Math.ceil(view.t0 / step) * step; time <= view.t1; time += step) {
    const x = Math.round(xOf(layout, view, time)) + 0.5;
    line(context, x, AXIS - 6, x, AXIS);
    if (view.pointed && Math.abs(x - xOf(layout, view, view.pointed.time)) < 56) continue; // the cursor's time is there
    context.textAlign = x < GUTTER + 24 ? "left" : x > GUTTER + layout.plot - 24 ? "right" : "center";
    context.fillText(timeText(time, view.t1, step), x, 10);
  }
  line(context, GUTTER, AXIS - 0.5, GUTTER + layout.plot, AXIS - 0.5);
  if (view.t1 - view.t0 < view.full) {
    context.strokeStyle = cssOf(theme.accent);
    context.lineWidth = 3; // marks the visible part of the whole step
    const scale = layout.plot / view.full;
    const [from, to] = [view.t0 * scale, Math.max(view.t1 * scale, view.t0 * scale + 3)];
    line(context, GUTTER + from, AXIS - 1.5, GUTTER + to, AXIS - 1.5);
  }
  context.textAlign = "left";
  context.fillText("idle, of the step", GUTTER + layout.plot + 14, 10);
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

/** Writes the rank names (every second, fourth, … if rows are low), and the headings if there are two sections. */
function paintNames(context, { layout, view, theme, sections }, { timeline, index, title }) {
  if (sections.length > 1) {
    const y = AXIS + layout.tops[index] - view.scroll - HEADING / 2 + 3;
    context.font = `600 12px ${FONT}`;
    context.fillStyle = cssOf(theme.ink);
    context.textAlign = "left";
    context.fillText(title, 14, y);
    const width = context.measureText(title).width;
    context.font = `12px ${FONT}`;
    context.fillStyle = cssOf(theme.muted);
    context.fillText(timeline.summary, 14 + width + 12, y);
  }
  let every = 1;
  while (every * layout.row < 13) every *= 2;
  context.font = `11px ${FONT}`;
  context.textAlign = "right";
  const [from, to] = ranksInSight(layout, view, index, timeline.numRanks);
  for (let rank = Math.ceil(from / every) * every; rank < to; rank += every) {
    const y = rowTop(layout, view, index, rank) + layout.lane / 2;
    context.fillStyle = cssOf(view.pointed?.section === index && view.pointed.rank === rank ? theme.ink : theme.muted);
    context.fillText(`rank ${rank}`, GUTTER - 10, y + 0.5);
  }
}

/** Draws each rank's idle time: a bar divided by causes, and its share of the makespan; one scale for both sections. */
function paintSide(context, { layout, view, theme, causes, sections }, { timeline, index, totals }) {
  const [x, maxWidth] = [GUTTER + layout.plot + 14, SIDE - 66];
  const shares = idleShares({ timeline, totals });
  const longest = (timeline.makespan || 1) * Math.max(...sections.flatMap(idleShares)) || 1;
  const [from, to] = ranksInSight(layout, view, index, timeline.numRanks);
  context.textAlign = "left";
  context.font = `11px ${FONT}`;
  for (let rank = from; rank < to; rank++) {
    const y = rowTop(layout, view, index, rank);
    const height = Math.min(14, layout.lane);
    let left = x;
    totals.ranks[rank].forEach((time, cause) => {
      context.globalAlpha = view.cause === null || view.cause === cause ? 1 : 0.18;
      context.fillStyle = causes[cause].color;
      context.fillRect(left, y + (layout.lane - height) / 2, (time / longest) * maxWidth, height);
      left += (time / longest) * maxWidth;
    });
    context.globalAlpha = 1;
    if (layout.row < 11) continue;
    context.fillStyle = cssOf(theme.muted);
    context.fillText(percent(shares[rank]), x + maxWidth + 8, y + layout.lane / 2 + 0.5);
  }
}

/** Returns the idle share of each rank's step. */
function idleShares({ timeline, totals }) {
  return totals.ranks.map((times) => times.reduce((sum, time) => sum + time, 0) / (timeline.makespan || 1));
}

/** Draws the memory limits as lines in the strips. */
function paintLimits(context, { layout, view, theme }, { timeline, index, fullBytes }) {
  context.strokeStyle = cssOf(theme.muted);
  context.lineWidth = 1;
  context.setLineDash([2, 4]);
  const [from, to] = ranksInSight(layout, view, index, timeline.numRanks);
  for (let rank = from; rank < to; rank++) {
    if (timeline.limits[rank] === null) continue;
    const bottom = rowTop(layout, view, index, rank) + layout.lane + layout.memory;
    const y = Math.round(bottom - ((layout.memory - 1) * timeline.limits[rank]) / fullBytes) + 0.5;
    line(context, GUTTER, y, Math.min(GUTTER + layout.plot, xOf(layout, view, timeline.makespan)), y);
  }
  context.setLineDash([]);
}

/** Writes names into the ops that are wide enough, and draws thin edges between ops that touch. */
function paintLabels(context, page, { timeline, index, colors, manyStages }) {
  const { layout, view, theme } = page;
  if (layout.lane < 9) return;
  const size = Math.min(12, layout.lane - 2);
  context.font = `${size}px ${FONT}`;
  context.textAlign = "center";
  const [from, to] = ranksInSight(layout, view, index, timeline.numRanks);
  const labels = [];
  for (let rank = from; rank < to; rank++) {
    const y = rowTop(layout, view, index, rank);
    for (const label of wideOps(layout, view, timeline.lanes[rank])) {
      if (label.touches) {
        context.fillStyle = "rgba(0,0,0,.28)";
        context.fillRect(label.left - 0.5, y, 1, layout.lane);
      }
      labels.push({ ...label, ...opOf(timeline, timeline.lanes[rank], label.i), y: y + layout.lane / 2 + 0.5 });
    }
  }
  if (labels.length > MAX_LABELS) return;
  const long = manyStages ? nameOf : ({ kind, batch }) => kind + batch;
  const fits = (label, text) => context.measureText(text).width + 3 < label.right - label.left;
  for (const label of labels) {
    const name = [long(label), String(label.batch)].find((text) => fits(label, text));
    if (!name) continue;
    const color = colors[label.lane.slot[label.i]];
    const dimmed = isDimmed(view, label.stage, label.kind, label.batch);
    context.fillStyle = cssOf(nameColor(color, dimmed, theme));
    context.fillText(name, (label.left + label.right) / 2, label.y);
  }
}

/** Writes causes into the idle intervals that are wide enough: a second cue beside the colour. */
function paintCauses(context, { layout, view, theme, causes }, { timeline, index }) {
  if (layout.lane < 12) return;
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  const words = causeWords(context, causes, view, theme);
  const [from, to] = ranksInSight(layout, view, index, timeline.numRanks);
  for (let rank = from; rank < to; rank++) {
    const { idle } = timeline.lanes[rank];
    const y = rowTop(layout, view, index, rank) + layout.lane / 2 + 0.5;
    for (let i = Math.max(0, lastUpTo(idle.start, idle.n, view.t0)); i < idle.n && idle.start[i] < view.t1; i++) {
      if (view.cause === null ? !view.show.causes : view.cause !== idle.cause[i]) continue;
      const left = xOf(layout, view, Math.max(idle.start[i], view.t0));
      const right = xOf(layout, view, Math.min(idle.end[i], view.t1));
      const { word, width, color } = words[idle.cause[i]];
      context.fillStyle = color;
      if (width < right - left) context.fillText(word, (left + right) / 2, y);
    }
  }
}

/** Returns the ops of a lane that are at least 5 pixels wide, as {i, left, right, touches}; none if ops are crowded. */
function wideOps(layout, view, lane) {
  const first = Math.max(0, lastUpTo(lane.start, lane.n, view.t0));
  const last = lastUpTo(lane.start, lane.n, view.t1);
  const ops = [];
  if (last - first > layout.plot / 7) return ops;
  for (let i = first; i <= last; i++) {
    const left = xOf(layout, view, Math.max(lane.start[i], view.t0));
    const right = xOf(layout, view, Math.min(lane.end[i], view.t1));
    const touches = i > first && lane.start[i] === lane.end[i - 1];
    if (right - left >= 5) ops.push({ i, left, right, touches });
  }
  return ops;
}

/** Draws a line along the ops' upper edges, slanted from rank to rank. */
function paintPath(context, { layout, view, theme }, { index }, ops, thickness) {
  const at = (op) => rowTop(layout, view, index, op.lane.rank) + thickness / 2;
  for (const [color, width] of [[theme.paper, thickness + 2], [theme.ink, thickness]]) {
    context.strokeStyle = cssOf(color);
    context.lineWidth = width;
    context.beginPath();
    let drawing = false;
    for (let k = 0; k < ops.length; k++) {
      const near = ops[k].end >= view.t0 && (k ? ops[k - 1].start : ops[k].start) <= view.t1;
      if (near && !drawing && k) context.moveTo(xOf(layout, view, ops[k - 1].end), at(ops[k - 1]));
      if (near) {
        if (k) context.lineTo(xOf(layout, view, ops[k].start), at(ops[k]));
        else context.moveTo(xOf(layout, view, ops[k].start), at(ops[k]));
        context.lineTo(xOf(layout, view, ops[k].end), at(ops[k]));
      }
      drawing = near;
    }
    context.stroke();
  }
}

function paintTransfers(context, { layout, view, theme }, { timeline, index }) {
  const { n, sent, arrived, handedOver, route, batch } = timeline.transfers;
  const visible = [];
  for (let k = 0; k < n && visible.length <= MAX_TRANSFERS; k++) {
    if (arrived[k] < view.t0 || handedOver[k] > view.t1 || (view.batch !== null && batch[k] !== view.batch)) continue;
    visible.push(k);
  }
  if (visible.length > MAX_TRANSFERS) return;
  context.strokeStyle = cssOf(theme.ink);
  context.globalAlpha = 0.45;
  context.lineWidth = 1;
  context.beginPath();
  const edge = (rank, lower) => rowTop(layout, view, index, rank) + (lower ? layout.lane : 0);
  for (const k of visible) {
    const [, , sender, receiver] = timeline.routes[route[k]];
    context.moveTo(xOf(layout, view, sent[k]), edge(sender, receiver > sender));
    context.lineTo(xOf(layout, view, arrived[k]), edge(receiver, receiver < sender));
  }
  context.stroke();
  context.globalAlpha = 1;
  paintWaits(context, { layout, view }, timeline, visible, edge);
}

/** Draws a frame around the op that is picked or pointed at, and around the same op in the other section. */
function paintPicked(context, page, section) {
  const { layout, view, theme, sections } = page;
  for (const [chosen, width] of [[view.pointed, 1.5], [view.picked, 2.5]]) {
    if (!chosen?.op) continue;
    const same = chosen.section === section.index;
    const op = same ? chosen.op : opNamed(section.timeline, nameOf(chosen.op));
    if (!op || (!same && sections.length < 2)) continue;
    const y = rowTop(layout, view, section.index, op.lane.rank);
    const [x, right] = [xOf(layout, view, op.start), xOf(layout, view, op.end)];
    context.lineWidth = width;
    context.strokeStyle = cssOf(theme.ink);
    context.setLineDash(same ? [] : [4, 3]);
    context.strokeRect(x - 0.5, y - 0.5, Math.max(2, right - x) + 1, layout.lane + 1);
    context.setLineDash([]);
  }
}

/** Draws a line through all sections at the pointer's time. */
function paintCursor(context, { layout, view, theme }) {
  if (!view.pointed) return;
  const x = Math.round(xOf(layout, view, view.pointed.time)) + 0.5;
  if (x < GUTTER || x > GUTTER + layout.plot) return;
  context.strokeStyle = cssOf(theme.accent);
  context.lineWidth = 1;
  line(context, x, AXIS - 6, x, layout.height);
  const text = timeText(view.pointed.time, view.t1, (view.t1 - view.t0) / layout.plot);
  context.font = `600 11px ${FONT}`;
  const width = context.measureText(text).width + 10;
  const left = Math.min(Math.max(x - width / 2, GUTTER), GUTTER + layout.plot - width);
  context.fillStyle = cssOf(theme.accent);
  context.fillRect(left, 2, width, 17);
  context.fillStyle = cssOf(theme.paper);
  context.textAlign = "center";
  context.fillText(text, left + width / 2, 11);
}
