/** Tables that sort by any column, and draw only the rows that are seen. */

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact.mjs";

/**
 * @typedef {object} Column
 * @property {string} key
 * @property {string} title
 * @property {string} [unit]
 * @property {(row: any) => any} value - what is sorted by; null: nothing is known, and comes last
 * @property {(row: any) => any} [cell] - what is shown, where it is not the value
 * @property {boolean} [numeric]
 * @property {number} [width] - characters
 * @property {boolean} [fixed] - whether it cannot be sorted by
 */

const ROW = 34;
const MARGIN = 2;
/** Rows that are drawn: the style sheet has room for 18, and up to two margins are above them. */
const DRAWN = 18 + 4 * MARGIN;
/** Tables of fewer rows are drawn whole: a browser's search finds everything in them. */
const WHOLE = 120;

/**
 * @param {object} props
 * @param {string} props.caption - what the table holds
 * @param {Column[]} props.columns
 * @param {any[]} props.rows
 * @param {(row: any) => any} [props.keyOf]
 * @param {(row: any) => string} [props.classOf]
 * @param {{key: string, descending: boolean}} [props.sort] - where the caller keeps it
 * @param {(sort: object) => void} [props.onSort]
 */
export function DataTable({ caption, columns, rows, keyOf, classOf = () => "", sort, onSort }) {
  const [own, setOwn] = useState({ key: "", descending: false });
  const order = sort ?? own;
  const sorted = useMemo(() => inOrder(rows, columns, order), [rows, columns, order]);
  const box = useRef(null);
  const [first, last] = useVisible(box, sorted.length);
  const shown = sorted.slice(first, last);
  const isWhole = sorted.length <= WHOLE;
  return html`<div class=${`table-box${isWhole ? "" : " tall"}`} ref=${box} tabindex="0" role="region" aria-label=${caption}>
    <table class=${isWhole ? "" : "even"} aria-rowcount=${sorted.length + 1}>
      <caption class="hidden">${caption}</caption>
      <colgroup>${columns.map(({ key, width = 12 }) => html`<col key=${key} style=${{ width: `${width}ch` }} />`)}</colgroup>
      <thead><tr aria-rowindex="1">
        ${columns.map((column) => html`<${Header} key=${column.key} column=${column} order=${order} onSort=${onSort ?? setOwn} />`)}
      </tr></thead>
      <tbody>
        <${Gap} rows=${first} columns=${columns.length} />
        ${shown.map((row, index) => html`<${Row} key=${keyOf ? keyOf(row) : first + index} row=${row} columns=${columns} look=${classOf(row)}
          place=${first + index + 2} />`)}
        <${Gap} rows=${sorted.length - last} columns=${columns.length} />
      </tbody>
    </table>
  </div>`;
}

/** Scrolling draws only the rows that come into sight: the same ones with the same columns stay as they are. */
function Row({ row, columns, look, place }) {
  return useMemo(() => html`<tr class=${look} aria-rowindex=${place}>
    ${columns.map((column) => html`<td key=${column.key} class=${column.numeric ? "number" : ""}>${shownCell(column, row)}</td>`)}
  </tr>`, [row, columns, look, place]);
}

function shownCell(column, row) {
  const value = (column.cell ?? column.value)(row);
  return value === null || value === undefined ? "–" : value;
}

function Header({ column, order, onSort }) {
  const { key, title, unit, numeric, fixed } = column;
  const isBy = order.key === key;
  const label = html`${title}${unit && html` <span class="unit">${unit}</span>`}`;
  if (fixed) return html`<th scope="col" class=${numeric ? "number" : ""}>${label}</th>`;
  const next = { key, descending: isBy ? !order.descending : Boolean(numeric) };
  return html`<th scope="col" class=${numeric ? "number" : ""} aria-sort=${isBy ? (order.descending ? "descending" : "ascending") : undefined}>
    <button type="button" onClick=${() => onSort(next)}>${label}<span class="arrow" aria-hidden="true">${isBy ? (order.descending ? "▼" : "▲") : ""}</span></button>
  </th>`;
}

/** As much room as the rows would take that are not drawn. */
function Gap({ rows, columns }) {
  return rows > 0 && html`<tr aria-hidden="true" class="gap"><td colspan=${columns} style=${{ height: `${rows * ROW}px` }}></td></tr>`;
}

/** Which rows are drawn: those in sight, and some above and below. It changes some rows at a time, not with every pixel. */
function useVisible(box, size) {
  const [first, setFirst] = useState(0);
  useEffect(() => {
    const element = box.current;
    const look = () => setFirst(Math.max(0, (Math.floor(element.scrollTop / ROW / MARGIN) - 1) * MARGIN));
    element.addEventListener("scroll", look, { passive: true });
    return () => element.removeEventListener("scroll", look);
  }, []);
  useLayoutEffect(() => {
    if (first > size) box.current.scrollTop = 0;
  }, [size]);
  if (size <= WHOLE) return [0, size];
  const from = Math.max(0, Math.min(first, size - DRAWN));
  return [from, Math.min(size, from + DRAWN)];
}

/** The rows by a column. Equal ones stay in the order in which they were; what is not known comes last. */
function inOrder(rows, columns, { key, descending }) {
  const column = columns.find((candidate) => candidate.key === key);
  if (!column) return rows;
  const sign = descending ? -1 : 1;
  const keyed = rows.map((row) => [column.value(row), row]);
  keyed.sort(([one], [other]) => {
    if (one === null || one === undefined) return other === null || other === undefined ? 0 : 1;
    if (other === null || other === undefined) return -1;
    if (typeof one === "number" && typeof other === "number") return sign * (one - other);
    return sign * (String(one) < String(other) ? -1 : String(one) > String(other) ? 1 : 0);
  });
  return keyed.map(([, row]) => row);
}
