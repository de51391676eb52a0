/** What runs now, as the ranks tell it about once a second. */

import { html, useMemo } from "./vendor/preact.mjs";
import { number } from "./format.mjs";
import { trialLink } from "./router.mjs";
import { useSignal } from "./signal.mjs";

export function Running({ live, points, job }) {
  const progress = useSignal(live.progress);
  const started = useMemo(() => runningRows(points), [points]);
  // A trial tells of itself before the events that it started have been looked up.
  const early = [...progress.keys()].filter((trial) => trial >= points.size);
  const trials = [...started, ...early];
  if (job.state !== "RUNNING" && trials.length === 0) return null;
  return html`<section class="card stack" aria-labelledby="running-heading">
    <h2 id="running-heading" class="minor">Running now</h2>
    ${trials.length === 0
      ? html`<p class="soft">No trial runs at this moment.</p>`
      : html`<ul class="running-list">${trials.map((trial) => html`<${Trial} key=${trial} trial=${trial} sign=${progress.get(trial)} points=${points} job=${job} />`)}</ul>`}
  </section>`;
}

function runningRows(points) {
  const rows = [];
  for (let row = 0; row < points.size; row++) if (points.isRunning(row)) rows.push(row);
  return rows;
}

function Trial({ trial, sign, points, job }) {
  return html`<li>
    <span class="pulse" aria-hidden="true"></span>
    <a href=${trialLink(job.id, trial)}>Trial ${trial}</a>${sign?.attempt > 1 && html` <span class="soft">attempt ${sign.attempt}</span>`}
    <span>${sign ? told(sign) : "starts"}</span>
    <span class="soft mono">${trial < points.size ? points.config(trial) : ""}</span>
  </li>`;
}

function told({ phase, step, samples_per_second: rate, message }) {
  return [phase, step ? `step ${step}` : "", rate === null ? "" : `${number(rate)} samples/s`, message].filter(Boolean).join(", ");
}
