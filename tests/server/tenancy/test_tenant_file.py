"""The tenants file."""

import hashlib
from pathlib import Path

import pytest

from tiercel.server.tenancy.operator_document import read_yaml
from tiercel.server.tenancy.tenant_file import load_tenant_file, read_tenants
from tiercel.server.tenancy.tenants import BestEffort, Limits, TenantTable, digest_of, make_table, narrowed, scope_of
from tiercel.values.errors import ConfigError
from tiercel.values.tenant import KvQuota, Slo

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "tenants.yaml"
SHA = hashlib.sha256(b"hidden").hexdigest()


def _read(text: str) -> TenantTable:
    config = read_tenants(read_yaml(text.encode()), "tenants.yaml")
    return make_table(config.tenants, version=1, source="file", admin_digests=config.admin_digests)


def test_every_field_finds_its_place() -> None:
    table = _read(
        f"""
        admin_key: boss
        secret: salt
        tenants:
          - name: acme
            keys: [one, two]
            key_sha256: {SHA.upper()}
            weight: 2.5
            band: 2
            requests_per_minute: 60
            tokens_per_minute: 9000
            max_concurrency: 8
            queue_share: 0.25
            queue_timeout_s: 2.5
            kv_quota_bytes: {{hbm: 1GiB, ddr: 2048, ssd: 0}}
            slo: {{class: batch, ttft_s: 2, tbt_s: 0.1}}
            best_effort: {{max_tokens: 64, band: 9}}
            group: friends
          - name: plain
            key: "123"
        """
    )
    acme, plain = table.tenants
    assert acme.limits == Limits(60, 9000, 8, 0.25, 2.5)
    assert acme.best_effort == BestEffort(64, 9)
    share = acme.share
    assert (share.weight, share.band, share.group) == (2.5, 2, "friends")
    assert share.slo == Slo(kind="batch", ttft_s=2.0, tbt_s=0.1)
    assert share.kv_quota == KvQuota(hbm=2**30, ddr=2048, ssd=0)
    assert (plain.limits, plain.best_effort, plain.share.weight) == (Limits(), None, 1.0)
    for key, tenant in {"one": acme, "two": acme, "hidden": acme, "123": plain}.items():
        assert table.find(f"Bearer {key}") is tenant
    assert table.find("Bearer boss") is None
    assert table.admits_admin("Bearer boss")
    assert not table.admits_admin("Bearer one")


def test_scopes_last_and_are_shared_by_a_group_alone() -> None:
    def scopes(text: str) -> dict[str, bytes]:
        return {tenant.name: tenant.scope for tenant in _read(text).tenants}

    text = """
    secret: s1
    tenants:
      - {name: a, key: a}
      - {name: b, key: b, group: g}
      - {name: c, key: c, group: g}
      - {name: g, key: g}
    """
    first = scopes(text)
    assert first["b"] == first["c"]
    assert len(set(first.values())) == 3
    assert scopes(text) == first
    assert not set(scopes(text.replace("s1", "s2")).values()) & set(first.values())
    assert scope_of("a", None, b"") != b""


def test_a_salt_separates_and_its_absence_does_not() -> None:
    assert narrowed(b"", None) == b""
    assert narrowed(b"x", None) == b"x"
    assert len({narrowed(scope, salt) for scope in (b"", b"x") for salt in ("a", "b")}) == 4


