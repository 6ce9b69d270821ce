"""Measure the device memory of steps, by running the largest ones before the KV pool is allocated."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.device.base import Device, Lane
from tiercel.device.shortage import is_shortage
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.memory.capacity import step_tokens
from tiercel.engine.models.base import Model
from tiercel.engine.sampling import Sampler
from tiercel.engine.step.graphs import StaticInputs, graph_sizes, wants_graphs
from tiercel.engine.step.mixed_graphs import MixedInputs, mixed_sizes
from tiercel.engine.step.tables import DeviceTables
from tiercel.kvcache.store.arena import open_arena
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import ConfigError
from tiercel.values.request import SamplingParams, pack_tokens
from tiercel.values.tier import KVSpec
from tiercel.values.units import MIB, show_bytes

log = logging.getLogger(__name__)

_MARGIN_SHARE = 0.1  # of a step: the allocator rounds up, and free memory is fragmented
_MARGIN_BYTES = 128 * MIB  # for kernels and workspaces that are loaded while serving
_GRAPH_BYTES = 16 * MIB  # allowance for the driver's part of one CUDA graph, beside the memory that all graphs share
_WORKSPACE_BYTES = 32 * MIB  # of cuBLAS for a stream that records, on Hopper; an allowance on other devices
_ALL_FEATURES = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    min_tokens=1,
    stop_token_ids=(0,),
    logprobs=20,
    grammar="-",  # never compiled: such a row may draw every token
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of device memory that the KV pool must leave."""

    step_bytes: int = 0  # peak of the larger trial step
    graph_bytes: int = 0  # of CUDA graphs, if any will be recorded
    table_bytes: int = 0  # of the block tables of all rows

    @property
    def reserved_bytes(self) -> int:
        """The sum with a margin of a tenth of the step and 128 MiB; 0 on the CPU."""
        if not self.step_bytes:
            return 0
        kept_bytes = self.graph_bytes + self.table_bytes
        return self.step_bytes + kept_bytes + int(_MARGIN_SHARE * self.step_bytes) + _MARGIN_BYTES


@dataclass(frozen=True, slots=True)
class TrialStep:
    """A step of `seqs` sequences with `tokens` tokens in total; every slice begins at token `start`."""

    seqs: int
    tokens: int
    start: int = 0

    def ends(self) -> list[int]:
        """Return the ends of the slices, which are as equal as possible."""
        least, longer = divmod(self.tokens, self.seqs)
        return [self.start + least + (index < longer) for index in range(self.seqs)]


