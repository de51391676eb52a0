/** The fields of a submission, as the service declares them: what they are called, how they are entered, what is sent. */

/**
 * @typedef {object} Field - `FormField` of `GET /v1/choices`
 * @property {string} name - in the request
 * @property {string} label
 * @property {string} section - workload, machine, goal, search or labels
 * @property {"number" | "choice" | "switch" | "bytes" | "percent" | "text" | "texts" | "words"} kind
 * @property {string} measure - its unit
 * @property {string} hint
 * @property {{value: string, label: string}[]} options
 * @property {boolean} foresees - whether it only goes with strategies that predict the gain of further trials
 * @property {string} required_on - the kind of devices on which it must be stated
 */

/** @returns {Field[]} of a part of the form */
export const inSection = (choices, section) => choices.fields.filter((field) => field.section === section);

/** Whether a field goes with the values of the others. */
export const applies = (field, { strategy }, { foreseeing, defaults }) => !field.foresees || foreseeing.includes(strategy || defaults.strategy);

/** Whether a field must be entered on this kind of devices: modules and most scripts have samples of their own length, and a script may state its batch. */
export function isRequired({ name, required_on: device }, { kind, factory, command }, cluster, { clusters }) {
  const found = clusters.find((choice) => choice.name === cluster.split(":")[0])?.device_kind ?? "cuda";
  if (device !== found) return false;
  if (name === "sequence_length" && kind === "factory") return factory.startsWith("hf:");
  if (name === "sequence_length" && kind === "command") return command.words.includes("{sequence_length}");
  return !(kind === "command" && /--(?:global|total)[-_]batch[-_]size[ =]\d/.test(command.words));
}

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
