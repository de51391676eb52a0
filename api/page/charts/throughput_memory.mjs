/** Throughput against memory: what was measured, the limit, the front, and by prediction what could not be measured. */

import { html, useMemo } from "../vendor/preact.mjs";
import { line, lines, linkTo } from "../describe.mjs";
import { bytes, counted, number, rate } from "../format.mjs";
import { outcomeLook, OUTCOME_NAMES } from "../outcomes.mjs";
import { Canvas } from "./canvas.mjs";
import { FigureCard } from "./card.mjs";
import { axis, byteScale, cloud, cursor, ground, plain, upright } from "./look.mjs";
import { trialTable } from "./trial_table.mjs";

/** What says nothing of throughput: a person or the scheduler ended it, or it was no legal configuration. */
const LEFT_OUT = new Set(["INVALID", "CANCELLED", "PREEMPTED"]);

export function ThroughputMemory({ points, job }) {
  const placed = useMemo(() => placeAll(points), [points]);
  const plot = useMemo(() => plotOf(points, placed, job.id), [points, placed, job.id]);
  const title = "Throughput against memory";
  return html`<${FigureCard} name="throughput_memory" title=${title} summary=${summaryOf(points, placed)}
    tables=${() => [{ caption: title, ...trialTable(points, placed.all.map(({ row }) => row)) }]}>
    ${placed.all.length > 0 && html`<${Canvas} plot=${plot} label=${title} height=${420} />`}
  <//>`;
}

/** Where each trial stands; `all` by memory, the rest by how they are drawn. */
function placeAll(points) {
  const kinds = new Map();
  for (let row = 0; row < points.size; row++) {
    const outcome = points.outcome(row);
    if (points.isRepeat(row)) continue; // a measurement of a configuration that has its place
    const at = LEFT_OUT.has(outcome) || (outcome === null && !points.isRunning(row)) ? null : placeOf(points, row, outcome);
    if (at === null) continue;
    if (!kinds.has(outcome)) kinds.set(outcome, []);
    kinds.get(outcome).push({ row, x: at[0], y: at[1] });
  }
  const all = [...kinds.values()].flat().sort((one, other) => one.x - other.x || one.row - other.row);
  return { kinds, all };
}

function placeOf(points, row, outcome) {
  const { high, peak, predicted_rate, predicted_peak } = points.columns;
  const isMeasured = outcome === "OK";
  const x = isMeasured ? peak[row] : outcome === "PRUNED" ? (peak[row] ?? predicted_peak[row]) : predicted_peak[row];
  const y = isMeasured ? points.rate(row) : outcome === "PRUNED" ? (high[row] ?? predicted_rate[row]) : predicted_rate[row];
  return x === null || y === null || x === undefined || y === undefined ? null : [x, y];
}

function summaryOf(points, { kinds, all }) {
  if (all.length === 0) return "No trial has been measured or predicted yet.";
  const measured = kinds.get("OK")?.length ?? 0;
  const told = [measured ? `${counted(measured, "configuration")} measured` : "Nothing measured"];
  const beyond = kinds.get("INFEASIBLE")?.length ?? 0;
  if (beyond) told.push(`${beyond === 1 ? "one that does not fit is" : `${number(beyond, 6)} that do not fit are`} placed by prediction`);
  const limit = points.limit === null ? "" : ` The limit is ${bytes(points.limit)} a rank.`;
  const best = points.bestRow === null ? "" : ` The best is trial ${points.bestRow}: ${rate(points.best.rate.mean)} within ${bytes(points.columns.peak[points.bestRow])}.`;
  return `${told.join("; ")}.${limit}${best}`;
}

function plotOf(points, placed, job) {
  const { all } = placed;
  return {
    option: (look) => optionOf(points, placed, look),
    items: () => all.map(({ row, x, y }) => ({ at: [x / scaleOf(points, all).size, y], text: line(points, row), href: linkTo(job, points, row) })),
    link: ({ data }) => (Array.isArray(data) && data.length > 2 ? linkTo(job, points, data[2]) : undefined),
  };
}

function scaleOf(points, all) {
  return byteScale(Math.max(points.limit ?? 0, all.at(-1)?.x ?? 0));
}

