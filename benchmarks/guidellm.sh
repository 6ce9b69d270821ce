#!/usr/bin/env bash
# tiercel bench serve and guidellm in turns on one server.   usage: guidellm.sh VENV URL MODEL_FOLDER REQUESTS_PER_S
set -euo pipefail
venv=${1:?usage: $0 VENV URL MODEL_FOLDER REQUESTS_PER_S} url=${2:?} model=${3:?} rate=${4:?}
seconds=${SECONDS_EACH:-30} input=${INPUT:-1000} output=${OUTPUT:-32}
out=$(mktemp -d)
for round in 1 2 3; do
  tiercel bench serve --backend openai-chat --base-url "$url" --tokenizer "$model" --request-rate "$rate" --arrivals constant \
    --num-prompts "$(python3 -c "print(round($rate * $seconds))")" --random-input-len "$input" \
    --random-output-len "$output" --ignore-eos --seed "$round" --disable-tqdm \
    --save-result --result-filename "$out/ours-$round.json" > /dev/null
  "$venv/bin/guidellm" run --backend "kind=openai_http,target=$url" --profile "kind=constant,rate=$rate" \
    --constraint "kind=max_duration,seconds=$seconds" --tokenizer "kind=hf_auto,model=$model" \
    --data "kind=synthetic_text,prompt_tokens=$input,output_tokens=$output" --seed "kind=static,value=$round" \
    --output "kind=json,path=$out/theirs-$round.json" --disable-console > "$out/theirs-$round.log" 2>&1 ||
    { tail -n 20 "$out/theirs-$round.log" >&2; exit 1; }
done
python3 - "$out" <<'PY'
import json
import statistics
import sys
from pathlib import Path

out = Path(sys.argv[1])
ours = [json.loads(path.read_text()) for path in sorted(out.glob("ours-*.json"))]
theirs = [json.loads(path.read_text())["benchmarks"][0]["metrics"] for path in sorted(out.glob("theirs-*.json"))]
rows = {
    "TTFT median ms": (
        [run["median_ttft_ms"] for run in ours],
        [run["time_to_first_token_ms"]["successful"]["median"] for run in theirs],
    ),
    "requests/s": (
        [run["request_throughput"] for run in ours],
        [run["requests_per_second"]["successful"]["mean"] for run in theirs],
    ),
    "output tokens/s": (
        [run["output_throughput"] for run in ours],
        [run["output_tokens_per_second"]["successful"]["mean"] for run in theirs],
    ),
}
print(f"{'':18} {'tiercel':>10} {'guidellm':>10} {'ratio':>8}")
for name, (left, right) in rows.items():
    mine, other = statistics.median(left), statistics.median(right)
    print(f"{name:18} {mine:10.2f} {other:10.2f} {mine / other:8.3f}")
print(out)
PY
