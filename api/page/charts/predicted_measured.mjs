/** Predicted against measured: on the diagonal the prediction was right. */

import { html, useMemo, useState } from "../vendor/preact.mjs";
import { line, lines, linkTo } from "../describe.mjs";
import { counted, number, share } from "../format.mjs";
import { Canvas } from "./canvas.mjs";
import { FigureCard } from "./card.mjs";
import { axis, byteScale, cloud, cursor, ground, plain, upright } from "./look.mjs";
import { trialTable } from "./trial_table.mjs";

const CHOICES = [{ value: "rate", label: "samples/s" }, { value: "peak", label: "memory" }];

export function PredictedMeasured({ points, job }) {
  const [what, setWhat] = useState("rate");
  const rows = useMemo(() => comparable(points, what), [points, what]);
  const plot = useMemo(() => plotOf(points, rows, what, job.id), [points, rows, what, job.id]);
  const title = "Predicted against measured";
  const hasAny = rows.length > 0 || comparable(points, "rate").length > 0;
  return html`<${FigureCard} name="predicted_measured" title=${title} summary=${summaryOf(points, rows, what)}
    choices=${CHOICES} choice=${what} onChoice=${setWhat}
    tables=${() => [{ caption: title, ...trialTable(points, rows, ["estimate", "rate", "predicted_rate", "peak", "predicted_peak"]) }]}>
    ${hasAny && html`<${Canvas} plot=${plot} label=${title} />`}
  <//>`;
}

/** Of each row; samples/s are those of its configuration. */
function valuesOf(points, what) {
  return what === "rate" ? points.columns.rate.map((_, row) => points.rate(row)) : points.columns[what];
}

function comparable(points, what) {
  const [measured, predicted] = [valuesOf(points, what), points.columns[`predicted_${what}`]];
  const rows = [];
  for (let row = 0; row < points.size; row++) {
    if (points.outcome(row) === "OK" && !points.isRepeat(row) && measured[row] > 0 && predicted[row] > 0) rows.push(row);
  }
  return rows.sort((one, other) => predicted[one] - predicted[other]);
}

function summaryOf(points, rows, what) {
  const about = what === "rate" ? "rates" : "peaks of memory";
  if (rows.length === 0) return `There are no trials yet whose ${about} were both predicted and measured.`;
  const [measured, predicted] = [valuesOf(points, what), points.columns[`predicted_${what}`]];
  const errors = rows.map((row) => Math.abs(predicted[row] / measured[row] - 1)).sort((one, other) => one - other);
  return `Of ${counted(rows.length, "trial")} the predicted ${about} are off by ${share(errors[errors.length >> 1])} in the middle, and by ${share(errors.at(-1))} at most.`;
}

function plotOf(points, rows, what, job) {
  const [measured, predicted] = [valuesOf(points, what), points.columns[`predicted_${what}`]];
  const largest = rows.reduce((most, row) => Math.max(most, measured[row], predicted[row]), 0);
  const { unit, size } = what === "rate" ? { unit: "samples/s", size: 1 } : byteScale(largest);
  const at = (row) => [predicted[row] / size, measured[row] / size, row];
  return {
    option: (look) => optionOf({ points, rows, at, unit, look }),
    items: () => rows.map((row) => ({ at: at(row), text: line(points, row), href: linkTo(job, points, row) })),
    link: ({ data }) => (data?.length > 2 ? linkTo(job, points, data[2]) : undefined),
  };
}

function optionOf({ points, rows, at, unit, look }) {
  const base = ground(look, rows.length);
  const data = rows.map(at);
  const ends = data.flatMap(([x, y]) => [x, y]);
  const [least, most] = [ends.reduce((a, b) => Math.min(a, b), Infinity), ends.reduce((a, b) => Math.max(a, b), 0)];
  return {
    ...base,
    legend: { show: false },
    grid: { ...base.grid, top: 36, bottom: 26 },
    tooltip: { ...base.tooltip, trigger: "item", formatter: ({ data: found }) => (found?.length > 2 ? plain(lines(points, found[2])) : "") },
    xAxis: axis(look, { name: `Predicted (${unit})`, format: (value) => number(value, 4) }),
    yAxis: upright(look, { name: `Measured (${unit})`, format: (value) => number(value, 4) }),
    series: [
      { id: "trials", type: "scatter", data, ...cloud(rows.length, 8), itemStyle: { color: look.color("--ok"), opacity: 0.6 } },
      { id: "diagonal", type: "line", data: rows.length ? [[least, least], [most, most]] : [], showSymbol: false, silent: true, lineStyle: { color: look.color("--line-strong"), type: "dashed", width: 1.5 } },
      cursor(look),
    ],
  };
}
