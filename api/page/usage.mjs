/** What one has taken of one's quotas, and the workers that run the jobs. */

import { html, useEffect, useState } from "./vendor/preact.mjs";
import { ago } from "./format.mjs";
import { ask } from "./service.mjs";
import { useTitle } from "./shell.mjs";
import { Heading, Unusable, Waiting } from "./states.mjs";

const TOLD = {
  queued_jobs: "Jobs that wait",
  stored_bytes: "Bytes of requests and of what trials printed",
  streams: "Open streams of events and logs",
  device_hours: "Device-hours today (UTC)",
  webhooks: "Webhooks",
};

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });

export default function Usage() {
  useTitle("Usage");
  const [usage, setUsage] = useState(null);
  const [problem, setProblem] = useState(null);
  const read = () => void Promise.all([ask("/v1/usage"), ask("/v1/workers")]).then(([used, { items }]) => setUsage({ ...used, workers: items }), setProblem);
  useEffect(read, []);
  if (problem) return html`<${Unusable} error=${problem} retry=${() => (setProblem(null), read())} />`;
  if (!usage) return html`<${Waiting} what="what is used" />`;
  return html`<${Heading}>Usage<//>
    <p>What ${usage.submitter ? html`<strong>${usage.submitter}</strong> has` : "you have"} taken, and may take. What is used up is refused.</p>
    <div class="table-box" tabindex="0" role="region" aria-label="Quotas"><table>
      <caption class="hidden">Quotas</caption>
      <thead><tr><th scope="col">Quota</th><th scope="col">Used</th><th scope="col">Limit</th></tr></thead>
      <tbody>${usage.quotas.map(({ quota, used, limit }) => html`<tr key=${quota}>
        <th scope="row">${TOLD[quota] ?? quota}</th><td>${NUMBER.format(used)}</td><td>${limit === null ? "none" : NUMBER.format(limit)}</td>
      </tr>`)}</tbody>
    </table></div>
    <${Workers} workers=${usage.workers} />`;
}

function Workers({ workers }) {
  return html`<section class="stack" aria-labelledby="workers-heading">
    <h2 id="workers-heading">Workers</h2>
    ${workers.length === 0
      ? html`<p class="problem" role="alert">No worker runs: queued jobs wait. Start one with <code>autotune worker</code>.</p>`
      : html`<div class="table-box" tabindex="0" role="region" aria-label="Workers"><table>
        <caption class="hidden">Workers</caption>
        <thead><tr><th scope="col">Worker</th><th scope="col">Does</th><th scope="col">Takes jobs of</th><th scope="col">Started</th><th scope="col">Health</th></tr></thead>
        <tbody>${workers.map(({ host, pid, started, runners, devices, is_busy: isBusy, problem }) => html`<tr key=${`${host}:${pid}`}>
          <th scope="row">${host}, process ${pid}</th><td>${isBusy ? "runs a job" : "waits"}</td>
          <td>${runners.join(", ") || "every runner"}; ${devices.join(", ") || "every device"}</td>
          <td>${ago(started)}</td><td>${problem ? html`<span aria-hidden="true">✕</span> ${problem}` : "well"}</td>
        </tr>`)}</tbody>
      </table></div>`}
  </section>`;
}
