"use strict";
// Redraws the page once a second, until whoever serves it has ended.
(() => {
  const place = document.querySelector("main");
  const said = document.getElementById("tip");
  let last = "";
  const say = (words) => {
    said.textContent = words;
    said.hidden = words === "";
  };
  const draw = async () => {
    try {
      const answer = await fetch("/live", { cache: "no-store" });
      const text = await answer.text();
      say(answer.ok ? "" : text);
      if (answer.ok && text !== last) {
        last = text;
        place.innerHTML = text;
        document.querySelector("header .sentence").textContent =
          place.firstElementChild.dataset.sentence;
      }
    } catch {
      say("`penstock watch` has ended: nothing new is shown");
    }
    setTimeout(draw, 1000);
  };
  setTimeout(draw, 1000);
})();
