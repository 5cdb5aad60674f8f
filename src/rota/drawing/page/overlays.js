// Ops' names and edges, paths from op to op, and what is pointed at or picked.

/** Names in the ops that are wide enough, and thin edges between ops that touch. */
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
  if (labels.length > MOST_LABELS) return;
  const long = manyStages ? nameOf : ({ kind, batch }) => kind + batch;
  const fits = (label, text) => context.measureText(text).width + 3 < label.right - label.left;
  const isRoomy = labels.filter((label) => fits(label, long(label))).length > 0.8 * labels.length;
  for (const label of labels) {
    const names = isRoomy ? [long(label), String(label.batch)] : [String(label.batch)];
    const name = names.find((text) => fits(label, text));
    if (!name) continue;
    const color = colors[label.lane.slot[label.i]];
    const dimmed = isDimmed(view, label.stage, label.kind, label.batch);
    context.fillStyle = dimmed ? cssOf(theme.muted) : isPale(color) ? "#111" : "#fff";
    context.fillText(name, (label.left + label.right) / 2, label.y);
  }
}

/** Each cause's word in the gaps that are wide enough: a second cue beside its colour. */
function paintCauses(context, { layout, view, theme, causes }, { timeline, index }) {
  if (layout.lane < 12) return;
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  context.fillStyle = cssOf(theme.muted);
  const words = causes.map(({ word }) => ({ word, width: context.measureText(word).width + 8 }));
  const [from, to] = ranksInSight(layout, view, index, timeline.numRanks);
  for (let rank = from; rank < to; rank++) {
    const { idle } = timeline.lanes[rank];
    const y = rowTop(layout, view, index, rank) + layout.lane / 2 + 0.5;
    for (let i = Math.max(0, lastUpTo(idle.start, idle.n, view.t0)); i < idle.n && idle.start[i] < view.t1; i++) {
      if (view.cause === null ? !view.show.causes : view.cause !== idle.cause[i]) continue;
      const left = xOf(layout, view, Math.max(idle.start[i], view.t0));
      const right = xOf(layout, view, Math.min(idle.end[i], view.t1));
      const { word, width } = words[idle.cause[i]];
      if (width < right - left) context.fillText(word, (left + right) / 2, y);
    }
  }
}

/** The ops of a lane that are at least 5 pixels wide, as {i, left, right, touches}; none where ops are crowded. */
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

/** The ops of the critical path, first to last. */
function criticalOps(timeline) {
  timeline.criticalOps ??= Array.from(timeline.critical, (number) => {
    if (number < timeline.numOps) return opNumber(timeline, number);
    const [rank, stage, what, start, end] = timeline.stepEnds[number - timeline.numOps];
    return { lane: timeline.lanes[rank], i: -1, stage, kind: what, batch: 0, start, end };
  });
  return timeline.criticalOps;
}

/** A line along the ops' upper edges, slanted where it goes from rank to rank. */
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
  const { n, sent, arrived, route, batch } = timeline.transfers;
  const seen = [];
  for (let k = 0; k < n && seen.length <= MOST_TRANSFERS; k++) {
    if (arrived[k] < view.t0 || sent[k] > view.t1 || (view.batch !== null && batch[k] !== view.batch)) continue;
    seen.push(k);
  }
  if (seen.length > MOST_TRANSFERS) return;
  context.strokeStyle = cssOf(theme.ink);
  context.globalAlpha = 0.45;
  context.lineWidth = 1;
  context.beginPath();
  for (const k of seen) {
    const [, , sender, receiver] = timeline.routes[route[k]];
    const down = receiver > sender;
    const from = rowTop(layout, view, index, sender) + (down ? layout.lane : 0);
    const to = rowTop(layout, view, index, receiver) + (down ? 0 : layout.lane);
    context.moveTo(xOf(layout, view, sent[k]), from);
    context.lineTo(xOf(layout, view, arrived[k]), to);
  }
  context.stroke();
  context.globalAlpha = 1;
}

/** A frame around the op that is picked or pointed at, and around the same op in the other section. */
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

/** One line through all sections at the pointer's time. */
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
