"""Graphs without a GPU: a recorder that repeats its jobs, a model that reads tensors only, and benches."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from tests.engine.small_grammars import GrammarsAtOnce
from tests.engine.test_loop import END, MAX_MODEL_LEN, Bench, random_prompt
from tests.engine.test_nanobatch import RandomSplitter
from tiercel.device.base import Device, Lane
from tiercel.device.graph import GraphRecorder
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.loop import EngineLoop
from tiercel.engine.models.base import Model
from tiercel.engine.models.config import ConfigFields, parse_decoder
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.ops import Ops
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.quantization_scheme import choose_scheme
from tiercel.engine.models.weights import fill_dummy
from tiercel.engine.sampling import Sampler
from tiercel.engine.sampling.sampler import DrawKernel
from tiercel.engine.step.graphs import DecodeGraphs, graph_sizes, record_graphs
from tiercel.engine.step.halves import Overlap
from tiercel.engine.step.mixed_graphs import MixedGraphs, record_mixed_graphs
from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.runner import DeviceFlight, Runner
from tiercel.engine.step.staging import Carrier, HostRing, KernelCarrier, Staging
from tiercel.scheduler.account import Account
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.prompt_lookup import PromptLookup
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.step_limits import StepLimits
from tiercel.values.errors import OutOfDeviceMemoryError
from tiercel.values.ids import SeqId, SlotId
from tiercel.values.plan import NanoBatch, Slice, StepPlan, TableUpdate
from tiercel.values.request import Request, SamplingParams, pack_tokens, unpack_tokens
from tiercel.wire.frames import Abort

VOCAB = 11


class FakeGraph:
    """A graph that repeats its job and writes to the memory that all graphs of the recorder share."""

    def __init__(self, job: Callable[[], Tensor], recorder: "FakeRecorder") -> None:
        self._job = job
        self._recorder = recorder

    def replay(self) -> Tensor:
        self._recorder.replays += 1
        memory = self._recorder.memory
        memory.fill_(torch.nan)  # the result of an earlier replay is not valid any more
        found = self._job()
        output = memory[: found.numel()].view(found.shape)
        output.copy_(found)
        return output


class FakeRecorder:
    """`capacity`: the number of recordings that succeed."""

    def __init__(self, capacity: int = 1000) -> None:
        self.memory = torch.zeros(1 << 16)
        self.recorded: list[tuple[int, ...]] = []  # shapes, in order
        self.replays = 0
        self._room = capacity

    def record(self, job: Callable[[], Tensor]) -> FakeGraph:
        if len(self.recorded) == self._room:
            raise OutOfDeviceMemoryError("graph.record_failed", "full")
        self.recorded.append(tuple(job().shape))
        return FakeGraph(job, self)


class WeighedSum:
    """A model whose next token is the sum of all tokens times their positions, modulo the vocabulary; exact in float32.

    It reads earlier tokens from the cache through the tables, so a wrong token, position, slot, table or length
    changes the result. Nothing is read on the host.
    """

    layers, kv_heads, head_dim, vocab_size, max_model_len = 1, 1, 1, VOCAB, 96
    precision = Precision.of(torch.float32)
    impl, weights_bytes, fingerprint, is_capturable = "native", 0, bytes(32), True

    def __init__(self) -> None:
        self.forwards = 0  # graphs are counted as well

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        """Return hidden states of one number."""
        self.forwards += 1
        kv[state.slot_ids, 0, state.slot_offsets, 0] = torch.stack((tokens, state.positions), -1).float()
        order = torch.arange(len(tokens), dtype=torch.int32, device=kv.device)
        sequence = torch.searchsorted(state.device_query_starts, order, right=True) - 1
        sequence = sequence.clamp(max=len(state.device_context_lengths) - 1)  # tokens of no sequence are padding
        rows = kv[:, 0, :, 0].index_select(0, state.block_tables.flatten()).view(len(state.block_tables), -1, 2)
        at = torch.arange(rows.shape[1], device=kv.device)
        weighed = torch.where(at < state.device_context_lengths[:, None], (rows[..., 0] + 1) * (rows[..., 1] + 1), 0)
        seen = torch.where(at <= state.positions[:, None], weighed.index_select(0, sequence), 0)
        return seen.sum(-1, keepdim=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return one-hot logits."""
        return hidden.new_zeros(len(hidden), VOCAB).scatter_(1, hidden.long() % VOCAB, 1.0)


