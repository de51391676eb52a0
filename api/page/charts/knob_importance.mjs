/** How much of the variance of samples/s each knob accounts for. */

import { html } from "../vendor/preact.mjs";
import { share } from "../format.mjs";
import { rowsOf } from "./figure_data.mjs";

export function KnobImportance({ figure }) {
  const knobs = rowsOf(figure, "knobs");
  const most = Math.max(...knobs.map(({ high, importance }) => high ?? importance), 0.01);
  const at = (value) => `${(100 * value) / most}%`;
  return html`<ol class="bars">
    ${knobs.map(({ knob, importance, low, high, best }) => html`<li key=${knob}>
      <span class="bar-name">${knob}${best !== null && html` <span class="soft">= ${best}</span>`}</span>
      <span class="bar-value">${share(importance)}</span>
      <span class="bar-track" aria-hidden="true">
        <span class="bar" style=${{ width: at(importance) }}></span>
        ${low !== null && html`<span class="whisker" style=${{ left: at(low), width: at(high - low) }}></span>`}
      </span>
    </li>`)}
  </ol>`;
}
