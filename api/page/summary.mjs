/** A job in a few figures: how far it is, what is best, how long it may take; and what keeps it from finding anything. */

import { html, useEffect, useMemo, useState } from "./vendor/preact.mjs";
import { bytes, count, counted, duration, interval, sentence, share, sureness, times } from "./format.mjs";
import { isOver, outcomeLook, OUTCOME_NAMES, REASONS, stateLook } from "./outcomes.mjs";
import { trialLink } from "./router.mjs";
import { ask } from "./service.mjs";
import { census, nearest } from "./standing.mjs";
import { coded } from "./states.mjs";

export function StateBadge({ job }) {
  const { label, mark, kind } = stateLook(job.state, job.reason);
  return html`<span class=${`badge ${kind}`}><span aria-hidden="true">${mark}</span>${label}</span>`;
}

/** A job's tags; nothing where it has none. */
export const Tags = ({ request }) => (request.tags ?? []).map((tag) => html`<span key=${tag} class="badge tag">${tag}</span>`);

export function Summary({ job, points }) {
  const counts = useMemo(() => census(points), [points]);
  const [progress, notice] = [html`<${Progress} job=${job} points=${points} counts=${counts} />`, html`<${Advice} job=${job} points=${points} counts=${counts} />`];
  if (points.best === null) return html`${notice}${progress}`;
  return html`
    <dl class="figures">
      <${Best} job=${job} points=${points} />
      <${Gain} points=${points} />
      <${Certainty} points=${points} />
      <${Goodput} points=${points} />
      <${Memory} points=${points} />
      <${Time} job=${job} points=${points} />
    </dl>
    ${progress}${notice}
  `;
}

/** How much of the budget is spent, and how trials ended. */
function Progress({ job, points, counts }) {
  const { trials } = job.request;
  const repeats = points.columns.repeat.filter((repeat) => repeat > 0).length;
  const beside = [repeats && counted(repeats, "repeat"), counts.running && `${count(counts.running)} running`, points.best === null && job.active_seconds > 0 && duration(job.active_seconds)];
  const outcomes = [...OUTCOME_NAMES, null].filter((outcome) => counts.counts.get(outcome));
  return html`<div class="card progress">
    <div class="progress-line">
      <strong>${count(Math.min(counts.searched, trials))} of ${counted(trials, "trial")}</strong>
      <span class="soft">${beside.filter(Boolean).join(", ")}</span>
    </div>
    <progress max=${trials} value=${Math.min(counts.searched, trials)} aria-label="Trials of the budget that have ended"></progress>
    <ul class="tally">
      ${outcomes.map((outcome) => html`<li key=${outcome}><${Tally} outcome=${outcome} value=${counts.counts.get(outcome)} running=${counts.running} /></li>`)}
    </ul>
  </div>`;
}

function Tally({ outcome, value, running }) {
  const { label, mark, color } = outcomeLook(outcome);
  const shown = outcome === null && running < value ? "Open" : label;
  return html`<span aria-hidden="true" style=${{ color: `var(${color})` }}>${mark}</span> ${shown}: ${count(value)}`;
}

function Figure({ title, value, more }) {
  return html`<div class="card figure"><dt>${title}</dt><dd><span class="value">${value}</span>${more && html`<span class="soft">${more}</span>`}</dd></div>`;
}

function Best({ job, points }) {
  const { best } = points;
  const over = isOver(job.state);
  const title = best.keeps_baseline ? (over ? "Keep your configuration" : "Nothing better so far") : over ? "Best" : "Best so far";
  const { mean, low, high } = best.rate;
  const more = html`<a href=${trialLink(job.id, best.trial)}>trial ${best.trial}</a>${best.tie && best.runner_up !== null ? html`, a tie with <a href=${trialLink(job.id, best.runner_up)}>trial ${best.runner_up}</a>` : ""}`;
  return html`<${Figure} title=${title} value=${html`${interval(mean, low, high)} <span class="unit">samples/s</span>`} more=${more} />`;
}

function Gain({ points }) {
  const { gain } = points.best;
  if (!gain) return html`<${Figure} title="Gain over the baseline" value="–" more="the baseline was not measured" />`;
  const isMemory = gain.of === "peak_memory_bytes";
  const more = points.best.keeps_baseline ? runnerUpText(points.best) : `between ${times(gain.low)} and ${times(gain.high)}`;
  return html`<${Figure} title=${isMemory ? "Less memory than the baseline" : "Gain over the baseline"} value=${times(gain.mean)} more=${more} />`;
}

/** The other configuration that is most likely better, against the baseline that is kept. */
function runnerUpText({ runner_up: trial, runner_up_ratio: ratio }) {
  return trial === null ? "the baseline is kept" : `trial ${trial}: ${times(ratio.mean, ratio.low, ratio.high)}`;
}

