/** The figures that the service computes, and how each is drawn. */

import { html } from "../vendor/preact.mjs";
import { MemoryBreakdown, TimeBreakdown } from "./breakdown.mjs";
import { FigureCard } from "./card.mjs";
import { dataTables } from "./figure_data.mjs";
import { KnobImportance } from "./knob_importance.mjs";
import { ModuleTree } from "./module_tree.mjs";
import { PipelineSchedule } from "./pipeline_schedule.mjs";
import { ResponseCurves } from "./response_curves.mjs";

const PICTURES = {
  knob_importance: KnobImportance,
  time_breakdown: TimeBreakdown,
  memory_breakdown: MemoryBreakdown,
  response_curves: ResponseCurves,
  pipeline_schedule: PipelineSchedule,
  module_tree: ModuleTree,
};

/** A figure in its frame; one without tables has no picture, and its summary says why. */
export function FigurePicture({ figure }) {
  const hasPicture = figure.tables.length > 0;
  return html`<${FigureCard} name=${figure.name} title=${figure.title} summary=${figure.summary} tables=${hasPicture ? () => dataTables(figure) : undefined}>
    ${hasPicture && html`<${PICTURES[figure.name]} figure=${figure} /><${Notes} notes=${figure.notes} />`}
  <//>`;
}

function Notes({ notes }) {
  if (notes.length === 0) return null;
  return html`<details class="notes-fold"><summary>How this was made</summary>${notes.map((note) => html`<p key=${note}>${note}</p>`)}</details>`;
}
