/** Name, tags, team and note of a job, which can be changed at any time. */

import { html, useEffect, useRef, useState } from "./vendor/preact.mjs";
import { ask } from "./service.mjs";
import { say } from "./shell.mjs";
import { ProblemNote } from "./states.mjs";

/**
 * @param {{job: object, onDone: () => void}} props - `onDone`: the job is to be read again
 */
export function Labels({ job, onDone }) {
  const [isOpen, setOpen] = useState(false);
  return html`<button type="button" onClick=${() => setOpen(true)}>Labels …</button>
    ${isOpen && html`<${Form} job=${job} onDone=${onDone} onClose=${() => setOpen(false)} />`}`;
}

function Form({ job, onDone, onClose }) {
  const dialog = useRef(null);
  const [labels, setLabels] = useState({ name: job.request.name ?? "", tags: (job.request.tags ?? []).join(" "), note: job.request.note ?? "", team: job.request.team ?? "" });
  const [problem, setProblem] = useState(null);
  useEffect(() => dialog.current.showModal(), []);
  const send = async (event) => {
    event.preventDefault();
    setProblem(null);
    try {
      await ask(`/v1/jobs/${job.id}`, { method: "PATCH", body: { ...labels, tags: labels.tags.split(/[\s,]+/).filter(Boolean) } });
    } catch (error) {
      setProblem(error);
      return;
    }
    dialog.current.close();
    say("The labels are changed.");
    onDone();
  };
  const change = (name) => (event) => setLabels({ ...labels, [name]: event.target.value });
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="labels-heading">
    <h2 id="labels-heading">Labels</h2>
    <form class="stack" onSubmit=${send}>
      <label>Name <input type="text" value=${labels.name} onInput=${change("name")} /></label>
      <label>Tags, with spaces between them <input type="text" value=${labels.tags} onInput=${change("tags")} /></label>
      <label>Team that sees it <input type="text" value=${labels.team} onInput=${change("team")} /></label>
      <label>Note <textarea rows="4" value=${labels.note} onInput=${change("note")}></textarea></label>
      <${ProblemNote} problem=${problem} />
      <p class="actions"><button type="submit" class="primary">Save</button>
        <button type="button" onClick=${() => dialog.current.close()}>Leave it</button></p>
    </form>
  </dialog>`;
}
