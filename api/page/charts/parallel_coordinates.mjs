/** Every measured trial as a line over its knobs. What is brushed on an axis is what the table of trials shows. */

import { html, useMemo } from "../vendor/preact.mjs";
import { line, linkTo } from "../describe.mjs";
import { count, counted, knob as knobText, number } from "../format.mjs";
import { Canvas } from "./canvas.mjs";
import { FigureCard } from "./card.mjs";
import { byteScale, CURSOR, ground } from "./look.mjs";
import { trialTable } from "./trial_table.mjs";

/** As many lines as can be told apart, and drawn in a moment: of more, the fastest half as many, and some of all others. */
const MOST_LINES = 1200;

/**
 * @param {object} props
 * @param {(rows: Set<number> | null) => void} [props.onBrush] - null: nothing is brushed
 */
export function ParallelCoordinates({ points, job, onBrush }) {
  const rows = useMemo(() => measured(points), [points]);
  const plot = useMemo(() => plotOf(points, rows, job.id, onBrush), [points, rows, job.id, onBrush]);
  const title = "Knobs of the measured trials";
  return html`<${FigureCard} name="parallel_coordinates" title=${title} summary=${summaryOf(points, rows, Boolean(onBrush))}
    tables=${() => [{ caption: title, ...trialTable(points, [...rows].reverse(), ["rate", "peak"]) }]}>
    ${rows.length > 0 && points.varied.length > 0 && html`<${Canvas} plot=${plot} label=${title} height=${heightOf(points)} />`}
  <//>`;
}

/** On a phone axes lie below each other. */
const heightOf = (points) => (innerWidth < 560 ? 60 * (points.varied.length + 2) : 360);

function summaryOf(points, rows, hasTable) {
  if (rows.length === 0) return "Nothing has been measured yet.";
  if (points.varied.length === 0) return "All trials have the same configuration.";
  const drawn = rows.length > MOST_LINES ? `${count(MOST_LINES)} of ${count(rows.length)} trials, the fastest among them,` : counted(rows.length, "trial");
  return `${drawn} over ${counted(points.varied.length, "knob")}; the fastest are gold. Drag along an axis to see these alone${hasTable ? ", here and in the table" : ""}.`;
}

function thinned(rows) {
  if (rows.length <= MOST_LINES) return rows;
  const [rest, fastest] = [rows.slice(0, -MOST_LINES / 2), rows.slice(-MOST_LINES / 2)];
  const step = rest.length / (MOST_LINES / 2);
  return [...Array.from({ length: MOST_LINES / 2 }, (_, index) => rest[Math.floor(index * step)]), ...fastest];
}

/** Slow ones first, so that the fast ones are drawn over them. */
function measured(points) {
  const { rate } = points.columns;
  const rows = [];
  for (let row = 0; row < points.size; row++) if (points.outcome(row) === "OK") rows.push(row);
  return rows.sort((one, other) => rate[one] - rate[other]);
}

function plotOf(points, rows, job, onBrush) {
  const axes = points.varied.map((knob) => ({ knob, order: inOrder(knob.values) }));
  const { rate, peak } = points.columns;
  const { size, unit } = byteScale(rows.reduce((most, row) => Math.max(most, peak[row] ?? 0), 0));
  const places = axes.map(({ knob, order }) => knob.values.map((_, code) => order.indexOf(code)));
  const lineOf = (row) => [...axes.map(({ knob }, dim) => places[dim][knob.codes[row]]), rate[row], peak[row] === null ? "-" : peak[row] / size];
  return {
    option: (look) => optionOf({ rows, axes, lineOf, unit, points, look }),
    items: () => [...rows].reverse().map((row) => ({ at: lineOf(row), text: line(points, row), href: linkTo(job, points, row) })),
    brush: (chart) => onBrush?.(brushed(chart, rows, lineOf)),
  };
}

/** Places of a knob's values in their natural order. */
function inOrder(values) {
  const places = values.map((_, index) => index);
  const both = (one, other) => typeof one === "number" && typeof other === "number";
  return places.sort((one, other) => (both(values[one], values[other]) ? values[one] - values[other] : String(values[one]) < String(values[other]) ? -1 : 1));
}

/** The rows within what is brushed, those among them that are not drawn too. */
function brushed(chart, rows, lineOf) {
  const model = chart.getModel();
  const dims = chart.getOption().parallelAxis.map((_, dim) => model.getComponent("parallelAxis", dim));
  const brushes = dims.map((dim, place) => ({ place, intervals: dim.activeIntervals })).filter(({ intervals }) => intervals.length > 0);
  if (brushes.length === 0) return null;
  const isWithin = (line) => brushes.every(({ place, intervals }) => intervals.some(([low, high]) => line[place] >= low && line[place] <= high));
  return new Set(rows.filter((row) => isWithin(lineOf(row))));
}

function optionOf({ rows, axes, lineOf, unit, points, look }) {
  const base = ground(look, rows.length);
  const { rate } = points.columns;
  const rateDim = axes.length;
  const text = look.color("--text-soft");
  const shared = {
    nameTextStyle: { color: look.color("--text"), fontSize: 11 }, axisLabel: { color: text, fontSize: 11, hideOverlap: true },
    axisLine: { lineStyle: { color: look.color("--line-strong") } }, axisTick: { show: false },
    areaSelectStyle: { width: 18, borderWidth: 1, borderColor: look.color("--focus"), color: look.color("--focus"), opacity: 0.25 },
  };
  return {
    animation: false,
    textStyle: base.textStyle,
    parallel: {
      ...(look.isNarrow ? { layout: "vertical", left: 14, right: 22, top: 26, bottom: 24 } : { left: 50, right: 60, top: 44, bottom: 16 }),

      parallelAxisDefault: { ...shared, ...(look.isNarrow ? { nameLocation: "middle", nameGap: -22 } : { nameLocation: "end", nameGap: 18 }), realtime: false },
    },
    parallelAxis: [
      ...axes.map(({ knob, order }, dim) => ({
        dim, type: "category", name: named(knob.name, dim, look), data: order.map((code) => knobText(knob.values[code])),
      })),
      { dim: rateDim, name: named("samples/s", rateDim, look), type: "value", scale: true, axisLabel: { ...shared.axisLabel, formatter: (value) => number(value) } },
      { dim: rateDim + 1, name: named(`memory (${unit})`, rateDim + 1, look), type: "value", scale: true, axisLabel: { ...shared.axisLabel, formatter: (value) => number(value) } },
    ],
    visualMap: {
      show: false, type: "continuous", dimension: rateDim, seriesIndex: 0, min: rate[rows[0]] ?? 0, max: rate[rows.at(-1)] ?? 1,
      inRange: { color: ["--line-strong", "--series-5", "--series-1", "--best"].map(look.color), opacity: [0.25, 0.9] },
    },
    series: [
      {
        id: "trials", type: "parallel", progressive: 300, progressiveThreshold: 600, inactiveOpacity: 0.03, activeOpacity: 1,
        lineStyle: { width: rows.length > 500 ? 0.8 : 1.4 }, data: thinned(rows).map(lineOf),
      },
      { id: CURSOR, type: "parallel", silent: true, z: 5, lineStyle: { width: 4, color: look.color("--focus"), opacity: 1 }, data: [] },
    ],
  };
}

/** Names of axes beside each other stand in two rows, so that neighbours do not run into each other. */
function named(name, dim, look) {
  if (look.isNarrow) return name;
  const text = name.length > 22 ? `${name.slice(0, 20)}…` : name;
  return dim % 2 ? `${text}\n` : text;
}
