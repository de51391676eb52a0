/** Things beside each other, a column each: what differs is marked. */

import { html } from "../vendor/preact.mjs";

/**
 * @typedef {object} Line
 * @property {string} title
 * @property {(subject: any) => any} value - what is compared; null or undefined: nothing is known
 * @property {(subject: any) => any} [cell] - what is shown, where it is not the value
 * @property {boolean} [isHeading] - whether it begins a group of lines, and has no values
 * @property {boolean} [isFigure] - whether it is measured: then another value is no difference to be marked
 */

/**
 * @param {object} props
 * @param {string} props.caption
 * @param {any[]} props.subjects
 * @param {(subject: any) => any} props.header
 * @param {Line[]} props.lines
 */
export function Beside({ caption, subjects, header, lines }) {
  return html`<div class="table-box" tabindex="0" role="region" aria-label=${caption}>
    <table class="compared">
      <caption class="hidden">${caption}</caption>
      <thead><tr><td></td>${subjects.map((subject, index) => html`<th scope="col" key=${index}>${header(subject)}</th>`)}</tr></thead>
      <tbody>${lines.map((line) => html`<${Row} key=${line.title} line=${line} subjects=${subjects} />`)}</tbody>
    </table>
  </div>`;
}

function Row({ line, subjects }) {
  if (line.isHeading) return html`<tr class="group-row"><th scope="rowgroup" colspan=${subjects.length + 1}>${line.title}</th></tr>`;
  const isOther = !line.isFigure && differs(line, subjects);
  return html`<tr class=${isOther ? "differs" : ""}>
    <th scope="row">${line.title}${isOther && html`<span class="hidden"> (differs)</span>`}</th>
    ${subjects.map((subject, index) => html`<td key=${index}>${shown(line, subject)}</td>`)}
  </tr>`;
}

/** Whether the subjects do not all have the same value. */
export function differs({ value }, subjects) {
  return new Set(subjects.map((subject) => JSON.stringify(value(subject) ?? null))).size > 1;
}

function shown(line, subject) {
  const found = (line.cell ?? line.value)(subject);
  return found === null || found === undefined || found === "" ? "–" : found;
}
