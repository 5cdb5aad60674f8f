// The layout: one section per timeline, one row per rank, then one per shared link; all in CSS pixels.

const GUTTER = 76; // left of the lanes: rank names
const SIDE = 132; // right of the lanes: idle time of each rank
const AXIS = 26; // height of the time axis
const HEADING = 30; // height of a section's heading, if there are two sections
const [LEAST_ROW, MAX_ROW] = [8, 88]; // height of a row
const LEAST_STRIP = 4; // height of the memory strip; lower rows have none

/** Makes rows as high as the window allows; if rows of the least height do not fit, they scroll. */
function makeLayout(width, height, sections, view) {
  const heading = sections.length > 1 ? HEADING : 8;
  const numRows = sections.reduce((sum, { timeline }) => sum + numRowsOf(timeline), 0);
  const available = height - AXIS - heading * sections.length - 8;
  const row = Math.max(LEAST_ROW, Math.min(MAX_ROW, Math.floor(available / numRows)));
  const gap = row >= 24 ? 6 : row >= 16 ? 3 : row >= 12 ? 2 : 1;
  const strip = view.show.memory ? Math.round((row - gap) * 0.3) : 0;
  const memory = strip >= LEAST_STRIP ? strip : 0;
  const layout = { width, height, plot: Math.max(40, width - GUTTER - SIDE), row, gap, memory, lane: row - gap - memory };
  let y = 0;
  layout.tops = sections.map(({ timeline }) => {
    const top = y + heading;
    y = top + row * numRowsOf(timeline);
    return top;
  });
  layout.content = y + 8;
  layout.maxScroll = Math.max(0, layout.content - (height - AXIS));
  view.scroll = Math.min(view.scroll, layout.maxScroll);
  return layout;
}

const numRowsOf = ({ numRanks, links }) => numRanks + links.length;
const rowTop = (layout, view, section, rank) => AXIS + layout.tops[section] + rank * layout.row - view.scroll;
const xOf = (layout, view, time) => GUTTER + ((time - view.t0) / (view.t1 - view.t0)) * layout.plot;
const timeAt = (layout, view, x) => view.t0 + ((x - GUTTER) / layout.plot) * (view.t1 - view.t0);

/** Returns the visible ranks of a section: [first, after the last]. */
function ranksInSight(layout, view, section, numRanks) {
  const above = view.scroll - layout.tops[section];
  const first = Math.max(0, Math.floor(above / layout.row));
  return [first, Math.min(numRanks, Math.ceil((above + layout.height - AXIS) / layout.row))];
}

/** Returns {section, rank} of the row at height `y`, or null. */
function rowAt(layout, view, sections, y) {
  if (y < AXIS) return null;
  for (const { index, timeline } of sections) {
    const rank = Math.floor((y - AXIS + view.scroll - layout.tops[index]) / layout.row);
    if (rank >= 0 && rank < timeline.numRanks) return { section: index, rank };
  }
  return null;
}
