/** From the first trial to each other one: the knobs that differ, and what each is predicted to do. */

import { html, useEffect, useState } from "../vendor/preact.mjs";
import { knob, share } from "../format.mjs";
import { trialLink } from "../router.mjs";
import { ask } from "../service.mjs";
import { DataTable } from "../table.mjs";

/** @param {{subjects: import("./subjects.mjs").TrialSubject[]}} props - effects are known between trials of one job */
export function Effects({ subjects: [first, ...others] }) {
  const pairs = others.filter(({ job }) => job.id === first.job.id);
  return pairs.map((other) => html`<${Pair} key=${`${first.trial.number} ${other.trial.number}`} job=${first.job.id} number=${first.trial.number} other=${other.trial.number} />`);
}

function Pair({ job, number: one, other }) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    const ended = new AbortController();
    ask(`/v1/jobs/${job}/trials/${one}/differences?other=${other}`, { signal: ended.signal }).then(setFound, () => {}); // the table above says what differs
    return () => ended.abort();
  }, [job, one, other]);
  if (found === null || found.knobs.length === 0) return null;
  const id = `effects-${one}-${other}`;
  return html`<section class="stack" aria-labelledby=${id}>
    <h3 id=${id}>From <a href=${trialLink(job, one)}>trial ${one}</a> to <a href=${trialLink(job, other)}>trial ${other}</a></h3>
    <p class="soft">${summaryOf(found)}</p>
    <${DataTable} caption=${`Predicted effects from trial ${one} to trial ${other}`} columns=${COLUMNS} rows=${found.knobs} keyOf=${({ knob: name }) => name} />
  </section>`;
}

function summaryOf({ measured_speed: measured, total, note }) {
  const speeds = [[measured, "measured"], [total?.speed ?? null, "predicted"]].filter(([value]) => value !== null);
  return `${speeds.map(([value, how]) => `Samples/s ${how}: ${share(value - 1, true)}. `).join("")}Effects ${note || "are predicted"}. The effect of a knob depends on the others: it is given as the first change, and as the last.`;
}

const effect = (key, title, part) => ({ key: `${key} ${part}`, title, width: 18, numeric: true, value: (row) => row[key]?.[part] ?? null, cell: (row) => (row[key] ? share(row[key][part] - 1, true) : null) });
const COLUMNS = [
  { key: "knob", title: "Knob", width: 28, value: (row) => row.knob },
  { key: "before", title: "Before", width: 14, fixed: true, value: (row) => knob(row.before) },
  { key: "after", title: "After", width: 14, fixed: true, value: (row) => knob(row.after) },
  effect("first", "Speed, first", "speed"),
  effect("last", "Speed, last", "speed"),
  effect("first", "Memory, first", "peak_memory"),
  effect("last", "Memory, last", "peak_memory"),
];
