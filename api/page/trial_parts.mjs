/** The parts of a trial's page: figures, configuration, steps, ranks, attempts. */

import { html, useMemo } from "./vendor/preact.mjs";
import { bytes, duration, interval, knob, number, share } from "./format.mjs";
import { outcomeLook } from "./outcomes.mjs";
import { DataTable } from "./table.mjs";

/** What this trial measured; the estimate of its configuration, from all of its measurements, is on the job's page. */
export function Result({ trial }) {
  const { result } = trial;
  const rate = result?.samples_per_second;
  if (!rate && !result?.peak_memory_bytes) return null;
  const steps = result.step_seconds ?? [];
  const middle = steps.length ? [...steps].sort((one, other) => one - other)[steps.length >> 1] : null;
  const isBound = trial.outcome === "PRUNED";
  const figures = [
    ["This measurement", isBound ? interval(null, null, rate?.high) : rate && interval(rate.mean, rate.low, rate.high), "samples/s"],
    ["Peak memory", result.peak_memory_bytes ? bytes(result.peak_memory_bytes) : null, "of the highest rank"],
    ["Step", middle === null ? null : duration(middle), `median of ${steps.length}`],
    ["Per device", result.tflops_per_device === null ? null : `${number(result.tflops_per_device)} TFLOP/s`, result.mfu === null ? "" : `MFU ${share(result.mfu)}`],
  ];
  return html`<dl class="figures">
    ${figures.filter(([, value]) => value).map(([title, value, more]) => html`<div class="card figure" key=${title}><dt>${title}</dt><dd><span class="value">${value}</span><span class="soft">${more}</span></dd></div>`)}
  </dl>`;
}

/** Every knob; those that are other than the baseline's first. */
export function Config({ trial, base }) {
  const entries = Object.entries(trial.config).filter(([, value]) => value !== "" && value !== null);
  const isOther = ([name, value]) => base !== null && String(base.config[name]) !== String(value);
  const [other, same] = [entries.filter(isOther), entries.filter((entry) => !isOther(entry))];
  return html`<section class="card stack" aria-labelledby="config-heading">
    <h2 id="config-heading">Configuration</h2>
    ${other.length > 0 && html`<h3>Other than the baseline</h3>
      <dl class="plain-list">${other.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd><strong>${knob(value)}</strong> <span class="soft">was ${knob(base.config[name])}</span></dd>`)}</dl>`}
    ${other.length > 0 && html`<h3>As in the baseline</h3>`}
    <dl class="plain-list">${same.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${knob(value)}</dd>`)}</dl>
  </section>`;
}

/** Each timed step as a bar: whether they were steady. */
export function Steps({ result }) {
  const steps = result?.step_seconds ?? [];
  if (steps.length < 2) return null;
  const most = Math.max(...steps);
  const phases = Object.entries(result.phase_seconds ?? {});
  const spread = `${duration(Math.min(...steps))} to ${duration(most)}`;
  return html`<section class="card stack" aria-labelledby="steps-heading">
    <h2 id="steps-heading">Timed steps</h2>
    <p class="soft">${steps.length} steps of ${spread}${result.unstable ? "; they did not settle" : ""}.</p>
    <svg class="steps" viewBox=${`0 0 ${steps.length * 4} 60`} preserveAspectRatio="none" role="img" aria-label=${`${steps.length} steps, ${spread}`}>
      ${steps.map((seconds, index) => html`<rect key=${index} x=${index * 4 + 0.4} width="3.2" y=${60 - (60 * seconds) / most} height=${(60 * seconds) / most} />`)}
    </svg>
    ${phases.length > 0 && html`<p class="soft">${phases.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ")}</p>`}
  </section>`;
}

/** What each rank held and did. */
export function Ranks({ result }) {
  const ranks = result?.ranks ?? [];
  const columns = useMemo(() => rankColumns(ranks), [ranks]);
  if (ranks.length === 0) return null;
  return html`<section class="card stack" aria-labelledby="ranks-heading">
    <h2 id="ranks-heading">Ranks</h2>
    <${DataTable} caption="What each rank measured" columns=${columns} rows=${ranks} keyOf=${({ rank }) => rank} />
  </section>`;
}

function rankColumns(ranks) {
  const tags = [...new Set(ranks.flatMap(({ memory_by_tag: tags }) => Object.keys(tags ?? {})))];
  const measure = (key, title, format, value = (row) => row[key]) => ({ key, title, numeric: true, value, cell: (row) => format(value(row)) });
  return [
    { key: "rank", title: "Rank", numeric: true, value: ({ rank }) => rank },
    { key: "host", title: "Node", value: ({ node, host }) => node ?? host },
    measure("peak_memory_bytes", "Peak", bytes),
    ...tags.map((tag) => measure(tag, tag.replaceAll("_", " "), bytes, ({ memory_by_tag: held }) => held?.[tag] ?? null)),
    measure("compute_seconds_per_step", "Computes a step", duration),
    measure("wait_seconds_per_step", "Waits a step", duration),
    measure("busy", "Busy", share, ({ compute_seconds_per_step: busy, wait_seconds_per_step: wait }) => (busy > 0 ? busy / (busy + (wait ?? 0)) : null)),
  ];
}

/** Every execution of the trial, those that do not count too. */
export function Attempts({ attempts }) {
  const columns = [
    { key: "number", title: "Attempt", numeric: true, value: ({ number: n }) => n },
    { key: "state", title: "State", value: ({ state }) => state },
    { key: "outcome", title: "Outcome", value: ({ outcome }) => (outcome === null ? null : outcomeLook(outcome).label) },
    { key: "seconds", title: "Took", numeric: true, value: took, cell: (row) => duration(took(row)) },
    { key: "node", title: "Node", value: ({ result }) => result?.node ?? result?.ranks?.[0]?.node ?? result?.ranks?.[0]?.host ?? null },
    { key: "message", title: "Message", value: ({ result }) => result?.message || null },
  ];
  return html`<section class="stack" aria-labelledby="attempts-heading">
    <h2 id="attempts-heading">Attempts</h2>
    <${DataTable} caption="Attempts of this trial" columns=${columns} rows=${attempts} keyOf=${({ number: n }) => n} />
  </section>`;
}

const took = ({ started, finished }) => (finished === null ? null : (new Date(finished) - new Date(started)) / 1000);
