/** What each rank of the winner's pipeline computes when. */

import { html, useMemo } from "../vendor/preact.mjs";
import { duration, share } from "../format.mjs";
import { rowsOf } from "./figure_data.mjs";

const KINDS = {
  forward: ["Forward", 1],
  backward: ["Backward", 2],
  input_gradient: ["Gradient of inputs", 2],
  weight_gradient: ["Gradient of weights", 3],
};
const LANE = 34;
/** Boxes narrower than this share of the step have no room for their number. */
const LEGIBLE = 0.018;

export function PipelineSchedule({ figure }) {
  const drawn = useMemo(() => layOut(figure), [figure]);
  const { ranks, end, shapes, labels, kinds } = drawn;
  const hasSeveral = shapes.some(({ shade }) => shade);
  const height = LANE * ranks.length;
  return html`<div class="schedule">
    <ul class="legend">${kinds.map((kind) => html`<li key=${kind}><span class=${`swatch fill-${KINDS[kind][1]}`} aria-hidden="true"></span>${KINDS[kind][0]}</li>`)}
      ${hasSeveral && html`<li>Paler: a further stage of the rank</li>`}</ul>
    <div class="schedule-grid">
      <ul class="schedule-names">${ranks.map(({ rank, idle_share: idle }) => html`<li key=${rank} style=${{ height: `${LANE}px` }}>Rank ${rank} <span class="soft">waits ${share(idle)}</span></li>`)}</ul>
      <div class="schedule-box" tabindex="0" role="group" aria-label=${figure.summary}>
        <svg class="schedule-picture" height=${height} aria-hidden="true">
          <svg viewBox=${`0 0 1000 ${height}`} preserveAspectRatio="none" width="100%" height=${height}>
            ${shapes.map(({ kind, shade, path }) => html`<path key=${kind + shade} d=${path} class=${`shape-${KINDS[kind][1]}${shade ? " pale" : ""}`} />`)}
          </svg>
          ${labels.map(({ key, x, y, text, kind, shade }) => html`<text key=${key} class=${`on-${KINDS[kind][1]}${shade ? " pale" : ""}`} x=${x} y=${y}>${text}</text>`)}
        </svg>
        <p class="schedule-axis soft"><span>0</span><span>${duration(end / 2)}</span><span>${duration(end)}</span></p>
      </div>
    </div>
  </div>`;
}

/** One path for all boxes of a kind: thousands of elements of their own would be slow. Every other stage of a rank is paler. */
function layOut(figure) {
  const actions = rowsOf(figure, "actions");
  const ranks = rowsOf(figure, "ranks");
  const end = actions.reduce((most, action) => Math.max(most, action.end), 0);
  const first = new Map();
  for (const { rank, stage } of actions) first.set(rank, Math.min(first.get(rank) ?? Infinity, stage));
  const paths = new Map();
  const labels = [];
  for (const action of actions) {
    const { rank, stage, micro_batch: batch, kind, start } = action;
    const shade = stage !== first.get(rank);
    const [x, width, y] = [(1000 * start) / end, (1000 * (action.end - start)) / end, LANE * rank + 3];
    const key = `${kind}|${Number(shade)}`;
    const path = paths.get(key) ?? paths.set(key, []).get(key);
    path.push(`M${x.toFixed(2)} ${y}h${Math.max(width - 1, 0.5).toFixed(2)}v${LANE - 6}h${(-Math.max(width - 1, 0.5)).toFixed(2)}z`);
    if (width / 1000 > LEGIBLE) {
      labels.push({ key: `${rank}-${start}`, x: `${((x + width / 2) / 10).toFixed(2)}%`, y: y + LANE / 2, text: batch, kind, shade });
    }
  }
  const shapes = [...paths].map(([key, path]) => ({ kind: key.split("|")[0], shade: key.endsWith("|1"), path: path.join("") }));
  const kinds = Object.keys(KINDS).filter((kind) => actions.some((action) => action.kind === kind));
  return { ranks, end, shapes, labels, kinds };
}
