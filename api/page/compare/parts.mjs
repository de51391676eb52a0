/** A whole and its parts, as a bar and in words. */

import { html } from "../vendor/preact.mjs";

const COLORS = 8;

/**
 * @param {object} props
 * @param {{name: string, value: number}[] | null} props.parts - in an order of their own, which tells their colours
 * @param {(value: number) => string} props.format
 */
export function Parts({ parts, format }) {
  const whole = parts?.reduce((sum, { value }) => sum + value, 0);
  if (!whole) return "–";
  const shown = parts.map((part, index) => ({ ...part, color: `var(--series-${(index % COLORS) + 1})` })).filter(({ value }) => value > 0);
  return html`
    <span class="parts" aria-hidden="true">${shown.map(({ name, value, color }) => html`<span key=${name} title=${`${name}: ${format(value)}`} style=${{ width: `${(100 * value) / whole}%`, background: color }}></span>`)}</span>
    <ul class="key-colors">${shown.map(({ name, value, color }) => html`<li key=${name}><span class="swatch" style=${{ background: color }} aria-hidden="true"></span>${name} ${format(value)}</li>`)}</ul>`;
}
