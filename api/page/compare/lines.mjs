/** What is said of each job and of each trial that is compared. */

import { html } from "../vendor/preact.mjs";
import { bytes, duration, interval, knob, moment, share, sureness, times } from "../format.mjs";
import { outcomeLook, stateLook } from "../outcomes.mjs";
import { isSaid, shown } from "../request.mjs";
import { trialLink } from "../router.mjs";
import { Parts } from "./parts.mjs";
import { differs } from "./beside.mjs";

const heading = (title) => ({ title, isHeading: true });
const figure = (title, value, cell) => ({ title, value, cell, isFigure: true });

/** Fields of a request that are always shown; the others are where they differ. */
const ASKED = ["model", "cluster", "ranks", "space", "strategy", "objective", "engine", "global_batch_size", "sequence_length", "trials", "seed", "memory_limit"];

/** @returns {import("./beside.mjs").Line[]} of jobs */
export function jobLines(subjects) {
  const line = (name) => ({ title: name.replaceAll("_", " "), value: ({ job }) => job.request[name], cell: ({ job }) => (isSaid(job.request[name]) ? shown(name, job.request[name]) : null) });
  const others = [...new Set(subjects.flatMap(({ job }) => Object.keys(job.request)))].filter((name) => !ASKED.includes(name)).map(line);
  return [
    ...ASKED.map(line),
    ...others.filter((other) => differs(other, subjects)),
    heading("Outcome"),
    figure("asked by", ({ job }) => job.submitter),
    figure("asked at", ({ job }) => job.created, ({ job }) => moment(job.created)),
    figure("state", ({ job }) => stateText(job), ({ job }) => stateText(job)),
    figure("trials measured", ({ points }) => points.columns.number.filter((row) => points.outcome(row) === "OK").length),
    figure("best samples/s", ({ points }) => points.best?.rate.mean, ({ points }) => bestRate(points)),
    figure("best trial", ({ points }) => points.bestRow, ({ job, points }) => points.bestRow !== null && html`<a href=${trialLink(job.id, points.bestRow)}>${points.bestRow}</a>`),
    figure("gain over the baseline", ({ points }) => points.best?.gain?.mean, ({ points }) => gain(points)),
    figure("probability of being the best", ({ points }) => points.best?.probability_best, ({ points }) => points.best && sureness(points.best.probability_best)),
    figure("memory of the best", ({ points }) => points.bestRow, ({ points }) => points.bestRow !== null && bytes(points.columns.peak[points.bestRow])),
    figure("time taken", ({ job }) => job.active_seconds, ({ job }) => duration(job.active_seconds)),
  ].filter((line) => line.isHeading || subjects.some((subject) => isTold(line.value(subject))));
}

/** @returns {import("./beside.mjs").Line[]} of trials: the knobs that differ first, then what was measured */
export function trialLines(subjects) {
  const knobs = [...new Set(subjects.flatMap(({ trial }) => Object.keys(trial.config)))].map((name) => ({
    title: name, value: ({ trial }) => trial.config[name], cell: ({ trial }) => knob(trial.config[name]),
  }));
  const [other, same] = [knobs.filter((line) => differs(line, subjects)), knobs.filter((line) => !differs(line, subjects))];
  const lines = [
    figure("outcome", ({ trial }) => trial.outcome, ({ trial }) => `${outcomeLook(trial.outcome).mark} ${outcomeLook(trial.outcome).label}`),
    figure("samples/s", rateOf, rateText),
    figure("against the first", rateOf, (subject) => ratio(subject, subjects[0])),
    figure("predicted samples/s", ({ points, trial }) => points.columns.predicted_rate[trial.number], ({ points, trial }) => interval(points.columns.predicted_rate[trial.number])),
    figure("peak memory", ({ trial }) => trial.result?.peak_memory_bytes, ({ trial }) => bytes(trial.result?.peak_memory_bytes)),
    figure("where the memory goes", ({ trial }) => tags(trial), ({ trial }) => html`<${Parts} parts=${tags(trial)} format=${bytes} />`),
    figure("where a step goes", ({ parts }) => steps(parts), ({ parts }) => html`<${Parts} parts=${steps(parts)} format=${duration} />`),
    figure("MFU", ({ trial }) => trial.result?.mfu, ({ trial }) => share(trial.result?.mfu)),
    figure("ran", ({ trial }) => seconds(trial), ({ trial }) => duration(seconds(trial))),
    figure("why", ({ trial }) => trial.result?.message || null),
    ...(other.length ? [heading("Knobs that differ"), ...other] : []),
    ...(same.length ? [heading("Knobs that are the same"), ...same] : []),
  ];
  return lines.filter((line) => line.isHeading || subjects.some((subject) => isTold(line.value(subject))));
}

function stateText(job) {
  const { label, mark } = stateLook(job.state, job.reason);
  return `${mark} ${label}`;
}

const isTold = (value) => value !== null && value !== undefined && value !== "";

function bestRate({ best }) {
  return best && interval(best.rate.mean, best.rate.low, best.rate.high);
}

function gain({ best }) {
  return best?.gain && times(best.gain.mean, best.gain.low, best.gain.high);
}

const rateOf = ({ points, trial }) => points.rate(trial.number);

/** The estimate of the trial's configuration; without one, what the trial measured. */
function rateText({ points, trial }) {
  const rate = points.estimate(trial.number)?.rate ?? trial.result?.samples_per_second;
  return rate && interval(rate.mean, rate.low, rate.high);
}

function ratio(subject, first) {
  const [rate, base] = [rateOf(subject), rateOf(first)];
  return rate && base && subject !== first ? times(rate / base) : null;
}

/** What the fullest rank holds at its peak, by tag. */
function tags({ result }) {
  const ranks = result?.ranks ?? [];
  if (ranks.length === 0) return null;
  const fullest = ranks.reduce((one, other) => (other.peak_memory_bytes > one.peak_memory_bytes ? other : one));
  return Object.entries(fullest.memory_by_tag).map(([name, value]) => ({ name: name.replaceAll("_", " "), value }));
}

const steps = (told) => told && told.parts.map(({ name, seconds: value }) => ({ name, value }));

function seconds({ started, finished }) {
  return started && finished ? (new Date(finished) - new Date(started)) / 1000 : null;
}
