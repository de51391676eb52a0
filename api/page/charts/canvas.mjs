/** A plot on a canvas: drawn when it comes into sight, again when its data or the theme change, and gone with its view. */

import { html, useEffect, useRef, useState } from "../vendor/preact.mjs";
import { onTheme } from "../theme.mjs";
import { go } from "../router.mjs";
import { CURSOR, lookOf } from "./look.mjs";

/** Least milliseconds between two drawings, and times that the last one took: a live job has news several times a second. */
const [DRAW_EVERY, REST] = [500, 12];
/** Milliseconds until the charts' code is asked for again where it could not be loaded. */
const AGAIN_AFTER = 2000;

let failures = 0;

let charts = null;

/** The chart library, or null where it cannot be loaded now. A browser remembers that an address failed: the next try has another. */
export async function loadCharts() {
  const loading = failures === 0 ? import("../vendor/echarts.mjs") : import(`../vendor/echarts.mjs?attempt=${failures}`);
  charts ??= await loading.catch(() => {
    failures += 1;
    return null;
  });
  return charts;
}

/**
 * @typedef {object} Item - a point that the keyboard reaches
 * @property {any[]} at - where the cursor is drawn
 * @property {string} text - what is said of it
 * @property {string} [href] - what Enter opens
 *
 * @typedef {object} Plot
 * @property {(look: import("./look.mjs").Look) => object} option - of ECharts
 * @property {() => Item[]} items - in the order of the arrow keys
 * @property {(event: object) => string | undefined} [link] - what a click opens
 * @property {(chart: object) => void} [brush] - something was brushed on its axes
 */

/**
 * @param {{plot: Plot, label: string, height?: number}} props
 */
export function Canvas({ plot, label, height = 320 }) {
  const host = useRef(null);
  const drawing = useRef(null);
  const [readout, setReadout] = useState("");
  const place = useRef(-1);

  useEffect(() => {
    const made = new Drawing(host.current);
    drawing.current = made;
    return () => made.close();
  }, []);
  useEffect(() => {
    drawing.current.show(plot);
  }, [plot]);

  const onKeyDown = (event) => {
    const items = plot.items();
    const next = stepped(event.key, place.current, items.length);
    if (event.key === "Enter" && items[place.current]?.href) go(items[place.current].href);
    if (next === null) return;
    event.preventDefault();
    place.current = next;
    drawing.current.point(items[next]);
    setReadout(`${items[next].text}${items[next].href ? "; Enter opens it" : ""}`);
  };
  const onBlur = () => {
    place.current = -1;
    drawing.current.point(null);
    setReadout("");
  };
  return html`
    <div class="canvas" ref=${host} style=${{ height: `${height}px` }} tabindex="0" role="group" aria-roledescription="chart"
      aria-label=${`${label} Arrow keys walk its points.`} onKeyDown=${onKeyDown} onBlur=${onBlur}></div>
    <p class=${`readout${readout ? "" : " hidden"}`} aria-live="polite">${readout}</p>
  `;
}

function stepped(key, place, size) {
  const page = Math.max(1, Math.round(size / 20));
  const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: page, PageDown: -page };
  if (size === 0) return null;
  if (key === "Home") return 0;
  if (key === "End") return size - 1;
  if (!(key in steps)) return null;
  return Math.min(size - 1, Math.max(0, place + steps[key]));
}

/** One canvas, from the first look at it to the end of its view. */
class Drawing {
  #host;
  #chart = null;
  #plot = null;
  #timer = 0;
  /** When it may be drawn again. */
  #next = 0;
  #isSeen = false;
  #isStale = false;
  #isClosed = false;
  #ends = [];

  constructor(host) {
    this.#host = host;
    const sight = new IntersectionObserver(([entry]) => this.#see(entry.isIntersecting), { rootMargin: "120px" });
    sight.observe(host);
    const size = new ResizeObserver(() => this.#resize());
    size.observe(host);
    const print = () => this.#print();
    addEventListener("beforeprint", print);
    this.#ends = [() => sight.disconnect(), () => size.disconnect(), onTheme(() => this.#ask()), () => removeEventListener("beforeprint", print)];
  }

  show(plot) {
    this.#plot = plot;
    this.#ask();
  }

  /** Show where the keyboard is. */
  point(item) {
    this.#chart?.setOption({ series: [{ id: CURSOR, data: item ? [item.at] : [] }] });
  }

  close() {
    this.#isClosed = true;
    clearTimeout(this.#timer);
    this.#ends.forEach((end) => end());
    this.#chart?.dispose();
  }

  #see(isSeen) {
    this.#isSeen = isSeen;
    if (isSeen && this.#isStale) this.#ask();
  }

  #ask() {
    this.#isStale = true;
    if (!this.#isSeen || this.#timer) return;
    this.#timer = setTimeout(() => this.#draw(), Math.max(0, this.#next - performance.now()));
  }

  async #draw() {
    const echarts = await loadCharts();
    this.#timer = 0;
    if (this.#isClosed) return;
    if (echarts === null) {
      // The server is gone: it is asked again, as the rest of the page does.
      this.#next = performance.now() + AGAIN_AFTER;
      this.#ask();
      return;
    }
    const began = performance.now();
    this.#paint(echarts);
    const now = performance.now();
    this.#next = now + Math.max(DRAW_EVERY, REST * (now - began));
  }

  /** A plot that has not been in sight is drawn at once for paper. */
  #print() {
    if (this.#isStale && charts !== null) this.#paint(charts);
  }

  #paint(echarts) {
    this.#isStale = false;
    if (this.#chart === null) this.#make(echarts);
    this.#chart.setOption(this.#plot.option(lookOf(this.#host)), { replaceMerge: ["series", "xAxis", "yAxis"] });
  }

  #make(echarts) {
    this.#chart = echarts.init(this.#host, null, { renderer: "canvas" });
    this.#chart.on("click", (event) => {
      const href = this.#plot.link?.(event);
      if (href) go(href);
    });
    this.#chart.on("axisareaselected", () => this.#plot.brush?.(this.#chart));
  }

  #resize() {
    if (this.#chart === null) return;
    this.#chart.resize();
    this.#ask();
  }
}
