/** The fields of a submission: where they stand, what they are called, how they are entered. */

/**
 * @typedef {object} Field
 * @property {string} name - in the request
 * @property {string} label
 * @property {"number" | "choice" | "switch" | "bytes" | "percent" | "text" | "texts" | "words"} kind
 * @property {string} [unit]
 * @property {string} [hint]
 * @property {(choices: object) => {value: string, label: string}[]} [options]
 * @property {(values: object, choices: object) => boolean} [applies]
 */

const named = (items) => items.map(({ name, note }) => ({ value: name, label: note ? `${name} – ${note}` : name }));
const plain = (items) => items.map((value) => ({ value, label: value }));
const foresees = ({ strategy }, { foreseeing, defaults }) => foreseeing.includes(strategy || defaults.strategy);

/** @type {Field[]} */
export const WORKLOAD = [
  { name: "global_batch_size", label: "Global batch size", kind: "number", unit: "samples", hint: "In one optimizer step, over all ranks." },
  { name: "sequence_length", label: "Sequence length", kind: "number", unit: "tokens" },
  { name: "lr", label: "Learning rate", kind: "number", hint: "Of your run: trials train with it, and exported files state it." },
  { name: "weight_decay", label: "Weight decay", kind: "number" },
  { name: "clip", label: "Gradient clipping", kind: "number", hint: "Bound of the norm; 0: none." },
  { name: "optimizer", label: "Optimizer", kind: "choice", options: ({ optimizers }) => plain(optimizers) },
];

export const MACHINE = [
  { name: "ranks", label: "Ranks", kind: "number", hint: "Left out: every device of the cluster." },
  { name: "memory_limit", label: "Memory limit", kind: "bytes", hint: "Of a rank. Left out: what the device has." },
  { name: "headroom", label: "Headroom", kind: "percent", hint: "Of the limit: what the winner leaves free." },
  { name: "engine", label: "Engine", kind: "choice", options: ({ engines }) => named(engines) },
  { name: "runner", label: "Runner", kind: "choice", options: ({ runners }) => plain(runners) },
];

export const GOAL = [
  { name: "objective", label: "Objective", kind: "choice", options: ({ objectives }) => plain(objectives) },
  { name: "trials", label: "Trials", kind: "number", hint: "Search trials that may start on a device." },
  { name: "max_seconds", label: "Time", kind: "number", unit: "seconds", hint: "After that no search trial starts. Left out: no such budget." },
  { name: "device_hours", label: "Device-hours", kind: "number", unit: "hours", hint: "Time times ranks. Left out: no such budget." },
  {
    name: "stop_margin", label: "Stop when sure", kind: "percent", applies: foresees,
    hint: "Ends when it is 95 % sure that nothing untried is faster by more than this.",
  },
  {
    name: "run_device_hours", label: "Run that is tuned for", kind: "number", unit: "device-hours", applies: foresees,
    hint: "Ends when a trial costs more than it is expected to save of them.",
  },
];

export const SEARCH = [
  { name: "strategy", label: "Strategy", kind: "choice", options: ({ strategies }) => plain(strategies) },
  { name: "seed", label: "Seed", kind: "number" },
  { name: "racing", label: "End trials early that cannot win", kind: "switch" },
  { name: "allow_unstable", label: "Let trials win that did not settle", kind: "switch" },
  { name: "confirm_repeats", label: "Confirmation", kind: "number", unit: "rounds of 3", hint: "Measurements of the finalists, at most." },
  { name: "control_every", label: "Control after", kind: "number", unit: "trials", hint: "The baseline is measured again, to see whether the machine drifts; 0: never." },
  {
    name: "environment_settings", label: "Environments", kind: "texts",
    hint: "Variables of the ranks' processes, tried on the best layout at last: NAME=VALUE pairs, a | between settings, or standard.",
  },
  { name: "trial_timeout", label: "Longest trial", kind: "number", unit: "seconds" },
  { name: "priority", label: "Priority", kind: "number", hint: "-100 to 100; higher ones go first." },
];

export const LABELS = [
  { name: "name", label: "Name", kind: "text", hint: "What the job is called." },
  { name: "tags", label: "Tags", kind: "words", hint: "Words to find it by." },
  { name: "note", label: "Note", kind: "text" },
];

export const ALL = [...WORKLOAD, ...MACHINE, ...GOAL, ...SEARCH, ...LABELS];

/** What is sent of an entry; what is not a number is sent as it is, such as bytes with a unit: the service reads it, or says what is wrong. */
export function sent(field, entry) {
  const text = String(entry).trim();
  if (field.kind === "switch") return entry === true || entry === "true";
  if (field.kind === "choice" || field.kind === "text") return text;
  if (field.kind === "words") return text.split(/[\s,]+/).filter(Boolean);
  if (field.kind === "texts") return text.split("|").map((part) => part.trim()).filter(Boolean);
  const value = Number(text);
  if (!Number.isFinite(value)) return text;
  return field.kind === "percent" ? Number((value / 100).toPrecision(12)) : value;
}

/** A value of a request as it is entered. */
export function entered(field, value) {
  if (value === null || value === undefined) return "";
  if (field.kind === "switch") return Boolean(value);
  if (field.kind === "texts") return value.join(" | ");
  if (field.kind === "words") return value.join(" ");
  if (field.kind === "percent") return String(Number((100 * value).toPrecision(12)));
  if (field.kind !== "bytes") return String(value);
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size && value % size === 0) return `${value / size} ${unit}`;
  }
  return String(value);
}

/** Values of a knob as they are entered, parted by commas. */
export function knobValues(text) {
  const values = text.split(",").map((part) => part.trim()).filter(Boolean).map(knobValue);
  return values.length === 1 ? values[0] : values;
}

function knobValue(text) {
  if (text === "true" || text === "false") return text === "true";
  return /^-?[\d_]+(\.\d+)?(e\d+)?$/i.test(text) ? Number(text.replaceAll("_", "")) : text;
}

export const knobText = (values) => [values].flat().join(", ");
