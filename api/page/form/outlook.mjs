/** What a submission comes to, before anything runs: the size of its space, the predicted best, what the trials may cost. */

import { Assumed } from "../assumed.mjs";
import { html } from "../vendor/preact.mjs";
import { bytes, count, counted, duration, interval, number, sureness, times } from "../format.mjs";
import { isSaid, shown } from "../request.mjs";
import { Problem } from "../service.mjs";
import { coded } from "../states.mjs";

/**
 * @param {object} props
 * @param {import("./draft.mjs").Verdict} props.verdict
 * @param {boolean} props.isCurrent - whether it is about what the entries hold now
 * @param {object} props.choices - of the service
 * @param {object[]} props.knobs - all that there are
 */
export function Outlook({ verdict, isCurrent, choices, knobs }) {
  const { body, draft, space, estimate } = verdict;
  if (!draft) return html`<p class="soft">As soon as the entries are complete, this says what the space holds, what is predicted to be best in it, and what the trials may cost.</p>`;
  return html`<dl class=${`plain-list outlook${isCurrent ? "" : " stale"}`}>
    ${draft.assumed.length > 0 && html`<dt>Assumed</dt><dd><${Assumed} assumed=${withAlternatives(draft, estimate)} labels=${labelsOf(choices)} /></dd>`}
    <dt>Model</dt><dd>${draft.model}${draft.parameter_count > 0 && html`, ${sized(draft.parameter_count)} parameters`}</dd>
    <dt>Runs on</dt><dd>${counted(draft.world_size, "rank")} of ${draft.cluster}</dd>
    <dt>Space</dt><dd><${Space} space=${space} /></dd>
    <${Prediction} estimate=${estimate} />
    <${Cost} estimate=${estimate} space=${space} />
    <${Defaults} draft=${draft} body=${JSON.parse(body)} knobs=${knobs} />
  </dl>
  ${estimate?.calibration_source && html`<p class="soft">Predicted by ${coded(estimate.calibration_source)}.</p>`}
  ${estimate?.note && html`<p class="note">${estimate.note}</p>`}`;
}

/** What the draft assumed, with the alternatives of the estimate unless that is still about former entries. */
function withAlternatives({ assumed }, estimate) {
  const text = (items) => JSON.stringify(items.map(({ name, value }) => [name, value]).sort());
  return estimate?.assumed && text(estimate.assumed) === text(assumed) ? estimate.assumed : assumed;
}

const labelsOf = ({ fields }) => Object.fromEntries(fields.map(({ name, label }) => [name, label]));

/** What nobody entered: fields with their defaults, and knobs that the kind of device decides. */
function Defaults({ draft, body, knobs }) {
  const standard = new Map(knobs.map((knob) => [knob.name, knob.default]));
  const assumed = new Set(draft.assumed.map(({ name }) => name));
  const isOpen = (name) => !(name in body) && !assumed.has(name);
  // A field that is a knob too, such as the optimizer, has the knob's value.
  const fields = Object.entries(draft.request).map(([name, value]) => [name, value ?? draft.baseline[name] ?? standard.get(name)]);
  const stated = new Set([...Object.keys(draft.domains), ...Object.keys(body.baseline ?? {}), ...fields.map(([name]) => name)]);
  const decided = Object.entries(draft.baseline).filter(([name, value]) => !stated.has(name) && value !== standard.get(name));
  const values = [...fields.filter(([name, value]) => isOpen(name) && isSaid(value)), ...decided];
  return html`<dt>By default</dt><dd><details><summary>${counted(values.length, "value")}</summary>
    <ul class="mono">${values.map(([name, value]) => html`<li key=${name}>${name}=${shown(name, value)}</li>`)}</ul></details></dd>`;
}

/** `8.03 B`, as people call models. */
const sized = (parameters) => (parameters >= 1e9 ? `${number(parameters / 1e9)} B` : parameters >= 1e6 ? `${number(parameters / 1e6)} M` : count(parameters));

function Space({ space }) {
  if (space === null) return "Counting …";
  if (space instanceof Problem) return html`<span class="soft">${space.message}</span>`;
  const rules = Object.entries(space.refused).sort(([, one], [, other]) => other - one);
  return html`<strong>${counted(space.legal, "configuration")}</strong> of ${count(space.raw)} combinations${rules.length > 0 && html`<details><summary>What refuses the others</summary><ul>${rules.map(([rule, refused]) => html`<li key=${rule}>${rule}: ${count(refused)}</li>`)}</ul></details>`}`;
}

function Prediction({ estimate }) {
  if (estimate === null) return html`<dt>Predicted</dt><dd>Asking …</dd>`;
  if (estimate instanceof Problem) return html`<dt>Predicted</dt><dd class="soft">${estimate.message}</dd>`;
  return html`
    ${estimate.best && html`<dt>Predicted best</dt><dd><${Figures} of=${estimate.best} gain=${estimate.gain} /><${Knobs} best=${estimate.best.config} baseline=${estimate.baseline?.config} /></dd>`}
    ${estimate.baseline && html`<dt>Baseline</dt><dd><${Figures} of=${estimate.baseline} /></dd>`}`;
}

function Figures({ of: { predicted }, gain }) {
  const { samples_per_second: rate, peak_memory_band: peak, memory_limit_bytes: limit, fit_probability: fits } = predicted;
  return html`<strong>${interval(rate.mean, rate.low, rate.high)} samples/s</strong>${gain && html` (${times(gain)} the baseline)`}, ${bytes(peak.mean)} of ${bytes(limit)} a rank, ${fits < 0.95 ? html`<strong>fits with ${sureness(fits)}</strong>` : `fits with ${sureness(fits)}`}`;
}

function Knobs({ best, baseline }) {
  const changed = Object.entries(best).filter(([name, value]) => baseline && baseline[name] !== value);
  if (changed.length === 0) return null;
  return html`<details><summary>${counted(changed.length, "knob")} unlike the baseline's</summary>
    <ul class="mono">${changed.map(([name, value]) => html`<li key=${name}>${name}=${String(value)}</li>`)}</ul></details>`;
}

function Cost({ estimate, space }) {
  if (!estimate || estimate instanceof Problem) return null;
  const { trials, trial_seconds: each, seconds, device_hours: hours } = estimate;
  const isFew = space && !(space instanceof Problem) && space.legal < trials;
  return html`<dt>Trials</dt><dd>at most ${counted(trials, "trial")}, controls and confirmations included${isFew && "; fewer, for the space is smaller"}</dd>
    ${each && html`<dt>Cost</dt><dd><strong>${range(seconds.low, seconds.high, duration)}</strong> (${range(each.low, each.high, duration)} a trial), ${range(hours.low, hours.high, number)} device-hours, by predictions</dd>`}`;
}

function range(low, high, format) {
  const [from, to] = [format(low), format(high)];
  return from === to ? from : `${from} to ${to}`;
}
