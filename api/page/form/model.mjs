/** What is tuned: a preset, an uploaded config.json, a factory or a script that the server allows. */

import { html } from "../vendor/preact.mjs";
import { Problem } from "../service.mjs";
import { Labelled, Radios, Select, Suggested } from "./inputs.mjs";

const KINDS = [
  { value: "preset", label: "By name" },
  { value: "config", label: "config.json" },
  { value: "factory", label: "Own module" },
  { value: "command", label: "Own script" },
];

/** The model as it is entered, from a request; what a request of another job does not hold is empty. */
export function enteredModel({ model, command }, choices) {
  const empty = { kind: "preset", preset: "", factory: "", name: "uploaded", config: "", command: enteredCommand(null, choices) };
  if (command) return { ...empty, kind: "command", command: enteredCommand(command, choices) };
  if (choices.factories.includes(model)) return { ...empty, kind: "factory", factory: model };
  if (model && !model.includes("/") && !choices.models.some(({ name }) => name === model)) return { ...empty, kind: "config", name: model };
  return { ...empty, preset: model ?? "" };
}

function enteredCommand(command, { commands }) {
  const begins = commands[0] ?? { folder: "", arguments: [] };
  const knobs = (values) => Object.entries(values ?? {}).map(([name, own]) => `${name}=${own.join(",")}`).join(" ");
  return {
    folder: command?.folder ?? begins.folder,
    words: words(command?.arguments ?? begins.arguments),
    launcher: command?.launcher ?? "torchrun",
    pattern: command?.pattern ?? "",
    script_knobs: knobs(command?.script_knobs),
    environment_knobs: knobs(command?.environment_knobs),
  };
}

