/** What fits: the ways of fine-tuning a model on some cards, cards side by side, and the file of the fastest. */

import { html, useEffect, useRef, useState } from "./vendor/preact.mjs";
import { Assumed } from "./assumed.mjs";
import { bytes, count, interval, number, sureness } from "./format.mjs";
import { Labelled, Select, Suggested } from "./form/inputs.mjs";
import { here, setQuery } from "./router.mjs";
import { ask } from "./service.mjs";
import { useTitle } from "./shell.mjs";
import { Heading, ProblemNote, Unusable, Waiting } from "./states.mjs";
import { DataTable } from "./table.mjs";

const INPUTS = { model: "", cluster: "1x4090", sequence_length: "2048", global_batch_size: "", dataset_rows: "", epochs: "" };
const PROGRAMS = ["trl", "trainer", "axolotl", "llamafactory", "accelerate", "deepspeed"];

/** The body of a request for one machine; numbers that are not given are left out. */
export function bodyOf(inputs, cluster, program) {
  const numbers = Object.entries(inputs).filter(([name, text]) => !["model", "cluster"].includes(name) && text.trim() !== "");
  const values = Object.fromEntries(numbers.map(([name, text]) => [name, Number(text)]));
  return { model: inputs.model.trim(), cluster, ...values, ...(program && { program }) };
}

const post = (body) => ask("/v1/fits", { method: "POST", body });

export const machinesOf = (text) => text.split(",").map((name) => name.trim()).filter(Boolean).slice(0, 4);

export default function Fit() {
  useTitle("What fits");
  const [choices, setChoices] = useState(null);
  const [inputs, setInputs] = useState(() => ({ ...INPUTS, ...Object.fromEntries(Object.keys(INPUTS).map((name) => [name, here().query.get(name)]).filter(([, text]) => text)) }));
  const [answers, setAnswers] = useState(null);
  const [problem, setProblem] = useState(null);
  const latest = useRef(0);
  useEffect(() => void ask("/v1/choices").then(setChoices, setProblem), []);
  const put = (name) => (value) => setInputs((before) => ({ ...before, [name]: value }));
  const find = async () => {
    const turn = ++latest.current;
    setQuery(inputs);
    setProblem(null);
    setAnswers(undefined);
    try {
      const found = await Promise.all(machinesOf(inputs.cluster).map((cluster) => post(bodyOf(inputs, cluster))));
      if (turn === latest.current) setAnswers(found);
    } catch (error) {
      if (turn === latest.current) (setAnswers(null), setProblem(error));
    }
  };
  useEffect(() => void (here().query.get("model") && find()), []);
  if (choices === null && problem) return html`<${Unusable} error=${problem} />`;
  if (choices === null) return html`<${Waiting} what="the models" />`;
  const text = (name, label, hint) => html`<${Labelled} name=${name} label=${label} hint=${hint}>${(attributes) => html`
    <input type="text" inputmode=${name === "cluster" ? "text" : "decimal"} ...${attributes} value=${inputs[name]} onInput=${(event) => put(name)(event.target.value)} />`}<//>`;
  return html`<${Heading}>What fits<//>
    <p class="soft">Which ways of fine-tuning a model fit on your cards, how fast they are, and the file to start. Predicted: nothing is run.</p>
    <form class="filters" aria-label="What to train" onSubmit=${(event) => (event.preventDefault(), find())}>
      <${Labelled} name="model" label="Model" hint="A name, or a Hugging Face id.">${(attributes) => html`
        <${Suggested} attributes=${attributes} options=${choices.models} value=${inputs.model} onChange=${put("model")} />`}<//>
      ${text("cluster", "Cards", "1x4090, 2x24GB, 8xh100; several with commas")}
      ${text("sequence_length", "Tokens per sample")}
      ${text("global_batch_size", "Samples per step", "64 by default")}
      ${text("dataset_rows", "Rows of the dataset")}
      ${text("epochs", "Epochs")}
      <button class="primary" type="submit">Show</button>
    </form>
    <${ProblemNote} problem=${problem} />
    ${answers === undefined && html`<${Waiting} what="the predictions" />`}
    ${answers && html`<div class="charts">${answers.map((answer) => html`<${Answer} key=${answer.cluster} answer=${answer} inputs=${inputs} />`)}</div>`}`;
}

