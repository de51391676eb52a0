/** The best so far, over trials and over time. */

import { html, useMemo, useState } from "../vendor/preact.mjs";
import { line, lines, linkTo } from "../describe.mjs";
import { bytes, duration, number, rate, times } from "../format.mjs";
import { course } from "../standing.mjs";
import { Canvas } from "./canvas.mjs";
import { FigureCard } from "./card.mjs";
import { axis, byteScale, cloud, cursor, ground, plain, upright } from "./look.mjs";
import { trialTable } from "./trial_table.mjs";

const CHOICES = [{ value: "trials", label: "trials" }, { value: "time", label: "time" }];

export function BestSoFar({ points, job }) {
  const [over, setOver] = useState("trials");
  const steps = useMemo(() => course(points, over), [points, over]);
  const plot = useMemo(() => plotOf(points, steps, over, job.id), [points, steps, over, job.id]);
  const title = "Best so far";
  return html`<${FigureCard} name="best_so_far" title=${title} summary=${summaryOf(points, steps)}
    choices=${CHOICES} choice=${over} onChoice=${setOver}
    tables=${() => [{ caption: title, ...trialTable(points, steps.map(({ row }) => row), ["estimate", "rate", "peak", "finished"]) }]}>
    ${steps.length > 0 && html`<${Canvas} plot=${plot} label=${`${title} over ${over}.`} />`}
  <//>`;
}

function summaryOf(points, steps) {
  if (steps.length === 0) return "Nothing has been measured yet.";
  const last = steps.findLast(({ isBest }) => isBest);
  if (!last) return "Nothing that was measured may win: it is beyond the memory limit.";
  const format = points.objective === "memory" ? bytes : rate;
  const found = points.columns.finished[last.row];
  const after = found === null ? "" : ` after ${duration(found - began(points))}`;
  const base = points.baselineRow === null ? null : points.objective === "memory" ? points.columns.peak[points.baselineRow] : points.rate(points.baselineRow);
  const gain = base && points.objective !== "memory" ? ` (${times(last.best / base)} the baseline)` : "";
  return `${format(last.best)}${gain}, found by trial ${points.columns.number[last.row]}${after}.`;
}

/** Second in which the first trial started. */
function began(points) {
  return points.columns.started.reduce((least, second) => (second !== null && second < least ? second : least), Infinity);
}

function plotOf(points, steps, over, job) {
  const isMemory = points.objective === "memory";
  const { unit, size } = isMemory ? byteScale(steps.reduce((most, { value }) => Math.max(most, value), 0)) : { unit: "samples/s", size: 1 };
  const first = began(points);
  const x = over === "trials" ? ({ row }) => points.columns.number[row] : ({ row }) => points.columns.finished[row] - first;
  const at = (step) => [x(step), step.value / size, step.row];
  const lineData = steps.filter(({ best }) => best !== null).map((step) => [x(step), step.best / size, step.row]);
  return {
    option: (look) => optionOf({ points, steps, over, unit, size, at, lineData, look }),
    items: () => steps.map((step) => ({ at: at(step), text: `${line(points, step.row)}${step.isBest ? "; the best up to here" : ""}`, href: linkTo(job, points, step.row) })),
    link: ({ data }) => (data?.length > 2 ? linkTo(job, points, data[2]) : undefined),
  };
}

function optionOf({ points, steps, over, unit, size, at, lineData, look }) {
  const base = ground(look, steps.length);
  const color = look.color("--ok");
  const isTime = over === "time";
  return {
    ...base,
    grid: { ...base.grid, top: 58, bottom: 26 },
    tooltip: { ...base.tooltip, trigger: "item", formatter: ({ data }) => (data?.length > 2 ? plain(lines(points, data[2])) : "") },
    xAxis: axis(look, { name: isTime ? "Time since the first trial" : "Trial", format: isTime ? duration : (value) => number(value, 6), minInterval: isTime ? 0 : 1 }),
    yAxis: upright(look, { name: unit, format: (value) => number(value, 4) }),
    series: [
      { id: "measured", name: "Measured", type: "scatter", data: steps.map(at), ...cloud(steps.length, 7), itemStyle: { color, opacity: 0.5 } },
      {
        id: "best", name: "Best so far", type: "line", step: "end", data: lineData, showSymbol: false, z: 4,
        lineStyle: { color: look.color("--best"), width: 2.5 }, itemStyle: { color: look.color("--best") }, markLine: baselineMark(points, size, look),
      },
      cursor(look),
    ],
  };
}

function baselineMark(points, size, look) {
  const row = points.baselineRow;
  const value = row === null ? null : points.objective === "memory" ? points.columns.peak[row] : points.rate(row);
  if (value === null || value === undefined) return undefined;
  const color = look.color("--text-soft");
  return {
    silent: true, symbol: "none", animation: false, data: [{ yAxis: value / size }],
    lineStyle: { color, type: "dashed" }, label: { formatter: "baseline", color, position: "insideEndBottom", backgroundColor: look.color("--surface"), padding: [1, 4] },
  };
}
