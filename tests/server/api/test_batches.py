"""/v1/files and /v1/batches: the official client, tenants, limits, restarts, hostile uploads."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.seeds import fresh_seeds
from tests.server.fake_engine import Script
from tests.server.harness import Running, chat_body, server_settings, text_body, until, with_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TENANTS = """
admin_key: boss
tenants:
  - {name: acme, key: one, band: 2}
  - {name: other, key: two}
  - {name: slow, key: three, requests_per_minute: 1}
"""
ONE, TWO = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
OVER = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def tenants(tmp_path: Path) -> str:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    path.chmod(0o600)
    return str(path)


def line(number: object, body: object, url: str = CHAT) -> bytes:
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}).encode() + b"\n"


def lines(count: int, **more: Any) -> bytes:
    return b"".join(line(number, chat_body(f"hello {number}", max_tokens=3, **more)) for number in range(count))


async def upload(http: httpx.AsyncClient, data: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    files = {"file": ("in.jsonl", data)}
    return await http.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers)


async def begin(http: httpx.AsyncClient, data: bytes, endpoint: str = CHAT, **more: Any) -> dict[str, Any]:
    headers = more.pop("headers", None)
    file = (await upload(http, data, headers)).raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h", **more}
    return (await http.post("/v1/batches", json=body, headers=headers)).raise_for_status().json()


async def until_over(http: httpx.AsyncClient, batch_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            batch = (await http.get(f"/v1/batches/{batch_id}", headers=headers)).raise_for_status().json()
            if batch["status"] in OVER:
                return batch
            await asyncio.sleep(0.01)


async def output(http: httpx.AsyncClient, file_id: str | None, headers: dict[str, str] | None = None) -> list[Any]:
    if file_id is None:
        return []
    answer = (await http.get(f"/v1/files/{file_id}/content", headers=headers)).raise_for_status()
    return [json.loads(text) for text in answer.text.splitlines()]


def test_the_official_client_uploads_runs_and_reads_a_batch(model_folder: Path, tmp_path: Path) -> None:
    def use(client: openai.OpenAI) -> None:
        file = client.files.create(
            file=("in.jsonl", lines(5)), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert file.bytes == len(lines(5)) and file.filename == "in.jsonl" and file.purpose == "batch"
        assert file.expires_at == file.created_at + 3600
        assert client.files.retrieve(file.id) == file
        assert client.files.content(file.id).read() == lines(5)
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"name": "test"}
        )
        assert batch.metadata == {"name": "test"} and batch.expires_at == batch.created_at + 24 * 3600
        while batch.status not in OVER:
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.error_file_id is None and batch.output_file_id is not None
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 5, 0)
        answers = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(one["custom_id"] for one in answers) == [f"id-{number}" for number in range(5)]
        for one in answers:
            assert one["response"]["body"]["choices"][0]["message"]["content"]
            assert one["response"]["status_code"] == 200 and one["error"] is None
        assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
        assert {one.id for one in client.files.list(limit=1)} == {file.id, batch.output_file_id}
        assert [one.id for one in client.files.list(purpose="batch_output")] == [batch.output_file_id]
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)

    async def test(server: Running) -> None:
        def work() -> None:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as client:
                use(client)

        await asyncio.to_thread(work)
        metrics = (await server.http.get("/metrics")).text
        assert 'tiercel_batches{status="completed"} 1.0' in metrics
        assert 'tiercel_batch_lines_total{outcome="completed"} 5.0' in metrics
        assert f'handler="{CHAT}",method="POST",status="2xx"}} 5.0' in metrics

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"), api_keys=("one",))


def test_without_a_folder_the_routes_name_the_setting(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for method, path in (("POST", "files"), ("GET", "files"), ("GET", "files/x"), ("GET", "batches")):
            answer = await server.http.request(method, f"/v1/{path}")
            assert answer.status_code == 403 and "--files-path" in answer.json()["error"]["message"]

    with_server(server_settings(model_folder), test)


def test_lines_are_served_in_the_lowest_band_with_the_checks_of_the_route(model_folder: Path, tmp_path: Path) -> None:
    async def test(server: Running) -> None:
        http = server.http
        wrong = [
            chat_body(max_tokens=0, messages=[]),
            chat_body(temperature=-1),
            chat_body(model="nothing"),
            chat_body(stream=True),
            {"messages": 1},
        ]
        data = line("ok", chat_body(priority=0, max_tokens=2)) + b"".join(line(i, body) for i, body in enumerate(wrong))
        batch = await until_over(http, (await begin(http, data))["id"])
        assert batch["request_counts"] == {"total": 6, "completed": 1, "failed": 5}
        errors = {one["custom_id"]: one["response"] for one in await output(http, batch["error_file_id"])}
        assert [errors[f"id-{number}"]["status_code"] for number in range(5)] == [400, 400, 404, 400, 400]
        assert errors["id-1"]["body"]["error"]["param"] == "temperature"
        assert errors["id-3"]["body"]["error"]["param"] == "stream"
        assert [request.band for request in server.engine.submitted] == [15]

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"))


def test_files_and_batches_belong_to_their_tenant(model_folder: Path, tmp_path: Path, tenants: str) -> None:
    async def test(server: Running) -> None:
        http = server.http
        batch = await begin(http, lines(2), headers=ONE)
        batch = await until_over(http, batch["id"], ONE)
        file_id, output_id = batch["input_file_id"], batch["output_file_id"]
        paths = [f"/v1/files/{one}{end}" for one in (file_id, output_id) for end in ("", "/content")]
        for path in [*paths, f"/v1/batches/{batch['id']}"]:
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers=TWO)).status_code == 404
            assert (await http.get(path, headers=ONE)).status_code == 200
        assert (await http.post(f"/v1/batches/{batch['id']}/cancel", headers=TWO)).status_code == 404
        assert (await http.delete(f"/v1/files/{file_id}", headers=TWO)).status_code == 404
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        assert (await http.post("/v1/batches", json=body, headers=TWO)).status_code == 400
        for path in ("/v1/files", "/v1/batches"):
            assert (await http.get(path, headers=TWO)).json()["data"] == []
        assert len(file_id) == len("file-") + 32 and len(batch["id"]) == len("batch_") + 32
        assert {request.tenant for request in server.engine.submitted} == {"acme"}

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"), tenants_config=tenants)


def test_a_limit_of_the_tenant_delays_its_lines(model_folder: Path, tmp_path: Path, tenants: str) -> None:
    async def test(server: Running) -> None:
        headers = {"authorization": "Bearer three"}
        batch = await begin(server.http, lines(2), headers=headers)
        await until(lambda: len(server.engine.submitted) == 1)
        await asyncio.sleep(0.2)
        found = (await server.http.get(f"/v1/batches/{batch['id']}", headers=headers)).json()
        assert found["status"] == "in_progress" and found["request_counts"]["completed"] == 1
        cancelled = await server.http.post(f"/v1/batches/{batch['id']}/cancel", headers=headers)
        assert cancelled.json()["status"] in ("cancelling", "cancelled")
        batch = await until_over(server.http, batch["id"], headers)
        assert batch["status"] == "cancelled" and len(await output(server.http, batch["output_file_id"], headers)) == 1

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"), tenants_config=tenants)


def test_a_cancel_ends_the_sequences_of_the_batch(model_folder: Path, tmp_path: Path) -> None:
    async def test(server: Running) -> None:
        batch = await begin(server.http, lines(20, ignore_eos=True, min_tokens=3))
        await until(lambda: server.engine.live >= 2)
        await server.http.post(f"/v1/batches/{batch['id']}/cancel")
        assert (await until_over(server.http, batch["id"]))["status"] == "cancelled"
        await until(lambda: server.engine.live == 0)
        deleted = await server.http.delete(f"/v1/files/{batch['input_file_id']}")
        assert deleted.status_code == 200

    with_server(server_settings(model_folder), test, Script(step_s=0.1), files_path=str(tmp_path / "files"))


def test_the_input_of_an_unfinished_batch_is_kept(model_folder: Path, tmp_path: Path) -> None:
    async def test(server: Running) -> None:
        batch = await begin(server.http, lines(20))
        answer = await server.http.delete(f"/v1/files/{batch['input_file_id']}")
        assert answer.status_code == 409 and batch["id"] in answer.json()["error"]["message"]

    with_server(server_settings(model_folder), test, Script(step_s=0.05), files_path=str(tmp_path / "files"))


def test_a_batch_goes_on_after_a_restart(model_folder: Path, tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []

    async def first(server: Running) -> None:
        found.append(await begin(server.http, lines(30)))
        await until(lambda: server.context.batches is not None and server.context.batches.num_lines[0] >= 5)

    async def second(server: Running) -> None:
        async with asyncio.timeout(10):
            while (await server.http.get("/v1/files")).status_code == 503:  # noqa: ASYNC110 - another server
                await asyncio.sleep(0.01)
        batch = await until_over(server.http, found[0]["id"])
        assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        ids = [one["custom_id"] for one in await output(server.http, batch["output_file_id"])]
        assert sorted(ids) == sorted(f"id-{number}" for number in range(30))
        assert len(server.engine.submitted) < 30

    folder = str(tmp_path / "files")
    with_server(server_settings(model_folder), first, Script(step_s=0.02), files_path=folder)
    with_server(server_settings(model_folder), second, files_path=folder)


def test_lines_wait_while_the_queue_is_full(model_folder: Path, tmp_path: Path) -> None:
    async def test(server: Running) -> None:
        others = [asyncio.ensure_future(server.http.post(TEXT, json=text_body(max_tokens=20))) for _ in range(4)]
        await until(lambda: server.context.client.sequences.num_open == 4)
        batch = await begin(server.http, lines(3))
        await asyncio.sleep(0.3)
        assert len(server.engine.submitted) == 4
        assert [answer.status_code for answer in await asyncio.gather(*others)] == [200] * 4
        assert (await until_over(server.http, batch["id"]))["request_counts"]["completed"] == 3

    script = Script(step_s=0.05, max_running=1)
    with_server(server_settings(model_folder), test, script, files_path=str(tmp_path / "files"), max_num_queued_reqs=6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"x": "y" * 600}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
def test_each_wrong_field_of_a_batch_is_named(
    model_folder: Path, tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async def test(server: Running) -> None:
        file = (await upload(server.http, lines(1))).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", **fields}
        answer = await server.http.post("/v1/batches", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"))


def test_a_file_may_be_larger_than_a_body_and_has_a_limit_of_its_own(model_folder: Path, tmp_path: Path) -> None:
    async def test(server: Running) -> None:
        data = b"x" * 3_000_000
        file = (await upload(server.http, data)).raise_for_status().json()
        assert (await server.http.get(f"/v1/files/{file['id']}/content")).content == data
        assert (await server.http.head(f"/v1/files/{file['id']}/content")).headers["content-length"] == "3000000"
        answer = await upload(server.http, b"x" * 4_000_001)
        assert answer.status_code == 413
        answer = await upload(server.http, b"x" * 5_000_000)
        assert answer.status_code == 413
        for _ in range(20):
            await upload(server.http, b"x" * 3_500_000)
        answer = await upload(server.http, b"x" * 3_500_000)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "storage_quota_exceeded"
        assert (await server.http.post(TEXT, json=text_body("x" * 200_000))).status_code == 413
        assert not list((tmp_path / "files" / "partial").iterdir())

    with_server(
        server_settings(model_folder), test, files_path=str(tmp_path / "files"), max_body_bytes=100_000,
        max_file_bytes=4_000_000, max_tenant_files_bytes=20_000_000,
    )  # fmt: skip


def test_the_form_of_an_upload_is_checked(model_folder: Path, tmp_path: Path) -> None:
    async def test(server: Running) -> None:
        http, files = server.http, {"file": ("x", b"x")}

        async def param(answer: httpx.Response) -> str | None:
            assert answer.status_code == 400, answer.text
            return answer.json()["error"]["param"]

        assert await param(await http.post("/v1/files", files=files)) == "purpose"
        assert await param(await http.post("/v1/files", files=files, data={"purpose": "batch_output"})) == "purpose"
        more = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}
        assert await param(await http.post("/v1/files", files=files, data=more)) == "expires_after"
        assert await param(await http.post("/v1/files", json={"purpose": "batch"})) is None
        for query in ("limit=0", "limit=x", "limit=99999", "order=up", "after=nothing"):
            assert await param(await http.get(f"/v1/files?{query}")) == query.partition("=")[0]
        assert (await http.get("/v1/files")).json()["data"] == []

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"))


def test_an_upload_whose_client_leaves_or_stalls_leaves_nothing(model_folder: Path, tmp_path: Path) -> None:
    head = (
        b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000000\r\n"
        b"content-type: multipart/form-data; boundary=x\r\n\r\n"
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )

    async def test(server: Running) -> None:
        service = server.context.batches
        assert service is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head + b"y" * 2_000_000)
        await writer.drain()
        await until(lambda: service.held[0] > 1_900_000)
        writer.transport.abort()
        await until(lambda: service.held == (0, 0))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head + b"y" * 1000)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408")
        writer.close()
        assert service.held == (0, 0) and not list((tmp_path / "files" / "partial").iterdir())

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"), timeout_body_s=0.5)


@pytest.mark.parametrize("seed", [1, *fresh_seeds(1)])
@pytest.mark.sampled(1)
def test_hostile_uploads_get_no_server_error(model_folder: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    right = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\ncontent-disposition: ' + (
        b'form-data; name="file"; filename="a"\r\n\r\n' + lines(2) + b"\r\n--x--\r\n"
    )

    async def test(server: Running) -> None:
        for number in range(150):
            body = bytearray(right)
            for _ in range(rng.randrange(4)):
                place = rng.randrange(len(body))
                body[place : place + rng.randrange(20)] = rng.randbytes(rng.randrange(20))
            content_type = rng.choice(["multipart/form-data; boundary=x"] * 5 + ["multipart/form-data", "text/plain"])
            answer = await server.http.post("/v1/files", content=bytes(body), headers={"content-type": content_type})
            assert answer.status_code in (200, 400), f"seed {seed}, {number}: {answer.text}: {bytes(body)!r}"
            if answer.status_code == 200:
                body = {"input_file_id": answer.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
                batch = (await server.http.post("/v1/batches", json=body)).json()
                assert (await until_over(server.http, batch["id"]))["status"] in ("completed", "failed"), f"seed {seed}"

    with_server(server_settings(model_folder), test, files_path=str(tmp_path / "files"))
