/** Where the step of one trial goes: apart from the other bars, since only the page asks a service. */

import { html, useEffect, useState } from "../vendor/preact.mjs";
import { duration } from "../format.mjs";
import { Divided, TIME } from "./breakdown.mjs";
import { askInTurn } from "./computed.mjs";

/** Where the step of one trial goes. */
export function TrialTime({ job, number }) {
  const [answer, setAnswer] = useState(null);
  useEffect(() => {
    const ended = new AbortController();
    askInTurn(`/v1/jobs/${job}/trials/${number}/parts`, ended.signal).then(setAnswer, () => {}); // without it the page is as whole
    return () => ended.abort();
  }, [job, number]);
  if (answer === null || answer.parts.length === 0) return null;
  const parts = answer.parts.filter(({ seconds }) => seconds > 0).map(({ name, seconds }) => ({ configuration: "step", trial: number, part: name, size: seconds }));
  return html`<section class="card stack" aria-labelledby="parts-heading">
    <h2 id="parts-heading">Where its step goes</h2>
    <${Divided} parts=${parts} words=${TIME} format=${duration} marks=${[]} />
    <p class="soft">Parts are estimated ${answer.note}.</p>
  </section>`;
}
