/** Requests to the service: the key, problem documents, and whether it can be reached. */

import { go, here } from "./router.mjs";
import { Signal } from "./signal.mjs";

const KEPT = "autotune-key";
const WANTED = "autotune-wanted";
const LINK = "autotune-link";

/** Whether the last request got an answer. */
export const reachable = new Signal(true);

/** Whether this page has a key. */
export const hasKey = new Signal(keyNow() !== null);

/** Why a request was refused (RFC 9457), or that no answer came. */
export class Problem extends Error {
  /**
   * @param {number} status - of HTTP; 0: no answer came
   * @param {string} detail - one line for people
   * @param {{field: string, message: string, remedy?: string}[]} errors - each field that is wrong
   * @param {number} retryAfter - seconds to wait; 0: not said
   */
  constructor(status, detail, errors = [], retryAfter = 0) {
    super(detail);
    Object.assign(this, { status, detail, errors, retryAfter });
  }

  /** Whether the same request may get another answer later. */
  get passes() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** Keep the key in this browser until the person signs out. */
export function keepKey(text) {
  localStorage.setItem(KEPT, text);
  sessionStorage.removeItem(LINK);
  hasKey.value = true;
}

export function forgetKey() {
  localStorage.removeItem(KEPT);
  sessionStorage.removeItem(LINK);
  hasKey.value = false;
}

/** Where the person was when a key was asked for. */
export const wanted = () => sessionStorage.getItem(WANTED) ?? "#/";

/**
 * Send a request and return the answer, whatever media type it has.
 * @param {string} path - of the service, such as `/v1/jobs`
 * @param {{method?: string, body?: object, headers?: Record<string, string>, signal?: AbortSignal}} options
 * @throws {Problem} it was refused, or no answer came; AbortError where `signal` says so
 */
export async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  const answer = await fetched(path, {
    method,
    signal,
    cache: "no-store",
    headers: { ...authorization(), ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (answer.ok || answer.status === 304) return answer;
  const problem = await readProblem(answer);
  if (problem.status === 401) askForKey();
  throw problem;
}

/** As `send`; the answer's JSON. */
export const ask = async (path, options) => (await send(path, options)).json();

/** A name that nobody else gives. `crypto.randomUUID` is there on pages of https alone. */
export const randomKey = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** Ask the person for a key, and come back afterwards. */
export function askForKey() {
  const { view } = here();
  if (view !== "key") {
    sessionStorage.removeItem(LINK);
    sessionStorage.setItem(WANTED, location.hash.replace(/[?&]link=[^&]*/, "") || "#/");
    go("#/key");
  }
}

/** The token of a link shows its job in this window, before any key of the person. */
function keyNow() {
  const token = here().query.get("link");
  if (token) sessionStorage.setItem(LINK, token);
  return sessionStorage.getItem(LINK) ?? localStorage.getItem(KEPT);
}

function authorization() {
  const key = keyNow();
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

async function fetched(path, options) {
  try {
    const answer = await fetch(path, options);
    reachable.value = true;
    return answer;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    reachable.value = false;
    throw new Problem(0, "The server does not answer.");
  }
}

async function readProblem(answer) {
  const retryAfter = Number(answer.headers.get("Retry-After")) || 0;
  try {
    const { detail, errors } = await answer.json();
    return new Problem(answer.status, String(detail), errors ?? [], retryAfter);
  } catch {
    return new Problem(answer.status, `The server answered ${answer.status}.`, [], retryAfter);
  }
}
