/** A figure that the service computes: asked for when it comes into sight, and again when what was found is another. */

import { html, useEffect, useRef, useState } from "../vendor/preact.mjs";
import { Problem } from "../service.mjs";
import { askInTurn } from "./computed.mjs";
import { FigurePicture } from "./pictures.mjs";
import { useInSight } from "./slot.mjs";

/** Milliseconds to wait for further news: a figure takes the server longer than an event takes to come. */
const SETTLED = 1500;

/**
 * @param {object} props
 * @param {string} props.job
 * @param {string} props.name - of the figure
 * @param {string} props.title - until the figure is there
 * @param {string} props.version - of what it rests on
 * @param {"wide"} [props.place]
 */
export function Figure({ job, name, title, version, place = "" }) {
  const box = useRef(null);
  const isSeen = useInSight(box);
  const { figure, problem } = useFigure(job, name, version, isSeen);
  const shown = figure ?? { name, title, summary: "Loading …", tables: [], notes: [] };
  return html`<div ref=${box} class=${`slot ${place}`}>
    <${FigurePicture} figure=${problem ? { ...shown, summary: problem.message } : shown} />
  </div>`;
}

function useFigure(job, name, version, isWanted) {
  const [state, setState] = useState({ figure: null, problem: null });
  /** The version that is shown; null: none is. */
  const shown = useRef(null);
  useEffect(() => {
    if (!isWanted || shown.current === version) return undefined;
    const ended = new AbortController();
    const read = async () => {
      try {
        const figure = await askInTurn(`/v1/jobs/${job}/figures/${name}`, ended.signal);
        shown.current = version;
        setState({ figure, problem: null });
      } catch (error) {
        if (ended.signal.aborted) return;
        if (!(error instanceof Problem)) throw error;
        if (error.passes) timer = setTimeout(read, 1000 * Math.max(3, error.retryAfter));
        setState(({ figure }) => ({ figure, problem: figure === null && !error.passes ? error : null }));
      }
    };
    let timer = setTimeout(read, shown.current === null ? 0 : SETTLED);
    return () => {
      clearTimeout(timer);
      ended.abort();
    };
  }, [job, name, version, isWanted]);
  return state;
}
