/** One job, live. */

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.mjs";
import { Actions } from "./actions.mjs";
import { Answer } from "./answer.mjs";
import { BestSoFar } from "./charts/best_so_far.mjs";
import { Explained } from "./charts/explained.mjs";
import { ParallelCoordinates } from "./charts/parallel_coordinates.mjs";
import { PredictedMeasured } from "./charts/predicted_measured.mjs";
import { Slot } from "./charts/slot.mjs";
import { ThroughputMemory } from "./charts/throughput_memory.mjs";
import { Timeline } from "./charts/timeline.mjs";
import { moment, rate } from "./format.mjs";
import { Labels } from "./labels.mjs";
import { LiveJob } from "./live.mjs";
import { Notify } from "./notify.mjs";
import { isOver, stateLook } from "./outcomes.mjs";
import { RequestCard } from "./request.mjs";
import { Running } from "./running.mjs";
import { Share } from "./share.mjs";
import { say, useTitle } from "./shell.mjs";
import { useSignal } from "./signal.mjs";
import { Heading, Unusable, Waiting } from "./states.mjs";
import { StateBadge, Summary, Tags } from "./summary.mjs";
import { Trials } from "./trials.mjs";

export default function Job({ route }) {
  const id = route.params.job;
  const live = useMemo(() => new LiveJob(id), [id]);
  useEffect(() => {
    live.open();
    return () => live.close();
  }, [live]);
  const [job, points, problem] = [useSignal(live.job), useSignal(live.points), useSignal(live.problem)];
  useTitle(job ? `${job.request.name || job.model} ${stateLook(job.state, job.reason).label.toLowerCase()}` : "Job");
  useSaid(job, points);
  if (problem) return html`<${Unusable} error=${problem} />`;
  if (job === null) return html`<${Waiting} what="the job" />`;
  if (points === null) return html`<${Top} job=${job} live=${live} /><${Waiting} what="its trials" />`;
  return html`
    <${Top} job=${job} live=${live} />
    <${Answer} job=${job} points=${points} />
    <${Summary} job=${job} points=${points} />
    <${Running} live=${live} points=${points} job=${job} />
    <${Measured} job=${job} points=${points} />
    <${RequestCard} job=${job} points=${points} />
  `;
}

function Top({ job, live }) {
  const isLive = useSignal(live.isLive);
  const refresh = () => {
    live.readJob().catch(() => {}); // the stream tells it too
    live.open();
  };
  return html`<div class="job-top">
    <div class="stack">
      <div class="title-line"><${Heading}>${job.request.name || job.model}<//><${StateBadge} job=${job} /><${Tags} request=${job.request} />${isLive && !isOver(job.state) && html`<span class="badge"><span class="pulse" aria-hidden="true"></span>Live</span>`}</div>
      <p class="soft"><span class="mono">${job.id}</span> · ${job.request.name && `${job.model} · `}${moment(job.created)}${job.submitter && ` · ${job.submitter}`}</p>
      ${job.request.note && html`<p class="lines">${job.request.note}</p>`}
    </div>
    <${Actions} job=${job} onDone=${refresh}><${Labels} job=${job} onDone=${refresh} /><${Share} job=${job} /><${Notify} job=${job} /><//>
  </div>`;
}

/** The figures of what was measured, and the trials: what is brushed in one is filtered in the other. */
function Measured({ job, points }) {
  const [brushed, setBrushed] = useState(null);
  const [brush, renewBrush] = useState(0);
  const unbrush = () => {
    setBrushed(null);
    renewBrush(brush + 1); // a plot without a brush takes the place of the one that has it
  };
  return html`
    ${points.size > 0 && html`<section class="stack" aria-labelledby="measured-heading">
      <h2 id="measured-heading">What was measured</h2>
      <div class="charts many">
        <${Slot} points=${points} place="first" draw=${(held) => html`<${ThroughputMemory} points=${held} job=${job} />`} />
        <${Slot} points=${points} draw=${(held) => html`<${BestSoFar} points=${held} job=${job} />`} />
        <${Slot} points=${points} draw=${(held) => html`<${PredictedMeasured} points=${held} job=${job} />`} />
        <${Slot} key=${brush} points=${points} place="wide" draw=${(held) => html`<${ParallelCoordinates} points=${held} job=${job} onBrush=${setBrushed} />`} />
        <${Slot} points=${points} place="wide" draw=${(held) => html`<${Timeline} points=${held} job=${job} />`} />
      </div>
    </section>`}
    ${points.best !== null && html`<${Explained} job=${job} points=${points} />`}
    <${Trials} points=${points} job=${job} brushed=${brushed} onUnbrush=${unbrush} />
  `;
}

/** Tell a screen reader when the state or the best changes; not of every event. */
function useSaid(job, points) {
  const before = useRef({ state: null, best: null });
  useEffect(() => {
    if (job === null || points === null) return;
    const now = { state: job.state, best: points.bestRow };
    const { state, best } = before.current;
    before.current = now;
    if (state !== null && now.state !== state) say(`The job: ${stateLook(job.state, job.reason).label.toLowerCase()}.`);
    else if (state !== null && now.best !== best && now.best !== null) say(`A new best: trial ${now.best}, ${rate(points.best.rate.mean)}.`);
  }, [job, points]);
}