const words = (list) => list.map((word) => (/[\s"\\]/.test(word) || word === "" ? JSON.stringify(word) : word)).join(" ");

/** The words of a line; those in double quotes may have spaces. */
function split(line) {
  return [...line.matchAll(/"((?:[^"\\]|\\.)*)"|(\S+)/g)].map(([, quoted, bare]) => bare ?? quoted.replaceAll(/\\(.)/g, "$1"));
}

function knobsOf(text) {
  const pairs = text.split(/\s+/).filter(Boolean).map((pair) => pair.split("="));
  return Object.fromEntries(pairs.map(([name, values = ""]) => [name, values.split(",").filter(Boolean)]));
}

/**
 * The fields `model` and `command` of a request.
 * @throws {Problem} what was entered cannot be sent
 */
export function sentModel(model) {
  if (model.kind === "preset") return { model: model.preset.trim() };
  if (model.kind === "factory") return { model: model.factory };
  if (model.kind === "config") return { model: { name: model.name, config: parsed(model.config) } };
  const { folder, words: line, launcher, pattern, script_knobs, environment_knobs } = model.command;
  const command = { arguments: split(line), folder, launcher, script_knobs: knobsOf(script_knobs), environment_knobs: knobsOf(environment_knobs) };
  return { command: pattern ? { ...command, pattern } : command };
}

function parsed(text) {
  try {
    const config = JSON.parse(text);
    if (config !== null && typeof config === "object" && !Array.isArray(config)) return config;
  } catch {
    // told below
  }
  const message = text.trim() ? "This is no JSON object." : "Paste a config.json, or choose its file.";
  throw new Problem(422, message, [{ field: "model.config", message }]);
}

export function ModelEntry({ model, choices, problems, onChange }) {
  const put = (changes) => onChange({ ...model, ...changes });
  const kinds = KINDS.filter(({ value }) => (value !== "factory" || choices.factories.length) && (value !== "command" || choices.commands.length));
  return html`
    <${Radios} name="model-kind" legend="Kind of model" options=${kinds} value=${model.kind} onChange=${(kind) => put({ kind })} />
    ${model.kind === "preset" && html`<${Labelled} name="model" label="Model" hint="A name, or an id of the Hugging Face hub." problems=${problems.model}>${(attributes) => html`
      <${Suggested} attributes=${attributes} options=${choices.models} value=${model.preset} onChange=${(preset) => put({ preset })} />`}<//>`}
    ${model.kind === "factory" && html`<${Labelled} name="model" label="Factory" hint="Modules that this server allows." problems=${problems.model}>${(attributes) => html`
      <${Select} attributes=${attributes} options=${choices.factories.map((value) => ({ value, label: value }))} value=${model.factory} onChange=${(factory) => put({ factory })} />`}<//>`}
    ${model.kind === "config" && html`<${ConfigEntry} model=${model} problems=${problems} put=${put} />`}
    ${model.kind === "command" && html`<${CommandEntry} command=${model.command} choices=${choices} problems=${problems} onChange=${(command) => put({ command })} />`}`;
}

function ConfigEntry({ model, problems, put }) {
  const read = async (event) => {
    const [file] = event.target.files;
    if (file) put({ config: await file.text() });
  };
  return html`
    <${Labelled} name="model.name" label="Name" problems=${problems["model.name"]}>${(attributes) => html`<input type="text" ...${attributes} value=${model.name}
      onInput=${(event) => put({ name: event.target.value })} />`}<//>
    <${Labelled} name="model.file" label="File" hint="A Hugging Face config.json. It is read here, and sent as text.">${(attributes) => html`<input type="file"
      ...${attributes} accept=".json,application/json" onChange=${read} />`}<//>
    <${Labelled} name="model.config" label="Its content" problems=${[...(problems["model.config"] ?? []), ...(problems.model ?? [])]}>${(attributes) => html`<textarea
      ...${attributes} rows="6" spellcheck=${false} class="mono" value=${model.config} onInput=${(event) => put({ config: event.target.value })}></textarea>`}<//>`;
}

function CommandEntry({ command, choices, problems, onChange }) {
  const put = (name) => (event) => onChange({ ...command, [name]: event.target.value });
  const text = (name, label, hint) => html`<${Labelled} name=${`command.${name}`} label=${label} hint=${hint} problems=${problems[`command.${name}`]}>${(attributes) => html`
    <input type="text" ...${attributes} class="mono" spellcheck=${false} autocomplete="off" value=${command[name]} onInput=${put(name)} />`}<//>`;
  const begins = choices.commands.map((one) => ({ value: words(one.arguments), label: `${words(one.arguments)} in ${one.folder}`, folder: one.folder }));
  const choose = (value) => onChange({ ...command, words: value, folder: begins.find((one) => one.value === value)?.folder ?? command.folder });
  return html`
    <${Labelled} name="command.begin" label="Script" hint="What this server allows.">${(attributes) => html`<${Select} attributes=${attributes} options=${begins}
      value=${begins.find(({ value }) => command.words.startsWith(value))?.value ?? ""} onChange=${choose} />`}<//>
    <${Labelled} name="command" label="Command" hint="{micro_batch_size} and the like stand for knobs." problems=${[...(problems.command ?? []), ...(problems["command.arguments"] ?? [])]}>${(attributes) => html`
      <textarea ...${attributes} rows="3" class="mono" spellcheck=${false} value=${command.words} onInput=${put("words")}></textarea>`}<//>
    <${Labelled} name="command.launcher" label="Launcher" problems=${problems["command.launcher"]}>${(attributes) => html`<${Select} attributes=${attributes}
      options=${["torchrun", "deepspeed", "accelerate"].map((value) => ({ value, label: value }))} value=${command.launcher} onChange=${(launcher) => onChange({ ...command, launcher })} />`}<//>
    ${text("pattern", "Pattern of its log", "Where the script does not call autotune.report: a regular expression with a named group such as samples_per_second.")}
    ${text("script_knobs", "Its own knobs", "num_workers=0,2,4 compile=true,false")}
    ${text("environment_knobs", "Environment variables", "OMP_NUM_THREADS=1,2")}`;
}
