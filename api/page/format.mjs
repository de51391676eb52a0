/** Figures as text: three digits, units named, a dash where nothing is known. */

const NOTHING = "–";
/** By most decimals. Made once: to make one takes longer than to use it a hundred times. */
const WRITTEN = Array.from({ length: 9 }, (_, decimals) => new Intl.NumberFormat("en", { maximumFractionDigits: decimals }));
const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

/** Three significant digits, thousands parted: `1,234`, `67.7`, `0.0123`. */
export function number(value, digits = 3) {
  if (!isKnown(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 1e9 || (size > 0 && size < 1e-4)) return value.toExponential(digits - 1);
  const decimals = size === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return WRITTEN[Math.min(decimals, 8)].format(value);
}

export const count = (value) => (isKnown(value) ? WRITTEN[3].format(value) : NOTHING);

/** The text with a capital at its beginning and a full stop at its end. */
export function sentence(text) {
  const trimmed = text.trim();
  return `${trimmed.charAt(0).toUpperCase()}${trimmed.slice(1)}${/[.?!…]$/.test(trimmed) ? "" : "."}`;
}

/** `3 trials`, `1 trial`. */
export const counted = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

/** `1.23 GiB`, as the command line has it. */
export function bytes(value) {
  if (!isKnown(value)) return NOTHING;
  let size = value;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(size) < 999.5) return `${number(size)} ${unit}`;
    size /= 1024;
  }
  return `${number(size)} GiB`;
}

/** `67.71 samples/s`: four digits, as the command line has them. */
export const rate = (value) => (isKnown(value) ? `${number(value, 4)} samples/s` : NOTHING);

/** `67.71 [55.62, 79.83]`. */
export function interval(mean, low, high) {
  if (!isKnown(mean)) return isKnown(high) ? `≤ ${number(high, 4)}` : NOTHING;
  return isKnown(low) && isKnown(high) && low !== high ? `${number(mean, 4)} [${number(low, 4)},\u00a0${number(high, 4)}]` : number(mean, 4);
}

/** `1.043x`, or with its interval `1.043x [1.021, 1.066]`: how gains are written everywhere. */
export function times(mean, low, high) {
  if (!isKnown(mean)) return NOTHING;
  return `${number(mean, 4)}x${isKnown(low) && isKnown(high) ? ` [${number(low, 4)},\u00a0${number(high, 4)}]` : ""}`;
}

const STEPS = [["d", 86_400], ["h", 3_600], ["min", 60], ["s", 1]];

/** `12.3 ms`, `4.5 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`. */
export function duration(seconds) {
  if (!isKnown(seconds)) return NOTHING;
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${number(1e6 * seconds)} µs`;
  if (seconds < 1) return `${number(1e3 * seconds)} ms`;
  if (seconds < 59.5) return `${number(seconds)} s`;
  const [[unit, size], [below, part] = []] = STEPS.slice(STEPS.findIndex(([, least]) => seconds >= least));
  const rest = part ? Math.floor((seconds % size) / part) : 0;
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest}\u00a0${below}` : ""}`;
}

/** `+12.3 %`. */
export function share(value, signed = false) {
  if (!isKnown(value)) return NOTHING;
  return `${signed && value > 0 ? "+" : ""}${number(100 * value)} %`;
}

/** A probability: a computed one is never certain. */
export const sureness = (value) => (value > 0.999 ? "> 99.9 %" : value < 0.001 ? "< 0.1 %" : share(value));

/** The value of a knob. */
export function knob(value) {
  if (value === null || value === undefined) return NOTHING;
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? (Number.isInteger(value) ? count(value) : number(value)) : String(value);
}

/** A moment, in the zone and manner of the reader. */
export function moment(time) {
  if (!time) return NOTHING;
  return new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

/** `3 min ago`. */
export function ago(time, now = Date.now()) {
  if (!time) return NOTHING;
  const seconds = (now - new Date(time)) / 1000;
  const [unit, size] = STEPS.find(([, least]) => seconds >= least) ?? ["s", 1];
  return seconds < 5 ? "just now" : `${Math.floor(seconds / size)} ${unit} ago`;
}
