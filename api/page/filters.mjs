/** Which trials a person wants to see: by outcome, purpose, text and the value of a knob. */

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.mjs";
import { count, knob as knobText } from "./format.mjs";
import { outcomeLook } from "./outcomes.mjs";

/** Columns of words that a text is looked for in, beside the knobs. */
const SEARCHED = ["outcome", "purpose", "cause", "node"];

/** Milliseconds after the last key: a letter is seen at once, and what it filters when nothing more is typed. */
const TYPED = 120;

export const NO_FILTER = { text: "", outcome: "", purpose: "", knob: "", value: "" };

/** Rows that pass; `brushed` are those that a plot was brushed to, null: all. */
export function passing(points, filter, brushed) {
  const rows = [];
  const tests = filter.text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => matcher(points, word));
  const knob = points.knobs.find(({ name }) => name === filter.knob);
  for (let row = 0; row < points.size; row++) {
    if (filter.outcome && (points.outcome(row) ?? "OPEN") !== filter.outcome) continue;
    if (filter.purpose && points.purpose(row) !== filter.purpose) continue;
    if (knob && filter.value && String(points.value(knob, row)) !== filter.value) continue;
    if (brushed && !brushed.has(row)) continue;
    if (tests.every((matches) => matches(row))) rows.push(row);
  }
  return rows;
}

/** Whether a row has the word. It is looked for once among the words that there are: rows are many, words are few. */
function matcher(points, word) {
  const has = (text) => text.toLowerCase().includes(word);
  const columns = [
    ...SEARCHED.map((name) => [points.columns[name], points.words[name].map(has)]),
    ...points.varied.map(({ name, codes, values }) => [codes, values.map((value) => has(`${name}=${value}`))]),
  ].filter(([, found]) => found.includes(true));
  return (row) => String(row) === word || columns.some(([codes, found]) => found[codes[row]]);
}

/**
 * @param {object} props
 * @param {typeof NO_FILTER} props.filter
 * @param {(changes: object) => void} props.onChange
 * @param {number} props.shown - rows that pass
 */
export function Filters({ points, filter, onChange, shown, brushed, onClear }) {
  const outcomes = useMemo(() => found(points, (row) => points.outcome(row) ?? "OPEN"), [points]);
  const purposes = useMemo(() => found(points, (row) => points.purpose(row)), [points]);
  const knob = points.varied.find(({ name }) => name === filter.knob);
  const isFiltered = brushed !== null || Object.values(filter).some(Boolean);
  return html`<form class="filters" role="search" aria-label="Filter the trials" onSubmit=${(event) => event.preventDefault()}>
    <${SearchText} value=${filter.text} placeholder="zero_stage=2" onChange=${(text) => onChange({ text })} />
    <${Choice} label="Outcome" value=${filter.outcome} options=${outcomes.map((name) => [name, name === "OPEN" ? "No outcome yet" : outcomeLook(name).label])} onChange=${(outcome) => onChange({ outcome })} />
    <${Choice} label="Purpose" value=${filter.purpose} options=${purposes.map((name) => [name, name])} onChange=${(purpose) => onChange({ purpose })} />
    <${Choice} label="Knob" value=${filter.knob} options=${points.varied.map(({ name }) => [name, name])} onChange=${(name) => onChange({ knob: name, value: "" })} />
    ${knob && html`<${Choice} label="Value" value=${filter.value} options=${knob.values.map((value) => [String(value), knobText(value)])} onChange=${(value) => onChange({ value })} />`}
    <p class="soft" role="status">${isFiltered ? `${count(shown)} of ${count(points.size)}` : `${count(points.size)} trials`}${brushed === null ? "" : ", as brushed"}</p>
    ${isFiltered && html`<button type="button" class="small" onClick=${onClear}>Show all</button>`}
  </form>`;
}

/** A text to look for, as long as the service takes, reported when nothing more is typed. */
export function SearchText({ value, onChange, placeholder }) {
  const [typed, setTyped] = useState(value);
  const told = useRef(value);
  const timer = useRef(0);
  const change = useRef(onChange);
  change.current = onChange;
  useEffect(() => {
    // It was set from outside, as by "Show all".
    if (value !== told.current) setTyped((told.current = value));
  }, [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const type = (text) => {
    setTyped(text);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => change.current((told.current = text)), TYPED);
  };
  return html`<label>Text <input type="search" maxlength="200" value=${typed} placeholder=${placeholder} onInput=${(event) => type(event.target.value)} /></label>`;
}

/** A selection of which nothing may be chosen: `options` are pairs of value and text. */
export function Choice({ label, value, options, onChange }) {
  return html`<label>${label}
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      <option value="">Any</option>
      ${options.map(([name, shown]) => html`<option key=${name} value=${name} selected=${name === value}>${shown}</option>`)}
    </select>
  </label>`;
}

function found(points, wordOf) {
  const words = new Set();
  for (let row = 0; row < points.size; row++) words.add(wordOf(row));
  return [...words];
}
