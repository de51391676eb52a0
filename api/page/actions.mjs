/** What a person may ask of a job; what cannot be taken back is asked about first. */

import { html, useEffect, useRef, useState } from "./vendor/preact.mjs";
import { go, jobLink } from "./router.mjs";
import { ask, randomKey } from "./service.mjs";
import { say } from "./shell.mjs";
import { ProblemNote } from "./states.mjs";

const MORE = { name: "more" };
const OPEN = ["QUEUED", "RUNNING"];
const ACTIONS = [
  { name: "pause", label: "Pause", states: OPEN, said: "Pausing: running trials end first." },
  { name: "resume", label: "Resume", states: ["PAUSED", "FAILED"], said: "The job waits for a worker again." },
  {
    name: "stop", label: "Stop", states: [...OPEN, "PAUSING", "PAUSED"], said: "Stopping: running trials end, and the best so far stands.",
    question: "Stop the search?", explained: "Running trials end, and the best so far is the job's answer. More trials can be added later.",
  },
  {
    name: "cancel", label: "Cancel", states: [...OPEN, "PAUSING", "PAUSED", "STOPPING"], isDanger: true, said: "Cancelling: running trials are killed.",
    question: "Cancel the job?", explained: "Running trials are killed and the job ends. What was measured is kept; the job cannot be resumed.",
  },
];

/**
 * @param {{job: object, onDone: () => void, children: any}} props - `onDone`: the job is to be read again; `children`: more actions
 */
export function Actions({ job, onDone, children }) {
  const [problem, setProblem] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const [asking, setAsking] = useState(null);
  const [key] = useState(randomKey); // pressed twice, it opens one job
  const perform = async (action) => {
    setAsking(null);
    setBusy(true);
    setProblem(null);
    try {
      await ask(`/v1/jobs/${job.id}/${action.name}`, { method: "POST" });
      say(action.said);
      onDone();
    } catch (error) {
      setProblem(error);
    }
    setBusy(false);
  };
  const goOn = async (trials) => {
    setAsking(null);
    setProblem(null);
    try {
      await ask(`/v1/jobs/${job.id}/resume`, { method: "POST", body: { trials } });
      say("The job waits for a worker again.");
      onDone();
    } catch (error) {
      setProblem(error);
    }
  };
  const clone = async () => {
    setProblem(null);
    try {
      go(jobLink((await ask(`/v1/jobs/${job.id}/clone`, { method: "POST", headers: { "Idempotency-Key": key } })).id));
    } catch (error) {
      setProblem(error);
    }
  };
  const offered = ACTIONS.filter(({ states }) => states.includes(job.state));
  return html`<div class="stack">
    <div class="actions" role="group" aria-label="Actions">
      ${offered.map((action) => html`<button key=${action.name} type="button" disabled=${isBusy} class=${action.isDanger ? "danger" : ""}
        onClick=${() => (action.question ? setAsking(action) : perform(action))}>${action.label}${action.question ? " …" : ""}</button>`)}
      ${job.state === "SUCCEEDED" && html`<button type="button" onClick=${() => setAsking(MORE)}>More trials …</button>`}
      <button type="button" onClick=${clone}>Run again</button>
      <a class="button" href=${`#/new?from=${job.id}`}>Change and run</a>
      ${children}
    </div>
    <${ProblemNote} problem=${problem} />
    ${asking === MORE && html`<${More} trials=${job.request.trials} onYes=${goOn} onNo=${() => setAsking(null)} />`}
    ${asking && asking !== MORE && html`<${Confirm} action=${asking} onYes=${() => perform(asking)} onNo=${() => setAsking(null)} />`}
  </div>`;
}

/** How many trials a job that has succeeded is to have in all. */
function More({ trials, onYes, onNo }) {
  const dialog = useRef(null);
  const [wanted, setWanted] = useState(2 * trials);
  useEffect(() => dialog.current.showModal(), []);
  const send = (event) => {
    event.preventDefault();
    dialog.current.close(); // so that the keyboard is where it was
    onYes(wanted);
  };
  return html`<dialog ref=${dialog} onClose=${onNo} aria-labelledby="more-question">
    <h2 id="more-question">Go on with more trials?</h2>
    <form onSubmit=${send}>
      <label>Trials in all <input type="number" min=${trials + 1} value=${wanted} required onInput=${(event) => setWanted(Number(event.target.value))} /></label>
      <p class="actions"><button type="submit" class="primary">Go on</button>
        <button type="button" onClick=${() => dialog.current.close()}>Leave it</button></p>
    </form>
  </dialog>`;
}

function Confirm({ action, onYes, onNo }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  const confirm = () => {
    dialog.current.close(); // so that the keyboard is where it was
    onYes();
  };
  return html`<dialog ref=${dialog} onClose=${onNo} aria-labelledby="confirm-question">
    <h2 id="confirm-question">${action.question}</h2>
    <p>${action.explained}</p>
    <p class="actions">
      <button type="button" class=${action.isDanger ? "danger" : "primary"} onClick=${confirm}>${action.label}</button>
      <button type="button" onClick=${() => dialog.current.close()}>Keep it running</button>
    </p>
  </dialog>`;
}
