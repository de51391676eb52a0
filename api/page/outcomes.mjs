/** The words for how trials and jobs end, each with a mark: nothing is told by colour alone. */

/**
 * @typedef {object} Look
 * @property {string} label
 * @property {string} mark - a character, for text
 * @property {string} symbol - of ECharts
 * @property {string} color - custom property of the style sheet
 */

const look = (label, mark, symbol, color) => ({ label, mark, symbol, color });

/** @type {Record<string, Look>} */
const OUTCOMES = {
  OK: look("OK", "●", "circle", "--ok"),
  INFEASIBLE: look("Does not fit", "✕", "path://M2 0 8 6 14 0 16 2 10 8 16 14 14 16 8 10 2 16 0 14 6 8 0 2Z", "--infeasible"),
  PRUNED: look("Pruned", "▽", "path://M0 1 16 1 8 15Z", "--pruned"),
  INVALID: look("Invalid", "▱", "path://M5 2 16 2 11 14 0 14Z", "--invalid"),
  WRONG: look("Wrong", "≠", "path://M8 0 16 8 8 16 0 8Z", "--failed"),
  FAILED: look("Failed", "◆", "diamond", "--failed"),
  TIMEOUT: look("Timed out", "◔", "path://M2 0 14 0 8 8 14 16 2 16 8 8Z", "--failed"),
  LOST: look("Lost", "?", "triangle", "--failed"),
  PREEMPTED: look("Preempted", "⇥", "path://M0 2 8 8 0 14ZM9 2 12 2 12 14 9 14Z", "--cancelled"),
  CANCELLED: look("Cancelled", "■", "rect", "--cancelled"),
};

export const RUNNING = look("Running", "◌", "emptyCircle", "--running");

/** How an outcome looks; null: the trial has none yet. */
export const outcomeLook = (outcome) => (outcome === null ? RUNNING : (OUTCOMES[outcome] ?? look(outcome, "·", "rect", "--cancelled")));

export const OUTCOME_NAMES = Object.keys(OUTCOMES);

/** State of a job: its word, its mark, and the kind that the style sheet colours. */
const STATES = {
  QUEUED: ["Queued", "◷", "waiting"],
  RUNNING: ["Running", "▶", "running"],
  PAUSING: ["Pausing", "▶", "running"],
  PAUSED: ["Paused", "❚❚", "waiting"],
  STOPPING: ["Stopping", "▶", "running"],
  CANCELLING: ["Cancelling", "▶", "running"],
  SUCCEEDED: ["Succeeded", "✓", "good"],
  FAILED: ["Failed", "✕", "bad"],
  CANCELLED: ["Cancelled", "■", "over"],
};

export const STATE_NAMES = Object.keys(STATES);

/** How a job looks; `reason` is the job's, because a job in which nothing fits succeeded at nothing. */
export function stateLook(state, reason = "") {
  if (reason === "NOTHING_FEASIBLE") return { label: "Nothing fits", mark: "✕", kind: "bad" };
  const [label, mark, kind] = STATES[state] ?? [state, "·", "over"];
  return { label, mark, kind };
}

const OVER = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);

/** Whether nothing happens to a job in this state any more by itself. */
export const isOver = (state) => OVER.has(state);

/** Why a job succeeded, for people. */
export const REASONS = {
  BUDGET: "the budget is spent",
  CONVERGED: "what is untried is unlikely enough to win",
  EXHAUSTED: "every legal configuration was tried",
  FOUND: "a configuration that may win was found",
  NOTHING_FEASIBLE: "no configuration that was tried fits",
  STOPPED: "somebody was content with the best so far",
};