_ONE = "tenants:\n  - {name: acme, key: one"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenants: []", "tenants.yaml: tenants a list: expected a list of 1 to 10,000 tenants"),
        ("", "tenants.yaml: expected fields such as `name: value`, found null"),
        ("{}", "tenants.yaml: tenants: expected a list of 1 to 10,000 tenants"),
        ("tenant: []", "tenants.yaml: tenants: expected a list"),
        ("tenants: [x]", "tenants.yaml: tenants[0]: expected fields such as `name: value`, found x"),
        ("tenants: [{key: x}]", "tenants.yaml: tenants[0]: name: expected text"),
        ("tenants: [{name: A B, key: x}]", "tenants.yaml: tenants[0]: name A B: expected 1 to 64 of a-z, 0-9, _ and -"),
        ("tenants: [{name: 7, key: x}]", "tenants[0]: name 7: expected text of 1 to 512 letters (numbers in quotes)"),
        ("tenants: [{name: acme}]", "tenants.yaml: tenant acme: key: expected a key, or key_sha256"),
        (_ONE + ", weight: 5000}", "tenants.yaml: tenant acme: weight 5000: expected a number from 0.01 to 1000"),
        (_ONE + ", weight: 0}", "weight 0: expected a number from 0.01 to 1000"),
        (_ONE + ", weight: true}", "weight true: expected a number from 0.01 to 1000"),
        (_ONE + ", weight: .nan}", "weight .nan: expected a number"),
        (_ONE + f", weight: 1{400 * '0'}}}", "expected a number from 0.01 to 1000"),
        (_ONE + ", wieght: 2}", "tenants.yaml: tenant acme: wieght: there is no such field; did you mean weight?"),
        (_ONE + ", zzz: 2}", "tenant acme: zzz: there is no such field: expected one of name, key, keys"),
        (_ONE + ", band: 16}", "band 16: expected a whole number from 0 to 15"),
        (_ONE + ", band: 1.5}", "band 1.5: expected a whole number from 0 to 15"),
        (_ONE + ", requests_per_minute: 0}", "requests_per_minute 0: expected a whole number from 1 to"),
        (_ONE + ", tokens_per_minute: lots}", "tokens_per_minute lots: expected a whole number"),
        (_ONE + ", max_concurrency: null}", "max_concurrency null: expected a whole number"),
        (_ONE + ", queue_share: 1.5}", "queue_share 1.5: expected a number from 0.0001 to 1"),
        (_ONE + ", kv_quota_bytes: 5}", "tenant acme: kv_quota_bytes: expected fields such as"),
        (_ONE + ", kv_quota_bytes: {hbm: 5X}}", "tenant acme: kv_quota_bytes.hbm 5X: expected a size such as"),
        (_ONE + ", kv_quota_bytes: {gpu: 5}}", "tenant acme: kv_quota_bytes.gpu: there is no such field"),
        (_ONE + ", slo: {class: fast}}", "tenant acme: slo.class fast: expected interactive or batch"),
        (_ONE + ", slo: {ttft_s: 0}}", "tenant acme: slo.ttft_s 0: expected a number from 0.001 to 86400"),
        (_ONE + ", best_effort: null}", "tenant acme: best_effort: expected fields such as `name: value`, found null"),
        (_ONE + ", best_effort: {}}", "tenant acme: best_effort: expected max_tokens, band or both"),
        (_ONE + ", band: 4, best_effort: {band: 3}}", "best_effort.band 3: expected a whole number from 4 to 15"),
        (_ONE + ", group: G}", "tenant acme: group G: expected 1 to 64 of a-z"),
        (_ONE + ", keys: []}", "tenant acme: keys ***: expected"),
        (_ONE + ", keys: [one]}", "it has it twice"),
        (_ONE + "}\n  - {name: acme, key: two}", "tenant acme: name: another tenant has it"),
        (_ONE + "}\n  - {name: other, key: one}", "tenant other: key 7692c3ad… (sha256): acme has it too"),
        ("admin_key: one\n" + _ONE + "}", "tenant acme: key 7692c3ad… (sha256): the admin has it too"),
        ("admin_key: [one]\n" + _ONE + "}", "tenants.yaml: admin_key ***: expected"),
        ("tenants: [{name: acme, key_sha256: 12}]", "tenant acme: key_sha256 ***: expected the 64 hexadecimal digits"),
    ],
)
def test_an_invalid_file_is_reported_with_file_tenant_field_and_limit(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        _read(text)
    assert message in refusal.value.message
    assert refusal.value.message.startswith("tenants.yaml: ")
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("key", ["se cret", "s\u00e9cret", "secret\x7f", "secret" * 100, '["secret"]', "{secret: 1}"])
def test_no_key_is_part_of_a_message(key: str) -> None:
    for text in (f"tenants: [{{name: acme, key: {key}}}]", f'tenants: [{{name: acme, key: "{key}"}}]'):
        with pytest.raises(Exception) as refusal:
            _read(text)
        assert "cret" not in str(refusal.value)


def test_a_file_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: [{name: a, key: k}]")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=r"tenants\.yaml: mode 666 lets other users change it: run `chmod o-w"):
        load_tenant_file(path)
    path.chmod(0o664)
    assert load_tenant_file(path).tenants


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_tenant_file(tmp_path / "none.yaml")
    path = tmp_path / "t.yaml"
    path.write_text("a: *x")
    with pytest.raises(ConfigError, match=r"t\.yaml: line 1: aliases are not supported"):
        load_tenant_file(path)


def test_the_key_of_the_settings_is_no_tenants_key(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(_ONE + "}")
    with pytest.raises(ConfigError, match="the admin has it too"):
        load_tenant_file(path, others=[digest_of("one")])


def test_the_example_of_the_manual_is_right() -> None:
    config = load_tenant_file(EXAMPLE)
    assert len(config.tenants) > 2
