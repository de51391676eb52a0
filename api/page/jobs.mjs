/** All jobs, newest first, as they stand now. */

import { html, useEffect, useState } from "./vendor/preact.mjs";
import { jobLink } from "./router.mjs";
import { ask } from "./service.mjs";
import { useTitle } from "./shell.mjs";
import { Heading, Unusable, Waiting } from "./states.mjs";
import { stateLook } from "./outcomes.mjs";

export default function Jobs() {
  useTitle("Jobs");
  const [jobs, setJobs] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => void ask("/v1/jobs").then((page) => setJobs(page.items), setError), []);
  if (error) return html`<${Unusable} error=${error} />`;
  if (jobs === null) return html`<${Waiting} what="jobs" />`;
  return html`<${Heading}>Jobs<//>
    <ul>${jobs.map((job) => html`<li key=${job.id}><a href=${jobLink(job.id)}>${job.model}</a> ${stateLook(job.state).label}</li>`)}</ul>`;
}
