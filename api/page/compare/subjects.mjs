/** What is compared: jobs and trials by the address, and what is read of them. */

import { useEffect, useState } from "../vendor/preact.mjs";
import { Points } from "../points.mjs";
import { ask } from "../service.mjs";

const JOB = /^[0-9]{8}-[0-9]{6}-[a-z0-9]{4}$/;
/** Columns that a screen has room for. */
export const MOST = 8;

/** @returns {{jobs: string[], trials: {job: string, number: number}[]}} that the address names; what is none is left out */
export function chosenBy(query) {
  const jobs = list(query.get("jobs")).filter((id) => JOB.test(id));
  const trials = list(query.get("trials")).map((text) => text.split(":")).filter(([job, number]) => JOB.test(job) && /^\d{1,9}$/.test(number ?? ""));
  return { jobs: jobs.slice(0, MOST), trials: trials.slice(0, MOST).map(([job, number]) => ({ job, number: Number(number) })) };
}

const list = (text) => [...new Set((text ?? "").split(",").filter(Boolean))];

/** What the address says of these. */
export const told = ({ jobs, trials }) => ({ jobs: jobs.join(","), trials: trials.map(({ job, number }) => `${job}:${number}`).join(",") });

/**
 * @typedef {object} JobSubject
 * @property {object} job - as `GET /v1/jobs/{id}` has it
 * @property {Points} points
 *
 * @typedef {object} TrialSubject
 * @property {string} name - in the header of its column
 * @property {object} job
 * @property {Points} points
 * @property {object} trial - as `GET /v1/jobs/{id}/trials` has it
 * @property {object | null} parts - where its step goes; null: nothing is predicted of its model
 */

/** Everything of the chosen ones. A job that was named has its best trial beside the others. */
export function useSubjects({ jobs, trials }) {
  const [state, setState] = useState({ jobs: [], trials: [], problem: null, isLoading: true });
  const key = JSON.stringify([jobs, trials]);
  useEffect(() => {
    const ended = new AbortController();
    setState((known) => ({ ...known, isLoading: true }));
    read(jobs, trials, ended.signal).then(
      (found) => ended.signal.aborted || setState({ ...found, problem: null, isLoading: false }),
      (problem) => ended.signal.aborted || setState({ jobs: [], trials: [], problem, isLoading: false }),
    );
    return () => ended.abort();
  }, [key]);
  return state;
}

async function read(jobs, trials, signal) {
  const ids = [...new Set([...jobs, ...trials.map(({ job }) => job)])];
  const found = new Map(await Promise.all(ids.map(async (id) => [id, await readJob(id, signal)])));
  const best = jobs.map((id) => ({ job: id, number: found.get(id).points.bestRow })).filter(({ number }) => number !== null);
  const wanted = [...new Map([...best, ...trials].map((one) => [`${one.job}:${one.number}`, one])).values()].slice(0, MOST);
  return {
    jobs: jobs.map((id) => found.get(id)),
    trials: await Promise.all(wanted.map((one) => readTrial(one, found.get(one.job), signal))),
  };
}

async function readJob(id, signal) {
  const [job, points] = await Promise.all([ask(`/v1/jobs/${id}`, { signal }), ask(`/v1/jobs/${id}/points`, { signal })]);
  return { job, points: new Points().after(points) };
}

async function readTrial({ number }, { job, points }, signal) {
  const page = await ask(`/v1/jobs/${job.id}/trials?cursor=${number}&limit=1`, { signal });
  const trial = page.items[0]?.number === number ? page.items[0] : null;
  if (trial === null) throw new Error(`Job ${job.id} has no trial ${number}.`);
  const isMeasured = trial.outcome === "OK";
  const parts = isMeasured ? await ask(`/v1/jobs/${job.id}/trials/${number}/parts`, { signal }).catch(() => null) : null;
  return { name: `${job.id} · ${number}`, job, points, trial, parts };
}
