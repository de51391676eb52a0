/** A new job: its fields, held against the service as they are entered, and what it may find and cost before anything runs. */

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.mjs";
import { applies, entered, inSection, sent } from "./form/fields.mjs";
import { problemsByField, useSubmissionKey, useVerdict } from "./form/draft.mjs";
import { Entry, Labelled, Select, Suggested } from "./form/inputs.mjs";
import { enteredModel, ModelEntry, sentModel } from "./form/model.mjs";
import { Outlook } from "./form/outlook.mjs";
import { enteredPins, Pins, sentPins } from "./form/pins.mjs";
import { counted } from "./format.mjs";
import { go, jobLink } from "./router.mjs";
import { ask, Problem } from "./service.mjs";
import { say, useTitle } from "./shell.mjs";
import { Heading, Unusable, Waiting } from "./states.mjs";

const JOB = /^[0-9]{8}-[0-9]{6}-[a-z0-9]{4}$/;

export default function NewJob({ route }) {
  useTitle("New job");
  const from = JOB.test(route.query.get("from") ?? "") ? route.query.get("from") : null;
  const [loaded, setLoaded] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => void load(from).then(setLoaded, setError), [from]);
  if (error) return html`<${Unusable} error=${error} />`;
  if (loaded === null) return html`<${Waiting} what="the form" />`;
  return html`<${Form} key=${from} from=${from} ...${loaded} />`;
}

async function load(from) {
  const [choices, knobs, job] = await Promise.all([ask("/v1/choices"), ask("/v1/knobs"), from && ask(`/v1/jobs/${from}`)]);
  return { choices, knobs: knobs.items, start: job ? { ...job.request, priority: job.priority } : {} };
}

function Form({ from, choices, knobs, start }) {
  const [state, setState] = useState(() => beginning(start, choices));
  const put = (changes) => setState((known) => ({ ...known, ...changes }));
  const { body, problem: own } = useMemo(() => written(state, choices), [state, choices]);
  const text = body === null ? null : JSON.stringify(body);
  const verdict = useVerdict(text);
  const isCurrent = text !== null && verdict.body === text;
  const [refusal, setRefusal] = useState({ body: "", problem: null });
  const problem = own ?? (refusal.body === text ? refusal.problem : isCurrent ? verdict.problem : null);
  const problems = problemsByField(problem, choices);
  const form = useRef(null);
  const submission = useSubmission(text, (refused) => setRefusal({ body: text, problem: refused }));
  const onSubmit = async (event) => {
    event.preventDefault();
    if (problem ? true : !(await submission.send())) setTimeout(() => form.current?.querySelector("[aria-invalid]")?.focus());
  };
  const shared = { choices, values: state.values, problems, model: state.model, cluster: state.cluster, onChange: (name, value) => put({ values: { ...state.values, [name]: value } }) };
  const isUploaded = from && state.model.kind === "config" && !state.model.config;
  return html`<${Heading}>${from ? "Clone of a job" : "New job"}<//>
    ${from && html`<p class="soft">The fields are those of <a href=${jobLink(from)}>${from}</a>. ${isUploaded && "Its model was uploaded: choose the file again."}</p>`}
    ${!choices.may_submit && html`<p class="note">This key may read alone. What is entered is checked; to submit it, use a key with the scope <code>submit</code>.</p>`}
    <form class="submission" ref=${form} onSubmit=${onSubmit} novalidate>
      <div class="groups">
        <${Group} legend="Model">
          <${ModelEntry} model=${state.model} choices=${choices} problems=${problems} onChange=${(model) => put({ model })} />
          <${Entries} fields=${inSection(choices, "workload")} ...${shared} />
        <//>
        <${Group} legend="Where it runs">
          <${Cluster} choices=${choices} cluster=${state.cluster} problems=${problems} onChange=${(cluster) => put({ cluster })} />
          <${Entries} fields=${inSection(choices, "machine")} ...${shared} />
        <//>
        <${Group} legend="What is tried">
          <${Space} choices=${choices} space=${state.space} problems=${problems} onChange=${(space) => put({ space })} />
          <${Pins} field="pins" label="Knobs with values of your own" hint="One value, or several parted by commas, in place of what the space has."
            knobs=${knobs} rows=${state.pins} problems=${problems} onChange=${(pins) => put({ pins })} />
        <//>
        <${Group} legend="Goal and budget"><${Entries} fields=${inSection(choices, "goal")} ...${shared} /><//>
        <${Group} legend="To find it again"><${Entries} fields=${inSection(choices, "labels")} ...${shared} /><//>
        <details class="card group more" open=${inSection(choices, "search").some(({ name }) => problems[name])}>
          <summary>How it searches, and more</summary>
          <div class="entries"><${Entries} fields=${inSection(choices, "search")} ...${shared} /></div>
          <${Pins} field="baseline" label="Present configuration" hint="What you train with now: trial 0, which the best is held against. Left out: the defaults at the lowest ZeRO stage that fits."
            knobs=${knobs} rows=${state.baseline} problems=${problems} onChange=${(baseline) => put({ baseline })} />
          <${Failures} text=${state.failures} problems=${problems} onChange=${(failures) => put({ failures })} />
        </details>
      </div>
      <aside class="card before" aria-label="Before anything runs">
        <h2>Before anything runs</h2>
        <${Standing} problem=${problem} problems=${problems} isCurrent=${isCurrent} />
        <${Outlook} verdict=${verdict} isCurrent=${isCurrent} choices=${choices} knobs=${knobs} />
        <p class="actions"><button type="submit" class="primary" disabled=${submission.isBusy || !choices.may_submit}>${submission.isBusy ? "Submitting …" : "Submit"}</button></p>
      </aside>
    </form>`;
}

