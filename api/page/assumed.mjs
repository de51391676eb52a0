/** What nobody stated, and what the answer would be with other values. */

import { html } from "./vendor/preact.mjs";
import { bytes, knob, number } from "./format.mjs";

/**
 * @param {object} props
 * @param {object[]} props.assumed - `AssumedValue`s, most consequential first
 * @param {Record<string, string>} [props.labels] - name -> the entry of a form that states it, in place of the option of the command line
 */
export function Assumed({ assumed, labels = {} }) {
  return html`<ul class="assumed">${assumed.map((item) => {
    const stated = labels[item.name] ?? item.stated_by;
    const decisive = item.alternatives.filter((answer) => answer.changes_verdict || answer.changes_rate || answer.choice);
    return html`<li key=${item.text}>${item.text}${stated && html` <span class="soft">(${stated})</span>`}
      ${decisive.length > 0 && html`<ul class="soft">${decisive.map((answer) => html`<li key=${String(answer.value)}>with ${valueText(item.name, answer.value)}: <${Answer} answer=${answer} /></li>`)}</ul>`}
    </li>`;
  })}</ul>`;
}

function valueText(name, value) {
  if (name.endsWith("_bandwidth")) return `${number(value / 1e9)} GB/s`;
  return name.endsWith("_bytes") ? bytes(value) : knob(value);
}

function Answer({ answer }) {
  const { verdict, peak_memory_bytes: peak, tokens_per_second: tokens, samples_per_second: samples, changes_verdict: isOther, changes_rate: hasRate, choice } = answer;
  return html`${isOther ? html`<strong>${verdict}</strong>` : verdict} (${bytes(peak)}${hasRate ? `, ${tokens === null ? `${number(samples)} samples/s` : `${number(tokens)} tokens/s`}` : ""})${choice && `, and best is ${choice}`}`;
}
