/** What a view shows when it has nothing else to show. */

import { html } from "./vendor/preact.mjs";
import { useHeading } from "./focus.mjs";
import { useTitle } from "./shell.mjs";

export const Heading = ({ children }) => html`<h1 tabindex="-1" ref=${useHeading()}>${children}</h1>`;

/** A text of the service, in which backticks mark what is typed. */
export const coded = (text) => text.split("`").map((part, index) => (index % 2 ? html`<code>${part}</code>` : part));

export function Waiting({ what = "the page" }) {
  return html`<p class="state" role="status">Loading ${what} …</p>`;
}

export function Missing() {
  useTitle("Not here");
  return html`<${Heading}>There is nothing here<//>
    <p>The address names no job and no view. <a href="#/">To all jobs</a></p>`;
}

/** A view that cannot be shown, and what can be done about it. */
export function Unusable({ error, retry }) {
  useTitle("Not available");
  const heading = error.status === 404 ? "Not found" : error.status === 403 ? "Not allowed" : "This cannot be shown";
  return html`<${Heading}>${heading}<//>
    <p class="problem" role="alert">${error.message}</p>
    <p class="actions">
      ${retry && html`<button type="button" onClick=${retry}>Try again</button>`}
      <a class="button quiet" href="#/">To all jobs</a>
    </p>`;
}

/** Refusals of a request, each with its remedy. */
export function ProblemNote({ problem }) {
  if (!problem) return null;
  const errors = problem.errors ?? [];
  return html`<div class="problem" role="alert">
    ${errors.length === 0 && html`<p>${problem.message}</p>`}
    ${errors.map(({ field, message, remedy }) => html`<p><strong>${field}</strong>: ${message}${remedy ? `; ${remedy}` : ""}</p>`)}
  </div>`;
}
