// Cells that run and panels that answer. Python does both, in worker.js; this file carries values
// and text there and puts HTML back in place. It knows no formula and no picture.
document.documentElement.dataset.live = "on";

const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const say = (note, text) => {
  note.textContent = text;
  note.hidden = !text;
};

// ---- One Python per page, started at its first use -------------------------------------------

const STOPPED = "Python was stopped and starts afresh: the names of this page are gone.";

class Python {
  worker = null;
  stage = ""; // what it is doing until it is ready, in words
  ready = false;
  ends = 0; // how often it has ended: what was asked of an earlier one is not asked again
  waiting = new Map();
  listeners = new Set(); // each is called with the stage
  restarts = new Set(); // called when all names and states are gone
  count = 0;

  start() {
    if (this.worker) return;
    this.tell("Starting Python (9 MB, once) …");
    try {
      this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    } catch (error) {
      this.fail(String(error));
      return;
    }
    this.worker.onmessage = ({ data }) => {
      if (typeof data?.failed === "string") this.fail(data.failed);
      else if (typeof data?.stage === "string") {
        this.ready = !data.stage;
        this.tell(data.stage && `Starting Python: ${data.stage} …`);
      } else if (this.waiting.has(data?.id)) {
        this.waiting.get(data.id).resolve(JSON.parse(data.answer));
        this.waiting.delete(data.id);
      }
    };
    // A blocked or missing script, or a browser that knows no module workers.
    this.worker.onerror = (event) => this.fail(event.message || "its script was not loaded");
  }

  ask(request) {
    this.start();
    return new Promise((resolve, reject) => {
      if (!this.worker) return reject(new Error(this.reason));
      const id = ++this.count;
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, request: JSON.stringify(request) });
    });
  }

  fail(why) {
    this.end(
      this.ready
        ? `Python broke down (${why}) and starts afresh: the names of this page are gone.`
        : `Python could not run here (${why}). The stored output stays.`,
    );
  }

  stop() {
    this.end(STOPPED);
  }

  end(reason) {
    this.worker?.terminate();
    this.worker = null;
    this.ready = false;
    this.reason = reason;
    this.ends++;
    this.tell("");
    const left = [...this.waiting.values()];
    this.waiting.clear();
    left.forEach(({ reject }) => reject(new Error(reason)));
    this.restarts.forEach((restart) => restart(reason));
  }

  tell(stage) {
    this.stage = stage;
    this.listeners.forEach((listener) => listener(stage));
  }
}

const python = new Python();

// ---- Cells -------------------------------------------------------------------------------------

const BLOCK = { text: "stream", error: "stream live-error", html: "text_html", note: "live-cut" };

const rendered = ({ kind, content }) => {
  const block = make("div", { class: `output ${BLOCK[kind]}` });
  if (kind === "html") block.innerHTML = content;
  else if (kind === "note") block.append(make("p", {}, content));
  else {
    // A box that scrolls can be reached by the keyboard, as the theme's own code boxes can.
    const pre = make("pre", { tabindex: "0" }, content);
    block.append(make("div", { class: "highlight" }, pre));
  }
  return block;
};

const HELP = {
  run: "Run the cells above that have not run yet, then this one (Ctrl+Enter in its code)",
  edit: "Change the code of this cell",
  reset: "Bring back the code and the output as printed",
  above: "Run all cells above this one afresh",
  stop: "Stop Python; the names of this page are lost",
};

class Cell {
  static all = [];
  static pressed = null; // the one whose Run was pressed last: the focus stays with it
  ran = false;
  busy = false;

