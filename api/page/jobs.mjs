/** All jobs, newest first, as they stand now. */

import { html, useEffect, useState } from "./vendor/preact.mjs";
import { Board } from "./board.mjs";
import { SearchText } from "./filters.mjs";
import { ago, count, counted, duration, number, times } from "./format.mjs";
import { stateLook, STATE_NAMES } from "./outcomes.mjs";
import { here, jobLink, setQuery } from "./router.mjs";
import { useTitle } from "./shell.mjs";
import { useSignal } from "./signal.mjs";
import { coded, Heading, Unusable, Waiting } from "./states.mjs";
import { StateBadge, Tags } from "./summary.mjs";

export default function Jobs() {
  useTitle("Jobs");
  const [filter, setFilter] = useState(() => ({ state: here().query.get("state") ?? "", text: here().query.get("text") ?? "" }));
  const [chosen, setChosen] = useState([]);
  const change = (changes) => {
    setFilter({ ...filter, ...changes });
    setQuery(changes);
  };
  return html`
    <div class="section-top"><${Heading}>Jobs<//><a class="button primary" href="#/new">New job</a></div>
    <form class="filters" role="search" aria-label="Filter the jobs" onSubmit=${(event) => event.preventDefault()}>
      <label>State
        <select value=${filter.state} onChange=${(event) => change({ state: event.target.value })}>
          <option value="">Any</option>
          ${STATE_NAMES.map((name) => html`<option key=${name} value=${name} selected=${name === filter.state}>${stateLook(name).label}</option>`)}
        </select>
      </label>
      <${SearchText} value=${filter.text} placeholder="name, tag, model, id" onChange=${(text) => change({ text })} />
    </form>
    <${JobList} key=${JSON.stringify(filter)} filter=${filter} chosen=${chosen} onChoose=${setChosen} />
  `;
}

function JobList({ filter, chosen, onChoose }) {
  const [board] = useState(() => new Board(filter));
  useEffect(() => {
    board.open();
    return () => board.close();
  }, [board]);
  const [jobs, overviews, problem, hasMore] = [useSignal(board.jobs), useSignal(board.overviews), useSignal(board.problem), useSignal(board.hasMore)];
  if (problem && jobs === null) return html`<${Unusable} error=${problem} />`;
  if (jobs === null) return html`<${Waiting} what="jobs" />`;
  const choose = (id) => onChoose(chosen.includes(id) ? chosen.filter((other) => other !== id) : [...chosen, id]);
  if (jobs.length === 0) return html`<${Empty} filter=${filter} />`;
  return html`
    ${chosen.length > 0 && html`<p class="actions"><a class="button primary" href=${`#/compare?jobs=${chosen.join(",")}`}>Compare ${counted(chosen.length, "job")}</a>
      <button type="button" class="quiet" onClick=${() => onChoose([])}>Untick all</button></p>`}
    <ul class="jobs" aria-label="Jobs, newest first">
      ${jobs.map((job) => html`<${JobRow} key=${job.id} job=${job} overview=${overviews.get(job.id)} isChosen=${chosen.includes(job.id)} onChoose=${choose} />`)}
    </ul>
    ${hasMore && html`<p class="actions"><button type="button" onClick=${() => board.more()}>Older jobs</button></p>`}
  `;
}

function Empty({ filter: { state, text } }) {
  if (text.trim()) return html`<p class="state">No job${state && ` that is ${stateLook(state).label.toLowerCase()}`} has all of these words: ${text}</p>`;
  if (state) return html`<p class="state">No job is ${stateLook(state).label.toLowerCase()}.</p>`;
  return html`<div class="state stack">
    <p>There is no job yet. A job measures configurations of a model by real trial runs, and finds the fastest that fits.</p>
    <p><a class="button primary" href="#/new">Submit the first one</a></p>
    <p>Or from a terminal: <code>autotune submit llama-tiny --url ${location.origin}</code></p>
  </div>`;
}

function JobRow({ job, overview, isChosen, onChoose }) {
  const { name, trials, space, strategy, cluster, ranks } = job.request;
  const about = [name && job.model, space, strategy, ranks ? `${cluster}, ${counted(ranks, "rank")}` : cluster].filter(Boolean).join(" · ");
  return html`<li class="card job-row">
    <input type="checkbox" checked=${isChosen} aria-label=${`Compare ${job.model} ${job.id}`} onChange=${() => onChoose(job.id)} />
    <div class="job-name">
      <a href=${jobLink(job.id)}><strong>${name || job.model}</strong></a> <${StateBadge} job=${job} /> <${Tags} request=${job.request} />
      <p class="soft">${about}</p>
      <p class="soft"><span class="mono">${job.id}</span> · <time datetime=${job.created}>${ago(job.created)}</time>${job.submitter && ` · ${job.submitter}`}</p>
      ${job.state === "FAILED" && html`<p class="row-problem">${job.message}</p>`}
    </div>
    <${Progress} job=${job} overview=${overview} trials=${trials} />
    <${Best} job=${job} overview=${overview} />
    <${Time} job=${job} overview=${overview} />
  </li>`;
}

function Progress({ job, overview, trials }) {
  const done = overview?.searched ?? 0;
  const beyond = overview?.outcomes.INFEASIBLE ?? 0;
  const others = [overview?.running ? `${count(overview.running)} running` : "", beyond ? `${count(beyond)} ${beyond === 1 ? "does" : "do"} not fit` : ""].filter(Boolean).join(", ");
  return html`<div class="job-cell">
    <span>${overview ? `${count(done)} of ${counted(trials, "trial")}` : "…"}</span>
    <progress max=${trials} value=${Math.min(done, trials)} aria-label=${`Trials of ${job.id} that have ended`}></progress>
    <span class="soft">${others}</span>
  </div>`;
}

/** What a job without an answer says of itself. */
function answerless({ state }, { waiting, outcomes }) {
  if (state === "QUEUED") return coded(waiting);
  if (state === "CANCELLED") return outcomes.OK ? "cancelled before it had an answer" : "cancelled before anything was measured";
  return state === "FAILED" || state === "SUCCEEDED" || outcomes.OK ? "no answer" : "nothing measured yet";
}

function Best({ job, overview }) {
  const { best_rate: best = null, gain = null, keeps_baseline: keeps = false } = overview ?? {};
  const gained = gain && `, ${times(gain.mean)} ${gain.of === "peak_memory_bytes" ? "less memory" : "the baseline"}`;
  return html`<div class="job-cell">
    ${best !== null && html`<span><strong>${number(best, 4)}</strong> <span class="unit">samples/s</span></span>`}
    <span class="soft">${best === null ? (overview ? answerless(job, overview) : "") : keeps ? "keeps the baseline" : `answer${gained ?? ""}`}</span>
  </div>`;
}

function Time({ job, overview }) {
  const left = overview?.seconds_left ?? null;
  return html`<div class="job-cell">
    <span>${job.active_seconds ? duration(job.active_seconds) : "–"}</span>
    <span class="soft">${left === null ? "" : left === 0 ? "about to end" : `at most ${duration(Math.ceil(left))} left`}</span>
  </div>`;
}
