// Says so in one sentence where the module live.js did not run: an old browser, a page opened as a
// file, a blocked script. Written for browsers that know no modules.
window.addEventListener("load", function () {
  if (document.documentElement.getAttribute("data-live")) return;
  var places = document.querySelectorAll("servelab-panel, .cell.tag_live");
  if (!places.length) return;
  var why = location.protocol === "file:"
    ? "browsers run none in a page opened as a file. Serve the folder instead, as `make serve` does."
    : "this browser is too old for it, or blocks the page's script.";
  var note = document.createElement("p");
  note.className = "live-note";
  note.setAttribute("role", "note");
  note.textContent = "Code and pictures of this page answer to a reader where Python can run, but "
    + why + " What is printed here stays true.";
  places[0].parentNode.insertBefore(note, places[0]);
});
