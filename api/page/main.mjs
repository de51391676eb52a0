/** Draws the view that the address names into the shell. */

import { html, render, useEffect, useState } from "./vendor/preact.mjs";
import { focusHeading } from "./focus.mjs";
import { here } from "./router.mjs";
import { Shell } from "./shell.mjs";
import { Missing, Unusable, Waiting } from "./states.mjs";

/** Views are loaded when they are first opened. Each module's default export is a component of `{route}`. */
const VIEWS = {
  jobs: () => import("./jobs.mjs"),
  job: () => import("./job.mjs"),
  trial: () => import("./trial.mjs"),
  form: () => import("./form.mjs"),
  compare: () => import("./compare.mjs"),
  leaderboard: () => import("./leaderboard.mjs"),
  usage: () => import("./usage.mjs"),
  fit: () => import("./fit.mjs"),
  key: () => import("./key.mjs"),
  missing: async () => ({ default: Missing }),
};

function Page() {
  const [shown, show] = useState({ View: Waiting, route: here(), first: true });
  useEffect(() => {
    let latest = 0;
    const open = async () => {
      const [route, turn, first] = [here(), ++latest, latest === 1];
      try {
        const { default: View } = await VIEWS[route.view]();
        if (turn === latest) show({ View, route, first });
      } catch (error) {
        if (turn === latest) show({ View: () => html`<${Unusable} error=${error} />`, route, first });
      }
    };
    addEventListener("hashchange", open);
    open();
    return () => removeEventListener("hashchange", open);
  }, []);
  useEffect(() => {
    if (!shown.first) focusHeading();
  }, [shown.View, shown.route.path]);
  const { View, route } = shown;
  return html`<${Shell} route=${route}><${View} key=${route.path} route=${route} /><//>`;
}

render(html`<${Page} />`, document.getElementById("app"));
