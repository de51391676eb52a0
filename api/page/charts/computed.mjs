/** What the service has to compute is asked for one after the other: it turns away who asks for much at once. */

import { ask } from "../service.mjs";

let last = Promise.resolve();

/**
 * As `ask`, when what was asked for before is there. Who does not want it any more before its turn is spared it; afterwards
 * the answer is waited for, since the service computes it to the end.
 */
export function askInTurn(path, signal) {
  const turn = last.then(() => {
    signal.throwIfAborted();
    return ask(path);
  });
  last = turn.catch(() => {});
  return turn.then((answer) => {
    signal.throwIfAborted();
    return answer;
  });
}
