/** When each trial ran, and where. */

import { html, useMemo } from "../vendor/preact.mjs";
import { line, lines, linkTo } from "../describe.mjs";
import { counted, duration } from "../format.mjs";
import { OUTCOME_NAMES, outcomeLook } from "../outcomes.mjs";
import { Canvas } from "./canvas.mjs";
import { FigureCard } from "./card.mjs";
import { axis, cursor, ground, plain } from "./look.mjs";
import { trialTable } from "./trial_table.mjs";

export function Timeline({ points, job }) {
  const laid = useMemo(() => layOut(points), [points]);
  const plot = useMemo(() => plotOf(points, laid, job.id), [points, laid, job.id]);
  const title = "Trials on nodes";
  return html`<${FigureCard} name="timeline" title=${title} summary=${summaryOf(laid)}
    tables=${() => [{ caption: title, ...trialTable(points, laid.bars.map(({ row }) => row), ["started", "finished", "ran", "node"]) }]}>
    ${laid.bars.length > 0 && html`<${Canvas} plot=${plot} label=${title} height=${Math.min(640, 96 + 26 * laid.lanes.length)} />`}
  <//>`;
}

/** Trials that ran at the same time on one node lie in lanes of their own. */
function layOut(points) {
  const { started, finished } = points.columns;
  const rows = [];
  for (let row = 0; row < points.size; row++) if (started[row] !== null) rows.push(row);
  rows.sort((one, other) => started[one] - started[other]);
  const first = rows.length ? started[rows[0]] : 0;
  const last = rows.reduce((most, row) => Math.max(most, finished[row] ?? 0, started[row]), 0);
  const lanes = new Map();
  const nodes = new Set(rows.map((row) => points.node(row)).filter(Boolean));
  const unknown = nodes.size === 1 ? [...nodes][0] : "not told yet";
  const bars = rows.map((row) => {
    const [from, to] = [started[row] - first, (finished[row] ?? last) - first];
    const node = points.node(row) ?? unknown;
    if (!lanes.has(node)) lanes.set(node, []);
    const ends = lanes.get(node);
    const free = ends.findIndex((end) => end <= from);
    const lane = free < 0 ? ends.length : free;
    ends[lane] = to;
    return { row, from, to, node, lane };
  });
  const inOrder = [...lanes].sort(([one], [other]) => (one < other ? -1 : 1));
  const places = new Map();
  const names = inOrder.flatMap(([node, ends], index) => {
    places.set(node, inOrder.slice(0, index).reduce((sum, [, before]) => sum + before.length, 0));
    return ends.map((_, lane) => (lane ? "" : node)); // a node's name stands at its first lane
  });
  const busy = bars.reduce((sum, { from, to }) => sum + to - from, 0);
  const placed = bars.map((bar) => ({ ...bar, lane: places.get(bar.node) + bar.lane }));
  return { bars: placed, lanes: names, nodes: lanes.size, span: last - first, busy };
}

function summaryOf({ bars, nodes, lanes, span, busy }) {
  if (bars.length === 0) return "No trial has started yet.";
  const share = span > 0 ? Math.round((100 * busy) / (span * lanes.length)) : 100;
  return `${counted(bars.length, "trial")} on ${counted(nodes, "node")} in ${duration(span)}, ${lanes.length} at a time; trials ran ${share} % of it.`;
}

function plotOf(points, laid, job) {
  return {
    option: (look) => optionOf(points, laid, look),
    items: () => laid.bars.map((bar) => ({ at: [bar.from, bar.lane], text: line(points, bar.row), href: linkTo(job, points, bar.row) })),
    link: ({ data }) => (data?.row === undefined ? undefined : linkTo(job, points, data.row)),
  };
}

function optionOf(points, { bars, lanes, span }, look) {
  const base = ground(look, bars.length);
  const kinds = Map.groupBy(bars, ({ row }) => points.outcome(row));
  const order = [...OUTCOME_NAMES, null].filter((outcome) => kinds.has(outcome));
  // About a pixel: what is shorter would not be seen, and without a gap neighbours would be one.
  const pixel = span / 1500;
  const width = Math.max(4, Math.min(16, 460 / Math.max(1, lanes.length)));
  return {
    ...base,
    grid: { ...base.grid, top: 34, bottom: 26 },
    tooltip: { ...base.tooltip, trigger: "item", formatter: ({ data }) => (data?.row === undefined ? "" : plain(lines(points, data.row))) },
    dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, filterMode: "none" }],
    xAxis: axis(look, { name: "Time since the first trial", format: duration, scale: false, min: 0, max: span }),
    yAxis: {
      type: "category", data: lanes.map((_, lane) => lane), inverse: true, axisTick: { show: false }, splitArea: { show: false },
      axisLine: { lineStyle: { color: look.color("--line-strong") } },
      axisLabel: { color: look.color("--text-soft"), width: look.isNarrow ? 70 : 160, overflow: "truncate", interval: 0, formatter: (lane) => lanes[lane] },
    },
    series: [
      ...order.map((outcome) => ({
        id: `outcome-${outcome}`, name: outcomeLook(outcome).label, type: "lines", coordinateSystem: "cartesian2d", polyline: false,
        lineStyle: { width, color: look.color(outcomeLook(outcome).color), opacity: 0.85, cap: "butt" }, itemStyle: { color: look.color(outcomeLook(outcome).color) },
        data: kinds.get(outcome).map((bar) => ({ row: bar.row, coords: [[bar.from, bar.lane], [Math.max(bar.to - pixel, bar.from + pixel), bar.lane]] })),
        large: bars.length > 1500, largeThreshold: 1500,
      })),
      cursor(look),
    ],
  };
}
