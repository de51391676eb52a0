/* Runs before everything else on the page: frames, long tasks and interactions. */
(() => {
  const seen = { tasks: [], events: [], frames: [], last: 0 };
  new PerformanceObserver((list) => list.getEntries().forEach(({ startTime, duration }) => seen.tasks.push([startTime, duration]))).observe({ type: "longtask", buffered: true });
  new PerformanceObserver((list) => list.getEntries().forEach(({ interactionId, duration }) => interactionId && seen.events.push(duration))).observe({ type: "event", durationThreshold: 16, buffered: true });
  const frame = (now) => {
    if (seen.last) seen.frames.push(now - seen.last);
    seen.last = now;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
  window.watch = {
    /** Discard the recorded entries. */
    begin: () => Object.assign(seen, { tasks: [], events: [], frames: [] }),
    seen: () => ({ tasks: seen.tasks, events: seen.events, frames: seen.frames }),
    /** When the canvas of a figure existed and the page had been idle for half a second; 0: not yet. */
    drawn: (figure) => {
      if (!document.querySelector(`[data-figure=${figure}] canvas`)) return 0;
      const end = Math.max(...seen.tasks.map(([start, duration]) => start + duration), performance.getEntriesByType("resource").reduce((most, { responseEnd }) => Math.max(most, responseEnd), 0));
      return performance.now() - end > 500 ? end : 0;
    },
    paint: () => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0,
  };
})();
