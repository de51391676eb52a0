/** Draws the figures of a file that has in it what the service would answer: a report, or a cell of a notebook. */

import { html, render } from "./vendor/preact.mjs";
import { BestSoFar } from "./charts/best_so_far.mjs";
import { loadCharts } from "./charts/canvas.mjs";
import { ParallelCoordinates } from "./charts/parallel_coordinates.mjs";
import { FigurePicture } from "./charts/pictures.mjs";
import { PredictedMeasured } from "./charts/predicted_measured.mjs";
import { ThroughputMemory } from "./charts/throughput_memory.mjs";
import { Timeline } from "./charts/timeline.mjs";
import { Points } from "./points.mjs";

/** The figures of the job's trials. All others are drawn from what the service computes. */
const OF_TRIALS = {
  throughput_memory: ThroughputMemory,
  best_so_far: BestSoFar,
  parallel_coordinates: ParallelCoordinates,
  predicted_measured: PredictedMeasured,
  timeline: Timeline,
};
/** There is no page of a trial that a point could open. */
const NO_PAGE = { id: null };

const { points: answer, figures } = JSON.parse(document.getElementById("data").textContent);
const points = answer && new Points().after(answer);
for (const box of document.querySelectorAll("[data-figure]")) {
  const { figure: name } = box.dataset;
  const OfTrials = points && OF_TRIALS[name];
  if (!OfTrials && !figures[name]) continue; // its tables are there without a program
  const drawn = document.createElement("div");
  try {
    render(OfTrials ? html`<${OfTrials} points=${points} job=${NO_PAGE} />` : html`<${FigurePicture} figure=${figures[name]} />`, drawn);
  } catch (error) {
    console.error(error); // the figure's tables stay
    continue;
  }
  if (!drawn.querySelector("figcaption + *")) continue; // there is no picture
  const notes = OfTrials ? [...box.querySelectorAll(":scope > p[data-note]")] : [];
  box.replaceChildren(drawn, ...notes);
}
if (points) loadCharts(); // a plot that is printed before it was in sight is drawn at once
