"""Answers batches with vLLM, one line of JSON each; run by the interpreter that has vLLM.

It imports nothing of ours, for that interpreter need not have it.
"""

import json
import os
import sys
from time import perf_counter


def main(settings: str) -> None:
    """Answer lines of JSON from stdin, (prompts, output lengths), with seconds and tokens.

    Parameters: ``settings`` of ``vllm.LLM`` as JSON.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints must not get between the answers
    import vllm  # type: ignore[import-not-found]

    llm = vllm.LLM(skip_tokenizer_init=True, **json.loads(settings))
    print(json.dumps({"vllm": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        prompts, lengths = json.loads(line)
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        began = perf_counter()
        done = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = perf_counter() - began
        tokens = [list(answer.outputs[0].token_ids) for answer in done]
        print(json.dumps([seconds, tokens]), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
