/** The model's modules with their time, FLOPs and memory, opened and closed like folders. */

import { html, useMemo, useState } from "../vendor/preact.mjs";
import { bytes, count, duration, share } from "../format.mjs";
import { flops, rowsOf } from "./figure_data.mjs";

export function ModuleTree({ figure }) {
  const modules = useMemo(() => withFamily(rowsOf(figure, "modules")), [figure]);
  const [open, setOpen] = useState(() => new Set(modules.filter(({ depth }) => depth === 0).map(({ place }) => place)));
  const toggle = (place) => {
    const next = new Set(open);
    if (!next.delete(place)) next.add(place);
    setOpen(next);
  };
  const shown = modules.filter(({ above }) => above.every((place) => open.has(place)));
  return html`<div class="table-box full" tabindex="0" role="region" aria-label=${figure.title}>
    <table>
      <caption class="hidden">${figure.title}</caption>
      <thead><tr>
        <th scope="col">Module</th><th scope="col" class="number">Time of a step</th><th scope="col" class="number">FLOPs</th>
        <th scope="col">Share of the FLOPs</th><th scope="col" class="number">Memory of states</th><th scope="col" class="number">Parameters</th>
      </tr></thead>
      <tbody>${shown.map((module) => html`<${Row} key=${module.place} module=${module} isOpen=${open.has(module.place)} onToggle=${toggle} />`)}</tbody>
    </table>
  </div>`;
}

function Row({ module, isOpen, onToggle }) {
  const { place, label, depth, count: alike, hasParts, seconds, flops: work, share: part, memory_bytes: memory, parameters } = module;
  return html`<tr>
    <th scope="row" class="module" style=${{ paddingLeft: `${8 + 20 * depth}px` }}>
      ${hasParts
        ? html`<button type="button" class="quiet small" aria-expanded=${String(isOpen)} onClick=${() => onToggle(place)}><span aria-hidden="true">${isOpen ? "▾" : "▸"}</span>${label}</button>`
        : html`<span class="leaf">${label}</span>`}
      ${alike > 1 && html`<span class="soft"> × ${count(alike)}</span>`}
    </th>
    <td class="number">${duration(seconds)}</td>
    <td class="number">${flops(work)}</td>
    <td><span class="share"><span class="bar-track" aria-hidden="true"><span class="bar" style=${{ width: `${100 * (part ?? 0)}%` }}></span></span><span class="share-value">${share(part)}</span></span></td>
    <td class="number">${bytes(memory)}</td>
    <td class="number">${count(parameters)}</td>
  </tr>`;
}

/** Each module with those that it is in. */
function withFamily(modules) {
  const path = [];
  return modules.map((module, place) => {
    path.length = module.depth;
    const above = [...path];
    path.push(place);
    return { ...module, place, above, hasParts: (modules[place + 1]?.depth ?? 0) > module.depth };
  });
}
