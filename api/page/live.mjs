/** One job as it stands now: read once, then kept up to date by its events. Only what changed is asked for again. */

import { Points } from "./points.mjs";
import { ask, Problem, send } from "./service.mjs";
import { Signal } from "./signal.mjs";
import { follow, sleep } from "./stream.mjs";

/** Least milliseconds between two patches: a fast job has dozens of events a second. */
const PATCH_EVERY = 400;
const PROGRESS = "progress";

export class LiveJob {
  /** @type {Signal} the job as `GET /v1/jobs/{id}` tells it; null: not read yet */
  job = new Signal(null);
  /** @type {Signal} its trials, as `Points`; null: not read yet */
  points = new Signal(null);
  /** @type {Signal} what running attempts do, by trial */
  progress = new Signal(new Map());
  /** @type {Signal} why the job cannot be shown; null: it can */
  problem = new Signal(null);
  /** @type {Signal} whether events come in */
  isLive = new Signal(false);

  #id;
  #etag = "";
  #ended = new AbortController();
  #isOpen = false;
  #patching = null;
  /** Number of the last event that was heard of. */
  #told = 0;

  constructor(id) {
    this.#id = id;
  }

  /** Read the job and follow it until it is over, or until `close`. To be called again when an ended job was resumed. */
  async open() {
    if (this.#isOpen) return;
    this.#isOpen = true;
    const { signal } = this.#ended;
    while (!signal.aborted) {
      try {
        await Promise.all([this.readJob(), this.#readPoints()]);
        await this.#follow();
        await this.#patching;
        await this.readJob();
        break;
      } catch (error) {
        if (signal.aborted) break;
        // 410: events since the last look were removed. Everything is read anew, and followed from there.
        if (!(await this.#outlast(error, error.status === 410))) break;
      }
    }
    this.#isOpen = this.isLive.value = false;
  }

  close() {
    this.#ended.abort();
  }

  /** Read the job's own row again; the server answers with nothing where it is the same. */
  async readJob() {
    const answer = await send(`/v1/jobs/${this.#id}`, {
      headers: this.#etag ? { "If-None-Match": this.#etag } : {},
      signal: this.#ended.signal,
    });
    if (answer.status === 304) return;
    this.#etag = answer.headers.get("ETag") ?? "";
    this.job.value = await answer.json();
  }

  async #readPoints(since = 0) {
    const answer = await ask(`/v1/jobs/${this.#id}/points?since=${since}`, { signal: this.#ended.signal });
    this.points.value = (this.points.value ?? new Points()).after(answer);
    // The server's rows may be newer than its events: a trial that began between the two is among the next changes.
    if (this.points.value.size < answer.count) await this.#readPoints(answer.version > since ? answer.version : 0);
  }

  #follow() {
    return follow({
      path: (last) => `/v1/jobs/${this.#id}/events/stream?progress=true&after=${last}`,
      last: String(this.points.value.version),
      onMessages: (messages) => this.#take(messages),
      onOpen: (isOpen) => (this.isLive.value = isOpen),
      signal: this.#ended.signal,
    });
  }

  #take(messages) {
    const signs = messages.filter((message) => message.kind === PROGRESS);
    const events = messages.filter((message) => message.kind !== PROGRESS);
    const over = events.filter(({ kind }) => kind === "attempt_finished" || kind === "attempt_abandoned");
    if (signs.length || over.length) this.#takeSigns(signs, over);
    if (events.length) {
      this.#told = Math.max(...events.map(({ id }) => Number(id)));
      this.#patching ??= this.#patch().finally(() => (this.#patching = null));
    }
  }

  #takeSigns(signs, over) {
    const progress = new Map(this.progress.value);
    for (const { data } of over) progress.delete(data.payload.trial);
    for (const { data } of signs) progress.set(data.trial, data);
    this.progress.value = progress;
  }

  /** Read what has changed, once for all events that come within a short time. */
  async #patch() {
    const { signal } = this.#ended;
    while (!signal.aborted && this.points.value.version < this.#told) {
      await sleep(PATCH_EVERY, signal);
      try {
        await Promise.all([this.readJob(), this.#readPoints(this.points.value.version)]);
      } catch (error) {
        if (!signal.aborted && !(await this.#outlast(error))) return;
      }
    }
  }

  /** Wait if the request may be answered later; else tell why the job cannot be shown, and return false. */
  async #outlast(error, passes = error.passes) {
    if (!(error instanceof Problem)) throw error;
    if (!passes) this.problem.value = error;
    else await sleep(1000 * Math.max(2, error.retryAfter), this.#ended.signal);
    return passes;
  }
}
