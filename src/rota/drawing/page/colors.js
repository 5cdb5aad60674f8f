// What ops and idle intervals look like, and the running sums from which any pixel's shares are computed.

const READABLE = 4.5; // least contrast of text with what is behind it, by WCAG 2
const [BLACK, WHITE] = [[0, 0, 0], [255, 255, 255]]; // on any colour, one of them can be read
const STEPS = [0, 0.2, 0.4, 0.6, 0.8, 1];
const PALER = 0.5; // share of white in the colours of a rank's last stage
const DIMMED = 0.86; // share of the background in the colours of what a filter leaves out
const MARK = 0.6; // brightness of a mark; 1 would be invisible

const rgbOf = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const mixed = (color, other, share) => color.map((channel, i) => channel + (other[i] - channel) * share);
const cssOf = (color) => `rgb(${color.map(Math.round).join(",")})`;

/** Returns the colours of the theme's CSS; read once per theme. */
function readTheme() {
  const css = getComputedStyle(document.documentElement);
  const names = ["paper", "band", "ink", "muted", "line", "accent"];
  return Object.fromEntries(names.map((name) => [name, rgbOf(css.getPropertyValue(`--${name}`).trim())]));
}

/** Returns the relative luminance of a colour, by WCAG 2. */
function luminanceOf(color) {
  const linear = (share) => (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = color.map((channel) => linear(channel / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** Returns the first of the wanted colours that can be read on a background; black or white if none can. */
function textOn(background, ...wanted) {
  const behind = luminanceOf(background.map(Math.round));
  const contrastWith = (color) => {
    const [darker, lighter] = [behind, luminanceOf(color)].sort((a, b) => a - b);
    return (lighter + 0.05) / (darker + 0.05);
  };
  return [...wanted, WHITE, BLACK].find((color) => contrastWith(color) >= READABLE);
}

/** Returns the theme's muted colour, or the next one towards its ink that can be read on a background. */
function mutedOn(background, theme) {
  return textOn(background, ...STEPS.map((share) => mixed(theme.muted, theme.ink, share).map(Math.round)));
}

/** Returns the colour of each slot: the colour of its kind, paler for the later stages of its rank. */
function slotColors(timeline, looks) {
  const orders = timeline.lanes.map(({ rank }) => [...stagesOf(timeline, rank)].sort((a, b) => a - b));
  return timeline.slots.map(([task, rank]) => {
    const [stage, kind] = timeline.tasks[task];
    const white = (PALER * orders[rank].indexOf(stage)) / Math.max(1, orders[rank].length - 1);
    return mixed(rgbOf(looks[kind].color), [255, 255, 255], white);
  });
}

/** Returns whether the filters leave an op out. */
function isDimmed(view, stage, kind, batch) {
  return (
    view.hidden.has(kind) ||
    (view.stage !== null && view.stage !== stage) ||
    (view.batch !== null && view.batch !== batch)
  );
}

/** Returns the colour of an op that a filter leaves out. */
const dimmedColor = (color, theme) => mixed(color, theme.band, DIMMED);

/** Returns the colour of an op's name. */
function nameColor(color, dimmed, theme) {
  return dimmed ? mutedOn(dimmedColor(color, theme), theme) : textOn(color);
}

/** Returns the colour of idle intervals: their cause's, if causes are shown or this one is highlighted. */
function idleColor(look, cause, view, theme) {
  const isColored = view.cause === null ? view.show.causes : view.cause === cause;
  return isColored ? mixed(rgbOf(look.color), theme.band, view.cause === cause ? 0.15 : 0.66) : theme.band;
}

/** Sets `lane.sums`, from which the lane's pixels are drawn. A filter makes ops pale, never idle. */
function sumOps(timeline, lane, colors, looks, view, theme) {
  const order = Object.keys(looks);
  const all = timeline.slots.map(([task, rank], slot) => [slot, ...timeline.tasks[task], rank]);
  const slots = all.filter(([, , , rank]) => rank === lane.rank);
  slots.sort((a, b) => order.indexOf(a[2]) - order.indexOf(b[2]) || a[1] - b[1]);
  const styles = slots.flatMap(([slot, , kind]) => {
    const full = { color: colors[slot], marks: looks[kind].mark };
    return [full, { color: dimmedColor(colors[slot], theme), marks: [] }];
  });
  const first = new Map(slots.map(([slot], k) => [slot, 2 * k]));
  lane.sums = runningSums(lane, styles, (i) => {
    const [stage, kind] = timeline.tasks[timeline.slots[lane.slot[i]][0]];
    return first.get(lane.slot[i]) + isDimmed(view, stage, kind, lane.batch[i]);
  });
}

/** Sets `lane.idle.sums`, from which the lane's idle pixels are drawn. */
function sumIdle(lane, causes, view, theme) {
  const styles = causes.map((look, cause) => ({ color: idleColor(look, cause, view, theme), marks: [] }));
  lane.idle.sums = runningSums(lane.idle, styles, (i) => lane.idle.cause[i]);
}

/**
 * Returns running sums: `before[count * i + s]` is the time of style s in all spans before span i. Styles that do not
 * occur are left out.
 */
function runningSums(spans, styles, styleOf) {
  const { n, start, end } = spans;
  const style = new Uint8Array(n);
  const used = new Map();
  for (let i = 0; i < n; i++) used.set((style[i] = styleOf(i)), 0);
  const kept = [...used.keys()].sort((a, b) => a - b);
  kept.forEach((original, position) => used.set(original, position));
  const count = kept.length;
  const before = new Float64Array(count * (n + 1));
  for (let i = 0, at = 0; i < n; i++, at += count) {
    style[i] = used.get(style[i]);
    for (let s = 0; s < count; s++) before[at + count + s] = before[at + s];
    before[at + count + style[i]] += end[i] - start[i];
  }
  return { count, before, style, styles: kept.map((original) => painted(styles[original])) };
}

/** Returns a style with its colours as pixels: plain, and darker for the marks at its top and bottom. */
function painted({ color, marks }) {
  const [plain, dark] = [packed(color), packed(color.map((channel) => channel * MARK))];
  return { plain, top: marks.includes("top") ? dark : plain, bottom: marks.includes("bottom") ? dark : plain };
}

/** Returns a colour as an opaque pixel. */
function packed(color) {
  const [red, green, blue] = color.map(Math.round);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
