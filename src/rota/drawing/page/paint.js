// The two canvases of pixels: `ground` with what is idle, and above it `work`, whose opacity is how busy a rank is.

/** Sets the canvases' sizes to whole device pixels. */
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

/** Draws all lanes in sight on both canvases. */
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

/** A row in device pixels: the lane, and the memory strip under it. */
function devicePixels(layout, view, section, rank) {
  const y = rowTop(layout, view, section, rank);
  const top = Math.round(y * layout.ratio);
  const bottom = Math.round((y + layout.lane) * layout.ratio);
  const strip = bottom + Math.round(layout.ratio);
  const stripBottom = Math.round((y + layout.lane + layout.memory) * layout.ratio);
  return { top, height: bottom - top, strip, stripHeight: Math.max(0, stripBottom - strip) };
}

/** Memory is drawn up to the makespan. */
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

/** Reductions and optimizer steps: strips along the lane's lower edge, as ops may run beside them. */
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