  constructor(element) {
    this.number = Cell.all.push(this);
    this.element = element;
    this.input = element.querySelector(".cell_input");
    this.original = this.input.querySelector("pre").textContent.replace(/\n$/, "");
    this.output = element.querySelector(".cell_output");
    if (!this.output) {
      this.output = make("div", { class: "cell_output docutils container" });
      element.append(this.output);
    }
    this.stored = [...this.output.childNodes];
    this.mayFail = element.classList.contains("tag_raises-exception");
    this.note = make("p", { class: "live-note", role: "status", hidden: "" });
    const button = (name, text, label, act) => {
      const made = make("button", { type: "button", class: `live-${name}`, title: HELP[name] }, text);
      made.setAttribute("aria-label", `${text} ${label}`);
      made.addEventListener("click", act);
      return made;
    };
    const which = `cell ${this.number}`;
    this.buttons = {
      run: button("run", "Run", which, () => runAll(this.needed(), this)),
      edit: button("edit", "Edit", which, () => this.edit()),
      reset: button("reset", "Reset", which, () => this.reset()),
      above: button("above", "Run all above", which, () => this.runAbove()),
      stop: button("stop", "Stop", which, () => python.stop()),
    };
    this.buttons.reset.disabled = true;
    this.buttons.above.disabled = this.number === 1;
    this.buttons.stop.hidden = true;
    const bar = make("div", { class: "live-bar", role: "group", "aria-label": `Live ${which}` });
    bar.append(...Object.values(this.buttons));
    this.input.after(bar, this.note);
  }

  // The cells to run for this one: those above. An exercise needs only the first of its section,
  // which imports the checker, so that nobody waits for the experiments of a chapter.
  needed() {
    const above = Cell.all.slice(0, this.number);
    if (!this.isExercise) return above;
    return [...new Set([above.find((cell) => cell.isExercise), this])];
  }

  get isExercise() {
    return this.element.classList.contains("tag_exercise");
  }

  get source() {
    return this.area ? this.area.value : this.original;
  }

  edit() {
    if (!this.area) {
      const id = `live-code-${this.number}`;
      this.label = make("label", { class: "live-label", for: id }, `Code of cell ${this.number}`);
      const settings = { id, class: "live-code", spellcheck: "false", autocapitalize: "off" };
      this.area = make("textarea", { ...settings, autocomplete: "off", wrap: "off" });
      this.area.value = this.original;
      this.area.addEventListener("input", () => {
        this.ran = false; // what ran is not what stands there
        this.fit();
      });
      this.area.addEventListener("keydown", (event) => {
        // Tab stays what moves the focus, so that the keyboard can leave the box.
        if (event.key === "Enter" && (event.ctrlKey || event.shiftKey || event.metaKey)) {
          event.preventDefault();
          this.buttons.run.click();
        }
      });
      this.code = this.input.querySelector("[class*=highlight-]");
      this.code.hidden = true;
      this.input.prepend(this.label, this.area);
      this.fit();
      this.buttons.reset.disabled = false;
    }
    this.area.focus();
  }

  fit() {
    this.area.rows = Math.min(this.area.value.split("\n").length + 1, 60);
  }

  reset() {
    if (this.area) {
      this.label.remove();
      this.area.remove();
      this.code.hidden = false;
      this.area = null;
    }
    this.output.replaceChildren(...this.stored);
    this.output.removeAttribute("role");
    this.element.classList.remove("live-ran");
    this.ran = false;
    say(this.note, "");
    this.buttons.reset.disabled = true;
    this.buttons.run.focus();
  }

  async runAbove() {
    const above = Cell.all.slice(0, this.number - 1);
    above.forEach((cell) => (cell.ran = false));
    await runAll(above, null);
  }

  // Returns whether the cells below may run.
  async run() {
    say(this.note, python.stage || "Running …");
    const { source } = this;
    try {
      const request = { kind: "cell", number: this.number, source };
      const { outputs } = await python.ask(request);
      this.output.setAttribute("role", "status");
      this.output.replaceChildren(...outputs.map(rendered));
      if (!outputs.length) this.output.append(make("p", { class: "live-cut" }, "It shows nothing."));
      this.element.classList.add("live-ran");
      this.element.querySelector("details.hide")?.setAttribute("open", "");
      const through = this.mayFail || !outputs.some(({ kind }) => kind === "error");
      this.ran = through && source === this.source; // it may have been edited meanwhile
      say(this.note, "");
      return through;
    } catch (error) {
      say(this.note, error.message);
      return false;
    } finally {
      this.working(false);
    }
  }

