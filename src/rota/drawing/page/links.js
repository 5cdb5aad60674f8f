// Links that transfers share: a row for each below the ranks, and the waits of transfers for them.

/** Draws a row per shared link, below the ranks: a pixel is as dark as the share of its time in which the link is busy. */
function paintLinks(context, { layout, view, theme }, { timeline, index }) {
  const { n, sent, served, route } = timeline.transfers;
  const perPixel = (view.t1 - view.t0) / layout.plot;
  timeline.links.forEach((name, link) => {
    const y = rowTop(layout, view, index, timeline.numRanks + link);
    if (y + layout.lane < AXIS || y > layout.height) return;
    const busy = new Float64Array(Math.ceil(layout.plot));
    let total = 0;
    for (let k = 0; k < n; k++) {
      if (!timeline.routes[route[k]][7].includes(link)) continue;
      total += served[k] - sent[k];
      const from = Math.max(sent[k], view.t0);
      const to = Math.min(served[k], view.t1);
      for (let x = Math.floor((from - view.t0) / perPixel); x < busy.length && view.t0 + x * perPixel < to; x++) {
        const left = Math.max(from, view.t0 + x * perPixel);
        busy[x] += Math.min(to, view.t0 + (x + 1) * perPixel) - left;
      }
    }
    const end = Math.min(layout.plot, xOf(layout, view, timeline.makespan) - GUTTER);
    context.fillStyle = cssOf(theme.line);
    if (end > 0) context.fillRect(GUTTER, y + layout.lane / 4, end, layout.lane / 2);
    context.fillStyle = cssOf(theme.muted);
    busy.forEach((time, x) => {
      if (!time) return;
      context.globalAlpha = Math.min(1, time / perPixel);
      context.fillRect(GUTTER + x, y + layout.lane / 4, 1, layout.lane / 2);
    });
    context.globalAlpha = 1;
    if (layout.row < 11) return;
    context.font = `11px ${FONT}`;
    context.textAlign = "right";
    context.fillText(name, GUTTER - 10, y + layout.lane / 2 + 0.5, GUTTER - 14);
    context.textAlign = "left";
    const share = `${percent(total / (timeline.makespan || 1))} busy`;
    context.fillText(share, GUTTER + layout.plot + 14, y + layout.lane / 2 + 0.5);
  });
}

/** Draws dotted lines along the senders' lanes while transfers wait; `edge` returns a lane's upper or lower edge. */
function paintWaits(context, { layout, view }, { transfers, routes }, visible, edge) {
  context.lineWidth = 2;
  context.setLineDash([2, 2]);
  context.beginPath();
  for (const k of visible) {
    if (transfers.handedOver[k] === transfers.sent[k]) continue;
    const [, , sender, receiver] = routes[transfers.route[k]];
    const y = edge(sender, receiver > sender);
    context.moveTo(xOf(layout, view, transfers.handedOver[k]), y);
    context.lineTo(xOf(layout, view, transfers.sent[k]), y);
  }
  context.stroke();
  context.setLineDash([]);
}
