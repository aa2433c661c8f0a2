// The page's Python: Pyodide with the book's package, in a worker of its own. It computes nothing
// itself: a request is JSON text that goes to servelab.live.Page as it is, and so does the answer.
const here = new URL("assets/", import.meta.url);

const fetched = async (name) => {
  const response = await fetch(new URL(name, here));
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  return response.arrayBuffer();
};

const start = async () => {
  const wheel = fetched("servelab.whl"); // on its way while Python starts
  const { loadPyodide } = await import(new URL("pyodide.mjs", here));
  // No key of the reader's reaches input(): it ends at once.
  const python = await loadPyodide({ indexURL: here.href, stdin: () => undefined });
  postMessage({ stage: "reading the book's calculators" });
  python.unpackArchive(await wheel, "wheel");
  const page = python.pyimport("servelab.live").Page();
  postMessage({ stage: "" });
  return page;
};

// Python's own errors come with a traceback: what happened is its last line.
const failed = (error) => {
  postMessage({ failed: String(error).trim().split("\n").at(-1).slice(0, 200) });
};

let ready = false;
// Where its WebAssembly comes spoilt, Pyodide only warns, and waits for ever ...
const { instantiateStreaming } = WebAssembly;
WebAssembly.instantiateStreaming = async (...given) => {
  try {
    return await instantiateStreaming(...given);
  } catch (error) {
    if (!ready) failed(error);
    throw error;
  }
};
const page = start();
page.then(() => (ready = true), failed);
// ... and where it does not come, it leaves a promise that nobody holds.
addEventListener("unhandledrejection", (event) => {
  event.preventDefault();
  if (!ready) failed(event.reason); // later ones are those of the reader's code
});

onmessage = async ({ data: { id, request } }) => {
  let answer;
  try {
    answer = (await page).ask(request);
  } catch (error) {
    failed(error); // Python itself has died, such as by a deep recursion
    return;
  }
  postMessage({ id, answer });
};
