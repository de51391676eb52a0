// Draws every plot of the report, in the light or dark colours of the reader's system.
"use strict";
(() => {
  const { plots, dark } = JSON.parse(document.getElementById("data").textContent);
  const night = matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false, doubleClick: false };

  const toned = (value) => {
    if (typeof value === "string") return dark[value] ?? value;
    if (Array.isArray(value)) return value.map(toned);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, toned(item)]));
  };

  const draw = (host) => {
    const plot = plots[host.dataset.plot];
    const { data, layout } = night.matches ? toned(plot) : structuredClone(plot);
    Plotly.react(host, data, layout, config);
  };

  // Draw plots as they come into view, so that a long report opens at once.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        seen.unobserve(entry.target);
        draw(entry.target);
      }
    }
  }, { rootMargin: "600px" });

  const hosts = [...document.querySelectorAll("[data-plot]")];
  for (const host of hosts) {
    host.style.minHeight = `${plots[host.dataset.plot].layout.height}px`;
    seen.observe(host);
  }
  night.addEventListener("change", () => hosts.filter((host) => host.classList.contains("js-plotly-plot")).forEach(draw));
  addEventListener("beforeprint", () => hosts.forEach(draw));
})();
