<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-c16jiMXoow81oKlQ6BO2c4i/9zTFGL/5GwdfHWxXdNs='; style-src 'unsafe-inline'; img-src 'self' file: data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Check: cannot judge</title>
<style>
:root {
  color-scheme: light dark;
  --ink: #1b1b1b; --soft: #4a4a4a; --line: #d9d9d9; --ground: #fff; --shade: #f5f6f7; --link: #0b5cad; --mark: #fff3c4; --veil: #0003;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e6e6; --soft: #b4b4b4; --line: #3d4248; --ground: #16191d; --shade: #20252b; --link: #7db8f0; --mark: #4a4222; --veil: #000a;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 0; }
a { color: var(--link); }
.page { max-width: 120rem; margin: 0 auto; padding: 1.5rem 1.5rem 4rem; }
.with-contents { max-width: 88rem; display: grid; grid-template-columns: 15rem minmax(0, 1fr); gap: 2.5rem; }
main { min-width: 0; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; max-width: 50rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .7rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
section { scroll-margin-top: 1rem; }
p, li { max-width: 52rem; overflow-wrap: anywhere; }
.kicker { color: var(--soft); font-weight: 600; margin: 0 0 .3rem; }
.lead { font-size: 1.2rem; line-height: 1.45; margin: 0 0 .8rem; }
.lead strong { font-size: 1.3em; display: block; }
.facts { color: var(--soft); font-size: .9rem; max-width: none; margin: .6rem 0; }
.warning { background: var(--mark); padding: .3rem .7rem; border-radius: 5px; max-width: max-content; }
.note { color: var(--soft); font-size: .9rem; }
nav { font-size: .9rem; position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto; padding: .3rem 0 1rem; }
nav ol { list-style: none; margin: 0; padding: 0; border-left: 2px solid var(--line); }
nav a { display: block; padding: .2rem .7rem; color: var(--soft); text-decoration: none; line-height: 1.3; }
nav a:hover { color: var(--link); }
nav a[aria-current] { color: var(--ink); font-weight: 600; box-shadow: -2px 0 var(--link); background: var(--shade); }
figure { margin: 0; }
figcaption p { font-size: .95rem; color: var(--soft); margin: .5rem 0; }
.files { font-size: .9rem; color: var(--soft); margin: .4rem 0; }
.files a, .files button { margin-right: .8rem; }
input[type=search] { font: inherit; width: min(32rem, 100%); padding: .3rem .5rem; margin: 1rem .6rem .5rem 0; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
th[aria-sort=ascending] button::after { content: " \2191"; }
th[aria-sort=descending] button::after { content: " \2193"; }
.files button { font: inherit; color: var(--link); background: none; border: 0; padding: 0; text-decoration: underline; cursor: pointer; }
[data-hover] { cursor: pointer; outline: none; }
[data-hover].shown { filter: drop-shadow(0 0 2px #000) drop-shadow(0 0 1px #000); }
#tip { position: fixed; z-index: 9; max-width: min(24rem, 96vw); padding: .35rem .6rem; border-radius: 5px; font-size: .85rem;
  line-height: 1.35; white-space: pre-wrap; overflow-wrap: anywhere; color: #fff; background: #1b1b1b; border: 1px solid #777;
  pointer-events: none; }
#tip[hidden] { display: none; }
.frame { position: relative; max-width: max-content; margin: .6rem 0 1rem; }
.frame::before, .frame::after { content: ""; position: absolute; z-index: 5; pointer-events: none; opacity: 0; transition: opacity .15s; }
.frame::before { top: 0; bottom: 0; right: 0; width: 2.5rem; background: linear-gradient(to left, var(--veil), transparent); }
.frame::after { left: 0; right: 0; bottom: 0; height: 2.5rem; background: linear-gradient(to top, var(--veil), transparent); }
.frame.more-right::before, .frame.more-below::after { opacity: 1; }
.table { overflow: auto; max-height: 85vh; max-width: 100%; }
.frame.more-right, .frame.more-below, .frame:has(> .table:focus-visible) { outline: 1px solid var(--line); }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem 1.1rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap;
  background: var(--ground); vertical-align: top; }
td.prose { white-space: normal; min-width: 12.5rem; }
th { font-weight: 600; position: sticky; top: 0; z-index: 2; white-space: normal; min-width: 4ch; max-width: 18rem; vertical-align: bottom; }
th:first-child, td:first-child { position: sticky; left: 0; z-index: 1; white-space: normal; min-width: 13rem; max-width: 26rem; }
th:first-child { z-index: 3; }
td.prose:first-child { min-width: 26rem; max-width: 32rem; }
pre, code { font: .85rem/1.5 ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--shade); padding: .6rem .8rem; border-radius: 5px; }
.verdicts { display: flex; flex-wrap: wrap; gap: .5rem; padding: 0; margin: .6rem 0; list-style: none; font-size: .9rem; }
.verdicts li { border: 1px solid var(--line); border-radius: 1rem; padding: .05rem .7rem; background: var(--shade); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); gap: 1.2rem; margin-top: 1rem; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .9rem; display: flex; flex-direction: column; color: inherit;
  text-decoration: none; min-width: 0; }
.card[hidden], section:has(.card):not(:has(.card:not([hidden]))) { display: none; }
.card:hover { border-color: var(--link); }
.card h3 { font-size: 1.02rem; line-height: 1.3; margin: .6rem 0 .2rem; }
.card p { margin: .2rem 0; font-size: .9rem; }
.card .said { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 5; overflow: hidden; }
.card .verdicts { margin-top: auto; padding-top: .4rem; font-size: .8rem; }
.card .thumbnail { display: block; width: 100%; aspect-ratio: 5 / 3; object-fit: contain; background: #fff; border-radius: 5px; }
@media (max-width: 60rem) {
  .page { padding: 1rem 1rem 3rem; }
  .with-contents { display: block; }
  nav { z-index: 4; background: var(--ground); border-bottom: 1px solid var(--line); margin: -1rem -1rem 1rem; padding: 0; }
  nav ol { display: flex; border: 0; overflow-x: auto; }
  nav a { white-space: nowrap; padding: .5rem .8rem; }
  nav a[aria-current] { box-shadow: inset 0 -2px var(--link); }
  section { scroll-margin-top: 3.5rem; }
  h1 { font-size: 1.45rem; }
  .lead { font-size: 1.08rem; }
  th:first-child, td:first-child, td.prose:first-child { max-width: 38vw; min-width: 8rem; overflow-wrap: anywhere; }
}
/* figures: whole at every width, by a drawing for narrow screens; in the dark white turns dark and hues stay */
.drawing { background: #fff; border: 1px solid #d9d9d9; border-radius: 6px; padding: .5rem; }
.drawing svg { display: block; max-width: 100%; height: auto; }
.drawing.narrow { display: none; }
@media screen and (max-width: 44rem) {
  .drawing.wide { display: none; }
  .drawing.narrow { display: block; }
  .drawing.narrow svg { width: 100%; }
}
@media screen and (prefers-color-scheme: dark) {
  .drawing, .card .thumbnail { filter: invert(.91) hue-rotate(180deg); }
}
@media print {
  .drawing { border: 0; padding: 0; }
}
/* end of figures */
@media print {
  :root { --ink: #000; --soft: #333; --line: #bbb; --ground: #fff; --shade: #f5f5f5; --link: #000; }
  .page { max-width: none; padding: 0; font-size: 10.5pt; }
  .with-contents { display: block; }
  nav, .files, #tip, .frame::before, .frame::after { display: none; }
  body:has(> .sheet) > :not(.sheet) { display: none; }
  .sheet svg { display: block; width: 100vw; height: auto; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .table { max-height: none; overflow: visible; }
  table { font-size: 8pt; }
  th, td { position: static; padding-right: .5rem; white-space: normal; }
}
</style>
</head>
<body>
<div class="page">
<main>
<h1>Check: cannot judge</h1>
<p class="lead">cannot judge: runs and baseline cannot be compared (margin 5 % of the best loss)</p>
<p class="plain">a against c</p>
<section id="why-it-cannot-be-judged">
<h2>Why it cannot be judged</h2>
<ul class="plain">
<li>no baseline c: No such file or directory</li>
</ul>
</section>
</main>
</div>
<script>(function () {
  "use strict";
  var near = 24; // pixels from the pointer to a point that it means
  var tip = document.createElement("div"), shown = null;
  tip.id = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.appendChild(tip);

  function middle(point) {
    var box = point.getBoundingClientRect();
    return { x: box.left + box.width / 2, y: box.top + box.height / 2, top: box.top, bottom: box.bottom };
  }
  function hide() {
    if (shown) shown.classList.remove("shown");
    shown = null;
    tip.hidden = true;
  }
  function show(point) {
    if (point === shown) return;
    hide();
    shown = point;
    point.classList.add("shown");
    tip.textContent = point.getAttribute("data-hover");
    tip.hidden = false;
    var at = middle(point), room = document.documentElement.clientWidth - tip.offsetWidth - 4;
    var above = at.top - tip.offsetHeight - 8;
    tip.style.left = Math.max(4, Math.min(at.x - tip.offsetWidth / 2, room)) + "px";
    tip.style.top = (above < 4 ? at.bottom + 8 : above) + "px";
  }
  function nearest(points, x, y) {
    var best = null, least = near * near;
    points.forEach(function (point) {
      var at = middle(point), distance = (at.x - x) * (at.x - x) + (at.y - y) * (at.y - y);
      if (distance < least) { least = distance; best = point; }
    });
    return best;
  }
  document.querySelectorAll("svg").forEach(function (drawing) {
    var points = Array.prototype.slice.call(drawing.querySelectorAll("[data-hover]"));
    if (!points.length) return;
    function follow(event) {
      var point = event.target.closest("[data-hover]") || nearest(points, event.clientX, event.clientY);
      if (point) show(point); else hide();
    }
    drawing.addEventListener("pointermove", follow);
    drawing.addEventListener("pointerdown", follow);
    drawing.addEventListener("pointerleave", function (event) { if (event.pointerType === "mouse") hide(); });
    points.forEach(function (point, index) { // Tab reaches the first point of a figure, arrow keys the others
      point.setAttribute("tabindex", index ? "-1" : "0");
      point.setAttribute("role", "img");
      point.setAttribute("aria-label", point.getAttribute("data-hover"));
      point.addEventListener("focus", function () { show(point); });
      point.addEventListener("blur", hide);
      point.addEventListener("keydown", function (event) {
        var step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        points[(index + step + points.length) % points.length].focus({ preventScroll: true });
      });
    });
  });
  document.addEventListener("keydown", function (event) { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", hide, { passive: true, capture: true });

  function plain(text) { return text.toLowerCase().replace(/[\s_-]+/g, " "); } // warm-up is found by "warm up", too

  function filters(items, before) { // a field that keeps the items with all words typed
    var field = document.createElement("input"), count = document.createElement("output");
    field.type = "search";
    field.placeholder = "filter by words";
    field.setAttribute("aria-label", field.placeholder);
    before.parentNode.insertBefore(field, before);
    before.parentNode.insertBefore(count, before);
    function filter() {
      var words = plain(field.value).split(" "), shown = 0;
      items.forEach(function (item) {
        var text = plain(item.textContent), joined = text.replace(/ /g, "");
        item.hidden = !words.every(function (word) { return text.indexOf(word) >= 0 || joined.indexOf(word) >= 0; });
        shown += item.hidden ? 0 : 1;
      });
      count.textContent = shown + " of " + items.length;
    }
    field.addEventListener("input", filter);
    filter();
  }
  document.querySelectorAll("main[data-filter=cards]").forEach(function (main) {
    var cards = Array.prototype.slice.call(main.querySelectorAll(".card"));
    if (cards.length) filters(cards, main.querySelector("section"));
  });

  document.querySelectorAll(".table").forEach(function (table) { // shades the side on which there is more to see
    function shade() {
      table.parentNode.classList.toggle("more-right", table.scrollLeft + table.clientWidth < table.scrollWidth - 2);
      table.parentNode.classList.toggle("more-below", table.scrollTop + table.clientHeight < table.scrollHeight - 2);
    }
    table.addEventListener("scroll", shade, { passive: true });
    window.addEventListener("resize", shade);
    shade();
  });

  // by size where a number counts in thousands or more: 98.7k is below 1.02M
  function number(text) {
    var found = /^[\u00d7+]?(-?[\d.]+(?:e[-+]?\d+)?)([kMB]?)\b/.exec(text.replace(/(\d),(?=\d{3})/g, "$1"));
    return found ? parseFloat(found[1]) * { "": 1, k: 1e3, M: 1e6, B: 1e9 }[found[2]] : NaN;
  }
  document.querySelectorAll("table[data-sorts]").forEach(function (table) {
    var body = table.tBodies[0], rows = Array.prototype.slice.call(body.rows), heads = table.tHead.rows[0].cells;
    filters(rows, table.parentNode.parentNode);
    Array.prototype.forEach.call(heads, function (head, column) {
      var button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.textContent = "";
      head.appendChild(button);
      button.addEventListener("click", function () {
        var down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
        Array.prototype.forEach.call(heads, function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        rows.slice().sort(function (one, other) {
          var a = one.cells[column].textContent, b = other.cells[column].textContent;
          if (!a || !b) return a ? -1 : b ? 1 : 0; // empty cells last, either way
          var numbers = [number(a), number(b)], words = numbers.some(isNaN);
          return sign * (words ? a.localeCompare(b, "en", { numeric: true }) : numbers[0] - numbers[1]);
        }).forEach(function (row) { body.appendChild(row); });
      });
    });
  });

  document.querySelectorAll("button[data-png]").forEach(function (button) { // a picture of the drawing above it
    button.hidden = false;
    button.addEventListener("click", function () {
      var drawing = button.closest("figure").querySelector("svg"), box = drawing.viewBox.baseVal, scale = 3;
      var picture = new Image(), canvas = document.createElement("canvas"), copy = drawing.cloneNode(true);
      canvas.width = box.width * scale;
      canvas.height = box.height * scale;
      copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
      copy.setAttribute("width", canvas.width);
      copy.setAttribute("height", canvas.height);
      picture.onload = function () {
        var link = document.createElement("a"), paper = canvas.getContext("2d");
        paper.fillStyle = "#fff";
        paper.fillRect(0, 0, canvas.width, canvas.height);
        paper.drawImage(picture, 0, 0, canvas.width, canvas.height);
        link.download = button.getAttribute("data-png") + ".png";
        link.href = canvas.toDataURL("image/png");
        link.click();
      };
      picture.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
    });
  });

  document.querySelectorAll("button[data-pdf]").forEach(function (button) { // the drawing above it, printed alone
    button.hidden = false;
    button.addEventListener("click", function () {
      var drawing = button.closest("figure").querySelector("svg"), box = drawing.viewBox.baseVal;
      var home = drawing.parentNode, sheet = document.createElement("div"), size = document.createElement("style");
      var title = document.title;
      size.textContent = "@page { size: " + box.width + "pt " + box.height + "pt; margin: 0 }";
      sheet.className = "sheet";
      sheet.appendChild(drawing); // itself, no copy: its clips and marks are known by their ids
      document.body.append(size, sheet);
      document.title = button.getAttribute("data-pdf"); // the name that browsers give the file
      window.addEventListener("afterprint", function () {
        home.appendChild(drawing);
        size.remove();
        sheet.remove();
        document.title = title;
      }, { once: true });
      window.print();
    });
  });

  var links = {}, marked = null, contents = document.querySelectorAll("nav a");
  contents.forEach(function (link) { links[link.getAttribute("href").slice(1)] = link; });
  var sections = Array.prototype.slice.call(document.querySelectorAll("section[id]"));
  function mark() {
    var current = null;
    sections.forEach(function (section) {
      if (section.getBoundingClientRect().top < window.innerHeight / 3) current = section;
    });
    var link = current && links[current.id];
    if (link === marked) return;
    if (marked) marked.removeAttribute("aria-current");
    marked = link;
    if (!link) return;
    link.setAttribute("aria-current", "true");
    var list = link.closest("ol"); // a row on narrow screens
    list.scrollLeft = link.offsetLeft - list.offsetLeft - 16;
  }
  if (contents.length) {
    document.addEventListener("scroll", mark, { passive: true });
    mark();
  }
})();
</script>
</body>
</html>
