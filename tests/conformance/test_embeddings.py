"""Vectors of /v1/embeddings against pooled states of transformers in float32."""

import base64
import random
from array import array
from collections.abc import Iterator

import httpx
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.e2e.daemon import Daemon, daemon
from tests.seeds import fresh_seeds
from tiercel.embedded import MODEL_DIR

ERROR = 1e-5
WORDS = ["the", "cat", "Paris", "is", "a", "city", "of", "light", "?", "number", "and", "12"]


@pytest.fixture(scope="module", params=["last", "mean"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, str]]:
    flags = ("--dtype", "float32", "--pooling", request.param, "--max-num-batched-tokens", "48")
    with daemon(tmp_path_factory.mktemp("served"), *flags) as running:
        yield running, request.param


def _expected(texts: list[str], pooling: str, dimensions: int | None = None) -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModel.from_pretrained(MODEL_DIR, dtype=torch.float32)
    vectors: list[torch.Tensor] = []
    for text in texts:
        with torch.inference_mode():
            (states,) = model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state
        pooled = states[-1] if pooling == "last" else states.mean(dim=0)
        vectors.append(torch.nn.functional.normalize(pooled[:dimensions], dim=0))
    return vectors


def _vectors(answer: httpx.Response) -> list[torch.Tensor]:
    assert answer.status_code == 200, answer.text
    return [torch.tensor(entry["embedding"]) for entry in answer.json()["data"]]


@pytest.mark.parametrize("seed", [3, *fresh_seeds(1)])
@pytest.mark.sampled(2)
def test_vectors_of_texts(served: tuple[Daemon, str], seed: int) -> None:
    """Batches equal single inputs, and inputs that take several steps, or whose prefix is cached, equal the rest."""
    server, pooling = served
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.choice((1, 3, 20, 90)))) for _ in range(12)]
    texts += [f"{texts[0]} {texts[1]}", texts[2]]
    expected = _expected(texts, pooling)
    batch = _vectors(server.http.post("/v1/embeddings", json={"input": texts}))
    for text, vector, right in zip(texts, batch, expected, strict=True):
        torch.testing.assert_close(vector, right, atol=ERROR, rtol=ERROR)
        (alone,) = _vectors(server.http.post("/v1/embeddings", json={"input": text}))
        torch.testing.assert_close(alone, vector, atol=ERROR, rtol=ERROR)
    server.assert_nothing_held()


def test_fewer_dimensions_and_base64(served: tuple[Daemon, str]) -> None:
    server, pooling = served
    (expected,) = _expected(["Paris is a city"], pooling, 16)
    body = {"input": "Paris is a city", "dimensions": 16}
    (vector,) = _vectors(server.http.post("/v1/embeddings", json=body))
    torch.testing.assert_close(vector, expected, atol=ERROR, rtol=ERROR)
    coded = server.http.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"][0]
    assert array("f", base64.b64decode(coded["embedding"])).tolist() == pytest.approx(vector.tolist(), abs=1e-6)
    size = 1 + max(len(one) for one in _expected(["a"], pooling))
    assert server.http.post("/v1/embeddings", json={"input": "a", "dimensions": size}).status_code == 400
