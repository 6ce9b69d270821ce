"""All other decoder-only architectures: the modelling code of transformers on paged attention."""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from tiercel.engine.attention.base import Attention
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.bridge import INTERFACE_NAME, Bridge
from tiercel.engine.models.config import ConfigFields
from tiercel.engine.models.logit_mask import LogitMask
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.probe import check_paged_logits, own_logits, probe_prompts
from tiercel.engine.models.transformers_outline import Outline, distinct_tensors, quiet, translated
from tiercel.engine.models.weights import ContentDigest, Progress, open_checkpoint, stream_tensors
from tiercel.values.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass
class _Body(ModelOutput):
    """The output of a body, with every field that the head of an architecture may read."""

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class HeadOnly(nn.Module):
    """Replaces the body of a model, and returns hidden states that were computed before.

    The architecture's own forward then runs only its head, including its changes to logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    @property
    def decoder(self) -> "HeadOnly":
        """The same object, for architectures that have the body one level deeper."""
        return self

    def forward(self, *_: object, **__: object) -> _Body:
        """Return the hidden states in `hidden`."""
        return _Body(last_hidden_state=self.hidden)


class TransformersModel:
    """A causal language model of transformers; implements `Model`. It replaces the model's body by `HeadOnly`."""

    impl = "transformers"
    products = "torch"
    is_capturable = False

    def __init__(
        self,
        model: PreTrainedModel,
        bridge: Bridge,
        outline: Outline,
        fingerprint: bytes,
        kv: torch.dtype,
    ) -> None:
        calls = outline.calls
        self.layers, self.kv_heads, self.head_dim = len(calls), calls[0].kv_heads, calls[0].head_dim
        self.vocab_size, self.max_model_len = outline.vocab_size, outline.max_model_len
        self.precision = Precision(weights=model.dtype, activations=model.dtype, kv=kv)
        self.fingerprint = fingerprint
        self.logit_mask: LogitMask | None = None  # of ids without a token
        self.weights_bytes = sum(tensor.nbytes for tensor in distinct_tensors(model).values())
        self._bridge = bridge
        self._model = model
        self._body: nn.Module = getattr(model, model.base_model_prefix)
        self._head_only = HeadOnly()
        setattr(model, model.base_model_prefix, self._head_only)

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        """See `Model.forward`."""
        self._bridge.enter(kv, state)
        try:
            out = self._body(input_ids=tokens[None], position_ids=state.positions[None], use_cache=False)
        finally:
            self._bridge.leave()
        return out[0][0]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        self._head_only.hidden = hidden[None]
        try:
            logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0].float()
            return logits if self.logit_mask is None else self.logit_mask.apply_no_sync(logits)
        finally:
            self._head_only.hidden = None


def load_transformers(
    folder: Path,
    fields: ConfigFields,
    outline: Outline,
    precision: Precision,
    device: torch.device,
    attention: Attention,
    progress: Progress | None,
    dummy_seed: int | None = None,
) -> TransformersModel:
    """Build an architecture of transformers on paged attention, and check that it computes the same.

    `outline`: the folder's. `precision`: weights and activations have one type.
    Effects: weights are read from the folder's safetensors, or drawn at random if `dummy_seed` is given.
    Errors:  ConfigError if the weights do not fit, or the architecture computes something else on a paged cache.
    """
    bridge, dtype, config = Bridge(attention), precision.weights, outline.config
    bridge.register()
    with quiet(), torch.no_grad():
        if dummy_seed is None:
            model = _read_model(folder, config, dtype, progress)
        else:
            model = _draw_model(config, dtype, dummy_seed)
        digest = ContentDigest(
            {
                "implementation": TransformersModel.impl,
                "config": config.to_json_string(),
                "types": precision.facts,
                "dummy_seed": dummy_seed,
            }
        )
        for name, tensor in distinct_tensors(model).items():
            digest.add(name, tensor)
        nn.Module.to(model, device)
        model.eval().requires_grad_(False)
        bridge.attach(model)
        prompts = probe_prompts(model.config.get_text_config().vocab_size, model.device)
        with translated(f"{fields.source}: architectures: {outline.architecture} cannot be called this way"):
            expected = own_logits(model, prompts)
            paged = TransformersModel(model, bridge, outline, digest.finish(), precision.kv)
            check_paged_logits(paged, prompts, expected)
        return paged


def _read_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, progress: Progress | None
) -> PreTrainedModel:
    checkpoint = open_checkpoint(folder)
    total = sum(path.stat().st_size for path, _ in checkpoint.shards)
    stored = {tensor.dtype for _, _, tensor in stream_tensors(checkpoint)}  # reads the headers only
    if progress is not None:
        progress(0, total)
    with translated(f"{folder}: the weights cannot be loaded"):
        loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=INTERFACE_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported, and rejected below
            output_loading_info=True,
        )
    model, report = cast(tuple[PreTrainedModel, dict[str, Collection[object]]], loaded)
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise ConfigError("weights.wrong", f"{folder}: {kind.replace('_', ' ')}: {min(map(str, report[kind]))}")
    if unused := report.get("unexpected_keys"):  # old checkpoints store buffers that are computed now
        log.warning("weights unused tensors=%d first=%s", len(unused), min(map(str, unused)))
    if progress is not None:
        progress(total, total)
    _own_memory(model, stored)
    return model


def _draw_model(config: PretrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with translated(f"{config.model_type} cannot be built"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=INTERFACE_NAME)


def _own_memory(model: PreTrainedModel, stored: set[torch.dtype]) -> None:
    """Copy tensors out of the mapped files, one at a time, because the folder may change while serving.

    Only tensors whose dtype was not changed are mapped; the others were copied when they were cast.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in stored:
            tensor.data = tensor.data.clone()
