/** Parts of a trial's output as lines: parts begin and end where they like, and ranks speak at once. */

/** Sequences that a terminal would take as colours or movements. */
const ESCAPES = /\u001b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\-_])/g;

export class LogText {
  #isNamed;
  #attempt = 0;
  #end = 0;
  /** Rank -> the beginning of a line that has not ended. */
  #open = new Map();

  /** @param {boolean} isNamed - whether each line says its rank */
  constructor(isNamed) {
    this.#isNamed = isNamed;
  }

  /**
   * @param {{attempt: number, rank: number, start: number, size: number, text: string}} part
   * @returns {string[]} the lines that ended with it
   */
  take({ attempt, rank, start, size, text }) {
    const lines = attempt === this.#attempt ? [] : this.#turn(attempt);
    if (start > this.#end) lines.push(`--- ${(start - this.#end).toLocaleString("en")} bytes left out ---`);
    this.#end = start + size;
    const pieces = ((this.#open.get(rank) ?? "") + text).split(/\r\n|\r|\n/);
    this.#open.set(rank, pieces.pop());
    return [...lines, ...pieces.map((piece) => this.#line(rank, piece))];
  }

  /** @returns {string[]} what has no end of line yet */
  rest() {
    const lines = [...this.#open].filter(([, text]) => text).map(([rank, text]) => this.#line(rank, text));
    this.#open.clear();
    return lines;
  }

  #turn(attempt) {
    const lines = this.rest();
    if (attempt > 1 || this.#attempt) lines.push(`--- attempt ${attempt} ---`);
    this.#attempt = attempt;
    this.#end = 0;
    return lines;
  }

  #line(rank, text) {
    const plain = text.replace(ESCAPES, "");
    return this.#isNamed ? `[rank ${rank}] ${plain}` : plain;
  }
}
