/** Figures that the service computes: their tables as rows, for pictures and for people. */

import { bytes, count, duration, knob, number, share } from "../format.mjs";

/**
 * @typedef {object} FigureData - `FigureView` of the service
 * @property {string} name
 * @property {string} title
 * @property {string} summary
 * @property {object[]} tables
 * @property {object[]} marks
 * @property {string[]} notes
 */

const FORMATS = {
  "samples/s": (value) => number(value),
  bytes,
  seconds: duration,
  share: (value) => share(value),
  times: (value) => number(value),
  FLOP: flops,
  elements: count,
};

/** `1.23 TFLOP`. */
export function flops(value) {
  if (typeof value !== "number") return "–";
  for (const [unit, size] of [["PFLOP", 1e15], ["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6]]) {
    if (value >= size) return `${number(value / size)} ${unit}`;
  }
  return `${count(Math.round(value))} FLOP`;
}

/** A table's rows as objects, by the names of its columns; empty: the figure has no such table. */
export function rowsOf(figure, name) {
  const table = figure.tables.find((candidate) => candidate.name === name);
  if (!table) return [];
  const size = table.columns[0]?.values.length ?? 0;
  return Array.from({ length: size }, (_, row) => Object.fromEntries(table.columns.map((column) => [column.name, column.values[row]])));
}

/** All tables of a figure, as `DataTable` takes them. */
export function dataTables(figure) {
  return figure.tables.map((table) => ({
    caption: `${figure.title}: ${table.title}`,
    columns: table.columns.map(dataColumn),
    rows: Array.from({ length: table.columns[0]?.values.length ?? 0 }, (_, row) => row),
  }));
}

function dataColumn({ name, title, unit, values }) {
  const isNumeric = values.some((value) => typeof value === "number");
  const format = FORMATS[unit] ?? knob;
  const longest = values.slice(0, 200).reduce((most, value) => Math.max(most, isNumeric ? 8 : String(value ?? "").length), title.length);
  return {
    key: name, title, unit: unit === "samples/s" ? unit : "", numeric: isNumeric, width: Math.min(60, longest + 7),
    value: (row) => values[row], cell: (row) => (typeof values[row] === "number" && name === "trial" ? String(values[row]) : format(values[row])),
  };
}
