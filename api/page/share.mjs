/** A job for other people: its permanent address, links for those without a key, and a page of paper. */

import { html, useEffect, useRef, useState } from "./vendor/preact.mjs";
import { copied } from "./exports.mjs";
import { moment } from "./format.mjs";
import { jobLink } from "./router.mjs";
import { ask, send } from "./service.mjs";
import { ProblemNote } from "./states.mjs";

const addressOf = (job, token) => `${location.origin}${location.pathname}${jobLink(job)}${token ? `?link=${token}` : ""}`;

export function Share({ job }) {
  const [isOpen, setOpen] = useState(false);
  return html`<button type="button" onClick=${() => setOpen(true)}>Share …</button>
    <button type="button" onClick=${() => print()}>Print or save as PDF</button>
    ${isOpen && html`<${Links} job=${job.id} onClose=${() => setOpen(false)} />`}`;
}

function Links({ job, onClose }) {
  const dialog = useRef(null);
  const [links, setLinks] = useState({ items: [], most_days: 0 });
  const [days, setDays] = useState(7);
  const [made, setMade] = useState(null);
  const [problem, setProblem] = useState(null);
  const path = `/v1/jobs/${job}/links`;
  const read = () => ask(path).then(setLinks, () => {}); // who only sees the job makes no links to it
  useEffect(() => void (dialog.current.showModal(), read()), []);
  const perform = (action) => action().then(() => (setProblem(null), read()), setProblem);
  const make = (event) => (event.preventDefault(), perform(async () => setMade(await ask(path, { method: "POST", body: { days } }))));
  const withdraw = (id) => perform(() => send(`${path}/${id}`, { method: "DELETE" }));
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="share-heading">
    <h2 id="share-heading">Share</h2>
    <${Address} label="For those who may see it" text=${addressOf(job)} />
    ${links.most_days > 0 && html`<form class="actions" onSubmit=${make}>
      <label class="inline">A link for anybody, for <input type="number" min="1" max=${links.most_days} required value=${days} onInput=${(event) => setDays(Number(event.target.value))} /> days</label>
      <button type="submit">Make a link</button>
    </form>`}
    ${made && html`<${Address} label="For anybody who has it; shown once" text=${addressOf(job, made.token)} />`}
    ${links.items.length > 0 && html`<ul>${links.items.map(({ id, owner, expires }) => html`<li key=${id}>${id} by ${owner}, until ${moment(expires)}
      <button type="button" class="small" onClick=${() => withdraw(id)}>Withdraw</button></li>`)}</ul>`}
    <${ProblemNote} problem=${problem} />
    <p class="actions"><button type="button" onClick=${() => dialog.current.close()}>Close</button></p>
  </dialog>`;
}

function Address({ label, text }) {
  return html`<label>${label} <input type="text" readonly value=${text} onFocus=${(event) => event.target.select()} /></label>
    <p class="actions"><button type="button" aria-label=${`Copy: ${label}`} onClick=${() => copied(text)}>Copy</button></p>`;
}
