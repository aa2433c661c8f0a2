// node live_bytecode.mjs PYODIDE_FOLDER WHEEL TARGET: run live_bytecode.py in Pyodide, with the
// wheel installed and the folder TARGET mounted where it writes.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, wheel, target] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`));
const python = await loadPyodide();
python.unpackArchive(new Uint8Array(readFileSync(wheel)), "wheel");
python.FS.mkdir("/target");
python.FS.mount(python.FS.filesystems.NODEFS, { root: target }, "/target");
python.runPython(readFileSync(new URL("live_bytecode.py", import.meta.url), "utf8"));