/** How sure the answer is. */
function Certainty({ points }) {
  const { probability_best: chance, expected_loss: loss } = points.best;
  return html`<${Figure} title="Probability of being the best" value=${sureness(chance)} more=${`expected loss ${share(loss)}`} />`;
}

/** Objective goodput: how to run the answer on nodes that fail, and when it ends. */
function Goodput({ points }) {
  const way = points.best.goodput?.ways[0];
  if (!way) return null;
  const days = (hours) => (hours / 24).toPrecision(3);
  const saved = way.interval_steps === null ? "no checkpoints" : `${way.checkpoint} checkpoint every ${counted(way.interval_steps, "step")}`;
  const { "0.05": early, "0.95": late } = way.hours_quantiles;
  const more = `${way.recovery}, ${saved}, ${counted(way.spares, "spare node")}; ${count(Math.round(way.interruptions))} interruptions; ends after ${days(way.hours)} days (${days(early)} to ${days(late)})`;
  return html`<${Figure} title="Kept on nodes that fail" value=${share(way.effective)} more=${more} />`;
}

function Memory({ points }) {
  const peak = points.columns.peak[points.best.trial];
  const more = points.limit === null ? "no limit is known" : `of ${bytes(points.limit)} a rank, ${share(peak / points.limit)}`;
  return html`<${Figure} title="Memory of the best" value=${bytes(peak)} more=${more} />`;
}

function Time({ job, points }) {
  const active = duration(job.active_seconds);
  if (isOver(job.state)) return html`<${Figure} title="Time taken" value=${active} />`;
  const left = points.secondsLeft;
  const value = left === null ? "–" : left === 0 ? "about to end" : `at most ${duration(Math.ceil(left))}`;
  return html`<${Figure} title="Time left" value=${value} more=${`${active} so far`} />`;
}

/** What a person should know who sees nothing in the plots, or not what was expected. */
function Advice({ job, points, counts }) {
  const found = advice(job, points, counts);
  return found && html`<div class=${found.isBad ? "problem" : "note"} role=${found.isBad ? "alert" : "status"}>
    <p><strong>${found.heading}</strong></p>
    ${found.text && html`<p class="lines">${typeof found.text === "string" ? coded(sentence(found.text)) : found.text}</p>`}
  </div>`;
}

/** Asked for every few seconds: workers come and go without an event of the job. */
function WhyItWaits({ job }) {
  const [waiting, setWaiting] = useState("");
  useEffect(() => {
    const read = () => ask(`/v1/overviews?job=${job}`).then(({ items: [{ waiting: reason }] }) => setWaiting(reason), () => {});
    read();
    const timer = setInterval(read, 5000);
    return () => clearInterval(timer);
  }, [job]);
  return html`${waiting ? coded(sentence(waiting)) : "It starts as soon as one is free."} <a href="#/usage">To the workers</a>`;
}

function advice(job, points, { counts, measured }) {
  const message = job.message;
  if (job.state === "FAILED") return { isBad: true, heading: "The job failed.", text: message };
  if (job.state === "CANCELLED") return { heading: "The job was cancelled.", text: measured ? "What was measured before is kept." : "Nothing had been measured." };
  if (job.state === "QUEUED" && !points.size) return { heading: "The job waits for a worker.", text: html`<${WhyItWaits} job=${job.id} />` };
  if (job.state === "PAUSED") return { heading: "The job is paused.", text: message };
  const beyond = counts.get("INFEASIBLE") ?? 0;
  if (points.best === null && beyond > 0 && measured === 0) return allInfeasible(points, beyond);
  const failed = [...counts].filter(([outcome]) => ["FAILED", "WRONG", "TIMEOUT", "LOST"].includes(outcome)).reduce((sum, [, value]) => sum + value, 0);
  if (points.best === null && failed > 0 && measured === 0) {
    return { isBad: true, heading: `Nothing has been measured: ${counted(failed, "trial")} failed.`, text: "Open a trial below to see its traceback and its log." };
  }
  if (job.state === "RUNNING" && measured === 0 && points.best === null) return { heading: "Nothing has ended yet.", text: "The first trial takes longest: its ranks start." };
  if (job.state === "SUCCEEDED" && REASONS[job.reason]) return { heading: `It ended because ${REASONS[job.reason]}.`, text: message };
  return null;
}

function allInfeasible(points, beyond) {
  const [closest] = nearest(points);
  const peak = closest === undefined ? null : points.columns.predicted_peak[closest];
  const near = peak === null ? "" : `Nearest to fitting is trial ${closest}, which is predicted to take ${bytes(peak)} (${points.config(closest)}). `;
  const limit = points.limit === null ? "" : `The limit is ${bytes(points.limit)} a rank. `;
  return {
    isBad: true,
    heading: beyond === 1 ? "The only trial so far does not fit." : `None of ${count(beyond)} trials fits.`,
    text: `${limit}${near}Raise the limit, take more ranks, or search a space with higher ZeRO stages, smaller micro-batches, checkpointing or offload.`,
  };
}
