/** Server-sent events by fetch: EventSource cannot send a key. */

import { Problem, reachable, send } from "./service.mjs";

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 10_000;
/** Longer than the server's own signs of life are apart, twice over: the connection is dead. */
const SILENCE = 40_000;

/**
 * @typedef {object} Message
 * @property {string} kind
 * @property {string | null} id
 * @property {any} data - from JSON
 */

/**
 * Follow a stream to its end, over lost connections: from the last id on.
 * @param {object} options
 * @param {(last: string) => string} options.path - of the stream beyond an id
 * @param {string} options.last - id from which on
 * @param {(messages: Message[]) => void} options.onMessages - what came at once
 * @param {(isOpen: boolean) => void} [options.onOpen]
 * @param {AbortSignal} options.signal - ends it
 * @returns {Promise<void>} when the stream is over, or `signal` says so
 * @throws {Problem} the service refuses it for good, such as 404, or 410: what lies beyond that id was removed
 */
export async function follow({ path, last, onMessages, onOpen = () => {}, signal }) {
  let pause = FIRST_PAUSE;
  while (!signal.aborted) {
    try {
      const answer = await send(path(last), { signal });
      if (answer.status === 204) return;
      onOpen(true);
      await read(answer, signal, (messages) => {
        pause = FIRST_PAUSE;
        last = messages.findLast((message) => message.id !== null)?.id ?? last;
        onMessages(messages);
      });
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && !error.passes) throw error;
      if (error instanceof Problem) pause = Math.max(pause, 1000 * error.retryAfter);
      else reachable.value = false;
    }
    onOpen(false);
    await sleep(pause * (0.75 + Math.random() / 2), signal);
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }
}

async function read(answer, signal, onMessages) {
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  const parser = new Parser();
  const stop = () => reader.cancel().catch(() => {});
  signal.addEventListener("abort", stop, { once: true });
  let watch = 0;
  try {
    for (;;) {
      clearTimeout(watch);
      watch = setTimeout(stop, SILENCE);
      const { value, done } = await reader.read();
      if (done) return;
      const messages = parser.take(decoder.decode(value, { stream: true }));
      if (messages.length && !signal.aborted) onMessages(messages);
    }
  } finally {
    clearTimeout(watch);
    signal.removeEventListener("abort", stop);
  }
}

/** Takes the text of a stream in pieces, and gives the messages that are whole. */
export class Parser {
  #rest = "";

  /** @returns {Message[]} */
  take(text) {
    const blocks = (this.#rest + text).split("\n\n");
    this.#rest = blocks.pop();
    return blocks.map(parseBlock).filter((message) => message !== null);
  }
}

function parseBlock(block) {
  const fields = { event: "message", id: null, data: [] };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon < 1) continue; // a comment: a sign of life
    const [name, value] = [line.slice(0, colon), line.slice(colon + 1).replace(/^ /, "")];
    if (name === "data") fields.data.push(value);
    else if (name in fields) fields[name] = value;
  }
  return fields.data.length ? { kind: fields.event, id: fields.id, data: JSON.parse(fields.data.join("\n")) } : null;
}

/** Wait; ends early when `signal` says so. */
export function sleep(milliseconds, signal) {
  return new Promise((resolve) => {
    if (signal?.aborted) return resolve();
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
