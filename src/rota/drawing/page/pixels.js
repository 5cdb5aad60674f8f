// A lane as pixels. At every zoom a pixel's opacity is exactly the share of its time in which the lane is busy: idle
// time between ops neither vanishes nor grows. Where ops share a pixel, its column is divided among their kinds.

const LOWEST_MARKED = 10; // of lanes, in pixels; in lower ones marks would hide the colours
const SHORT = 24; // runs of pixels for which a loop is faster than a call
const NOTHING = 1e-6; // of a pixel: less is the sums' rounding

/** Where a lane goes: `height` rows from row `top` on of a frame that is `width` pixels wide. */
function makeTarget(frame, width, top, height) {
  const from = Math.max(0, top);
  const to = Math.min(frame.length / width, top + height);
  const mark = height < LOWEST_MARKED ? 0 : Math.max(1, Math.round(height / 9));
  return { frame, width, top, height, from, to, mark };
}

/** Draws the spans of `[t0, t1]`. `opaque`: for what lies below all else, whose pixels are never partly clear. */
function drawLane(target, spans, t0, t1, opaque) {
  const { n, start, end, sums } = spans;
  const { width } = target;
  const pixel = (t1 - t0) / width; // in µs
  let here = new Float64Array(sums.count);
  let next = new Float64Array(sums.count);
  let i = lastUpTo(start, n, t0);
  let owed = 0; // what rounding left out so far, in 1/255 of a pixel
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
      x = Math.min(width, Math.max(x + 1, Math.floor((coming - t0) / pixel))) - 1; // nothing is drawn up to there
      upTo(here, spans, i, t0 + (x + 1) * pixel);
      continue;
    }
    while (i + 1 < n && start[i + 1] <= time + pixel) i++;
    upTo(next, spans, i, time + pixel);
    let busy = 0;
    for (let s = 0; s < sums.count; s++) busy += here[s] = next[s] - here[s];
    const share = (255 * Math.min(busy, pixel)) / pixel;
    if (share > NOTHING) {
      const exact = opaque || share > 255 - NOTHING;
      const alpha = exact ? 255 : Math.max(0, Math.min(255, Math.round(share + owed)));
      if (!exact) owed += share - alpha;
      drawStacked(target, x, sums.styles, here, busy, alpha);
    }
    [here, next] = [next, here];
  }
}

/** For each style its time up to `time`; span `i` is the last that has begun. */
function upTo(times, { start, end, sums }, i, time) {
  for (let s = 0; s < sums.count; s++) times[s] = i < 0 ? 0 : sums.before[sums.count * i + s];
  if (i >= 0) times[sums.style[i]] += Math.min(time, end[i]) - start[i];
}

/** Pixels from `x` to before `last` that one span fills. */
function drawSolid({ frame, width, top, height, from, to, mark }, x, last, style) {
  for (let y = from; y < to; y++) {
    const color = y - top < mark ? style.top : top + height - y <= mark ? style.bottom : style.plain;
    if (last - x > SHORT) frame.fill(color, y * width + x, y * width + last);
    else for (let at = y * width + x; at < y * width + last; at++) frame[at] = color;
  }
}

/** A column in which each style is as high as its share of the busy time. */
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

/** Memory from the strip's bottom up: in every pixel the most that is held in its time, as a share of `full` bytes. */
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
