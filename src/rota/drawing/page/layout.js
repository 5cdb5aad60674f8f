// Where everything is: sections (one for each timeline), one row a rank, all in CSS pixels.

const GUTTER = 76; // left of the lanes: rank names
const SIDE = 132; // right of the lanes: idle time of each rank
const AXIS = 26;
const HEADING = 30; // of a section, where there are two
const [LOWEST, HIGHEST] = [8, 88]; // of a row
const LEAST_STRIP = 4; // memory's; where rows are lower than that allows, there is none

/** Rows are as high as the window allows; where even the lowest do not fit, they scroll. */
function makeLayout(width, height, sections, view) {
  const heading = sections.length > 1 ? HEADING : 8;
  const ranks = sections.reduce((sum, { timeline }) => sum + timeline.numRanks, 0);
  const room = height - AXIS - heading * sections.length - 8;
  const row = Math.max(LOWEST, Math.min(HIGHEST, Math.floor(room / ranks)));
  const gap = row >= 24 ? 6 : row >= 16 ? 3 : row >= 12 ? 2 : 1;
  const strip = view.show.memory ? Math.round((row - gap) * 0.3) : 0;
  const memory = strip >= LEAST_STRIP ? strip : 0;
  const layout = { width, height, plot: Math.max(40, width - GUTTER - SIDE), row, gap, memory, lane: row - gap - memory };
  let y = 0;
  layout.tops = sections.map(({ timeline }) => {
    const top = y + heading;
    y = top + row * timeline.numRanks;
    return top;
  });
  layout.content = y + 8;
  layout.mostScroll = Math.max(0, layout.content - (height - AXIS));
  view.scroll = Math.min(view.scroll, layout.mostScroll);
  return layout;
}

const rowTop = (layout, view, section, rank) => AXIS + layout.tops[section] + rank * layout.row - view.scroll;
const xOf = (layout, view, time) => GUTTER + ((time - view.t0) / (view.t1 - view.t0)) * layout.plot;
const timeAt = (layout, view, x) => view.t0 + ((x - GUTTER) / layout.plot) * (view.t1 - view.t0);

/** The ranks of a section that are in sight: [first, after the last]. */
function ranksInSight(layout, view, section, numRanks) {
  const above = view.scroll - layout.tops[section];
  const first = Math.max(0, Math.floor(above / layout.row));
  return [first, Math.min(numRanks, Math.ceil((above + layout.height - AXIS) / layout.row))];
}

/** {section, rank} of the row at a height, or null. */
function rowAt(layout, view, sections, y) {
  if (y < AXIS) return null;
  for (const { index, timeline } of sections) {
    const rank = Math.floor((y - AXIS + view.scroll - layout.tops[index]) / layout.row);
    if (rank >= 0 && rank < timeline.numRanks) return { section: index, rank };
  }
  return null;
}
