/** The trials of a job: filtered, sorted, and chosen to be compared. */

import { html, useCallback, useEffect, useMemo, useState } from "./vendor/preact.mjs";
import { Filters, NO_FILTER, passing } from "./filters.mjs";
import { bytes, duration, interval, knob as knobText, number, times } from "./format.mjs";
import { outcomeLook } from "./outcomes.mjs";
import { here, setQuery, trialLink } from "./router.mjs";
import { DataTable } from "./table.mjs";

/** More than these side by side nobody reads. */
const MOST_COMPARED = 8;

export function Trials({ points, job, brushed, onUnbrush }) {
  const [filter, setFilter] = useState(filterOfAddress);
  const [sort, setSort] = useState(sortOfAddress);
  useEffect(() => setQuery({ ...filter, sort: sort.key === "number" && sort.descending ? "" : `${sort.descending ? "-" : ""}${sort.key}` }), [filter, sort]);
  const [chosen, setChosen] = useState([]);
  const rows = useMemo(() => passing(points, filter, brushed), [points, filter, brushed]);
  const choose = useCallback((row) => setChosen((known) => (known.includes(row) ? known.filter((other) => other !== row) : [...known, row].slice(-MOST_COMPARED))), []);
  const columns = useMemo(() => columnsOf(points, job, chosen, choose), [points, job.id, chosen]);
  const clear = () => {
    setFilter(NO_FILTER);
    onUnbrush();
  };
  if (points.size === 0) return null;
  return html`<section aria-labelledby="trials-heading" class="stack">
    <div class="section-top">
      <h2 id="trials-heading">Trials</h2>
      <${CompareLink} job=${job.id} chosen=${chosen} onClear=${() => setChosen([])} />
    </div>
    <${Filters} points=${points} filter=${filter} shown=${rows.length} brushed=${brushed} onClear=${clear}
      onChange=${(changes) => setFilter((known) => ({ ...known, ...changes }))} />
    ${rows.length === 0
      ? html`<p class="state">No trial is like that.</p>`
      : html`<${DataTable} caption="Trials of this job" columns=${columns} rows=${rows} keyOf=${(row) => row} sort=${sort} onSort=${setSort}
          classOf=${(row) => (row === points.bestRow ? "best" : "")} />`}
  </section>`;
}

/** The address has the filters and the order, so that it can be shared. */
function filterOfAddress() {
  const { query } = here();
  return Object.fromEntries(Object.keys(NO_FILTER).map((name) => [name, query.get(name) ?? ""]));
}

function sortOfAddress() {
  const text = here().query.get("sort") ?? "-number";
  return { key: text.replace(/^-/, ""), descending: text.startsWith("-") };
}

function CompareLink({ job, chosen, onClear }) {
  if (chosen.length === 0) return html`<p class="soft">Tick trials to compare them.</p>`;
  const href = `#/compare?trials=${chosen.map((row) => `${job}:${row}`).join(",")}`;
  return html`<p class="actions">
    <a class="button primary" href=${href}>Compare ${chosen.length}</a>
    <button type="button" class="quiet" onClick=${onClear}>Untick all</button>
  </p>`;
}

function columnsOf(points, job, chosen, choose) {
  const { columns } = points;
  const base = points.baselineRow === null ? null : points.rate(points.baselineRow);
  const measure = (key, title, width, cell, unit) => ({ key, title, unit, width, numeric: true, value: (row) => columns[key][row], cell: (row) => cell(columns[key][row], row) });
  return [
    {
      key: "chosen", title: html`<span class="hidden">Compare</span>`, width: 5, fixed: true, value: (row) => row,
      cell: (row) => html`<input type="checkbox" checked=${chosen.includes(row)} aria-label=${`Compare trial ${row}`} onChange=${() => choose(row)} />`,
    },
    { key: "number", title: "Trial", numeric: true, width: 9, value: (row) => row, cell: (row) => html`<a href=${trialLink(job.id, row)}>${row}</a>` },
    { key: "outcome", title: "Outcome", width: 16, value: (row) => wordOf(points, row), cell: (row) => html`<${OutcomeMark} points=${points} row=${row} />` },
    { key: "purpose", title: "Purpose", width: 11, value: (row) => points.purpose(row), cell: (row) => `${points.purpose(row)}${columns.repeat[row] ? ` ${columns.repeat[row]}` : ""}` },
    {
      key: "estimate", title: "Estimate", unit: "samples/s", width: 24, numeric: true, value: (row) => points.estimate(row)?.rate.mean ?? null,
      cell: (row) => estimated(points.estimate(row)),
    },
    measure("rate", "This measurement", 26, (mean, row) => interval(mean, columns.low[row], columns.high[row]), "samples/s"),
    { key: "gain", title: "Gain", width: 10, numeric: true, value: (row) => gain(points, row, base), cell: (row) => times(gain(points, row, base)) },
    measure("peak", "Memory", 13, (value) => bytes(value)),
    measure("predicted_rate", "Predicted", 24, (value) => number(value, 4), "samples/s"),
    ...points.varied.map((knob) => ({
      key: `knob-${knob.name}`, title: knob.name, width: Math.max(10, knob.name.length + 5), numeric: typeof knob.values[0] === "number",
      value: (row) => points.value(knob, row), cell: (row) => knobText(points.value(knob, row)),
    })),
    { key: "seconds", title: "Ran", numeric: true, width: 12, value: (row) => points.seconds(row), cell: (row) => duration(points.seconds(row)) },
    { key: "node", title: "Node", width: 18, value: (row) => points.node(row) },
    { key: "cause", title: "Why", width: 26, value: (row) => points.cause(row) },
  ];
}

const estimated = (standing) => standing && interval(standing.rate.mean, standing.rate.low, standing.rate.high);

/** Of a configuration: that of a repeat is at the trial that it repeats. */
function gain(points, row, base) {
  const rate = points.isRepeat(row) ? null : points.rate(row);
  return rate === null || !base ? null : rate / base;
}

function wordOf(points, row) {
  const outcome = points.outcome(row);
  return outcome === null && !points.isRunning(row) ? "Waiting" : outcomeLook(outcome).label;
}

function OutcomeMark({ points, row }) {
  const { mark, color } = outcomeLook(points.outcome(row));
  return html`<span class="mark" aria-hidden="true" style=${{ color: `var(${color})` }}>${mark}</span> ${wordOf(points, row)}`;
}
