// Runs what the pages run, with the same Pyodide and wheel, without a browser.
// node answers.mjs PYODIDE_FOLDER WHEEL: a job per line on stdin, its answer per line on stdout.
// Jobs, in JSON: {"requests": [...]} to one servelab.live.Page, or {"program": Python whose last
// expression is text}.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [folder, wheel] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`));
const python = await loadPyodide();
python.unpackArchive(new Uint8Array(readFileSync(wheel)), "wheel");
const Page = python.pyimport("servelab.live").Page;

for await (const line of createInterface({ input: process.stdin })) {
  const { requests, program } = JSON.parse(line);
  const page = Page();
  const answer = program
    ? python.runPython(program, { globals: python.toPy({}) })
    : requests.map((request) => page.ask(request));
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
