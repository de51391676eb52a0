/** What was entered, held against the service while it is entered: whether it would be accepted, what it may find and cost. */

import { useEffect, useRef, useState } from "../vendor/preact.mjs";
import { sentence } from "../format.mjs";
import { ask, Problem, randomKey } from "../service.mjs";
import { sleep } from "../stream.mjs";

/** Milliseconds without a change before the service is asked. */
const PAUSE = 300;

/**
 * @typedef {object} Verdict
 * @property {string} body - what was asked about, as JSON; empty: nothing yet
 * @property {object | null} draft - `DraftView`: it would be accepted
 * @property {Problem | null} problem - it would be refused
 * @property {object | Problem | null} space - `SpaceView`, or why nothing is counted
 * @property {object | Problem | null} estimate - `EstimateView`, or why nothing is predicted
 */

const NOTHING = { body: "", draft: null, problem: null, space: null, estimate: null };

/** @returns {Verdict} on a body: as it is now, or as it was a moment ago */
export function useVerdict(body) {
  const [verdict, setVerdict] = useState(NOTHING);
  useEffect(() => {
    if (body === null) return undefined;
    const ended = new AbortController();
    const put = (changes) => ended.signal.aborted || setVerdict((known) => ({ ...known, ...changes }));
    judge(body, put, ended.signal);
    return () => ended.abort();
  }, [body]);
  return verdict;
}

async function judge(body, put, signal) {
  await sleep(PAUSE, signal);
  if (signal.aborted) return;
  const draft = await asked("/v1/drafts/check", body, signal);
  if (signal.aborted) return;
  if (draft instanceof Problem) return put({ ...NOTHING, body, problem: draft });
  put({ body, draft, problem: null });
  // What is known of the former body stays until the new answer is here: figures that vanish at each key would flicker.
  const tell = (name) => (found) => put({ [name]: found });
  asked("/v1/spaces/count", body, signal).then(tell("space"));
  asked("/v1/drafts/estimate", body, signal).then(tell("estimate"));
}

/** The answer, or why there is none; a service that is busy or away is asked again. */
async function asked(path, body, signal) {
  while (!signal.aborted) {
    try {
      return await ask(path, { method: "POST", body: JSON.parse(body), signal });
    } catch (error) {
      if (!(error instanceof Problem)) return new Problem(0, String(error.message));
      if (!error.passes || error.status === 500) return error;
      await sleep(1000 * Math.max(2, error.retryAfter), signal);
    }
  }
  return null;
}

/** A name of this submission: sent twice, it opens one job. Another body has another one. */
export function useSubmissionKey(body) {
  const kept = useRef({ body: null, key: "" });
  if (kept.current.body !== body) kept.current = { body, key: randomKey() };
  return kept.current.key;
}

/** Entries that no list of fields has. */
const OTHERS = ["model", "command", "cluster", "space", "pins", "baseline", "failures"];

/**
 * The lines of a problem by the entry that they are about; those that no entry has are under "".
 * @param {Problem | null} problem
 * @param {object} choices - of the service
 * @returns {Record<string, string[]>}
 */
export function problemsByField(problem, choices) {
  const found = {};
  const entries = new Set([...choices.fields.map(({ name }) => name), ...OTHERS]);
  if (problem === null) return found;
  const errors = problem.errors.length ? problem.errors : [{ field: "", message: problem.message }];
  for (const { field, message, remedy } of errors) {
    const [entry, rest] = placeOf(field, entries);
    const text = `${rest ? `${rest}: ` : ""}${message}`;
    (found[entry] ??= []).push(`${sentence(text)}${remedy ? ` ${sentence(remedy)}` : ""}`);
  }
  return found;
}

/** The entry that a problem belongs to, and which part of it. */
function placeOf(name, entries) {
  const [first, second, ...rest] = name.split(".");
  if (!entries.has(first)) return ["", name];
  const isEntry = second && ["pins", "baseline", "model", "command"].includes(first);
  const parts = (isEntry ? rest : [second ?? "", ...rest]).filter((part) => !/^\d*$/.test(part));
  return [isEntry ? `${first}.${second}` : first, parts.join(".")];
}
