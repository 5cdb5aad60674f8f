// What is written and drawn over the lanes: axis, names, the critical path, transfers, and what is pointed at.

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
const MOST_LABELS = 1500;
const MOST_TRANSFERS = 3000; // more than that hide what they join

function paintMarks(canvas, page) {
  const { layout, view, sections } = page;
  const context = canvas.getContext("2d");
  context.setTransform(layout.ratio, 0, 0, layout.ratio, 0, 0);
  context.clearRect(0, 0, layout.width, layout.height);
  context.textBaseline = "middle";
  paintAxis(context, page);
  within(context, [0, AXIS, layout.width, layout.height - AXIS], () => {
    for (const section of sections) paintNames(context, page, section);
    for (const section of sections) paintSide(context, page, section);
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

function within(context, box, draw) {
  context.save();
  context.beginPath();
  context.rect(...box);
  context.clip();
  draw();
  context.restore();
}

/** A tick's step: 1, 2 or 5 of a power of ten, at least 90 pixels apart. */
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
    context.textAlign = x < GUTTER + 24 ? "left" : x > GUTTER + layout.plot - 24 ? "right" : "center";
    context.fillText(timeText(time, view.t1, step), x, 10);
  }
  line(context, GUTTER, AXIS - 0.5, GUTTER + layout.plot, AXIS - 0.5);
  if (view.t1 - view.t0 < view.full) {
    context.strokeStyle = cssOf(theme.accent);
    context.lineWidth = 3; // where in the whole we are
    const scale = layout.plot / view.full;
    const [from, to] = [view.t0 * scale, Math.max(view.t1 * scale, view.t0 * scale + 3)];
    line(context, GUTTER + from, AXIS - 1.5, GUTTER + to, AXIS - 1.5);
  }
  context.textAlign = "left";
  context.fillText("idle", GUTTER + layout.plot + 14, 10);
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

/** Rank names where rows are high enough for them, else every second one, fourth, …; headings of two sections. */
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

/** Each rank's idle time: a bar of its causes, and its share of the makespan. */
function paintSide(context, { layout, view, theme, causes }, { timeline, index, totals }) {
  const x = GUTTER + layout.plot + 14;
  const room = SIDE - 66;
  const longest = Math.max(1, ...totals.ranks.map((times) => times.reduce((sum, time) => sum + time, 0)));
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
      context.fillRect(left, y + (layout.lane - height) / 2, (time / longest) * room, height);
      left += (time / longest) * room;
    });
    context.globalAlpha = 1;
    if (layout.row < 11) continue;
    context.fillStyle = cssOf(theme.muted);
    const idle = totals.ranks[rank].reduce((sum, time) => sum + time, 0);
    context.fillText(percent(idle / (timeline.makespan || 1)), x + room + 8, y + layout.lane / 2 + 0.5);
  }
}

/** The memory limit as a line in the strip. */
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
