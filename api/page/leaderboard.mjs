/** The fastest answers of all jobs, by model and cluster. */

import { html, useEffect, useMemo, useState } from "./vendor/preact.mjs";
import { Choice } from "./filters.mjs";
import { count, counted, interval, moment, number, times } from "./format.mjs";
import { here, jobLink, setQuery, trialLink } from "./router.mjs";
import { ask } from "./service.mjs";
import { useTitle } from "./shell.mjs";
import { Heading, Unusable, Waiting } from "./states.mjs";
import { DataTable } from "./table.mjs";

const FILTERS = { model: "Model", cluster: "Cluster" };

export default function Leaderboard() {
  useTitle("Best");
  const [board, setBoard] = useState(null);
  const [problem, setProblem] = useState(null);
  const [filter, setFilter] = useState(() => ({ model: here().query.get("model") ?? "", cluster: here().query.get("cluster") ?? "" }));
  const read = () => void ask("/v1/leaderboard").then(setBoard, setProblem);
  useEffect(read, []);
  const columns = useMemo(() => columnsOf(), []);
  if (problem) return html`<${Unusable} error=${problem} retry=${() => (setProblem(null), read())} />`;
  if (board === null) return html`<${Waiting} what="the best of all jobs" />`;
  const change = (changes) => {
    setFilter({ ...filter, ...changes });
    setQuery(changes);
  };
  const shown = board.items.filter((item) => Object.keys(FILTERS).every((name) => !filter[name] || filter[name] === item[name]));
  return html`<${Heading}>Best by model and cluster<//>
    <p class="soft">The fastest answer of all jobs with the same model, cluster, ranks, batch and sequence length. ${counted(board.jobs, "job")} compared.</p>
    ${board.items.length === 0
      ? html`<p class="state">No job has an answer yet. <a href="#/new">Submit one</a></p>`
      : html`<form class="filters" role="search" aria-label="Filter the best" onSubmit=${(event) => event.preventDefault()}>
          ${Object.entries(FILTERS).map(([name, label]) => html`<${Choice} key=${name} label=${label} value=${filter[name]} options=${valuesOf(board.items, name)} onChange=${(value) => change({ [name]: value })} />`)}
        </form>
        <${DataTable} caption="The fastest answers" columns=${columns} rows=${shown} keyOf=${({ job }) => job} />`}`;
}

const valuesOf = (items, name) => [...new Set(items.map((item) => item[name]))].sort().map((value) => [value, value]);

const wrapped = (content) => html`<span class="wrapped">${content}</span>`;

function columnsOf() {
  const field = (key, title, width, more = {}) => ({ key, title, width, value: (row) => row[key], ...more });
  const counted = (key, title, width, unit) => field(key, title, width, { unit, numeric: true, cell: (row) => count(row[key]) });
  const tokens = (row) => row.rate.mean * row.sequence_length;
  return [
    field("model", "Model", 16),
    field("cluster", "Cluster", 14),
    counted("ranks", "Ranks", 8),
    counted("global_batch_size", "Batch", 9),
    counted("sequence_length", "Length", 10, "tokens"),
    { key: "rate", title: "Best", unit: "samples/s", width: 26, numeric: true, value: (row) => row.rate.mean, cell: ({ rate }) => interval(rate.mean, rate.low, rate.high) },
    { key: "tokens", title: "Tokens", unit: "tokens/s", width: 14, numeric: true, value: tokens, cell: (row) => number(tokens(row)) },
    { key: "gain", title: "Gain", width: 10, numeric: true, value: ({ gain }) => gain?.mean ?? null, cell: ({ gain }) => gain && times(gain.mean) },
    { key: "created", title: "Measured", width: 30, value: ({ created }) => created, cell: ({ created, submitter }) => wrapped(`${moment(created)}${submitter && ` by ${submitter}`}`) },
    { key: "job", title: "Job", width: 28, value: ({ name, job }) => name || job, cell: ({ job, name, trial, jobs }) => wrapped(html`<a href=${jobLink(job)}>${name || job}</a>, <a href=${trialLink(job, trial)}>trial ${trial}</a>${jobs > 1 && `, best of ${count(jobs)} jobs`}`) },
  ];
}
