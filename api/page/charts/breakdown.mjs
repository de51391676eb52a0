/** Bars that are divided: where a step goes, and what memory holds, of the best, the baseline and the runner-up. */

import { html } from "../vendor/preact.mjs";
import { bytes, duration, share } from "../format.mjs";
import { rowsOf } from "./figure_data.mjs";

export const TIME = {
  compute: ["Compute", 1], tensor: ["Tensor parallel", 2], pipeline: ["Pipeline bubble", 3], data: ["Data parallel", 5],
  optimizer: ["Optimizer", 4], offload: ["Offload", 6], unexplained: ["Unexplained", 0],
};
/** Tags of memory in a colour each; further ones take what is left. */
const MEMORY = {
  parameters: ["Parameters", 1], gradients: ["Gradients", 2], optimizer_state: ["Optimizer state", 4],
  activations: ["Activations", 3], buffers: ["Buffers", 5], communication: ["Communication", 6],
};
const FURTHER = [7, 8, 0];

export function TimeBreakdown({ figure }) {
  const parts = rowsOf(figure, "parts").map(({ configuration, trial, part, seconds }) => ({ configuration, trial, part, size: seconds }));
  return html`<${Divided} parts=${parts} words=${TIME} format=${duration} marks=${[]} />`;
}

export function MemoryBreakdown({ figure }) {
  const parts = rowsOf(figure, "tags").map(({ configuration, trial, tag, bytes: size }) => ({ configuration, trial, part: tag, size }));
  return html`<${Divided} parts=${parts} words=${MEMORY} format=${bytes} marks=${figure.marks.filter(({ name }) => name === "limit")} />`;
}

export function Divided({ parts, words, format, marks }) {
  const groups = [...Map.groupBy(parts, ({ configuration }) => configuration)].map(([name, own]) => ({
    name, own, trial: own[0].trial, whole: own.reduce((sum, { size }) => sum + size, 0),
  }));
  const most = Math.max(...groups.map(({ whole }) => whole), ...marks.map(({ value }) => value));
  const names = [...new Set([...Object.keys(words), ...parts.map(({ part }) => part)])].filter((name) => parts.some(({ part }) => part === name));
  const look = lookOf(names, words);
  return html`<div class="divided">
    <ul class="legend">${names.map((name) => html`<li key=${name}><span class=${`swatch fill-${look(name).color}`} aria-hidden="true"></span>${look(name).label}</li>`)}</ul>
    ${groups.map((group) => html`<${Bar} key=${group.name} group=${group} most=${most} look=${look} format=${format} marks=${marks} />`)}
    ${marks.map(({ title }) => html`<p key=${title} class="soft mark-note"><span class="mark-line" aria-hidden="true"></span>${title}</p>`)}
  </div>`;
}

function Bar({ group: { name, own, trial, whole }, most, look, format, marks }) {
  return html`<div class="divided-row">
    <p><strong>${name}</strong> <span class="soft">trial ${trial}, ${format(whole)}</span></p>
    <div class="divided-track">
      <ul class="divided-bar" style=${{ width: `${(100 * whole) / most}%` }} aria-label=${`${name}: ${format(whole)}`}>
        ${own.map(({ part, size }) => html`<li key=${part} class=${`fill-${look(part).color}`} style=${{ flexGrow: size / whole }} title=${`${look(part).label}: ${format(size)}, ${share(size / whole)}`}>
          <span class=${size / most > 0.09 ? "" : "hidden"}><span class="hidden">${look(part).label} </span>${size / whole > 0.995 ? "100 %" : `${Math.round((100 * size) / whole)} %`}</span>
        </li>`)}
      </ul>
      ${marks.map(({ name: key, value }) => html`<span key=${key} class="divided-mark" style=${{ left: `${(100 * value) / most}%` }} aria-hidden="true"></span>`)}
    </div>
  </div>`;
}

function lookOf(names, words) {
  const further = names.filter((name) => !(name in words));
  return (name) => {
    const [label, color] = words[name] ?? [name.replaceAll("_", " "), FURTHER[further.indexOf(name) % FURTHER.length]];
    return { label, color };
  };
}
