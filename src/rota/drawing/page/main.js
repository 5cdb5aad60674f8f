// Puts the page together: data, view, canvases, controls. It draws at most once per frame.

async function main() {
  const [head, column] = await unpack();
  const sections = head.timelines.map((fields, index) => makeSection(fields, column, index, head));
  const hasMemory = sections.some(({ timeline }) => timeline.hasMemory);
  const full = Math.max(...sections.map(({ timeline }) => timeline.makespan));
  const page = {
    ...head,
    sections,
    numMicrobatches: Math.max(...sections.map(({ timeline }) => timeline.numMicrobatches)),
    view: makeView(full, hasMemory),
    initial: makeView(full, hasMemory),
    stage: document.getElementById("stage"),
    tip: document.getElementById("tip"),
    said: document.getElementById("said"),
    help: document.getElementById("help"),
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
  };
  setDark(page, page.dark);
  connect(page);
  if (location.hash) readHash(page);
  page.resize();
  performance.mark("rota-first-picture");
  makeIdleBars(page);
  makeControls(page);
  updateControls(page);
  listenToPointer(page);
  listenToKeys(page);
  new ResizeObserver(() => page.resize()).observe(page.stage);
  addEventListener("hashchange", () => readHash(page));
  window.rota = page; // for the console
}

function makeSection(fields, column, index, head) {
  const timeline = makeTimeline(fields, column);
  const section = {
    index,
    title: timeline.title,
    timeline,
    colors: slotColors(timeline, head.looks),
    manyStages: timeline.lanes.some(({ rank }) => stagesOf(timeline, rank).size > 1),
    totals: idleTotals(timeline, head.causes.length),
  };
  lazily(section, "fullBytes", () => Math.max(...timeline.peaks, ...timeline.limits.filter((limit) => limit !== null)));
  return section;
}

/**
 * Adds the page's actions: `recolor` after a change of filters or theme, `resize`, `draw`, `drawOverlays` without the
 * lanes, and `changed` after any choice.
 */
function connect(page) {
  const { view, sections } = page;
  const canvases = Object.fromEntries(["ground", "work", "top"].map((name) => [name, document.getElementById(name)]));
  let wanted = null;
  const paint = () => {
    if (wanted === "all") paintLanes(canvases, page);
    wanted = null;
    paintOverlays(canvases.top, page);
    showTip(page);
  };
  const request = (what) => {
    if (!wanted) requestAnimationFrame(paint);
    wanted = wanted === "all" ? wanted : what;
  };
  page.recolor = () => {
    for (const { timeline, colors } of sections) {
      for (const lane of timeline.lanes) {
        sumOps(timeline, lane, colors, page.looks, view, page.theme);
        sumIdle(lane, page.causes, view, page.theme);
      }
    }
  };
  page.drawOverlays = () => request("overlays");
  page.draw = () => {
    request("all");
    writeHash(page);
  };
  page.resize = () => {
    page.layout = makeLayout(page.stage.clientWidth, page.stage.clientHeight, sections, view);
    fitCanvases(canvases, page.layout);
    paintLanes(canvases, page);
    paintOverlays(canvases.top, page);
  };
  page.changed = () => {
    page.recolor();
    page.layout = { ...page.layout, ...makeLayout(page.layout.width, page.layout.height, sections, view) };
    updateControls(page);
    page.draw();
  };
  page.recolor();
}

let hashTimer = 0;
let knownHash = location.hash;
function writeHash(page) {
  clearTimeout(hashTimer);
  hashTimer = setTimeout(() => {
    if (location.hash !== knownHash) return; // the user has just entered another one, which is read next
    const hash = toHash(page.view, page.initial);
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    knownHash = location.hash;
  }, 150);
}

function readHash(page) {
  knownHash = location.hash;
  fromHash(page.view, page.initial, location.hash, page.sections, page.causes.length);
  if (page.layout) page.changed();
  else page.recolor();
}

main().catch((error) => {
  const tip = document.getElementById("tip");
  tip.hidden = false;
  tip.textContent =
    typeof DecompressionStream === "undefined"
      ? "This page needs a browser of 2023 or later (Chrome 80, Firefox 113, Safari 16.4)."
      : `The page cannot be drawn: ${error.message}`;
  throw error;
});