function optionOf(points, { kinds, all }, look) {
  const base = ground(look, all.length);
  const { unit, size } = scaleOf(points, all);
  const at = ({ row, x, y }) => [x / size, y, row];
  const order = [...OUTCOME_NAMES].reverse().filter((name) => kinds.has(name));
  if (kinds.has(null)) order.push(null);
  return {
    ...base,
    tooltip: { ...base.tooltip, trigger: "item", formatter: ({ data }) => (data?.length > 2 ? plain(lines(points, data[2])) : "") },
    dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, moveOnMouseWheel: false, filterMode: "none" }],
    grid: { ...base.grid, top: 58, bottom: 26 },
    xAxis: axis(look, { name: `Peak memory of a rank (${unit})`, format: (value) => number(value, 4), max: ({ max }) => Math.max(max, (1.03 * (points.limit ?? 0)) / size) }),
    yAxis: upright(look, { name: "samples/s", format: (value) => number(value, 4) }),
    series: [
      ...order.map((outcome) => seriesOf(outcome, kinds.get(outcome).map(at), look)),
      singleSeries(points, size, look),
      frontSeries(points, size, look),
      ...marked(points, size, look),
      cursor(look, 22),
    ],
  };
}

function seriesOf(outcome, data, look) {
  const { label, symbol, color } = outcomeLook(outcome);
  const byPrediction = outcome === "OK" ? "" : outcome === "PRUNED" ? " (at most)" : " (predicted)";
  return {
    id: `outcome-${outcome}`, name: `${label}${byPrediction}`, type: "scatter", data, symbol, ...cloud(data.length, 9),
    itemStyle: { color: look.color(color), opacity: 0.75 }, z: outcome === "OK" ? 4 : 3,
  };
}

/** The single measurements of the configurations that have an estimate: small, because the estimate is what counts. */
function singleSeries(points, size, look) {
  const { rate: mean, peak } = points.columns;
  const data = [];
  for (let row = 0; row < points.size; row++) {
    const isShown = points.outcome(row) === "OK" && (points.isRepeat(row) || points.estimate(row));
    if (isShown && mean[row] !== null && peak[row] !== null) data.push([peak[row] / size, mean[row], row]);
  }
  return {
    id: "single", name: "Single measurements", type: "scatter", data, symbol: "circle", symbolSize: 3, z: 2, large: data.length > 2000,
    itemStyle: { color: look.color("--text-soft"), opacity: 0.8 },
  };
}

/** By the estimates, which the front is made of. By another objective the front may have configurations that others beat in both. */
function frontSeries(points, size, look) {
  const { peak } = points.columns;
  const data = [];
  for (const row of [...points.front].sort((one, other) => peak[one] - peak[other])) {
    if (data.length === 0 || points.rate(row) >= data.at(-1)[1]) data.push([peak[row] / size, points.rate(row), row]);
  }
  return {
    id: "front", name: "Pareto front", type: "line", step: "end", data, symbol: "circle", symbolSize: 6, z: 5,
    lineStyle: { color: look.color("--front"), width: 2 }, itemStyle: { color: look.color("--front") },
    markLine: limitLine(points, size, look),
  };
}

function limitLine(points, size, look) {
  if (points.limit === null) return undefined;
  const color = look.color("--limit");
  return {
    silent: true, symbol: "none", animation: false, data: [{ xAxis: points.limit / size }],
    lineStyle: { color, type: "dashed", width: 1.5 }, label: { formatter: "limit", color, position: "insideEndTop" },
  };
}

function marked(points, size, look) {
  const { peak } = points.columns;
  const made = [
    ["best", "Best", points.bestRow, "path://M8 0 10.4 5.2 16 6 12 10 13 16 8 13.2 3 16 4 10 0 6 5.6 5.2Z", 20, "--best", look.color("--text")],
    ["baseline", "Baseline", points.baselineRow, "emptyRect", 13, "--baseline", look.color("--baseline")],
  ];
  return made
    .filter(([, , row]) => row !== null && points.rate(row) !== null && peak[row] !== null)
    .map(([id, name, row, symbol, symbolSize, color, borderColor]) => ({
      id, name, type: "scatter", symbol, symbolSize, z: 7, data: [[peak[row] / size, points.rate(row), row]],
      itemStyle: { color: look.color(color), borderColor, borderWidth: id === "best" ? 0.8 : 2 },
    }));
}
