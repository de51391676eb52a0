/** Where the keyboard and a screen reader go on after another view was opened: at its heading, as soon as it has one. */

import { useEffect, useRef } from "./vendor/preact.mjs";

let isWanted = false;

/** Go to the heading of the view that was opened just now. */
export function focusHeading() {
  scrollTo(0, 0);
  const heading = document.querySelector("main h1");
  isWanted = heading === null;
  (heading ?? document.getElementById("main")).focus({ preventScroll: true });
}

/** @returns a reference for the heading of a view */
export function useHeading() {
  const heading = useRef(null);
  useEffect(() => {
    if (!isWanted) return;
    isWanted = false;
    heading.current.focus({ preventScroll: true });
  }, []);
  return heading;
}
