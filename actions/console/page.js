"use strict";
// The server renders and escapes; this only fetches the rendered part once a second and puts it in place.
(() => {
  const live = document.getElementById("live");
  let lastGood = Date.now();
  const query = location.search;
  const openIds = () => new Set([...live.querySelectorAll("details[open]")].map((d) => d.id));
  const closedIds = () => new Set([...live.querySelectorAll("details:not([open])")].map((d) => d.id));
  async function refresh() {
    try {
      const reply = await fetch("/v1/status.json" + query, { cache: "no-store" });
      if (!reply.ok) throw new Error(String(reply.status));
      const status = await reply.json();
      const opened = openIds(), closed = closedIds();
      if (!document.getSelection().toString()) {
        live.innerHTML = status.html;
        for (const d of live.querySelectorAll("details")) {
          if (opened.has(d.id)) d.open = true;
          else if (closed.has(d.id)) d.open = false;
        }
      }
      document.title = status.title;
      lastGood = Date.now();
      document.body.classList.remove("lost");
    } catch (error) {
      document.getElementById("lost-age").textContent = Math.round((Date.now() - lastGood) / 1000);
      document.body.classList.add("lost");
    }
    setTimeout(refresh, document.hidden ? 5000 : 1000);
  }
  document.addEventListener("keydown", (event) => {
    if (event.key !== "j" && event.key !== "k") return;
    const all = [...live.querySelectorAll("details.incident > summary")];
    const at = all.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1);
    if (all[at]) all[at].focus();
  });
  setTimeout(refresh, 1000);
})();
