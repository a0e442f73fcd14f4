"""Program that answers the questions of `jenga.demo.documents` with an engine of its own.

Usage: `python -m jenga.demo.document_engine JOB ANSWERS`. JOB is a JSON file
with the engine's options and the number of tokens of a document. The program writes ANSWERS, a
list of answers as JSON.
"""

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from jenga.demo.documents import OUTPUT_TOKENS, Answer, prompts, turns


def main(job: Path, answers: Path) -> None:
    """Answer the questions of a job, one after the other."""
    from vllm import LLM, SamplingParams

    asked = json.loads(job.read_text(encoding="utf-8"))
    llm = LLM(**asked["options"])
    tokenizer = llm.get_tokenizer()
    encoded = prompts(
        tokenizer.encode,
        partial(tokenizer.encode, add_special_tokens=False),
        asked["document_tokens"],
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    given: list[Answer] = []
    for (document, question), tokens in zip(turns(), encoded, strict=True):
        (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        given.append(
            Answer(
                document=document,
                question=question,
                prompt_tokens=len(tokens),
                found_tokens=output.num_cached_tokens or 0,
                text=output.outputs[0].text,
            )
        )
    answers.write_text(json.dumps([asdict(each) for each in given]), encoding="utf-8")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
