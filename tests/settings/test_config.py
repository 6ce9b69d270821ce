"""Settings from flags, environment and file."""

import os
from pathlib import Path

import pytest

from tiercel.settings.config import EMBEDDED_NAME, client_admin_key, client_api_key, resolve
from tiercel.settings.exposure import is_loopback
from tiercel.settings.settings import SETTINGS, EngineSettings, ServerSettings, Settings
from tiercel.values.errors import ConfigError
from tiercel.values.units import GIB, MIB


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model folder in an empty working folder, and no variable of ours set."""
    for name in os.environ:
        if name.startswith(("TIERCEL_", "VLLM_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return "model"


def settings(**flags: object) -> Settings:
    return resolve({"model": "model"} | flags).settings


def refusal(**flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(**flags)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_defaults_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    resolved = settings()
    # An engine that was put together by hand measures nothing and keeps nothing.
    assert resolved.engine == EngineSettings(model="model", calibration_s=1.5, cache_folder="/cache/tiercel")
    assert resolved.server == ServerSettings(model="model", served_model_names=("model",))


def test_flags_win_over_the_environment_and_that_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tiercel.toml").write_text('port = 1001\nmax-num-seqs = 7\nlog_level = "debug"\n')
    assert settings().server.port == 1001
    monkeypatch.setenv("VLLM_PORT", "1002")
    assert settings().server.port == 1002
    monkeypatch.setenv("TIERCEL_PORT", "1003")
    assert settings().server.port == 1003
    resolved = settings(port="1004")
    assert (resolved.server.port, resolved.server.log_level, resolved.engine.max_num_seqs) == (1004, "debug", 7)


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_in_the_working_folder_that_others_may_write_is_refused(mode: int) -> None:
    Path("tiercel.toml").write_text("port = 1001\n")
    Path("tiercel.toml").chmod(mode)
    with pytest.raises(ConfigError) as refused:
        settings()
    assert refused.value.message == (
        f"tiercel.toml: mode {mode:o} lets other users change it: run `chmod go-w tiercel.toml`"
    )
    Path("tiercel.toml").chmod(0o644)
    assert settings().server.port == 1001


def test_a_named_file_is_refused_if_everybody_may_write_it() -> None:
    Path("other.toml").write_text("port = 1001\n")
    Path("other.toml").chmod(0o666)
    with pytest.raises(ConfigError, match=r"other\.toml: mode 666 .* run `chmod o-w other\.toml`"):
        settings(config="other.toml")
    Path("other.toml").chmod(0o664)
    assert settings(config="other.toml").server.port == 1001
    assert settings(config="/dev/null").server.port == 8000


def test_another_file_stands_for_tiercel_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tiercel.toml").write_text("port = 1001\nseed = 5\n")
    other = tmp_path / "other.toml"
    other.write_text("port = 1002\n")
    assert settings(config=str(other)).server.port == 1002
    monkeypatch.setenv("TIERCEL_CONFIG", str(other))
    resolved = settings()
    assert (resolved.server.port, resolved.engine.seed) == (1002, 0)


def test_variables_of_vllm_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VLLM_API_KEY": "a,b",
        "VLLM_CPU_KVCACHE_SPACE": "1.5",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "7",
        "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": "1048576",
    }.items():
        monkeypatch.setenv(name, value)
    resolved = settings()
    assert resolved.engine.kv_cache_memory_bytes == 3 * GIB // 2
    server = resolved.server
    assert (server.api_keys, server.log_level, server.timeout_keep_alive_s) == (("a,b",), "warning", 7.0)
    assert server.max_body_bytes == MIB


def test_the_links_that_kubernetes_sets_for_a_service_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCEL_PORT", "tcp://10.0.0.1:8000")
    resolved = resolve({"model": "model"})
    assert resolved.settings.server.port == 8000
    assert "TIERCEL_PORT" in resolved.warnings[0]


@pytest.mark.parametrize(
    ("text", "keys"), [("one", ("one",)), ("one, two", ("one", "two")), ('["one", "t,o"]', ("one", "t,o"))]
)
def test_several_keys_fit_into_one_variable(text: str, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCEL_API_KEY", text)
    assert settings().server.api_keys == keys


def test_a_key_given_as_a_flag_is_taken_as_it_is() -> None:
    assert settings(api_key=["a,b", "c"]).server.api_keys == ("a,b", "c")


def test_lengths_and_sizes_are_read_as_people_write_them() -> None:
    resolved = settings(max_model_len="8K", max_num_batched_tokens="2k", kv_cache_memory_bytes="2GiB")
    assert (resolved.engine.max_model_len, resolved.engine.max_num_batched_tokens) == (8192, 2000)
    assert resolved.engine.kv_cache_memory_bytes == 2 * GIB
    assert settings(max_model_len="auto").engine.max_model_len is None


def test_the_cache_folder_is_where_the_standard_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    for elsewhere in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", elsewhere)
        assert settings().engine.cache_folder == "/somewhere/.cache/tiercel"
    assert settings(calibration_seconds="0").engine.calibration_s == 0
    assert "--calibration-seconds 61: expected a number, from 0 to 60" in refusal(calibration_seconds=61)


def test_sizes_of_the_tiers() -> None:
    engine = settings(kv_host_size="2G", kv_disk_path=["a", "b"], kv_disk_daily_writes="0").engine
    assert engine.kv_host_bytes == 2 * GIB
    assert engine.kv_disk_paths == (str(Path("a").absolute()), str(Path("b").absolute()))
    assert (engine.kv_disk_bytes, engine.kv_disk_daily_bytes) == (4 * GIB, 0)
    assert settings(kv_disk_path="a,b", kv_disk_size="64M").engine.kv_disk_bytes == 64 * MIB
    assert settings(kv_disk_path="a", kv_disk_size="1G").engine.kv_disk_daily_bytes == GIB


def test_words_of_vllm_for_the_same_thing_are_understood() -> None:
    assert settings(dtype="half").engine.dtype == "float16"
    assert settings(kv_cache_dtype="fp8_e4m3").engine.kv_cache_dtype == "fp8"
    assert settings(async_scheduling=False).engine.async_depth == 0
    assert settings(enforce_eager=True).engine.enforce_eager
    assert settings(override_generation_config='{"top_k": 5}').server.override_generation_config == {"top_k": 5.0}
    assert settings(allowed_origins=['["https://a", "https://b"]']).server.allowed_origins == ("https://a", "https://b")


def test_values_of_every_kind_fit_into_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCEL_OVERRIDE_GENERATION_CONFIG", '{"top_k": 5}')
    monkeypatch.setenv("TIERCEL_ENABLE_PREFIX_CACHING", "off")
    monkeypatch.setenv("TIERCEL_MAX_MODEL_LEN", "4k")
    monkeypatch.setenv("TIERCEL_SEED", "")
    resolved = settings()
    assert resolved.server.override_generation_config == {"top_k": 5.0}
    assert (resolved.engine.enable_prefix_caching, resolved.engine.max_model_len) == (False, 4000)


def test_a_model_is_addressed_by_the_given_name_and_by_its_folder() -> None:
    assert settings(model="./model").server.served_model_names == ("./model", "model")
    assert settings(served_model_name=["a", "b"]).server.served_model_names == ("a", "b")


def test_a_model_of_the_hub_cache_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    resolved = settings(model="org/name")
    assert resolved.engine.model == str(snapshot)
    assert resolved.server.served_model_names[0] == "org/name"


def test_without_a_model_the_embedded_one_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tiercel.settings.config.MODEL_DIR", tmp_path / "model")  # the weights may not be built yet
    resolved = resolve({}).settings
    assert resolved.engine.model == resolved.server.model == str(tmp_path / "model")
    assert resolved.server.served_model_names == (EMBEDDED_NAME,)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "99999"}, "--port 99999: expected a whole number, from 0 to 65,535"),
        ({"port": "\u0661"}, "--port \u0661: expected a whole number, from 0 to 65,535"),
        ({"tokenizer": "\ud800"}, "--tokenizer '\\ud800': expected text"),
        (
            {"kv_disk_path": ["a\udcff"]},
            "--kv-disk-path 'a\\udcff': expected names that are not empty: given again, or as a JSON list",
        ),
        ({"port": "abc"}, "--port abc: expected a whole number, from 0 to 65,535"),
        ({"dtype": "int8"}, "--dtype int8: expected one of auto, float32, bfloat16, float16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2: expected one of auto, int8, fp8"),
        ({"block_size": "12"}, "--block-size 12: expected a power of two from 1 to 256"),
        ({"block_size": "512"}, "--block-size 512: expected a power of two from 1 to 256"),
        ({"gpu_memory_utilization": "nan"}, "--gpu-memory-utilization nan: expected a number, from 0.01 to 1"),
        ({"gpu_memory_utilization": "1.5"}, "--gpu-memory-utilization 1.5: expected a number, from 0.01 to 1"),
        (
            {"max_model_len": "8x"},
            "--max-model-len 8x: expected tokens such as 4096, 8k or 8K, from 2 to 16,777,216",
        ),
        ({"max_model_len": "1"}, "--max-model-len 1: expected tokens such as 4096, 8k or 8K, from 2 to 16,777,216"),
        (
            {"max_num_batched_tokens": "8"},
            "--max-num-batched-tokens 8 is below --block-size 16: a step must hold one block",
        ),
        ({"max_num_seqs": "0"}, "--max-num-seqs 0: expected a whole number, from 1 to 65,536"),
        ({"ssl_keyfile": "k"}, "--ssl-keyfile and --ssl-certfile belong together: give both or none"),
        ({"generation_config": "nowhere"}, "--generation-config nowhere: there is no such folder"),
        ({"tokenizer": "nowhere"}, "--tokenizer nowhere: there is no such folder"),
        ({"chat_template": "nowhere.jinja"}, "--chat-template nowhere.jinja: there is no such file"),
        ({"kv_disk_size": "1G"}, "--kv-disk-size needs --kv-disk-path: there is no folder to write to"),
        ({"kv_disk_daily_writes": "1G"}, "--kv-disk-daily-writes needs --kv-disk-path: there is no folder to write to"),
        (
            {"kv_disk_path": ["a"], "kv_disk_size": "8"},
            "--kv-disk-size 8: expected a size such as 1073741824, 512M or 2GiB, "
            "from 1,048,576 to 1,125,899,906,842,624",
        ),
        ({"kv_disk_path": ["a", "./a"]}, "--kv-disk-path a: the same folder twice"),
        (
            {"kv_disk_path": ["a"], "enable_prefix_caching": "false"},
            "--kv-disk-path needs --enable-prefix-caching: blocks are found again by their content",
        ),
        ({"preemption_mode": "never"}, "--preemption-mode never: expected one of auto, swap, recompute"),
        ({"admin_port": "9000", "admin_uds": "a.sock"}, "--admin-uds beside --admin-port: give one of them"),
        ({"admin_host": "127.0.0.1"}, "--admin-host needs --admin-port"),
        ({"root_path": "api"}, "--root-path api: expected a path that starts with /"),
        ({"model": "nowhere"}, "nowhere: no such folder"),
        ({"config": "nowhere.toml"}, "--config nowhere.toml: cannot be read: No such file or directory"),
    ],
)
def test_an_invalid_value_gives_one_line_with_flag_value_and_allowed_values(
    flags: dict[str, object], message: str
) -> None:
    assert refusal(**flags) == message


def test_a_wrong_value_is_named_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tiercel.toml").write_text("max-num-seqs = true\n")
    assert refusal() == "tiercel.toml: max-num-seqs = True: expected a whole number, from 1 to 65,536"
    Path("tiercel.toml").write_text("port = 1.5\n")
    assert refusal() == "tiercel.toml: port = 1.5: expected a whole number, from 0 to 65,535"
    monkeypatch.setenv("TIERCEL_PORT", "70000")
    assert refusal() == "TIERCEL_PORT=70000: expected a whole number, from 0 to 65,535"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    assert refusal() == "VLLM_CPU_KVCACHE_SPACE=much: expected a number of GiB"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1\n", "tiercel.toml: there is no setting prot; did you mean port?"),
        ('quantization = "aqw"\n', "tiercel.toml: quantization = aqw: expected one of auto, int8, int4"),
        ("port = \n", "--config tiercel.toml: not a TOML file: Invalid value (at line 1, column 8)"),
        ('config = "x"\n', "tiercel.toml: there is no setting config"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(content: str, message: str) -> None:
    Path("tiercel.toml").write_text(content)
    assert refusal().startswith(message)


def test_keys_are_never_part_of_a_message() -> None:
    for key in ("se cret", "s\u00e9cret", ""):
        assert "cret" not in refusal(api_key=[key])


def test_the_keys_of_tenants_stand_in_their_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.yaml").write_text("")
    assert settings(tenants_config="t.yaml", host="0.0.0.0").server.tenants_config == "t.yaml"
    assert refusal(tenants_config="t.yaml", api_key=["a"]).startswith("--api-key beside --tenants-config")
    assert refusal(tenants_config="none.yaml") == "--tenants-config none.yaml: there is no such file"
    monkeypatch.setenv("TIERCEL_API_KEY", "of-a-client")
    resolved = resolve({"model": "model", "tenants_config": "t.yaml"})
    assert resolved.settings.server.api_keys == ()
    assert resolved.warnings == ("TIERCEL_API_KEY is ignored: keys are read from the tenants file",)


def test_the_admin_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().server.admin_key is None
    assert client_admin_key() is None
    monkeypatch.setenv("TIERCEL_ADMIN_KEY", "boss")
    assert (settings().server.admin_key, client_admin_key()) == ("boss", "boss")
    assert refusal(admin_key="se cret").startswith("--admin-key ***: expected printable ASCII")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_beyond_loopback_a_key_is_needed(host: str) -> None:
    assert "--api-key" in refusal(host=host)
    assert settings(host=host, api_key=["secret"]).server.host == host
    assert settings(host=host, allow_unauthenticated=True).server.allow_unauthenticated
    assert settings(host=host, uds="socket").server.uds == "socket"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert settings(host=host).server.api_keys == ()


def test_cookies_of_every_origin_are_refused() -> None:
    assert "--allow-credentials" in refusal(allow_credentials=True, allowed_origins=["*"])
    assert settings(allow_credentials=True, allowed_origins=["https://a"]).server.allow_credentials


def test_clients_take_the_first_key_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_api_key() is None
    monkeypatch.setenv("TIERCEL_API_KEY", "one, two")
    assert client_api_key() == "one"


def test_every_number_has_a_range_and_every_setting_a_help_text() -> None:
    for name, option in SETTINGS.items():
        assert option.option.help.endswith("."), name
        assert (option.option.within is not None) == (option.kind in (int, float)), name


def test_defaults_pass_their_own_checks() -> None:
    for name, option in SETTINGS.items():
        written = list(option.default) if isinstance(option.default, tuple) else option.default
        assert option.default in (None, ()) or option.read(written) == option.default, name
