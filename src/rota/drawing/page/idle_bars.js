// Below the lanes: each timeline's idle time by cause, worst first; a click picks a cause out in the lanes.

function makeIdleBars(page) {
  const { sections, causes } = page;
  const rows = sections.map(({ timeline, totals, title }) => {
    const row = document.createElement("div");
    row.className = "causes";
    const idle = totals.all.reduce((sum, time) => sum + time, 0);
    const head = document.createElement("span");
    head.className = "head";
    head.textContent = `${sections.length > 1 ? `${title}: ` : ""}why idle`;
    row.append(head);
    const order = causes.map((_, cause) => cause).filter((cause) => totals.all[cause] > 0);
    order.sort((a, b) => totals.all[b] - totals.all[a]);
    for (const cause of order) {
      row.append(causeOf(page, cause, totals.all[cause] / idle, totals.all[cause] / timeline.numRanks));
    }
    if (!order.length) row.append("no rank is ever idle");
    return row;
  });
  document.getElementById("idle").replaceChildren(...rows);
}

function causeOf(page, cause, share, meanTime) {
  const look = page.causes[cause];
  const entry = document.createElement("button");
  entry.className = "cause";
  entry.dataset.cause = cause;
  entry.title = `${look.word}: ${shortTime(meanTime)} a rank, ${percent(share)} of all idle time`;
  const bar = document.createElement("span");
  bar.className = "bar";
  const filled = document.createElement("i");
  filled.style.width = `${100 * share}%`;
  filled.style.background = look.color;
  bar.append(filled);
  const word = document.createElement("span");
  word.textContent = look.word;
  const number = document.createElement("b");
  number.textContent = percent(share);
  entry.append(word, number, bar);
  listen(page, entry, "click", () => (page.view.cause = page.view.cause === cause ? null : cause));
  return entry;
}
