/** The newest jobs and how far each is, asked for again as long as somebody looks. */

import { ask, Problem } from "./service.mjs";
import { Signal } from "./signal.mjs";
import { sleep } from "./stream.mjs";

const PAGE = 50;
/** Milliseconds between two looks at the newest jobs. */
const LOOK_EVERY = 2000;

export class Board {
  /** @type {Signal} jobs, newest first; null: not read yet */
  jobs = new Signal(null);
  /** @type {Signal} job -> how far it is */
  overviews = new Signal(new Map());
  /** @type {Signal} whether there are older ones */
  hasMore = new Signal(false);
  /** @type {Signal} why jobs cannot be read; null: they can */
  problem = new Signal(null);

  #filter;
  #cursor = null;
  #ended = new AbortController();

  /** @param {{state: string, text: string}} filter - of the jobs to show; empty: all */
  constructor(filter) {
    this.#filter = filter;
  }

  /** Look until `close`. A window that nobody sees does not ask. */
  async open() {
    const { signal } = this.#ended;
    while (!signal.aborted) {
      try {
        if (!document.hidden || this.jobs.value === null) await this.#look();
        this.problem.value = null;
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof Problem)) throw error;
        this.problem.value = error;
        if (!error.passes) return;
      }
      await sleep(LOOK_EVERY, signal);
    }
  }

  close() {
    this.#ended.abort();
  }

  /** Read the next page of older jobs. */
  async more() {
    const page = await this.#page(this.#cursor);
    this.#cursor = page.next;
    this.hasMore.value = page.next !== null;
    await this.#take([...this.jobs.value, ...page.items]);
  }

  async #look() {
    const page = await this.#page(null);
    if (this.#cursor === null) {
      this.#cursor = page.next;
      this.hasMore.value = page.next !== null;
    }
    await this.#take(page.next === null ? page.items : [...page.items, ...olderThan(page.items.at(-1), this.jobs.value ?? [])]);
  }

  #page(cursor) {
    const query = new URLSearchParams({ limit: PAGE });
    if (cursor) query.set("cursor", cursor);
    for (const [name, value] of Object.entries(this.#filter)) if (value) query.set(name, value);
    return ask(`/v1/jobs?${query}`, { signal: this.#ended.signal });
  }

  /** Ask how far the jobs are that have changed, and tell of all at once. */
  async #take(jobs) {
    const stale = jobs.filter(({ id, version }) => this.overviews.value.get(id)?.version !== version).map(({ id }) => id);
    if (this.jobs.value === null) this.jobs.value = jobs;
    if (stale.length) {
      const query = stale.slice(0, PAGE).map((id) => `job=${id}`).join("&");
      const { items } = await ask(`/v1/overviews?${query}`, { signal: this.#ended.signal });
      this.overviews.value = new Map([...this.overviews.value, ...items.map((item) => [item.job, item])]);
    }
    this.jobs.value = jobs;
  }
}

/** Those of the jobs, newest first, that the newest page does not reach. What it lacks within its reach is gone. */
const olderThan = (last, jobs) => jobs.filter(({ created, id }) => created < last.created || (created === last.created && id < last.id));
