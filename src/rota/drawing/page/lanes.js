// The lanes as pixels, on two canvases: `ground` has what is idle, and above it `work` has the ops.
//
// At every zoom, a pixel's opacity on `work` is exactly the share of its time in which the rank is busy: idle time
// between ops neither vanishes nor grows. Ops that share a pixel divide its column among their kinds.

const LEAST_MARKED = 10; // height of a lane in pixels; in lower lanes, marks would hide the colours
const SHORT = 24; // pixels; up to this length a loop is faster than a call of fill()
const ROUNDING = 1e-6; // share of a pixel; less is a rounding error of the sums

// --- canvases

/** Sets the sizes of the canvases to whole device pixels. */
function fitCanvases(canvases, layout) {
  const ratio = window.devicePixelRatio || 1;
  layout.ratio = ratio;
  layout.pixels = Math.round(layout.plot * ratio); // of a lane
  for (const [name, canvas] of Object.entries(canvases)) {
    const [left, width] = name === "top" ? [0, layout.width] : [GUTTER, layout.pixels / ratio];
    canvas.style.left = `${left}px`;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${layout.height}px`;
    const size = [name === "top" ? Math.round(width * ratio) : layout.pixels, Math.round(layout.height * ratio)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  }
  layout.groundFrame = new ImageData(layout.pixels, canvases.ground.height);
  layout.workFrame = new ImageData(layout.pixels, canvases.work.height);
}

/** Draws all visible lanes on both canvases. */
function paintLanes(canvases, page) {
  const { layout, view, sections, theme } = page;
  const ground = new Uint32Array(layout.groundFrame.data.buffer).fill(0);
  const work = new Uint32Array(layout.workFrame.data.buffer).fill(0);
  const memoryColor = packed(mixed(theme.muted, theme.paper, 0.45));
  for (const section of sections) {
    const { timeline, index } = section;
    const [from, to] = ranksInSight(layout, view, index, timeline.numRanks);
    for (let rank = from; rank < to; rank++) {
      const lane = timeline.lanes[rank];
      const { top, height, strip, stripHeight } = devicePixels(layout, view, index, rank);
      drawLane(makeTarget(ground, layout.pixels, top, height), lane.idle, view.t0, view.t1, true);
      drawLane(makeTarget(work, layout.pixels, top, height), lane, view.t0, view.t1, false);
      if (layout.memory && timeline.hasMemory) {
        const target = makeTarget(ground, layout.pixels, strip, stripHeight);
        drawLevels(target, lane.levels, view.t0, view.t1, section.fullBytes, memoryColor);
      }
    }
    hideAfterEnd(ground, layout, view, section, [from, to]);
  }
  clearAxis(ground, layout);
  clearAxis(work, layout);
  canvases.ground.getContext("2d").putImageData(layout.groundFrame, 0, 0);
  const context = canvases.work.getContext("2d");
  context.putImageData(layout.workFrame, 0, 0);
  for (const section of sections) paintStepEnds(context, page, section);
}

/** Returns a row in device pixels: the lane, and the memory strip below it. */
function devicePixels(layout, view, section, rank) {
  const y = rowTop(layout, view, section, rank);
  const top = Math.round(y * layout.ratio);
  const bottom = Math.round((y + layout.lane) * layout.ratio);
  const strip = bottom + Math.round(layout.ratio);
  const stripBottom = Math.round((y + layout.lane + layout.memory) * layout.ratio);
  return { top, height: bottom - top, strip, stripHeight: Math.max(0, stripBottom - strip) };
}

/** Clears the memory strips after the makespan. */
function hideAfterEnd(frame, layout, view, { timeline, index }, [from, to]) {
  if (view.t1 <= timeline.makespan) return;
  const end = Math.ceil((xOf(layout, view, timeline.makespan) - GUTTER) * layout.ratio);
  for (let rank = from; rank < to; rank++) {
    const { strip, stripHeight } = devicePixels(layout, view, index, rank);
    for (let y = Math.max(0, strip); y < strip + stripHeight; y++) {
      frame.fill(0, y * layout.pixels + Math.max(0, end), (y + 1) * layout.pixels);
    }
  }
}

function clearAxis(frame, layout) {
  frame.fill(0, 0, Math.round(AXIS * layout.ratio) * layout.pixels);
}

/** Draws reductions and optimizer steps as strips along the lanes' lower edges, because ops may run beside them. */
function paintStepEnds(context, page, { timeline, index }) {
  const { layout, view, looks } = page;
  context.save();
  context.beginPath();
  context.rect(0, AXIS * layout.ratio, layout.pixels, layout.height * layout.ratio);
  context.clip();
  for (const [rank, stage, what, start, end] of timeline.stepEnds) {
    if (end < view.t0 || start > view.t1) continue;
    const { top, height } = devicePixels(layout, view, index, rank);
    const x = (xOf(layout, view, start) - GUTTER) * layout.ratio;
    const right = (xOf(layout, view, end) - GUTTER) * layout.ratio;
    context.globalAlpha = view.stage !== null && view.stage !== stage ? 1 - DIMMED : 1;
    context.fillStyle = looks[what].color;
    context.fillRect(x, top + Math.ceil(height * 0.62), right - x, height - Math.ceil(height * 0.62));
  }
  context.restore();
}

// --- pixels

/** Returns the part of a frame for a lane: `height` rows from row `top` on; the frame is `width` pixels wide. */
function makeTarget(frame, width, top, height) {
  const from = Math.max(0, top);
  const to = Math.min(frame.length / width, top + height);
  const mark = height < LEAST_MARKED ? 0 : Math.max(1, Math.round(height / 9));
  return { frame, width, top, height, from, to, mark };
}

/** Draws the spans in [t0, t1]. `opaque`: for the lowest canvas, whose pixels are never transparent. */
function drawLane(target, spans, t0, t1, opaque) {
  const { n, start, end, sums } = spans;
  const { width } = target;
  const pixel = (t1 - t0) / width; // in µs
  let here = new Float64Array(sums.count);
  let next = new Float64Array(sums.count);
  let i = lastUpTo(start, n, t0);
  let carry = 0; // the rounding error so far, in 1/255 of a pixel
  upTo(here, spans, i, t0);
  for (let x = 0; x < width; x++) {
    const time = t0 + x * pixel;
    if (i >= 0 && time + pixel <= end[i]) {
      const last = Math.min(width, Math.max(x + 1, Math.floor((end[i] - t0) / pixel)));
      drawSolid(target, x, last, sums.styles[sums.style[i]]);
      x = last - 1;
      upTo(here, spans, i, t0 + last * pixel);
      continue;
    }
    const coming = i + 1 < n ? start[i + 1] : Infinity;
    if (coming >= time + pixel && (i < 0 || end[i] <= time)) {
      x = Math.min(width, Math.max(x + 1, Math.floor((coming - t0) / pixel))) - 1; // nothing to draw up to there
      upTo(here, spans, i, t0 + (x + 1) * pixel);
      continue;
    }
    while (i + 1 < n && start[i + 1] <= time + pixel) i++;
    upTo(next, spans, i, time + pixel);
    let busy = 0;
    for (let s = 0; s < sums.count; s++) busy += here[s] = next[s] - here[s];
    const share = (255 * Math.min(busy, pixel)) / pixel;
    if (share > ROUNDING) {
      const exact = opaque || share > 255 - ROUNDING;
      const alpha = exact ? 255 : Math.max(0, Math.min(255, Math.round(share + carry)));
      if (!exact) carry += share - alpha;
      drawStacked(target, x, sums.styles, here, busy, alpha);
    }
    [here, next] = [next, here];
  }
}

/** Sets `times` to the time of each style up to `time`; span `i` is the last that has started. */
function upTo(times, { start, end, sums }, i, time) {
  for (let s = 0; s < sums.count; s++) times[s] = i < 0 ? 0 : sums.before[sums.count * i + s];
  if (i >= 0) times[sums.style[i]] += Math.min(time, end[i]) - start[i];
}

/** Draws the pixels from `x` to before `last`, which one span fills. */
function drawSolid({ frame, width, top, height, from, to, mark }, x, last, style) {
  for (let y = from; y < to; y++) {
    const color = y - top < mark ? style.top : top + height - y <= mark ? style.bottom : style.plain;
    if (last - x > SHORT) frame.fill(color, y * width + x, y * width + last);
    else for (let at = y * width + x; at < y * width + last; at++) frame[at] = color;
  }
}

/** Draws a column in which the height of each style is its share of the busy time. */
function drawStacked({ frame, width, top, height, from, to }, x, styles, times, busy, alpha) {
  const opacity = alpha << 24;
  const scale = height / busy;
  let s = 0;
  let edge = times[0] * scale; // where style s ends
  for (let y = from, at = from * width + x; y < to; y++, at += width) {
    while (edge <= y - top + 0.5 && s + 1 < styles.length) edge += times[++s] * scale;
    frame[at] = (styles[s].plain & 0xffffff) | opacity;
  }
}

/** Draws memory from the strip's bottom up: in every pixel the maximum in its time, as a share of `full` bytes. */
function drawLevels({ frame, width, top, height, from, to }, levels, t0, t1, full, color) {
  const pixel = (t1 - t0) / width;
  let i = Math.max(0, lastUpTo(levels.time, levels.n, t0));
  for (let x = 0; x < width; x++) {
    let most = levels.bytes[i];
    while (i + 1 < levels.n && levels.time[i + 1] < t0 + (x + 1) * pixel) most = Math.max(most, levels.bytes[++i]);
    const upper = Math.max(from, top + height - Math.ceil((height * Math.min(most, full)) / full));
    for (let y = upper, at = upper * width + x; y < to; y++, at += width) frame[at] = color;
  }
}
