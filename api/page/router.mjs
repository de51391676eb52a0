/** Which view an address names. The part behind `#` is all that changes: the server always gives the same page. */

const JOB = "[0-9]{8}-[0-9]{6}-[a-z0-9]{4}";

/** Pattern of the path, name of the view, names of its parts. */
const ROUTES = [
  [/^\/?$/, "jobs", []],
  [/^\/new$/, "form", []],
  [/^\/key$/, "key", []],
  [/^\/usage$/, "usage", []],
  [/^\/fit$/, "fit", []],
  [/^\/best$/, "leaderboard", []],
  [/^\/compare$/, "compare", []],
  [new RegExp(`^/jobs/(${JOB})$`), "job", ["job"]],
  [new RegExp(`^/jobs/(${JOB})/trials/(\\d{1,9})$`), "trial", ["job", "number"]],
];

/**
 * @typedef {object} Route
 * @property {string} view - name of the view; "missing" where the address names none
 * @property {Record<string, string>} params - parts of the path
 * @property {URLSearchParams} query - what stands behind `?`
 * @property {string} path - the path alone: views are made anew when it changes
 */

/**
 * @param {string} hash - of the address, with its `#`
 * @returns {Route}
 */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#/, "").split("?", 2);
  const query = new URLSearchParams(search);
  for (const [pattern, view, names] of ROUTES) {
    const found = pattern.exec(path);
    if (found) {
      const params = Object.fromEntries(names.map((name, index) => [name, found[index + 1]]));
      return { view, params, query, path };
    }
  }
  return { view: "missing", params: {}, query, path };
}

/** @returns {Route} of the address that is open now */
export const here = () => parse(location.hash);

/** Open another view. */
export function go(hash) {
  location.hash = hash;
}

/** Change what stands behind `?` without a step in the history. Empty values are left out. */
export function setQuery(values) {
  const { path, query } = here();
  for (const [name, value] of Object.entries(values)) value ? query.set(name, value) : query.delete(name);
  const text = query.toString();
  history.replaceState(null, "", `#${path}${text && `?${text}`}`);
}

export const jobLink = (job) => `#/jobs/${job}`;
export const trialLink = (job, number) => `#/jobs/${job}/trials/${number}`;
