/** What a job found, first: the knobs to change with their values before and after, and what to do now. */

import { html } from "./vendor/preact.mjs";
import { Exports } from "./exports.mjs";
import { duration, interval, knob as knobText, sureness, times } from "./format.mjs";
import { isOver } from "./outcomes.mjs";
import { trialLink } from "./router.mjs";

export function Answer({ job, points }) {
  const { best } = points;
  if (best === null) return null;
  return html`<section class="card stack answer" aria-labelledby="answer-heading">
    <h2 id="answer-heading">${headingOf(job, best)}</h2>
    <p><a href=${trialLink(job.id, points.bestRow)}>Trial ${points.bestRow}</a>: ${sentence(best)}${!isOver(job.state) && left(points)}</p>
    <div class="answer-parts">
      ${!best.keeps_baseline && html`<${Changes} points=${points} />`}
      <${Exports} job=${job.id} version=${points.bestRow} />
    </div>
  </section>`;
}

function headingOf(job, { keeps_baseline: keeps }) {
  if (isOver(job.state)) return keeps ? "Keep your configuration" : "Change this";
  return keeps ? "Nothing better so far" : "Best so far";
}

function sentence({ rate, gain, keeps_baseline: keeps, probability_best: chance }) {
  const shown = `${interval(rate.mean, rate.low, rate.high)} samples/s`;
  if (keeps) return html`<strong>${shown}</strong>: no other configuration is known to be better.`;
  const of = gain?.of === "peak_memory_bytes" ? "less memory than the baseline" : "the baseline";
  const gained = gain && `, ${times(gain.mean, gain.low, gain.high)} ${of}`;
  return html`<strong>${shown}</strong>${gained}; the best with a probability of ${sureness(chance)}.`;
}

function left({ secondsLeft: seconds }) {
  return seconds === null ? " The search goes on." : html` The search goes on, for <strong>at most ${duration(Math.ceil(seconds))}</strong>.`;
}

/** The knobs that the best has otherwise than the baseline. */
function Changes({ points }) {
  const [before, after] = [points.baselineRow, points.bestRow];
  const changed = points.varied.filter((knob) => points.value(knob, before) !== points.value(knob, after));
  return html`<div class="table-box" tabindex="0" role="region" aria-label="Knobs to change">
    <table>
      <caption class="hidden">Knobs to change</caption>
      <thead><tr><th scope="col">Knob</th><th scope="col">Before</th><th scope="col">Now</th></tr></thead>
      <tbody>${changed.map((knob) => html`<tr key=${knob.name}><th scope="row" class="mono">${knob.name}</th>
        <td>${knobText(points.value(knob, before))}</td><td><strong>${knobText(points.value(knob, after))}</strong></td></tr>`)}</tbody>
    </table>
  </div>`;
}