function Answer({ answer, inputs }) {
  const [isWhole, setWhole] = useState(false);
  const fastest = answer.setups[answer.fastest];
  const leanest = answer.setups[answer.leanest];
  const rows = answer.setups.filter((way) => isWhole || way.best_of_method || way === leanest);
  return html`<section class="card stack" aria-label=${`On ${answer.cluster}`}>
    <h2>${answer.model} on ${answer.cluster}</h2>
    ${fastest
      ? html`<p><strong>Fastest that fits: ${wayText(fastest)}</strong>, micro-batch ${fastest.config.micro_batch_size}, ${bytes(fastest.needed_bytes)} of ${`${bytes(fastest.predicted.memory_limit_bytes)} per card`} with a probability of ${sureness(fastest.predicted.fit_probability)}: ${rateText(fastest)}${fastest.hours && html`, ${interval(fastest.hours.mean, fastest.hours.low, fastest.hours.high)} hours`}.</p>
        ${leanest !== fastest && html`<p>Least memory: ${wayText(leanest)}, ${bytes(leanest.least_bytes)} per card at micro-batch 1; at its fastest, with ${bytes(leanest.needed_bytes)}: ${rateText(leanest)}.</p>`}`
      : html`<p><strong>Nothing fits.</strong> The nearest is ${wayText(answer.setups[answer.nearest])}. ${answer.remedies.length > 0 && html`What would do: ${answer.remedies.map(remedyText).join("; or ")}.`}</p>`}
    <${DataTable} caption=${`Ways of training on ${answer.cluster}`} columns=${COLUMNS} rows=${rows} keyOf=${(way) => `${way.method}/${wayText(way)}`} />
    ${!isWhole && html`<button type="button" class="small" onClick=${() => setWhole(true)}>Show all ${answer.setups.length} ways</button>`}
    ${fastest && fastest.method && html`<${File} answer=${answer} inputs=${inputs} />`}
    ${answer.assumed.length > 0 && html`<details><summary>Assumed, because nobody stated it</summary><${Assumed} assumed=${answer.assumed} /></details>`}
  </section>`;
}

function File({ answer, inputs }) {
  const [program, setProgram] = useState("");
  const [file, setFile] = useState(null);
  const choose = (name) => {
    setProgram(name);
    setFile(null);
    if (name) post(bodyOf(inputs, answer.cluster, name)).then((found) => setFile(found.file), (error) => setFile({ text: "", notes: [error.message] }));
  };
  const options = [{ value: "", label: "choose a program" }, ...PROGRAMS.map((value) => ({ value, label: value }))];
  return html`<${Labelled} name=${`file-${answer.cluster}`} label="The fastest way's file">${(attributes) => html`<${Select} attributes=${attributes} options=${options} value=${program} onChange=${choose} />`}<//>
    ${file && html`<ul class="soft">${file.notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>
      ${file.text && html`<textarea class="mono" readonly rows="12" aria-label=${`File for ${program}`} value=${file.text}></textarea>`}`}`;
}

const wayText = ({ method, sharding, recomputes }) => [method ?? "as made", sharding, ...(recomputes ? ["recomputed"] : [])].join(", ");
const ratesOf = ({ predicted }) => {
  const { samples_per_second: rate, tokens_per_second: tokens } = predicted;
  const factor = tokens === null ? 1 : tokens / rate.mean;
  return [rate.mean * factor, rate.low * factor, rate.high * factor];
};
const rateText = (way) => `${interval(...ratesOf(way))} ${way.predicted.tokens_per_second === null ? "samples/s" : "tokens/s"}`;

function remedyText({ remedy, value }) {
  const texts = { shorter_samples: `samples of at most ${count(value)} tokens`, card_memory: `cards of ${bytes(value)}`, host_memory: `${bytes(value)} of main memory per node` };
  return texts[remedy] ?? `${count(value)} such nodes`;
}

const cardOf = (way) => (way.fits ? way.needed_bytes : way.least_bytes);
const fitting = (value) => (way) => (way.fits ? value(way) : null);
const COLUMNS = [
  { key: "method", title: "Trained", width: 10, value: ({ method }) => method ?? "as made" },
  { key: "how", title: "How", width: 27, value: ({ sharding, recomputes }) => `${sharding}${recomputes ? ", recomputed" : ""}` },
  { key: "card", title: "Per card", width: 10, numeric: true, value: cardOf, cell: (way) => bytes(cardOf(way)) },
  { key: "rate", title: "Rate", unit: "/s", width: 9, numeric: true, value: fitting((way) => ratesOf(way)[0]), cell: fitting((way) => number(ratesOf(way)[0])) },
  { key: "hours", title: "Hours", width: 8, numeric: true, value: ({ hours }) => (hours ? hours.mean : null), cell: ({ hours }) => (hours ? number(hours.mean) : null) },
  { key: "batch", title: "Batch", width: 8, numeric: true, value: fitting(({ config }) => config.micro_batch_size) },
  { key: "most", title: "Largest", width: 9, numeric: true, value: fitting((way) => way.largest_micro_batch_size), cell: fitting((way) => count(way.largest_micro_batch_size)) },
  { key: "longest", title: "Longest", unit: "tokens", width: 14, numeric: true, value: fitting((way) => way.longest_sequence_length), cell: fitting((way) => (way.longest_sequence_length === null ? null : count(way.longest_sequence_length))) },
  { key: "host", title: "Main memory", width: 13, numeric: true, value: ({ predicted }) => predicted.host_memory_bytes || null, cell: ({ predicted }) => (predicted.host_memory_bytes ? bytes(predicted.host_memory_bytes) : null) },
];
