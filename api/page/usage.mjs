/** What one has taken of one's quotas. */

import { html, useEffect, useState } from "./vendor/preact.mjs";
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
  const read = () => void ask("/v1/usage").then(setUsage, setProblem);
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
    </table></div>`;
}
