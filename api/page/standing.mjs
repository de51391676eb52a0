/** What a job's trials come to so far: how far it is, what is best at each moment, and how long it may still take. */

/**
 * Each measured value, and the best up to there.
 * @param {import("./points.mjs").Points} points
 * @param {"trials" | "time"} over - in the order in which trials were proposed, or ended
 * @returns {{row: number, value: number, best: number, isBest: boolean}[]}
 */
export function course(points, over) {
  const { peak, finished, eligible } = points.columns;
  const isMemory = points.objective === "memory";
  const rows = [];
  for (let row = 0; row < points.size; row++) {
    if (points.outcome(row) === "OK" && points.purpose(row) === "search" && points.rate(row) !== null) rows.push(row);
  }
  if (over === "time") rows.sort((one, other) => finished[one] - finished[other]);
  let best = null;
  return rows.map((row) => {
    const value = isMemory ? peak[row] : points.rate(row);
    const isBest = Boolean(eligible[row]) && (best === null || (isMemory ? value < best : value > best));
    if (isBest) best = value;
    return { row, value, best, isBest };
  });
}

/** Trials by how they ended; `counts.get(null)` are those that have not. */
export function census(points) {
  const counts = new Map();
  let [searched, running] = [0, 0];
  for (let row = 0; row < points.size; row++) {
    const outcome = points.outcome(row);
    counts.set(outcome, (counts.get(outcome) ?? 0) + 1);
    running += points.isRunning(row);
    // What was refused never started: it costs no trial.
    searched += points.purpose(row) === "search" && points.seconds(row) !== null;
  }
  return { counts, searched, running, measured: counts.get("OK") ?? 0 };
}

/** Rows of the trials that do not fit, those nearest to fitting first. */
export function nearest(points) {
  const { predicted_peak: peak } = points.columns;
  const rows = [];
  for (let row = 0; row < points.size; row++) {
    if (points.outcome(row) === "INFEASIBLE" && peak[row] !== null) rows.push(row);
  }
  return rows.sort((one, other) => peak[one] - peak[other]);
}
