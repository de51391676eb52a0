/** Why the best is best: the figures that the service computes. */

import { html } from "../vendor/preact.mjs";
import { MemoryBreakdown, TimeBreakdown } from "./breakdown.mjs";
import { Figure } from "./figure.mjs";
import { KnobImportance } from "./knob_importance.mjs";
import { ModuleTree } from "./module_tree.mjs";
import { PipelineSchedule } from "./pipeline_schedule.mjs";
import { ResponseCurves } from "./response_curves.mjs";

const FIGURES = [
  { name: "knob_importance", title: "Which knobs matter", picture: KnobImportance },
  { name: "time_breakdown", title: "Where a step goes", picture: TimeBreakdown },
  { name: "memory_breakdown", title: "What memory holds", picture: MemoryBreakdown },
  { name: "response_curves", title: "Around the best", picture: ResponseCurves, place: "wide" },
  { name: "pipeline_schedule", title: "Pipeline schedule of the best", picture: PipelineSchedule, place: "wide" },
  { name: "module_tree", title: "Modules of the model", picture: ModuleTree, place: "wide" },
];

/** They rest on what was found: with every other event they stay as they are. */
export function Explained({ job, points }) {
  const { trial, baseline, runner_up: runnerUp } = points.best;
  const version = [trial, baseline, runnerUp, job.state].join("-");
  return html`<section class="stack" aria-labelledby="explained-heading">
    <h2 id="explained-heading">Why the best is best</h2>
    <div class="charts close">
      ${FIGURES.map(({ name, ...more }) => html`<${Figure} key=${name} job=${job.id} name=${name} version=${version} ...${more} />`)}
    </div>
  </section>`;
}