def _mixed_step(tokens: int, seqs: int, longest: int) -> TrialStep:
    """Return a step as large as the largest graph of mixed steps, in as few slices as contexts allow."""
    slices = min(seqs, -(-tokens // longest))
    return TrialStep(slices, min(tokens, slices * longest))


def measure_footprint(
    settings: EngineSettings,
    model: Model,
    sampler: Sampler,
    spec: KVSpec,
    device: Device,
    lane: Lane,
    place: torch.device,
) -> Footprint:
    """Run the largest steps once and return the peak of their memory.

    Two steps are the largest: one with as many sequences as may run at once, all with every sampling feature, and one
    with a single prompt at the end of the longest context. CUDA graphs keep the memory of a decode and of a mixed step
    of their largest sizes, their inputs, two workspaces, and an allowance for each graph. The runner keeps the block
    tables of its rows.
    Cost:    four forwards; nothing on the CPU, where pages are allocated when they are first written.
    Effects: KV goes to the null block of an arena made for the purpose. The sampler's rows are filled, and what it
             keeps for penalties is allocated now: it need not be found later.
    Errors:  ConfigError if such a step does not fit beside the weights.
    """
    if device.name == "cpu":
        return Footprint()
    tokens = step_tokens(settings, device)
    longest = min(settings.max_model_len or model.max_model_len, model.max_model_len)
    seqs = settings.sequences
    chunk = min(tokens, longest)
    sizes = graph_sizes(seqs) if wants_graphs(settings, model) else ()
    mixed = mixed_sizes(tokens) if sizes else ()
    free = device.free_bytes()
    trial = _FootprintTrial(model, sampler, open_arena(spec, 0, place).kv, device, lane)
    try:
        trial.fill_rows(seqs)
        crowd = trial.peak_bytes(TrialStep(seqs, min(tokens, seqs * longest)))
        prompt = trial.peak_bytes(TrialStep(1, chunk, longest - chunk))
        decode = trial.peak_bytes(TrialStep(sizes[-1], sizes[-1])) if sizes else 0
        small = trial.peak_bytes(_mixed_step(mixed[-1], seqs, longest)) if mixed else 0
    except (RuntimeError, MemoryError) as exc:
        if not is_shortage(exc):
            raise
        raise ConfigError(
            "step.no_memory",
            f"a step of {tokens} tokens and {seqs} sequences, or one at the end of {longest} tokens, does not fit into "
            f"the {show_bytes(free)} that are free beside {show_bytes(model.weights_bytes)} of weights: "
            "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len",
        ) from exc
    finally:
        del trial
        device.give_back_cached()
    max_blocks = -(-longest // spec.block_size)
    graphs = decode + small + _graph_bytes(sizes, mixed, seqs, max_blocks) if sizes else 0
    tables = DeviceTables.open(seqs + 1, max_blocks, torch.device("meta"))
    found = Footprint(max(crowd, prompt), graphs, tables.nbytes)
    log.info(
        "footprint crowd_bytes=%d prompt_bytes=%d decode_bytes=%d mixed_bytes=%d graphs=%d graph_bytes=%d "
        "table_bytes=%d reserved_bytes=%d",
        crowd,
        prompt,
        decode,
        small,
        len(sizes) + len(mixed),
        found.graph_bytes,
        found.table_bytes,
        found.reserved_bytes,
    )
    return found


def _graph_bytes(sizes: tuple[int, ...], mixed: tuple[int, ...], seqs: int, max_blocks: int) -> int:
    """Return the bytes of graphs of decodes and of mixed steps, without the memory that their forwards compute in."""
    meta = torch.device("meta")
    inputs = StaticInputs.open(sizes[-1], max_blocks, meta).nbytes
    inputs += MixedInputs.open(mixed[-1], seqs + 1, max_blocks, meta).nbytes
    return inputs + 2 * _WORKSPACE_BYTES + (len(sizes) + len(mixed)) * _GRAPH_BYTES


class _FootprintTrial:
    """Runs trial steps, without requests."""

    def __init__(self, model: Model, sampler: Sampler, null_block: Tensor, device: Device, lane: Lane) -> None:
        self._model = model
        self._sampler = sampler
        self._null_block = null_block
        self._device = device
        self._lane = lane

    def fill_rows(self, rows: int) -> None:
        """Fill sampler rows with every feature. Memory that this allocates permanently is not part of a step."""

        def fill() -> None:
            for row in range(rows):
                self._sampler.set_row(row, _ALL_FEATURES, pack_tokens([0]), b"", ())

        self._lane.run(fill).result()

    def peak_bytes(self, crowd: TrialStep) -> int:
        """Return the peak of the memory allocated during this step."""
        self._device.give_back_cached()
        self._device.reset_peak()
        self._lane.run(lambda: self._step(crowd)).result()
        return self._device.peak_bytes()

    @torch.inference_mode()
    def _step(self, crowd: TrialStep) -> None:
        ends, block_size = crowd.ends(), self._null_block.shape[2]
        tables = torch.zeros(
            (crowd.seqs, -(-max(ends) // block_size)), dtype=torch.int64, device=self._null_block.device
        )
        state = ForwardState.of_slices(tables, [crowd.start] * crowd.seqs, ends, block_size, writes_null_block=True)
        hidden = self._model.forward(state.positions % self._model.vocab_size, self._null_block, state)
        logits = self._model.logits(hidden[state.device_query_starts[1:].long() - 1])
        # As for rows with grammars, while the step after it runs; or the rows that all graphs write their logits to.
        held = logits.clone()
        self._sampler.sample_no_sync(logits, range(crowd.seqs), ends, [0] * crowd.seqs).to_host_no_sync()
        del held