  working(on) {
    this.busy = on;
    this.element.classList.toggle("live-busy", on);
    const stopHadFocus = document.activeElement === this.buttons.stop;
    this.buttons.stop.hidden = !on;
    this.buttons.run.disabled = on;
    this.buttons.reset.disabled = on;
    if (on) say(this.note, python.stage || "Waiting for the cells above …");
    // A button that goes off or away drops the focus.
    const dropped = this === Cell.pressed && document.activeElement === document.body;
    if (stopHadFocus || dropped)
      this.buttons[on ? "stop" : "run"].focus({ preventScroll: true });
  }
}

// Runs, in order, those of the cells that have not run yet, and the last one in any case; what is
// asked for meanwhile waits its turn, so that no cell runs before those above it.
let turn = Promise.resolve();
const runAll = (cells, last) => {
  const due = () => cells.filter((cell) => !cell.ran || cell === last);
  const { ends } = python;
  Cell.pressed = last;
  python.start();
  due().forEach((cell) => cell.working(true));
  turn = turn.then(async () => {
    // After a stop nothing of it is asked for any longer.
    let why = python.ends === ends ? "" : python.reason;
    const now = why ? cells.filter((cell) => cell.busy) : due();
    now.forEach((cell) => cell.working(true));
    for (const cell of now) {
      if (why) {
        cell.working(false);
        say(cell.note, cell === last ? why : "");
      } else if (!(await cell.run()))
        why = `Not run: cell ${cell.number} above did not get through.`;
    }
  });
  return turn;
};

python.listeners.add((stage) => {
  for (const cell of Cell.all) if (cell.busy) say(cell.note, stage || "Running …");
});
python.restarts.add(() => Cell.all.forEach((cell) => (cell.ran = false)));

// ---- Panels ------------------------------------------------------------------------------------

