#!/usr/bin/env bash
# Fetch the wheels that a bare machine lacks (it has torch with its Triton, transformers and what those bring), for its
# Python 3.12, in the versions of constraints.txt; then check that nothing else is wanted.
#
#   benchmarks/gpu/wheels.sh [FOLDER]        default: benchmarks/gpu/wheels, which git ignores
#   PYTHON=python3.12 benchmarks/gpu/wheels.sh
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=${1:-$here/wheels}
python=${PYTHON:-python3}

# What serving, offline mode and the load test import, less what comes with torch and transformers.
names=(
    msgspec xxhash llguidance structlog prometheus_client rich typer httpx
    pydantic pydantic_core typing-inspection typing_extensions annotated-types
    fastapi starlette uvicorn uvloop httptools python-multipart opentelemetry-api annotated-doc
    anyio sniffio h11 httpcore idna certifi click shellingham markdown-it-py mdurl Pygments
)

pins=()
for name in "${names[@]}"; do
    line=$(grep -i "^$name==" "$root/constraints.txt") || {
        echo "constraints.txt has no $name" >&2
        exit 2
    }
    pins+=("$line")
done

platforms=()
for minor in 39 35 34 31 28 27 26 24 17 12 5; do
    platforms+=(--platform "manylinux_2_${minor}_x86_64")
done

mkdir -p "$folder"
find "$folder" -name '*.whl' -delete
"$python" -m pip download --quiet --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
    --dest "$folder" "${pins[@]}"
"$python" "$here/wheel_needs.py" "$folder"