function Group({ legend, children }) {
  return html`<fieldset class="card group"><legend>${legend}</legend><div class="entries">${children}</div></fieldset>`;
}

const Entries = ({ fields, ...shared }) => fields.map((field) => html`<${Entry} key=${field.name} field=${field} ...${shared} />`);

function Cluster({ choices, cluster, problems, onChange }) {
  const note = choices.clusters.find(({ name }) => name === cluster.split(":")[0])?.note;
  return html`<${Labelled} name="cluster" label="Cluster" hint=${`${note ? `${note}. ` : ""}A name or cards, such as 8xh100; NAME:NODES for several machines.`} problems=${problems.cluster}>${(attributes) => html`
    <${Suggested} attributes=${attributes} options=${choices.clusters} value=${cluster} onChange=${onChange} />`}<//>`;
}

function Space({ choices, space, problems, onChange }) {
  const options = choices.spaces.map(({ name }) => ({ value: name, label: name }));
  const note = choices.spaces.find(({ name }) => name === space)?.note;
  return html`<${Labelled} name="space" label="Space" hint=${note && `${note}.`} problems=${problems.space}>${(attributes) => html`<${Select} attributes=${attributes} options=${options} value=${space} onChange=${onChange} />`}<//>`;
}

function Failures({ text, problems, onChange }) {
  return html`<${Labelled} name="failures" label="Failure table" hint="Rows of your own, as JSON: how a failure is told by its output, and what becomes of its trial." problems=${problems.failures}>${(attributes) => html`
    <textarea ...${attributes} rows="3" class="mono" spellcheck=${false} value=${text} placeholder='{"flaky-link": {"outcome": "LOST", "retries": 2, …}}' onInput=${(event) => onChange(event.target.value)}></textarea>`}<//>`;
}

/** Whether the entries would be accepted, in one line; and what no entry can show. */
function Standing({ problem, problems, isCurrent }) {
  const fields = Object.keys(problems).filter(Boolean).length;
  const told = problem ? (fields ? `${counted(fields, "entry", "entries")} to correct.` : "This cannot be submitted.") : isCurrent ? "Ready to submit." : "Checking …";
  return html`<div role="status" class="standing">
    <p><span class=${`badge${problem ? " bad" : isCurrent ? " good" : ""}`}>${told}</span></p>
    ${(problems[""] ?? []).map((line) => html`<p class="field-problem" key=${line}>${line}</p>`)}
    ${Object.entries(problems).filter(([field]) => field).map(([field, lines]) => html`<p class="soft" key=${field}><strong>${field}</strong>: ${lines.join(" ")}</p>`)}
  </div>`;
}

function beginning(start, choices) {
  const values = {};
  for (const field of choices.fields) {
    const value = start[field.name];
    if (value !== undefined && value !== choices.defaults[field.name]) values[field.name] = entered(field, value);
  }
  return {
    values,
    model: enteredModel({ model: choices.models[0]?.name, ...start }, choices),
    cluster: start.cluster ?? choices.defaults.cluster,
    space: start.space ?? choices.defaults.space,
    pins: enteredPins(start.pins),
    baseline: enteredPins(start.baseline),
    failures: start.failures?.length ? JSON.stringify(rowsByName(start.failures)) : "",
  };
}

const rowsByName = (rows) => Object.fromEntries(rows.map(({ name, ...row }) => [name, row]));

/** The request's body, or what keeps it from being one. */
function written({ values, model, cluster, space, pins, baseline, failures }, choices) {
  try {
    const body = { ...sentModel(model), cluster: cluster.trim(), space };
    for (const field of choices.fields) {
      const isMeant = applies(field, values, choices);
      if (isMeant && values[field.name] !== undefined && String(values[field.name]).trim() !== "") body[field.name] = sent(field, values[field.name]);
    }
    if (model.kind === "command") delete body.engine;
    if (pins.length) body.pins = sentPins(pins);
    if (Object.keys(sentPins(baseline)).length) body.baseline = sentPins(baseline);
    if (failures.trim()) body.failures = table(failures);
    return { body, problem: null };
  } catch (problem) {
    return { body: null, problem };
  }
}

function table(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Problem(422, "This is no JSON.", [{ field: "failures", message: "This is no JSON." }]);
  }
}

/** Sends the body once, however often the button is pressed. */
function useSubmission(text, onRefused) {
  const [isBusy, setBusy] = useState(false);
  const key = useSubmissionKey(text);
  const send = async () => {
    if (isBusy || text === null) return false;
    setBusy(true);
    try {
      const job = await ask("/v1/jobs", { method: "POST", body: JSON.parse(text), headers: { "Idempotency-Key": key } });
      say("The job was submitted.");
      go(jobLink(job.id));
      return true;
    } catch (error) {
      onRefused(error);
      setBusy(false);
      return false;
    }
  };
  return { isBusy, send };
}
