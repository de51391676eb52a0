/** Jobs and trials beside each other: what was asked for, what was found, which knobs differ. */

import { html, useEffect, useState } from "./vendor/preact.mjs";
import { Beside } from "./compare/beside.mjs";
import { Effects } from "./compare/effects.mjs";
import { jobLines, trialLines } from "./compare/lines.mjs";
import { JobsBest, JobsMeasured } from "./compare/plots.mjs";
import { chosenBy, MOST, told, useSubjects } from "./compare/subjects.mjs";
import { counted, moment } from "./format.mjs";
import { stateLook } from "./outcomes.mjs";
import { jobLink, setQuery, trialLink } from "./router.mjs";
import { ask } from "./service.mjs";
import { useTitle } from "./shell.mjs";
import { Heading, ProblemNote } from "./states.mjs";

export default function Compare({ route }) {
  useTitle("Compare");
  const [chosen, setChosen] = useState(() => chosenBy(route.query));
  useEffect(() => setChosen(chosenBy(route.query)), [route.query.toString()]);
  const choose = (next) => {
    setQuery(told(next));
    setChosen(next);
  };
  const subjects = useSubjects(chosen);
  const isEmpty = chosen.jobs.length + chosen.trials.length === 0;
  const [isOpen] = useState(isEmpty); // it stays open while one thing after another is chosen
  return html`<${Heading}>Compare<//>
    <${Chooser} chosen=${chosen} onChoose=${choose} isOpen=${isOpen} />
    <${ProblemNote} problem=${subjects.problem} />
    ${isEmpty && html`<p class="state">Choose jobs, or single trials, and they stand here beside each other.</p>`}
    ${!isEmpty && subjects.isLoading && subjects.trials.length + subjects.jobs.length === 0 && html`<p class="state" role="status">Loading …</p>`}
    ${subjects.jobs.length > 0 && html`<${Jobs} subjects=${subjects.jobs} onRemove=${(id) => choose({ ...chosen, jobs: chosen.jobs.filter((job) => job !== id) })} />`}
    ${subjects.trials.length > 0 && html`<${Trials} subjects=${subjects.trials} chosen=${chosen} onChoose=${choose} />`}`;
}

function Jobs({ subjects, onRemove }) {
  const header = ({ job }) => html`<${Head} href=${jobLink(job.id)} name=${job.id} what=${job.model} onRemove=${() => onRemove(job.id)} />`;
  return html`<section class="compared-part" aria-labelledby="compared-jobs">
    <h2 id="compared-jobs">${counted(subjects.length, "job")}</h2>
    <${Beside} caption="Jobs beside each other" subjects=${subjects} header=${header} lines=${jobLines(subjects)} />
    <div class="charts"><${JobsMeasured} subjects=${subjects} /><${JobsBest} subjects=${subjects} /></div>
  </section>`;
}

function Trials({ subjects, chosen, onChoose }) {
  const isChosen = ({ job, trial }) => chosen.trials.some((one) => one.job === job.id && one.number === trial.number);
  const remove = ({ job, trial }) => onChoose({ ...chosen, trials: chosen.trials.filter((one) => one.job !== job.id || one.number !== trial.number) });
  const header = (subject) => html`<${Head} href=${trialLink(subject.job.id, subject.trial.number)} name=${subject.name}
    what=${`${subject.job.model}${role(subject)}`} onRemove=${isChosen(subject) ? () => remove(subject) : null} />`;
  return html`<section class="compared-part" aria-labelledby="compared-trials">
    <h2 id="compared-trials">${counted(subjects.length, "trial")}</h2>
    <${Beside} caption="Trials beside each other" subjects=${subjects} header=${header} lines=${trialLines(subjects)} />
    <${Effects} subjects=${subjects} />
  </section>`;
}

function role({ points, trial }) {
  const { best } = points;
  const roles = [[best?.trial, "best"], [best?.runner_up, "runner-up"], [points.baselineRow, "baseline"]];
  const own = roles.filter(([number]) => number === trial.number).map(([, name]) => name);
  return own.length ? `, ${own.join(", ")}` : "";
}

function Head({ href, name, what, onRemove }) {
  return html`<span class="column-head"><a href=${href}>${name}</a>
    ${onRemove && html`<button type="button" class="quiet icon small" aria-label=${`Remove ${name}`} onClick=${onRemove}><span aria-hidden="true">✕</span></button>`}
    <span class="soft">${what}</span></span>`;
}

function Chooser({ chosen, onChoose, isOpen }) {
  const [jobs, setJobs] = useState([]);
  const [problem, setProblem] = useState(null);
  useEffect(() => void ask("/v1/jobs?limit=50").then((page) => setJobs(page.items), setProblem), []);
  const isFull = chosen.jobs.length >= MOST;
  const toggle = (id, isOn) => onChoose({ ...chosen, jobs: isOn ? [...chosen.jobs, id] : chosen.jobs.filter((job) => job !== id) });
  return html`<details class="card chooser" open=${isOpen}>
    <summary>Choose what to compare</summary>
    <${ProblemNote} problem=${problem} />
    <fieldset class="choose-jobs"><legend>Jobs, newest first</legend>
      ${jobs.map((job) => html`<label key=${job.id}><input type="checkbox" checked=${chosen.jobs.includes(job.id)} disabled=${isFull && !chosen.jobs.includes(job.id)}
        onChange=${(event) => toggle(job.id, event.target.checked)} /> ${job.model} <span class="soft">${job.id}, ${stateLook(job.state, job.reason).label}, ${moment(job.created)}</span></label>`)}
      ${jobs.length === 0 && !problem && html`<p class="soft">There are no jobs yet.</p>`}
    </fieldset>
    <${TrialChooser} jobs=${jobs} chosen=${chosen} onChoose=${onChoose} />
  </details>`;
}

function TrialChooser({ jobs, chosen, onChoose }) {
  const [job, setJob] = useState("");
  const [number, setNumber] = useState("");
  const from = job || chosen.jobs[0] || jobs[0]?.id;
  const isReady = /^\d{1,9}$/.test(number) && from && chosen.trials.length < MOST;
  const add = (event) => {
    event.preventDefault();
    if (!isReady) return;
    if (!chosen.trials.some((one) => one.job === from && one.number === Number(number))) onChoose({ ...chosen, trials: [...chosen.trials, { job: from, number: Number(number) }] });
    setNumber("");
  };
  if (jobs.length === 0) return null;
  return html`<form class="actions" onSubmit=${add}>
    <label class="inline">A trial of <select value=${from} onChange=${(event) => setJob(event.target.value)}>
      ${jobs.map(({ id, model }) => html`<option key=${id} value=${id} selected=${id === from}>${model} ${id}</option>`)}</select></label>
    <label class="inline">number <input type="text" inputmode="numeric" size="6" value=${number} onInput=${(event) => setNumber(event.target.value)} /></label>
    <button type="submit" disabled=${!isReady}>Add</button>
  </form>`;
}
