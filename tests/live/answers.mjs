// Runs what the pages run, with the same Pyodide and wheel, without a browser.
// node answers.mjs PYODIDE_FOLDER WHEEL < jobs.json > answers.json
// Jobs: pages, lists of requests to one servelab.live.Page each; programs, Python whose last
// expression is text.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, wheel] = process.argv.slice(2);
const jobs = JSON.parse(readFileSync(0, "utf8"));
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`));
const python = await loadPyodide();
python.unpackArchive(new Uint8Array(readFileSync(wheel)), "wheel");
const Page = python.pyimport("servelab.live").Page;

const answers = { pages: {}, programs: {} };
for (const [name, requests] of Object.entries(jobs.pages)) {
  const page = Page();
  answers.pages[name] = requests.map((request) => page.ask(request));
}
for (const [name, source] of Object.entries(jobs.programs)) {
  answers.programs[name] = python.runPython(source, { globals: python.toPy({}) });
}
process.stdout.write(JSON.stringify(answers));
