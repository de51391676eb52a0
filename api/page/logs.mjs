/** What the ranks of a trial print, as it comes. */

import { html, useEffect, useRef, useState } from "./vendor/preact.mjs";
import { LogText } from "./log_text.mjs";
import { Problem } from "./service.mjs";
import { ProblemNote } from "./states.mjs";
import { follow } from "./stream.mjs";

/** Pixels from the end within which a reader is taken to be at it. */
const AT_END = 40;

/**
 * @param {{job: string, trial: number, onOver: () => void}} props - `onOver`: nothing comes any more
 */
export function Logs({ job, trial, onOver }) {
  const { parts, isOver, problem } = useParts(job, trial, onOver);
  const [chosen, choose] = useState({ attempt: "", rank: "" });
  const attempts = distinct(parts, "attempt");
  const ranks = distinct(parts, "rank");
  const wanted = parts.filter(({ attempt, rank }) => fits(chosen.attempt, attempt) && fits(chosen.rank, rank));
  return html`<section class="card stack" aria-labelledby="logs-heading">
    <div class="chart-top">
      <h2 id="logs-heading">Log</h2>
      ${attempts.length > 1 && html`<${Pick} label="Attempt" value=${chosen.attempt} options=${attempts} onChange=${(attempt) => choose({ ...chosen, attempt })} />`}
      ${ranks.length > 1 && html`<${Pick} label="Rank" value=${chosen.rank} options=${ranks} onChange=${(rank) => choose({ ...chosen, rank })} />`}
      <span class="soft" role="status">${isOver ? "" : "goes on"}</span>
    </div>
    <${ProblemNote} problem=${problem} />
    ${parts.length === 0
      ? html`<p class="soft">${isOver ? "Its ranks printed nothing." : "Its ranks have printed nothing yet."}</p>`
      : html`<${Pane} key=${`${chosen.attempt}|${chosen.rank}`} parts=${wanted} isOver=${isOver} isNamed=${ranks.length > 1 && !chosen.rank} />`}
  </section>`;
}

const fits = (wanted, value) => wanted === "" || wanted === String(value);
const distinct = (parts, name) => [...new Set(parts.map((part) => part[name]))].sort((one, other) => one - other);

function Pick({ label, value, options, onChange }) {
  return html`<label class="inline">${label}
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      <option value="">All</option>
      ${options.map((option) => html`<option key=${option} value=${option} selected=${String(option) === value}>${option}</option>`)}
    </select>
  </label>`;
}

/** The lines, to which what is new is added: to draw thousands of them anew each time would be slow. */
function Pane({ parts, isOver, isNamed }) {
  const box = useRef(null);
  const state = useRef(null);
  useEffect(() => {
    state.current ??= { text: new LogText(isNamed), taken: 0 };
    const { current } = state;
    const element = box.current;
    const wasAtEnd = element.scrollHeight - element.scrollTop - element.clientHeight < AT_END;
    const lines = parts.slice(current.taken).flatMap((part) => current.text.take(part));
    if (isOver) lines.push(...current.text.rest());
    current.taken = parts.length;
    if (lines.length) element.append(document.createTextNode(`${lines.join("\n")}\n`));
    if (wasAtEnd) element.scrollTop = element.scrollHeight;
  }, [parts, isOver]);
  return html`<pre class="log" ref=${box} tabindex="0" role="log" aria-label="Output of the trial's ranks" aria-live="off"></pre>`;
}

function useParts(job, trial, onOver) {
  const [state, setState] = useState({ parts: [], isOver: false, problem: null });
  useEffect(() => {
    const ended = new AbortController();
    follow({
      path: (last) => `/v1/jobs/${job}/trials/${trial}/logs/stream?after=${last}`,
      last: "0",
      signal: ended.signal,
      onMessages: (messages) => setState((known) => ({ ...known, parts: [...known.parts, ...messages.map(({ data }) => data)] })),
    }).then(
      () => {
        if (ended.signal.aborted) return;
        setState((known) => ({ ...known, isOver: true }));
        onOver();
      },
      (error) => {
        if (!(error instanceof Problem)) throw error;
        setState((known) => ({ ...known, problem: error }));
      },
    );
    return () => ended.abort();
  }, [job, trial]);
  return state;
}
