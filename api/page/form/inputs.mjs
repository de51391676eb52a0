/** Entries of a form: each with its label, its hint, and what is wrong with it. */

import { html } from "../vendor/preact.mjs";
import { count } from "../format.mjs";
import { applies, entered, isRequired } from "./fields.mjs";

/**
 * @param {object} props
 * @param {string} props.name - of the field in the request; problems name it so
 * @param {string} props.label
 * @param {string} [props.hint]
 * @param {boolean} [props.mustBe] - whether it must be entered
 * @param {string[]} [props.problems]
 * @param {(attributes: object) => any} props.children - draws the entry with these attributes
 */
export function Labelled({ name, label, unit, hint, mustBe = false, problems = [], isInline = false, children }) {
  const id = `field-${name}`;
  const described = [hint && `${id}-hint`, problems.length > 0 && `${id}-problem`].filter(Boolean).join(" ");
  const entry = children({ id, name, required: mustBe, "aria-describedby": described || undefined, "aria-invalid": problems.length > 0 ? "true" : undefined });
  return html`<div class=${`field${isInline ? " switch" : ""}`}>
    ${isInline && entry}
    <label for=${id}>${label}${unit && html` <span class="unit">${unit}</span>`}${mustBe && html` <span class="badge">required</span>`}</label>
    ${!isInline && entry}
    ${hint && html`<p class="hint" id=${`${id}-hint`}>${hint}</p>`}
    ${problems.length > 0 && html`<p class="field-problem" id=${`${id}-problem`}>${problems.join(" ")}</p>`}
  </div>`;
}

/** A field of the request by its description. */
export function Entry({ field, choices, values, problems, model, cluster, onChange }) {
  if (!applies(field, values, choices)) return null;
  const { name, label, measure, kind } = field;
  const most = name === "sequence_length" && choices.models.find((choice) => model.kind === "preset" && choice.name === model.preset)?.sequence_length;
  const hint = most ? `${field.hint} ${model.preset} takes at most ${count(most)}.` : field.hint;
  const value = values[name] ?? "";
  const standard = entered(field, choices.defaults[name]);
  const more = { name, label, hint, mustBe: isRequired(field, model, cluster, choices), problems: problems[name] };
  if (kind === "switch") {
    const isOn = value === "" ? standard === true : value === true;
    return html`<${Labelled} ...${more} isInline=${true}>${(attributes) => html`<input type="checkbox" ...${attributes} checked=${isOn}
      onChange=${(event) => onChange(name, event.target.checked)} />`}<//>`;
  }
  if (kind === "choice") {
    return html`<${Labelled} ...${more}>${(attributes) => html`<${Select} attributes=${attributes} options=${field.options} unset="By default"
      value=${value || standard} onChange=${(chosen) => onChange(name, chosen)} />`}<//>`;
  }
  const shownUnit = kind === "percent" ? "%" : kind === "bytes" ? "such as 16 GiB" : measure;
  return html`<${Labelled} ...${more} unit=${shownUnit}>${(attributes) => html`<input type="text" ...${attributes}
    inputmode=${["bytes", "text", "texts", "words"].includes(kind) ? "text" : "decimal"} autocomplete="off" value=${value} placeholder=${String(standard)}
    onInput=${(event) => onChange(name, event.target.value)} />`}<//>`;
}

/** One of several. A value that is none of them is shown as it is; `unset`: what stands for no value. */
export function Select({ attributes, options, value, unset = "Choose one", onChange }) {
  const isKnown = options.some((option) => option.value === value);
  return html`<select ...${attributes} value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${!isKnown && html`<option value=${value} selected>${value || unset}</option>`}
    ${options.map((option) => html`<option key=${option.value} value=${option.value} selected=${option.value === value}>${option.label}</option>`)}
  </select>`;
}

/** A name: one of those that the service lists, or another that it accepts. */
export function Suggested({ attributes, options, value, onChange }) {
  const list = `${attributes.id}-names`;
  return html`<input type="text" ...${attributes} list=${list} autocomplete="off" spellcheck=${false} value=${value} onInput=${(event) => onChange(event.target.value)} />
    <datalist id=${list}>${options.map(({ name, note }) => html`<option key=${name} value=${name}>${note}</option>`)}</datalist>`;
}

/** One of a few, all seen at once. */
export function Radios({ name, legend, options, value, onChange }) {
  return html`<fieldset class="choices">
    <legend class="hidden">${legend}</legend>
    ${options.map((option) => html`<label key=${option.value}>
      <input type="radio" name=${name} value=${option.value} checked=${option.value === value} onChange=${() => onChange(option.value)} /><span>${option.label}</span>
    </label>`)}
  </fieldset>`;
}
