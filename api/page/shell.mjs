/** What surrounds every view: the header, the banner when the server is gone, and where news is told to screen readers. */

import { html, useEffect, useState } from "./vendor/preact.mjs";
import { KeyboardHelp } from "./keyboard.mjs";
import { forgetKey, hasKey, reachable } from "./service.mjs";
import { useSignal, Signal } from "./signal.mjs";
import { onTheme, theme, toggleTheme } from "./theme.mjs";

const said = new Signal("");

/** Have a screen reader say something when it has nothing else to say. */
export function say(text) {
  said.value = text;
}

/** The name of the view, for the window and its history. */
export function useTitle(title) {
  useEffect(() => {
    document.title = title ? `${title} – Autotune` : "Autotune";
  }, [title]);
}

export function Shell({ route, children }) {
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header class="top">
      <a class="brand" href="#/"><img src="/page/icon.svg" alt="" width="24" height="24" />Autotune</a>
      <nav aria-label="Main">
        <${NavLink} href="#/" current=${["jobs", "job", "trial"].includes(route.view)}>Jobs<//>
        <${NavLink} href="#/best" current=${route.view === "leaderboard"}>Best<//>
        <${NavLink} href="#/compare" current=${route.view === "compare"}>Compare<//>
        <${NavLink} href="#/fit" current=${route.view === "fit"}>What fits<//>
        <${NavLink} href="#/new" current=${route.view === "form"}>New job<//>
        <${NavLink} href="#/usage" current=${route.view === "usage"}>Usage<//>
      </nav>
      <div class="tools"><${KeyTool} /><${KeyboardHelp} /><${ThemeTool} /></div>
    </header>
    <${Banner} />
    <main id="main" tabindex="-1">${children}</main>
    <${Announcer} />
  `;
}

function skip(event) {
  event.preventDefault(); // the part behind # is the address of the view
  document.getElementById("main").focus();
}

function NavLink({ href, current, children }) {
  return html`<a href=${href} aria-current=${current ? "page" : undefined}>${children}</a>`;
}

function ThemeTool() {
  const [shown, show] = useState(theme());
  useEffect(() => onTheme(() => show(theme())), []);
  const other = shown === "dark" ? "light" : "dark";
  return html`<button type="button" class="quiet icon" onClick=${toggleTheme} aria-label=${`Use ${other} colours`}>
    <span aria-hidden="true">${shown === "dark" ? "☀" : "☾"}</span>
  </button>`;
}

function KeyTool() {
  const has = useSignal(hasKey);
  if (!has) return null;
  return html`<a class="button quiet" href="#/key" onClick=${forgetKey}>Sign out</a>`;
}

function Banner() {
  const isReachable = useSignal(reachable);
  return html`<div role="status">
    ${!isReachable && html`<p class="banner">The server does not answer. What you see may be old; it is asked again by itself.</p>`}
  </div>`;
}

function Announcer() {
  return html`<p class="hidden" aria-live="polite">${useSignal(said)}</p>`;
}
