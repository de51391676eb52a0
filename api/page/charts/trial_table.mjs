/** Trials of a figure as a table. */

import { bytes, duration, number } from "../format.mjs";
import { outcomeLook } from "../outcomes.mjs";

const four = (value) => number(value, 4);
const figure = (key, title, unit, format, width = 13) => ({ key, title, unit, format, width });
const FIGURES = [
  figure("estimate", "Estimate", "samples/s", four),
  figure("rate", "Single measurement", "samples/s", four, 18),
  figure("low", "Low", "samples/s", four, 14),
  figure("high", "High", "samples/s", four, 14),
  figure("predicted_rate", "Predicted", "samples/s", number, 18),
  figure("peak", "Peak memory", "", bytes, 14),
  figure("predicted_peak", "Predicted peak", "", bytes, 16),
  figure("started", "Started", "s", number, 12),
  figure("finished", "Finished", "s", number, 12),
];

const valueOf = (points, key, row) => (key === "estimate" ? points.estimate(row)?.rate.mean ?? null : points.columns[key][row]);

/**
 * @param {import("../points.mjs").Points} points
 * @param {number[]} rows - which, in their order
 * @param {string[]} [names] - columns that the figure is about
 */
export function trialTable(points, rows, names = ["estimate", "rate", "low", "high", "predicted_rate", "peak", "predicted_peak"]) {
  const columns = [
    { key: "number", title: "Trial", numeric: true, width: 8, value: (row) => points.columns.number[row] },
    { key: "outcome", title: "Outcome", width: 15, value: (row) => outcomeLook(points.outcome(row)).label },
    ...FIGURES.filter(({ key }) => names.includes(key)).map(({ key, title, unit, format, width }) => ({
      key, title, unit, width, numeric: true, value: (row) => valueOf(points, key, row), cell: (row) => format(valueOf(points, key, row)),
    })),
    ...(names.includes("ran") ? [{ key: "ran", title: "Ran", numeric: true, width: 12, value: (row) => points.seconds(row), cell: (row) => duration(points.seconds(row)) }] : []),
    ...(names.includes("node") ? [{ key: "node", title: "Node", width: 18, value: (row) => points.node(row) }] : []),
    { key: "config", title: "Configuration", width: 60, value: (row) => points.config(row) },
  ];
  return { columns, rows };
}
