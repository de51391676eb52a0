/** Light or dark: what the system says, unless the person said otherwise. */

const KEPT = "autotune-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

/** @returns {"light" | "dark"} what is shown now */
export const theme = () => document.documentElement.dataset.theme;

/** Show the other theme from now on. */
export function toggleTheme() {
  const wanted = theme() === "dark" ? "light" : "dark";
  localStorage.setItem(KEPT, wanted);
  apply();
}

/**
 * Call back whenever the theme changes.
 * @param {() => void} listener
 * @returns {() => void} ends it
 */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** What the person chose; null: nothing, or this is a frame of a notebook, which has no storage. */
function chosen() {
  try {
    return localStorage.getItem(KEPT);
  } catch {
    return null;
  }
}

function apply() {
  document.documentElement.dataset.theme = chosen() ?? (system.matches ? "dark" : "light");
  listeners.forEach((listener) => listener());
}

system.addEventListener("change", apply);
apply();
