/** Why the best is best: the figures that the service computes. */

import { html } from "../vendor/preact.mjs";
import { Figure } from "./figure.mjs";

const FIGURES = [
  { name: "knob_importance", title: "Which knobs matter" },
  { name: "time_breakdown", title: "Where a step goes" },
  { name: "memory_breakdown", title: "What memory holds" },
  { name: "response_curves", title: "Around the best", place: "wide" },
  { name: "pipeline_schedule", title: "Pipeline schedule of the best", place: "wide" },
  { name: "module_tree", title: "Modules of the model", place: "wide" },
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
