/** A job's trials as columns: what all plots and the table are drawn from. Patched row by row as news come. */

/** Columns whose cells are places in a list of words, which only grows. */
const WORDS = { outcome: "outcomes", purpose: "purposes", fidelity: "fidelities", cause: "causes", node: "nodes" };

/** Trials of one job. Row i is the trial of number i. */
export class Points {
  /** Grows with every event of the job that is in here. */
  version = 0;
  size = 0;
  /** Milliseconds since 1970 when the job was created: seconds in columns count from there. */
  epoch = 0;
  objective = "throughput";
  /** Bytes that a rank may have, and the same less the headroom; null: not known. */
  limit = null;
  capacity = null;
  /** Numbers of the trials on the Pareto front. */
  front = [];
  /** What was found so far, as `VerdictView` of the service has it; null: nothing may win yet. */
  best = null;
  /** What predictions rest on, in words; null: nothing is predicted. */
  calibrationSource = null;
  secondsLeft = null;
  /** @type {{name: string, unit: string, values: any[], codes: number[]}[]} that are searched, or have several values */
  knobs = [];
  /** Those of them that have several values among the trials. */
  varied = [];
  /** Knob -> value, of all others. */
  constants = {};
  columns = { number: [] };
  words = {};

  /**
   * The trials after an answer of `/points`. What is known already is taken over, not copied: these points are used up.
   * @param {object} answer - `PointsView`
   */
  after(answer) {
    const next = answer.whole ? new Points() : Object.assign(new Points(), this);
    const rows = answer.columns.number;
    for (const [name, values] of Object.entries(answer.columns)) place((next.columns[name] ??= []), rows, values);
    next.knobs = answer.knobs.map(({ name, unit, values, codes }) => {
      // One that comes later had its first value in all trials before.
      const known = this.knobs.find((knob) => !answer.whole && knob.name === name)?.codes ?? new Array(next.size).fill(0);
      place(known, rows, codes);
      return { name, unit, values, codes: known };
    });
    next.varied = next.knobs.filter((knob) => knob.values.length > 1);
    return Object.assign(next, {
      version: answer.version, size: next.columns.number.length, epoch: Date.parse(answer.epoch), objective: answer.objective,
      estimates: new Map((answer.best?.standings ?? []).map((standing) => [standing.trial, standing])),
      limit: answer.limit_bytes, capacity: answer.capacity_bytes, front: answer.front, best: answer.best,
      calibrationSource: answer.calibration_source, secondsLeft: answer.seconds_left, constants: answer.constants,
      words: Object.fromEntries(Object.entries(WORDS).map(([column, list]) => [column, answer[list]])),
    });
  }

  #word(column, row) {
    const code = this.columns[column][row];
    return code === null ? null : this.words[column][code];
  }

  /** null: it has none yet. */
  outcome(row) {
    return this.#word("outcome", row);
  }

  purpose(row) {
    return this.#word("purpose", row);
  }

  /** The rule, or the row of the failure table, that told the outcome. */
  cause(row) {
    return this.#word("cause", row);
  }

  node(row) {
    return this.#word("node", row);
  }

  /** Seconds that it ran; null: it has not ended, or never began. */
  seconds(row) {
    const { started, finished } = this.columns;
    return started[row] === null || finished[row] === null ? null : finished[row] - started[row];
  }

  isRunning(row) {
    return this.columns.outcome[row] === null && this.columns.started[row] !== null;
  }

  value(knob, row) {
    return knob.values[knob.codes[row]];
  }

  /** `zero_stage=2 micro_batch_size=4`: what tells a trial from the others. */
  config(row) {
    return this.varied.map((knob) => `${knob.name}=${this.value(knob, row)}`).join(" ");
  }

  /** What all measurements of a search trial's configuration come to; undefined: it is not compared, or the trial is a repeat. */
  estimate(row) {
    return this.estimates.get(this.columns.number[row]);
  }

  /** Samples/s of the row's configuration by all that was measured of it, where that is known; else what the trial measured. */
  rate(row) {
    return this.estimate(row)?.rate.mean ?? this.columns.rate[row];
  }

  /** Whether the row only measured again what another row tried. */
  isRepeat(row) {
    return this.purpose(row) === "confirm" || this.purpose(row) === "control";
  }

  /** Number of the best trial; null: there is none. */
  get bestRow() {
    return this.best?.trial ?? null;
  }

  /** Number of the baseline's trial, which is proposed first; null: nothing is proposed yet. */
  get baselineRow() {
    return this.best?.baseline ?? (this.size ? 0 : null);
  }
}

/** Put values into their rows. */
function place(column, rows, values) {
  rows.forEach((row, index) => (column[row] = values[index]));
}
