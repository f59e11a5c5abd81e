"""``python -m benchmarks.front_end``: tokens a second of one process of vLLM, as verl asks and as this recipe does."""

import argparse
import asyncio
import time

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from benchmarks.models.char_tokenizer import build_tokenizer


async def rate(kind: RequestOutputKind, text: bool, requests: int = 304, tokens: int = 200) -> float:
    """Tokens for each second of CPU time to decode messages, process outputs and wake what waits for them."""

    async def read(queue: RequestOutputCollector) -> None:
        while not (queue.get_nowait() or await queue.get()).finished:
            pass

    processor, readers = OutputProcessor(build_tokenizer("0123456789", max_length=4096), log_stats=False), []
    asked = SamplingParams(max_tokens=tokens, logprobs=0, output_kind=kind, detokenize=text)
    for name in map(str, range(requests)):
        rest = {"external_req_id": name, "cache_salt": None, "data_parallel_rank": None}
        request = EngineCoreRequest(name, [1, 2, 3] * 80, None, asked, None, 0.0, None, **rest)
        processor.add_request(request, None, None, 0, queue := RequestOutputCollector(kind, name))
        readers.append(asyncio.create_task(read(queue)))
    one, frames = LogprobsLists(np.array([[3]]), np.array([[-0.5]], dtype=np.float32), np.array([1])), []
    for end in [None] * (tokens - 1) + [FinishReason.LENGTH]:
        outputs = [EngineCoreOutput(str(name), [3], one, finish_reason=end) for name in range(requests)]
        frames.append([bytes(part) for part in MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))])
    begin, decoder = time.process_time(), MsgpackDecoder(EngineCoreOutputs)
    for frame in frames:
        outputs = decoder.decode(frame).outputs
        for first in range(0, requests, 128):  # as AsyncLLM does
            processor.process_outputs(outputs[first : first + 128], 0.0, None)
            await asyncio.sleep(0)
    await asyncio.gather(*readers)
    return requests * tokens / (time.process_time() - begin)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for kind, text in ((RequestOutputKind.CUMULATIVE, True), (RequestOutputKind.FINAL_ONLY, False)):
        print(f"{kind.name}, {'with' if text else 'without'} text: {asyncio.run(rate(kind, text)):,.0f} tokens/s")
