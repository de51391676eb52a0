/** The place of a figure on the page. */

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.mjs";

/** Whether an element is in sight, or nearly. */
export function useInSight(box) {
  const [isSeen, setSeen] = useState(false);
  useEffect(() => {
    const sight = new IntersectionObserver((entries) => setSeen(entries.at(-1).isIntersecting), { rootMargin: "300px" });
    sight.observe(box.current);
    return () => sight.disconnect();
  }, []);
  return isSeen;
}

/**
 * A figure of a live job: news reach it while it is in sight, so that an event costs what is seen of it.
 * @param {object} props
 * @param {import("../points.mjs").Points} props.points
 * @param {(points: import("../points.mjs").Points) => any} props.draw
 * @param {"wide" | "first"} [props.place] - the whole width; the first one shares it where there is much
 */
export function Slot({ points, draw, place = "" }) {
  const box = useRef(null);
  const held = useRef(points);
  if (useInSight(box)) held.current = points;
  const drawn = useMemo(() => draw(held.current), [held.current]);
  return html`<div ref=${box} class=${`slot ${place}`}>${drawn}</div>`;
}
