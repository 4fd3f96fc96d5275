(function () {
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
      if (point.closest(".off")) return;
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
  document.querySelectorAll("svg").forEach(function (drawing) { // a key hides what has its colour, and shows it again
    var keys = Array.prototype.slice.call(drawing.querySelectorAll(".key"));
    var samples = Array.prototype.slice.call(drawing.querySelectorAll(".sample"));
    function toggle(colour) {
      var hides = drawing.querySelector(".key[data-colour='" + colour + "']").getAttribute("aria-pressed") === "true";
      keys.concat(samples).forEach(function (each) {
        if (each.dataset.colour !== colour) return;
        each.classList.toggle("faded", hides);
        if (each.hasAttribute("aria-pressed")) each.setAttribute("aria-pressed", String(!hides));
      });
      drawing.querySelectorAll("[style*='" + colour + "']").forEach(function (drawn) {
        if (!drawn.closest(".key, .sample")) drawn.classList.toggle("off", hides);
      });
    }
    keys.forEach(function (key) {
      key.setAttribute("role", "button");
      key.setAttribute("tabindex", "0");
      key.setAttribute("aria-pressed", "true");
      key.addEventListener("keydown", function (event) {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        toggle(key.dataset.colour);
      });
    });
    drawing.addEventListener("click", function (event) { // also between the letters of a key
      var pressed = keys.concat(samples).filter(function (key) {
        var box = key.getBoundingClientRect();
        return event.clientX >= box.left - 4 && event.clientX <= box.right + 4 && event.clientY >= box.top - 4 &&
          event.clientY <= box.bottom + 4;
      })[0];
      if (pressed) toggle(pressed.dataset.colour);
    });
  });
  document.addEventListener("keydown", function (event) { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", hide, { passive: true, capture: true });

  function plain(text) { return text.toLowerCase().replace(/[\s_-]+/g, " "); } // warm-up is found by "warm up", too

  // a field that keeps the items with all words typed; where they have a kind, such as a verdict, that is chosen or typed
  function filters(items, before, kind, kind_of) {
    var field = document.createElement("input"), count = document.createElement("output");
    var kinds = Array.from(new Set(kind_of ? items.map(kind_of) : [])), choice = document.createElement("select");
    field.type = "search";
    field.placeholder = "filter by words";
    field.setAttribute("aria-label", field.placeholder);
    before.parentNode.insertBefore(field, before);
    choice.setAttribute("aria-label", kind);
    choice.add(new Option("any " + kind, ""));
    kinds.forEach(function (each) { choice.add(new Option(each)); });
    if (kinds.length > 1) before.parentNode.insertBefore(choice, before);
    before.parentNode.insertBefore(count, before);
    function filter() {
      var typed = plain(field.value).trim(), words = typed.split(" "), shown = 0;
      var named = kinds.filter(function (each) { return plain(each) === typed; })[0], chosen = choice.value || named;
      items.forEach(function (item) {
        var text = plain(item.textContent), joined = text.replace(/ /g, "");
        var found = words.every(function (word) { return text.indexOf(word) >= 0 || joined.indexOf(word) >= 0; });
        item.hidden = !found || Boolean(chosen && kind_of(item) !== chosen);
        shown += item.hidden ? 0 : 1;
      });
      count.textContent = shown + " of " + items.length;
    }
    field.addEventListener("input", filter);
    choice.addEventListener("input", filter);
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
    var kind = table.dataset.sorts, column_of_kind = Array.from(heads).findIndex(function (head) { return head.textContent === kind; });
    var kind_of = column_of_kind < 0 ? null : function (row) { return row.cells[column_of_kind].textContent; };
    filters(rows, table.parentNode.parentNode, kind, kind_of);
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

  function save(address, name) {
    var link = document.createElement("a");
    link.download = name;
    link.href = address;
    link.click();
  }
  function drawn(drawing, width, height) { // a drawing as a file
    var copy = drawing.cloneNode(true);
    copy.querySelectorAll(".off").forEach(function (hidden) { hidden.remove(); });
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    return "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
  }
  document.querySelectorAll("button[data-svg]").forEach(function (button) { // the drawing beside it
    button.hidden = false;
    button.addEventListener("click", function () {
      var drawing = button.closest("figure").querySelector("svg"), box = drawing.viewBox.baseVal;
      save(drawn(drawing, box.width + "pt", box.height + "pt"), button.getAttribute("data-svg") + ".svg");
    });
  });

  document.querySelectorAll("button[data-png]").forEach(function (button) { // a picture of the drawing beside it
    button.hidden = false;
    button.addEventListener("click", function () {
      var drawing = button.closest("figure").querySelector("svg"), box = drawing.viewBox.baseVal, scale = 3;
      var picture = new Image(), canvas = document.createElement("canvas");
      canvas.width = box.width * scale;
      canvas.height = box.height * scale;
      picture.onload = function () {
        var paper = canvas.getContext("2d");
        paper.fillStyle = "#fff";
        paper.fillRect(0, 0, canvas.width, canvas.height);
        paper.drawImage(picture, 0, 0, canvas.width, canvas.height);
        save(canvas.toDataURL("image/png"), button.getAttribute("data-png") + ".png");
      };
      picture.src = drawn(drawing, canvas.width, canvas.height);
    });
  });

  document.querySelectorAll("button[data-pdf]").forEach(function (button) { // the drawing beside it, printed alone
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

  // a folded section opens when a link leads to it, and all open for the printer
  function unfold() {
    var section = location.hash && document.getElementById(location.hash.slice(1));
    var folded = section && section.querySelector("details");
    if (folded) folded.open = true;
  }
  window.addEventListener("hashchange", unfold);
  document.querySelectorAll("nav a").forEach(function (link) {
    link.addEventListener("click", function () { setTimeout(unfold); }); // the address may stay the same
  });
  unfold();
  var unfolded = [];
  window.addEventListener("beforeprint", function () {
    unfolded = Array.prototype.slice.call(document.querySelectorAll("details:not([open])"));
    unfolded.forEach(function (folded) { folded.open = true; });
  });
  window.addEventListener("afterprint", function () { unfolded.forEach(function (folded) { folded.open = false; }); });

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
