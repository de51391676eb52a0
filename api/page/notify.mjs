/** A notification of the browser when a job ends, while its page is open in some tab. */

import { html, useEffect, useState } from "./vendor/preact.mjs";
import { isOver, stateLook } from "./outcomes.mjs";
import { say } from "./shell.mjs";

export function Notify({ job }) {
  const [isWanted, setWanted] = useState(false);
  const [isRefused, setRefused] = useState(false);
  const over = isOver(job.state);
  useEffect(() => {
    if (!over || !isWanted) return;
    setWanted(false);
    new Notification(`${job.request.name || job.model}: ${stateLook(job.state, job.reason).label.toLowerCase()}`, { body: job.message, tag: job.id });
  }, [over]);
  if (over || !("Notification" in window)) return null;
  const toggle = async () => {
    const isAllowed = isWanted || (await Notification.requestPermission()) === "granted";
    setRefused(!isAllowed);
    setWanted(isAllowed && !isWanted);
    if (isAllowed && !isWanted) say("You are notified when the job ends, as long as this page is open.");
  };
  return html`<button type="button" aria-pressed=${isWanted} onClick=${toggle} title="As long as this page is open">Notify me at the end</button>
    ${isRefused && html`<span class="soft" role="status">The browser does not allow notifications of this page.</span>`}`;
}
