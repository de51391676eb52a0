/** The frame of every figure: its title, what it says in one sentence, the picture, and the same figures as a table. */

import { html, useMemo, useState } from "../vendor/preact.mjs";
import { DataTable } from "../table.mjs";

/**
 * @param {object} props
 * @param {string} props.name - of the figure; in the page's addresses and tests
 * @param {string} props.title
 * @param {string} props.summary - one sentence that says what is seen
 * @param {() => {caption: string, columns: import("../table.mjs").Column[], rows: any[]}[]} [props.tables]
 * @param {{value: string, label: string}[]} [props.choices] - what the figure can be drawn over
 * @param {string} [props.choice]
 * @param {(value: string) => void} [props.onChoice]
 * @param {any} props.children - the picture; nothing: there is none, and the summary says why
 */
export function FigureCard({ name, title, summary, tables, choices, choice, onChoice, children }) {
  const [asTable, setAsTable] = useState(false);
  const hasPicture = Boolean(children);
  return html`<figure class="card chart" data-figure=${name} aria-labelledby=${`figure-${name}`}>
    <div class="chart-top">
      <h3 id=${`figure-${name}`}>${title}</h3>
      ${hasPicture && choices && html`<${Choices} name=${name} choices=${choices} choice=${choice} onChoice=${onChoice} />`}
      ${hasPicture && tables && html`<button type="button" class="quiet small" aria-pressed=${String(asTable)} onClick=${() => setAsTable(!asTable)}>
        ${asTable ? "As picture" : "As table"}<span class="hidden">: ${title}</span>
      </button>`}
    </div>
    <figcaption class="soft">${summary}</figcaption>
    ${hasPicture && (asTable ? html`<${Tables} tables=${tables} />` : children)}
  </figure>`;
}

function Choices({ name, choices, choice, onChoice }) {
  return html`<fieldset class="choices">
    <legend class="hidden">Drawn over</legend>
    ${choices.map(({ value, label }) => html`<label key=${value}>
      <input type="radio" name=${`choice-${name}`} value=${value} checked=${choice === value} onChange=${() => onChoice(value)} /><span>${label}</span>
    </label>`)}
  </fieldset>`;
}

function Tables({ tables }) {
  const made = useMemo(tables, [tables]);
  return made.map(({ caption, columns, rows }) => html`<div class="chart-table" key=${caption}>
    <p class="soft">${caption}</p>
    <${DataTable} caption=${caption} columns=${columns} rows=${rows} />
  </div>`);
}
