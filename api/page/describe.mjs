/** Trials in words: what tooltips, the keyboard's readout and screen readers say of one. */

import { bytes, counted, duration, interval, rate } from "./format.mjs";
import { outcomeLook } from "./outcomes.mjs";
import { trialLink } from "./router.mjs";

/** What was measured, or why nothing was: `67.7 [55.6, 79.8] samples/s, 12.3 MiB`. */
export function figuresOf(points, row) {
  const { rate: mean, low, high, peak } = points.columns;
  const told = [];
  const estimate = points.estimate(row);
  if (estimate) told.push(`${interval(estimate.rate.mean, estimate.rate.low, estimate.rate.high)} samples/s, estimated from ${counted(estimate.repeats, "measurement")}`);
  const single = `${interval(mean[row], low[row], high[row])}${estimate ? " in this trial" : " samples/s"}`;
  if (mean[row] !== null || high[row] !== null) told.push(single);
  if (peak[row] !== null) told.push(bytes(peak[row]));
  return told.join(", ");
}

/** One line of a trial: `Trial 7, OK: 67.7 samples/s, 12.3 MiB; zero_stage=2`. */
export function line(points, row) {
  return `${heading(points, row)}: ${[figuresOf(points, row) || predicted(points, row), points.config(row)].filter(Boolean).join("; ")}`;
}

/** Several lines of a trial, for a tooltip. */
export function lines(points, row) {
  const knobs = points.config(row).split(" ").filter(Boolean);
  const more = knobs.length > 12 ? [`and ${knobs.length - 12} more`] : [];
  const ran = points.seconds(row);
  return [
    heading(points, row),
    figuresOf(points, row),
    predicted(points, row),
    ran === null ? "" : `ran ${duration(ran)}`,
    ...knobs.slice(0, 12),
    ...more,
  ].filter(Boolean).join("\n");
}

/** Address of the row's trial; undefined: a report has no page of a trial. */
export const linkTo = (job, points, row) => job && trialLink(job, points.columns.number[row]);

function heading(points, row) {
  const purpose = points.purpose(row);
  const why = purpose === "search" || purpose === null ? "" : ` (${purpose} ${points.columns.repeat[row] ?? ""})`.replace(" )", ")");
  const outcome = points.outcome(row);
  const label = outcome === null && !points.isRunning(row) ? "Waiting" : outcomeLook(outcome).label;
  return `Trial ${points.columns.number[row]}${why}, ${label}`;
}

function predicted(points, row) {
  const { predicted_rate: mean, predicted_peak: peak } = points.columns;
  const told = [mean[row] === null ? "" : rate(mean[row]), peak[row] === null ? "" : bytes(peak[row])].filter(Boolean);
  return told.length ? `predicted ${told.join(", ")}` : "";
}
