"""Classes of processors, ratios, promises and tables of benchmarks/cpu, from made-up figures."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.cpu.processor import CLASSES, Processor, ProcessorClass, class_of
from benchmarks.cpu.promises import PROMISES, Promise, best_peer, exit_code, judge
from benchmarks.cpu.report import judgements_of, tables
from benchmarks.cpu.results import (
    KernelResults,
    KernelRow,
    TrialResult,
    WorkloadResults,
    chosen_peers,
    read_results,
    write_results,
)

JUDGED: tuple[ProcessorClass, ...] = ("avx2", "avx512_bf16", "amx")
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni"}
FIGURE = {"W1": "out_tok_s", "W2": "out_tok_s", "W3": "out_tok_s", "W3w": "out_tok_s", "W4": "long_ttft_s"}


def processor(kind: ProcessorClass = "avx2", name: str = "a processor") -> Processor:
    return Processor(name=name, kind=kind, forced=False, threads=2, caches={"L2": "1M"}, memory_gb=8.0)


def trial(server: str, workload: str, value: float, round_number: int = 0, *, gap_s: float = 1.0) -> TrialResult:
    return TrialResult(
        server=server,
        workload=workload,
        round=round_number,
        figures={FIGURE[workload]: value, "gap_max_s": gap_s},
        server_cores=2.0,
        client_cores=0.0,
        other_cores=0.0,
        resident_bytes=2_000_000_000,
        kv_bytes=800_000_000 if server == "tiercel" else 0,
    )


def workloads(*trials: TrialResult, model: str = "qwen05b", kind: ProcessorClass = "avx2") -> WorkloadResults:
    return WorkloadResults(
        model=model, date="2026-11-22T00:00:00+00:00", command=[], processor=processor(kind), threads=2,
        is_quick=False, versions={"tiercel": "1"}, trials=list(trials),
    )  # fmt: skip


def kernels(*shares: tuple[str, float], kind: ProcessorClass = "avx2") -> KernelResults:
    rows = [
        KernelRow(name=name, unit="GB/s", values={"ours": 1.0}, share=share, limit="read") for name, share in shares
    ]
    return KernelResults(
        date="2026-11-22T00:00:00+00:00", command=[], processor=processor(kind), threads=2, versions={},
        limits={"read": 30.0}, rows=rows,
    )  # fmt: skip


# ---- classes of processors


def test_a_class_needs_all_its_flags_and_those_of_the_classes_before() -> None:
    assert class_of(set()) == "portable"
    assert class_of(AVX2) == "avx2"
    assert class_of(AVX2 - {"fma"}) == "portable"
    assert class_of(AVX512) == "avx512_bf16"
    assert class_of(AVX512 - {"avx512_bf16"}) == "avx2"
    assert class_of(AVX512 | {"amx_tile", "amx_bf16", "amx_int8"}) == "amx"
    assert class_of(AVX2 | {"amx_tile", "amx_bf16", "amx_int8"}) == "avx2"


# ---- promises


@pytest.mark.parametrize("kind", JUDGED)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.figure)
def test_each_promise_is_broken_by_a_worse_figure_and_alone_decides_the_exit_code(
    promise: Promise, kind: ProcessorClass
) -> None:
    limit = promise.limit(kind)
    assert limit is not None
    kept = {other.figure: other.limit(kind) or 0.0 for other in PROMISES}
    assert exit_code(judge(kind, kept)) == 0
    worse = limit * (1.01 if promise.is_most else 0.99)
    judgements = judge(kind, kept | {promise.figure: worse})
    assert [one.promise for one in judgements if one.verdict == "BROKEN"] == [promise]
    assert exit_code(judgements) == 1


@pytest.mark.parametrize("kind", JUDGED)
def test_every_aim_is_at_least_as_good_as_its_limit(kind: ProcessorClass) -> None:
    for promise in PROMISES:
        assert promise.verdict(kind, promise.aim(kind)) == "kept"


def test_unmeasured_figures_and_classes_without_promises_break_nothing() -> None:
    assert {one.verdict for one in judge("amx", {})} == {"unmeasured"}
    broken = {promise.figure: 1e9 if promise.is_most else 0.0 for promise in PROMISES}
    assert {one.verdict for one in judge("portable", broken)} == {"no promise"}
    assert exit_code(judge("portable", broken)) == exit_code(judge("amx", {})) == 0
    assert set(JUDGED) == set(CLASSES) - {"portable"}


def test_the_promises_are_those_of_their_classes() -> None:
    two = next(promise for promise in PROMISES if promise.figure == "qwen05b.W2.out_tok_s.ratio")
    assert [two.limit(kind) for kind in CLASSES] == [None, 1.6, 1.2, 1.2]
    assert two.verdict("avx2", 1.5) == "BROKEN"
    assert two.verdict("avx512_bf16", 1.5) == "kept"


# ---- ratios


def test_the_best_peer_is_the_fastest_or_the_one_with_the_shortest_time() -> None:
    assert best_peer("out_tok_s", {"a": 1.0, "b": 2.0}) == ("b", 2.0)
    assert best_peer("gap_max_s", {"a": 1.0, "b": 2.0}) == ("a", 1.0)
    assert best_peer("out_tok_s", {}) is None


def test_ratios_are_of_medians_over_rounds_and_leave_disturbed_rounds_out() -> None:
    disturbed = msgspec.structs.replace(trial("tiercel", "W1", 1.0, 3), is_disturbed=True)
    results = workloads(
        *(trial("tiercel", "W1", value, number) for number, value in enumerate((20.0, 50.0, 30.0))),
        disturbed,
        *(trial("vllm", "W1", value, number) for number, value in enumerate((10.0, 15.0, 90.0))),
        trial("openvino", "W1", 12.0),
    )
    assert results.medians("W1", "out_tok_s") == {"tiercel": 30.0, "vllm": 15.0, "openvino": 12.0}
    assert results.ratio("W1", "out_tok_s") == (2.0, "vllm")
    assert results.disturbed("W1") == 1
    assert results.ratio("W2", "out_tok_s") is None
    assert results.values() == {"qwen05b.W1.out_tok_s.ratio": 2.0, "qwen05b.memory_gb": 1.2}


def test_only_disturbed_rounds_are_better_than_none() -> None:
    disturbed = msgspec.structs.replace(trial("tiercel", "W1", 4.0), is_disturbed=True)
    assert workloads(disturbed).medians("W1", "out_tok_s") == {"tiercel": 4.0}


def test_times_of_the_long_prompt_are_compared_each_with_its_own_best_peer() -> None:
    results = workloads(
        trial("tiercel", "W4", 5.0, gap_s=0.2),
        trial("vllm", "W4", 4.0, gap_s=8.0),
        trial("llamacpp", "W4", 10.0, gap_s=4.0),
    )
    assert results.ratio("W4", "long_ttft_s") == (1.25, "vllm")
    assert results.ratio("W4", "gap_max_s") == (0.05, "llamacpp")


def test_small_sizes_judge_nothing() -> None:
    results = workloads(trial("tiercel", "W1", 1.0), trial("vllm", "W1", 9.0))
    assert exit_code(judgements_of([results])) == 1
    results.is_quick = True
    assert exit_code(judgements_of([results])) == 0


def test_after_the_first_round_the_two_best_peers_stay() -> None:
    names = ("tiercel", "a", "b", "c")
    trials = [trial(name, "W2", value) for name, value in zip(names, (1.0, 5.0, 9.0, 7.0), strict=True)]
    assert chosen_peers(trials, "W2") == ["tiercel", "b", "c"]
    assert chosen_peers([], "W2") == []  # no server could be measured
    times = [
        trial(name, "W4", value, gap_s=10 - value) for name, value in zip(names, (1.0, 2.0, 3.0, 4.0), strict=True)
    ]
    assert chosen_peers(times, "W4") == ["tiercel", "a", "c"]  # the best by the first token, the best by the gap


def test_the_worst_kernel_of_a_kind_is_judged() -> None:
    results = kernels(("attention.a.512", 0.4), ("attention.a.4096", 0.6), ("prefill.a", 0.9), ("linear.a.M1", 0.1))
    assert results.values() == {"attention.share": 0.4, "prefill.share": 0.9}
    assert exit_code(judgements_of([results])) == 1
    assert exit_code(judgements_of([kernels(("attention.a.512", 0.5), ("prefill.a", 0.7))])) == 0


# ---- files and tables


def test_files_are_read_as_they_were_written_and_make_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = workloads(trial("tiercel", "W2", 300.0), trial("vllm", "W2", 150.0), kind="avx512_bf16")
    theirs = kernels(("prefill.qwen05b", 0.75), kind="avx512_bf16")
    write_results(tmp_path / "a.json", mine)
    write_results(tmp_path / "b.json", theirs)
    found = [read_results(tmp_path / name) for name in ("a.json", "b.json")]
    assert found == [mine, theirs]
    text = "\n".join(tables(found))
    assert "| W2, 16 streams, tokens/s | 300 | 150 | 2.00 (vllm) |" in text
    assert "| W2 16 streams, tokens/s | at least 1.20 x | 1.40 x | 2.00 x | kept |" in text
    assert "| prefill of 2,048 tokens, of the peak | at least 70% | 80% | 75% | kept |" in text
    assert "| W1 one stream, tokens/s | at least 1.00 x | 1.30 x | unmeasured | unmeasured |" in text
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(SystemExit):
        read_results(tmp_path / "b.json")
    assert str(tmp_path / "b.json") in capsys.readouterr().err


def test_files_of_different_processors_are_refused() -> None:
    other = workloads(trial("tiercel", "W1", 1.0))
    other.processor = processor(name="another")
    with pytest.raises(SystemExit):
        judgements_of([workloads(trial("tiercel", "W1", 1.0)), other])