class ServelabPanel extends HTMLElement {
  connectedCallback() {
    if (this.note) return;
    this.form = this.querySelector("form");
    this.words = this.querySelector(".panel-words");
    this.parts = this.querySelector(".panel-parts");
    this.note = make("p", { class: "live-note", role: "status", hidden: "" });
    this.form.after(this.note);
    this.initial = [this.form.innerHTML, this.words.textContent, this.parts.innerHTML];
    this.queue = []; // actions to ask for; "" where only values changed
    this.touched = new Set(); // controls moved since the last request left
    this.asking = this.used = false;
    this.form.hidden = false;
    for (const name of ["focusin", "pointerdown"])
      this.form.addEventListener(name, () => python.start(), { once: true });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", ({ target }) => {
      this.touched.add(target.name);
      if (target.dataset.stops) this.show(target, stopOf(target));
      this.ask("");
    });
    this.addEventListener("click", ({ target }) => this.act(target.closest("[data-action]")));
    this.addEventListener("keydown", (event) => {
      const pressed = event.target.closest("[data-action]");
      if (!pressed || pressed.tagName === "BUTTON" || !["Enter", " "].includes(event.key)) return;
      event.preventDefault();
      this.act(pressed);
    });
    python.restarts.add((reason) => this.used && this.restore(reason));
    python.listeners.add((stage) => this.asking && say(this.note, stage));
  }

  act(pressed) {
    if (pressed && pressed.getAttribute("aria-disabled") !== "true") this.ask(pressed.dataset.action);
  }

  control(name) {
    return this.form.elements.namedItem(name);
  }

  values() {
    const named = [...this.form.elements].filter((control) => control.name);
    return Object.fromEntries(named.map((control) => [control.name, valueOf(control)]));
  }

  // One request at a time; of changed values only the newest are sent, an action never is dropped.
  async ask(action) {
    if (action || this.queue.at(-1) !== "") this.queue.push(action);
    if (this.asking) return;
    this.asking = this.used = true;
    this.setAttribute("aria-busy", "true");
    const running = Cell.all.find((cell) => cell.busy);
    say(this.note, python.stage || (running ? `Waiting for cell ${running.number} …` : ""));
    try {
      while (this.queue.length) {
        const name = this.getAttribute("name");
        const request = { kind: "panel", name, action: this.queue.shift(), values: this.values() };
        this.touched.clear();
        this.take(await python.ask(request));
      }
      say(this.note, "");
    } catch (error) {
      this.queue = [];
      say(this.note, error.message);
    } finally {
      this.asking = false;
      this.removeAttribute("aria-busy");
    }
  }

  take(answer) {
    this.words.classList.toggle("live-error", "error" in answer);
    this.words.textContent = answer.error ?? answer.words;
    if ("error" in answer) return;
    for (const [name, options] of Object.entries(answer.options)) this.setOptions(name, options);
    for (const [name, stops] of Object.entries(answer.stops)) this.setStops(name, stops);
    for (const [name, value] of Object.entries(answer.values))
      if (!this.touched.has(name)) this.setValue(this.control(name), value);
    for (const slider of this.form.querySelectorAll("[data-stops]"))
      this.show(slider, answer.said[slider.name] ?? stopOf(slider));
    for (const control of this.form.elements) {
      const off = answer.off.includes(control.name || control.dataset.action);
      // A button that goes off under the reader's finger keeps the focus.
      if (control.type === "button") control.setAttribute("aria-disabled", off);
      else if (control.name) control.disabled = off;
    }
    this.setParts(answer.parts);
  }

  setValue(control, value) {
    if (control.dataset.stops) control.value = control.dataset.stops.split(" ").indexOf(value);
    else if (control.type === "checkbox") control.checked = value !== "";
    else if (control.value !== value) control.value = value;
  }

  setStops(name, stops) {
    const slider = this.control(name);
    if (slider.dataset.stops === stops.join(" ")) return;
    const at = stops.indexOf(stopOf(slider));
    slider.dataset.stops = stops.join(" ");
    slider.max = stops.length - 1;
    if (at >= 0) slider.value = at;
  }

  setOptions(name, options) {
    const select = this.control(name);
    const chosen = select.value;
    select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
    if (options.some(([value]) => value === chosen)) select.value = chosen;
  }

  show(slider, said) {
    slider.setAttribute("aria-valuetext", said);
    this.form.querySelector(`output[for="${slider.id}"]`).value = said;
  }

  setParts(parts) {
    const focused = this.parts.contains(document.activeElement) ? document.activeElement : null;
    const again = focused?.id
      ? `#${CSS.escape(focused.id)}`
      : focused?.dataset.action && `[data-action="${CSS.escape(focused.dataset.action)}"]`;
    const old = new Map([...this.parts.children].map((part) => [part.dataset.part, part]));
    const now = Object.entries(parts).map(([name, html]) => {
      const part = old.get(name) ?? make("div", { class: "panel-part", "data-part": name });
      if (part.html !== html) part.innerHTML = part.html = html;
      return part;
    });
    const same = now.length === old.size && now.every((part, i) => part === this.parts.children[i]);
    if (!same) this.parts.replaceChildren(...now);
    if (again && document.activeElement !== focused)
      this.parts.querySelector(again)?.focus({ preventScroll: true });
  }

  restore(reason) {
    const [form, words, parts] = this.initial;
    const focused = this.form.contains(document.activeElement) && document.activeElement.id;
    this.form.innerHTML = form;
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    this.words.textContent = words;
    this.words.classList.remove("live-error");
    this.parts.innerHTML = parts;
    this.queue = [];
    this.used = false;
    say(this.note, reason);
  }
}

const stopOf = (slider) => slider.dataset.stops.split(" ")[slider.valueAsNumber];

const valueOf = (control) => {
  if (control.dataset.stops) return stopOf(control);
  if (control.type === "checkbox") return control.checked ? "on" : "";
  return control.value;
};

customElements.define("servelab-panel", ServelabPanel);
for (const element of document.querySelectorAll(".cell.tag_live")) new Cell(element);
