/** What can be done by keyboard, on a question mark; `/` goes to the search field of a view. */

import { html, useEffect, useRef } from "./vendor/preact.mjs";

const KEYS = [
  ["?", "shows this list"],
  ["/", "to the search field of the view"],
  ["Tab, Shift+Tab", "to the next or the previous control"],
  ["arrows, Page Up, Page Down, Home, End", "in a plot: between its points; in a table or a log: scroll"],
  ["Enter", "in a plot: opens the trial of the selected point"],
  ["Escape", "closes a dialog"],
];

const TYPING = "input, select, textarea, [contenteditable]";

export function KeyboardHelp() {
  const dialog = useRef(null);
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest(TYPING) || document.querySelector("dialog[open]")) return;
      const field = event.key === "/" ? document.querySelector('main input[type="search"]') : null;
      if (event.key === "?") dialog.current.showModal();
      else if (field) field.focus();
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  return html`<button type="button" class="quiet icon" onClick=${() => dialog.current.showModal()} aria-label="Keys"><span aria-hidden="true">?</span></button>
    <dialog ref=${dialog} aria-labelledby="keys-heading">
      <h2 id="keys-heading" tabindex="-1" autofocus>By keyboard</h2>
      <dl class="plain-list">${KEYS.map(([keys, what]) => html`<dt key=${keys}><kbd>${keys}</kbd></dt><dd>${what}</dd>`)}</dl>
      <p class="actions"><button type="button" onClick=${() => dialog.current.close()}>Close</button></p>
    </dialog>`;
}
