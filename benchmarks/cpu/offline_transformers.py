"""transformers' own `generate`, in padded batches, on the request list of `tiercel bench throughput --save-requests`.

    python offline_transformers.py --requests FILE --model FOLDER [--load-format dummy] [--batch-size 32]

Batches follow the order of the list. Prompts are left-padded; every batch generates the length of its longest answer,
and shorter answers are truncated. Prints the JSON of tiercel's command.
"""

import argparse
import time
from pathlib import Path

import torch
from offline_requests import PeerRequest, finish, like, read_requests, report
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel


def load(args: argparse.Namespace) -> PreTrainedModel:
    """Load the model."""
    dtype = "auto" if args.dtype == "auto" else getattr(torch, args.dtype)
    if args.load_format != "dummy":
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, local_files_only=True)
        return model.to(args.device).eval()
    config = AutoConfig.from_pretrained(args.model, local_files_only=True)
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype if dtype == "auto" else dtype).eval()


@torch.inference_mode()
def generate(model: PreTrainedModel, requests: list[PeerRequest], batch_size: int, temperature: float) -> list[int]:
    """Return the number of tokens of each answer."""
    found: list[int] = []
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        width = max(len(one.prompt_token_ids) for one in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, one in enumerate(batch):
            tokens[row, width - len(one.prompt_token_ids) :] = torch.tensor(one.prompt_token_ids)
            mask[row, width - len(one.prompt_token_ids) :] = 1
        longest = max(one.output_len for one in batch)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        config = GenerationConfig(max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0, **sampling)
        output = model.generate(tokens.to(model.device), attention_mask=mask.to(model.device), generation_config=config)
        output = output[:, width:].cpu()
        found += [len(output[row, : one.output_len]) for row, one in enumerate(batch)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-warmups", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of dummy weights")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    requests = read_requests(args.requests)
    if args.threads:
        torch.set_num_threads(args.threads)
    model = load(args)
    model.generation_config = GenerationConfig()  # without an end of sequence, so that answers have their full length
    if args.num_warmups:
        generate(model, like(requests, args.num_warmups), args.batch_size, args.temperature)
    start_s = time.perf_counter()
    outputs = generate(model, requests, args.batch_size, args.temperature)
    elapsed_s = time.perf_counter() - start_s
    facts = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": model.config._attn_implementation,
        "batch_size": args.batch_size,
    }
    packages = ("transformers", "torch")
    result = report("transformers", args.model, requests, outputs, elapsed_s, args.temperature, facts, packages)
    finish(result, args.output_json)


if __name__ == "__main__":
    main()
