/** What a job was asked for. */

import { html } from "./vendor/preact.mjs";
import { Assumed } from "./assumed.mjs";
import { bytes, knob } from "./format.mjs";

export const shown = (name, value) => {
  if (name.endsWith("_bytes") || name === "memory_limit") return bytes(value);
  return typeof value === "object" ? JSON.stringify(value) : typeof value === "number" || typeof value === "boolean" ? knob(value) : String(value);
};

const LABELS = ["name", "tags", "note"]; // at the top of the page
export const isSaid = (value) => value !== null && value !== undefined && value !== "" && !(typeof value === "object" && Object.keys(value).length === 0);

export function RequestCard({ job, points }) {
  const fields = Object.entries(job.request).filter(([name, value]) => isSaid(value) && !LABELS.includes(name));
  const constants = Object.entries(points.constants);
  return html`<section class="stack asked" aria-labelledby="request-heading">
    <h2 id="request-heading">What was asked for</h2>
    <div class="charts loose">
      <div class="card"><dl class="plain-list">${fields.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${shown(name, value)}</dd>`)}</dl></div>
      ${job.assumed.length > 0 && html`<div class="card"><h3>Assumed, because nobody stated it</h3><${Assumed} assumed=${job.assumed} /></div>`}
      ${constants.length > 0 && html`<details class="card">
        <summary>Knobs with one value</summary>
        <dl class="plain-list">${constants.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${knob(value)}</dd>`)}</dl>
      </details>`}
    </div>
  </section>`;
}