def expected_sums(request: Request, end_tokens: frozenset[int], max_model_len: int) -> list[int]:
    """Return the tokens that `WeighedSum` generates for a request."""
    tokens = list(unpack_tokens(request.prompt))
    num_prompt = len(tokens)
    while len(tokens) < min(num_prompt + request.params.max_tokens, max_model_len):
        tokens.append(next_token(tokens))
        if tokens[-1] in end_tokens and not request.params.ignore_eos:
            break
    return tokens[num_prompt:]


def next_token(tokens: Iterable[int]) -> int:
    """Return the next token of `WeighedSum`."""
    return sum((token + 1) * (position + 1) for position, token in enumerate(tokens)) % VOCAB


class GraphBench(Bench):
    """The loop on a real runner with the exact model and with graphs."""

    def __init__(
        self, recorder: GraphRecorder | None, device: Device, *, depth: int, seqs: int, tokens: int, blocks: int,
        splits: bool, lookup: PromptLookup | None = None, lookup_tokens: int = 0, lane: Lane | None = None,
        holds: bool | None = None, carrier: Carrier | None = None, mixed_sizes: tuple[int, ...] = (),
        mixed_recorder: GraphRecorder | None = None,
    ) -> None:  # fmt: skip
        super().__init__(blocks=blocks, depth=depth, seqs=seqs, tokens=tokens, lookup_tokens=lookup_tokens)
        torch_device = torch.device(device.name)
        rows = RowBook(seqs + 1, -(-MAX_MODEL_LEN // 4))
        kv = torch.full((blocks + 1, 1, 4, 1, 2), torch.nan, device=torch_device)
        kv[0] = 0
        self.lane = lane or device.open_lane()
        if device.name == "cuda":
            carrier = KernelCarrier()
        staging = Staging(torch_device, self.lane, HostRing(is_pinned=device.name == "cuda"), carrier)
        sampler = Sampler(seqs + 1, VOCAB, torch_device, link=staging)
        graphs = recorder and record(WeighedSum(), kv, rows, self.lane, recorder, graph_sizes(seqs))
        self.sizes = () if graphs is None else graphs.sizes
        self.grammars = GrammarsAtOnce()
        self.eager = WeighedSum()  # counts the forwards that are launched kernel by kernel
        runner = Runner(
            *(self.eager, kv, sampler, self.lane, rows, self.book, tuple(END)),
            staging=staging,
            graphs=graphs,
            grammars=self.grammars,
            holds=holds,
            mixed=record_mixed(WeighedSum(), kv, graphs, rows, self.lane, mixed_recorder or recorder, mixed_sizes),
        )
        splitter = RandomSplitter() if splits else None
        planner = Planner(self.book, StepLimits(seqs, tokens), splitter=splitter, lookup=lookup)
        self.loop = EngineLoop(
            self.book, self.cache, planner, runner, self.client, self.clock, depth, grammars=self.grammars
        )

    def expected(self, seq: int) -> list[int]:
        return expected_sums(self.requests[seq], END, MAX_MODEL_LEN)

    def run_random(self, rng: random.Random) -> None:
        """Run random prompts that share prefixes, wait for blocks, end or are aborted, and check every answer."""
        shared = [rng.randrange(VOCAB) for _ in range(40)]
        for _ in range(rng.randrange(5, 25)):
            prompt = random_prompt(rng, shared)
            self.submit(prompt, max_tokens=rng.randrange(1, 30), ignore_eos=rng.random() < 0.7)
            for _ in range(rng.randrange(0, 4)):
                self.loop.step()
            if rng.random() < 0.2:
                self.loop.take([Abort((SeqId(rng.randrange(1, len(self.requests) + 1)),))])
        self.run()
        self.lane.close()
        self.assert_all_right()


class StepBench:
    """A runner of a few sequences; sequence n has row n - 1 and some blocks of its own, by default two."""

    def __init__(
        self,
        model: Model,
        sequences: int,
        recorder: GraphRecorder | None,
        lane: Lane,
        device: str = "cpu",
        sizes: tuple[int, ...] | None = None,
        kernel: DrawKernel | None = None,
        carrier: Carrier | None = None,
        mixed_sizes: tuple[int, ...] = (),
        blocks: int = 2,
        overlap: Overlap | None = None,
    ) -> None:
        """`kernel`: of the sampler; by default it has none. `carrier`: by default copies on the CPU, else kernels."""
        torch_device = torch.device(device)
        shape = (blocks * sequences + 1, model.layers, 4, model.kv_heads, 2 * model.head_dim)
        self.kv = torch.zeros(shape, device=torch_device)
        rows = RowBook(sequences, blocks)
        self._sequences: dict[SeqId, SequenceProgress] = {}
        if carrier is None and device != "cpu":
            carrier = KernelCarrier()
        staging = Staging(torch_device, lane, HostRing(is_pinned=device != "cpu"), carrier)
        sampler = Sampler(sequences, model.vocab_size, torch_device, kernel, link=staging)
        if device == "cuda":
            torch.cuda.synchronize()  # zeroing was not queued on the lane
        graphs = None
        if recorder is not None:
            graphs = record(model, self.kv, rows, lane, recorder, sizes or graph_sizes(sequences), overlap)
        mixed = record_mixed(model, self.kv, graphs, rows, lane, recorder, mixed_sizes)
        self.runner = Runner(
            *(model, self.kv, sampler, lane, rows, self._sequences, ()),
            staging=staging,
            graphs=graphs,
            mixed=mixed,
            overlap=overlap,
        )
        self._steps = 0

    def prefill(self, prompts: list[list[int]], params: SamplingParams) -> DeviceFlight:
        """Launch the first step of these prompts."""
        self.open(prompts, params)
        updates: list[TableUpdate] = []
        slices: list[Slice] = []
        for number, prompt in enumerate(prompts, start=1):
            seq = SeqId(number)
            updates.append(TableUpdate(seq, 0, (SlotId(2 * number), SlotId(2 * number - 1))))
            slices.append(Slice(seq, 0, len(prompt), True))
        return self.launch(slices, tuple(updates))

    def open(self, prompts: list[list[int]], params: SamplingParams) -> None:
        """Make the sequences of these prompts known."""
        for number, prompt in enumerate(prompts, start=1):
            request = Request(id=SeqId(number), prompt=pack_tokens(prompt), params=params, arrival_s=0.0)
            self._sequences[SeqId(number)] = SequenceProgress(request, Account(request.band, request.tenant), 8)

    def decode(self, start_by_number: dict[int, int]) -> DeviceFlight:
        """Launch a decode of sequences with these numbers of computed tokens. Their book does not get the result."""
        return self.launch([Slice(SeqId(number), start, 1, True) for number, start in start_by_number.items()])

    def launch(self, slices: list[Slice], updates: tuple[TableUpdate, ...] = ()) -> DeviceFlight:
        """Launch a step of one nano-batch."""
        self._steps += 1
        return self.runner.launch(StepPlan(self._steps, (NanoBatch(tuple(slices)),), updates))


def record(
    model: Model,
    kv: Tensor,
    rows: RowBook,
    lane: Lane,
    recorder: GraphRecorder,
    sizes: tuple[int, ...],
    overlap: Overlap | None = None,
) -> DecodeGraphs | None:
    """Record graphs for a runner with these rows; None if a recording fails."""
    return record_graphs(model, kv, *rows.tables.shape, lane, recorder, sizes, lambda done, total: None, overlap)


def record_mixed(
    model: Model,
    kv: Tensor,
    graphs: DecodeGraphs | None,
    rows: RowBook,
    lane: Lane,
    recorder: GraphRecorder | None,
    sizes: tuple[int, ...],
) -> MixedGraphs | None:
    """Record graphs of mixed steps beside those of decodes; None without sizes."""
    if not sizes:
        return None
    assert graphs is not None and recorder is not None
    max_blocks = rows.tables.shape[1]
    mixed = record_mixed_graphs(
        *(model, kv, graphs.last_tokens, max_blocks, lane, recorder, sizes), lambda done, total: None
    )
    assert mixed is not None
    return mixed


def small_decoder(ops: Ops, device: str, quantization: str = "auto", layers: int = 1, *, fills: bool = True) -> Decoder:
    """Return a decoder, quantised on request, with random weights if it is to be filled here."""
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
    }  # fmt: skip
    found = ConfigFields(fields, "config.json")
    precision = replace(Precision.of(torch.float32), scheme=choose_scheme(quantization, found))
    model = Decoder(parse_decoder(found), ops, precision, torch.device(device))
    if fills:
        fill_dummy(dict(model.targets()), 3)
        if precision.scheme is not None:
            model.pack()
    return model
