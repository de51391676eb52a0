/** One trial: what was tried, what came of it, and what its ranks printed. */

import { html, useCallback, useEffect, useState } from "./vendor/preact.mjs";
import { Attempts, Config, Ranks, Result, Steps } from "./trial_parts.mjs";
import { TrialTime } from "./charts/trial_time.mjs";
import { moment } from "./format.mjs";
import { Logs } from "./logs.mjs";
import { outcomeLook } from "./outcomes.mjs";
import { jobLink, trialLink } from "./router.mjs";
import { ask, Problem } from "./service.mjs";
import { useTitle } from "./shell.mjs";
import { Heading, Unusable, Waiting } from "./states.mjs";
import { follow } from "./stream.mjs";

export default function TrialPage({ route }) {
  const { job: id } = route.params;
  const number = Number(route.params.number);
  const { found, sign, problem, refresh } = useTrial(id, number);
  useTitle(`Trial ${number}`);
  if (problem) return html`<${Unusable} error=${problem} />`;
  if (found === null) return html`<${Waiting} what="the trial" />`;
  const { job, trial, base, attempts, count } = found;
  return html`
    <${Top} job=${job} trial=${trial} count=${count} />
    <${Verdict} trial=${trial} sign=${sign} />
    <${Result} trial=${trial} />
    <div class="charts loose">
      <${Config} trial=${trial} base=${base} />
      <div class="stack">
        ${trial.result?.samples_per_second && html`<${TrialTime} job=${id} number=${number} />`}
        <${Steps} result=${trial.result} />
        <${Ranks} result=${trial.result} />
      </div>
    </div>
    ${attempts.length > 0 && html`<${Attempts} attempts=${attempts} />`}
    <${Logs} job=${id} trial=${number} onOver=${refresh} />
  `;
}

function Top({ job, trial: { number, outcome, started, purpose, repeat, created }, count }) {
  const { label, mark, color } = outcome === null && started === null ? { ...outcomeLook(null), label: "Waiting" } : outcomeLook(outcome);
  const why = purpose === "search" ? "" : `${purpose} ${repeat} · `;
  return html`<div class="job-top">
    <div class="stack">
      <nav aria-label="Where this is" class="soft"><a href="#/">Jobs</a> / <a href=${jobLink(job.id)}>${job.model}</a></nav>
      <div class="title-line"><${Heading}>Trial ${number}<//><span class="badge"><span aria-hidden="true" style=${{ color: `var(${color})` }}>${mark}</span>${label}</span></div>
      <p class="soft">${why}${started ? `started ${moment(started)}` : `proposed ${moment(created)}`}</p>
    </div>
    <nav class="actions" aria-label="Other trials">
      ${number > 0 && html`<a class="button" href=${trialLink(job.id, number - 1)} aria-label=${`Trial ${number - 1}`}>← ${number - 1}</a>`}
      ${number + 1 < count && html`<a class="button" href=${trialLink(job.id, number + 1)} aria-label=${`Trial ${number + 1}`}>${number + 1} →</a>`}
      <a class="button" href=${`#/compare?trials=${job.id}:${number}`}>Compare</a>
    </nav>
  </div>`;
}

/** Why it ended as it did; while it runs, what it does. */
function Verdict({ trial, sign }) {
  const { outcome, result } = trial;
  if (outcome === null) {
    const told = sign && [sign.phase, sign.step ? `step ${sign.step}` : "", sign.message].filter(Boolean).join(", ");
    return html`<p class="note" role="status">${told ? `Now: ${told}` : trial.attempts ? "It runs." : "It waits for its turn."}</p>`;
  }
  const { message, rule, cause, traceback } = result ?? {};
  if (!message && !rule && !cause && !traceback) return null;
  return html`<div class=${outcome === "OK" || outcome === "PRUNED" ? "note" : "problem"}>
    ${message && html`<p class="lines">${message}</p>`}
    ${(rule || cause) && html`<p>${rule ? "Rule" : "Cause"}: <code>${rule ?? cause}</code></p>`}
    ${traceback && html`<details open><summary>Traceback</summary><pre class="log" tabindex="0" role="region" aria-label="Traceback">${traceback}</pre></details>`}
  </div>`;
}

/** The trial as it stands: read again when an event names it. */
function useTrial(id, number) {
  const [state, setState] = useState({ found: null, problem: null });
  const [sign, setSign] = useState(null);
  const [turn, setTurn] = useState(0);
  const refresh = useCallback(() => setTurn((known) => known + 1), []);
  const fail = (error) => {
    if (!(error instanceof Problem)) throw error;
    setState(({ found }) => ({ found, problem: found === null ? error : null }));
  };
  useEffect(() => {
    const ended = new AbortController();
    read(id, number, ended.signal).then(
      (found) => setState({ found, problem: null }),
      (error) => ended.signal.aborted || fail(error),
    );
    return () => ended.abort();
  }, [id, number, turn]);
  const isOpen = state.found !== null && state.found.trial.outcome === null;
  useEffect(() => {
    if (!isOpen) return undefined;
    const ended = new AbortController();
    follow({
      path: (last) => `/v1/jobs/${id}/events/stream?progress=true&after=${last}`,
      last: String(state.found.job.version),
      signal: ended.signal,
      onMessages: (messages) => {
        const mine = messages.filter(({ kind, data }) => (kind === "progress" ? data : data.payload).trial === number);
        const signs = mine.filter(({ kind }) => kind === "progress");
        if (signs.length) setSign(signs.at(-1).data);
        if (mine.length > signs.length) refresh();
      },
    }).catch(fail);
    return () => ended.abort();
  }, [id, number, isOpen]);
  return { ...state, sign, refresh };
}

async function read(id, number, signal) {
  const path = `/v1/jobs/${id}`;
  const [job, page, first, { items: attempts }] = await Promise.all([
    ask(path, { signal }),
    ask(`${path}/trials?cursor=${number}&limit=2`, { signal }),
    ask(`${path}/trials?limit=1`, { signal }),
    ask(`${path}/trials/${number}/attempts`, { signal }),
  ]);
  const trial = page.items[0];
  if (trial?.number !== number) throw new Problem(404, `The job has no trial ${number}.`);
  const count = page.items.length > 1 ? number + 2 : number + 1;
  return { job, trial, base: number === 0 ? null : first.items[0], attempts, count };
}
