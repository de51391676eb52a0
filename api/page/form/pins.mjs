/** Knobs with values of one's own: what is searched of them, or where the baseline stands. */

import { html } from "../vendor/preact.mjs";
import { knobText, knobValues } from "./fields.mjs";

let count = 0;

/** Rows as they are entered, from knobs of a request. */
export const enteredPins = (pins) => Object.entries(pins ?? {}).map(([name, values]) => ({ id: ++count, name, text: knobText(values) }));

/** Knobs of a request from rows; rows that are not filled in are left out. */
export const sentPins = (rows) => Object.fromEntries(rows.filter(({ name, text }) => name && text.trim()).map(({ name, text }) => [name, knobValues(text)]));

/**
 * @param {object} props
 * @param {string} props.field - of the request, such as `pins`
 * @param {string} props.label
 * @param {{name: string, domain: string, unit: string, description: string}[]} props.knobs
 * @param {{id: number, name: string, text: string}[]} props.rows
 */
export function Pins({ field, label, hint, knobs, rows, problems, onChange }) {
  const put = (id, changes) => onChange(rows.map((row) => (row.id === id ? { ...row, ...changes } : row)));
  const add = () => onChange([...rows, { id: ++count, name: "", text: "" }]);
  return html`<fieldset class="pins">
    <legend>${label}</legend>
    <p class="hint" id=${`field-${field}-hint`}>${hint}</p>
    ${rows.map((row) => html`<${Row} key=${row.id} field=${field} row=${row} knobs=${knobs} problems=${problems[`${field}.${row.name}`]}
      onChange=${(changes) => put(row.id, changes)} onRemove=${() => onChange(rows.filter(({ id }) => id !== row.id))} />`)}
    ${(problems[field] ?? []).length > 0 && html`<p class="field-problem">${problems[field].join(" ")}</p>`}
    <p><button type="button" class="small" onClick=${add}>Add a knob</button></p>
  </fieldset>`;
}

function Row({ field, row, knobs, problems = [], onChange, onRemove }) {
  const id = `field-${field}-${row.id}`;
  const knob = knobs.find(({ name }) => name === row.name);
  return html`<div class="pin" role="group" aria-label=${row.name || "New knob"}>
    <select aria-label="Knob" value=${row.name} onChange=${(event) => onChange({ name: event.target.value })}>
      <option value="" selected=${!row.name}>Choose a knob</option>
      ${knobs.map(({ name }) => html`<option key=${name} value=${name} selected=${name === row.name}>${name}</option>`)}
    </select>
    <input type="text" aria-label=${`Values of ${row.name || "the knob"}`} autocomplete="off" value=${row.text} placeholder=${knob?.domain ?? "1, 2, 4"}
      aria-invalid=${problems.length ? "true" : undefined} aria-describedby=${`${id}-hint`} onInput=${(event) => onChange({ text: event.target.value })} />
    <button type="button" class="quiet icon" aria-label=${`Remove ${row.name || "this knob"}`} onClick=${onRemove}><span aria-hidden="true">✕</span></button>
    <p class=${problems.length ? "field-problem" : "hint"} id=${`${id}-hint`}>${problems.length ? problems.join(" ") : knob?.description ?? ""}</p>
  </div>`;
}
