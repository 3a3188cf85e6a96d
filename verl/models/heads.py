"""The modules an engine trains: backbone and head behind one ``forward``, so that sharding hooks cover both.

FSDP2 gathers the parameters of a module when its ``forward`` is called. A policy's log-probs need the backbone and
the output embedding, but not the logits that the causal LM's own ``forward`` would return; a wrapper whose
``forward`` goes from tokens to log-probs keeps the output embedding (tied or not) inside the sharded call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.errors import ConfigError
from verl.models.attention import packed_attention
from verl.models.logprobs import LogitTransform, token_log_probs, token_sum_pi_squared
from verl.models.packing import RowLayout
from verl.models.probe import ProbeRow, plain_attention, plain_log_probs
from verl.models.vision import ImageTokens, embed

#: fields that each head can compute
LM_OUTPUTS = frozenset({"log_probs", "entropys", "sum_pi_squared"})
VALUE_OUTPUTS = frozenset({"values"})
CLASSIFIER_OUTPUTS = frozenset({"scores"})
#: field of every head for comparisons with plain Transformers: (B,R), one number for each response token that depends
#: on all of the backbone
PROBE = "probe"


class HeadModel(nn.Module, ABC):
    """A Transformers model as the engine calls it.

    Args:
        model: the whole Transformers model, head included; its parameter names are the exported ones.
    """

    outputs: frozenset[str]

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.image_tokens = ImageTokens.of(model.config)

    @property
    def backbone(self) -> PreTrainedModel:
        """The model without its head."""
        return self.model.base_model

    def hidden_states(self, layout: RowLayout) -> Tensor:
        """(tokens, H) final hidden states of the rows in ``layout``."""
        plan = layout.plan
        if plan is None:
            out = self._run_backbone(layout)
        else:
            before = plan.calls
            with packed_attention(plan):
                out = self._run_backbone(layout)
            if plan.calls == before:
                raise ConfigError(
                    f"{type(self.backbone).__name__} does not use Transformers' attention interface, so rows without "
                    "padding would attend to each other; set model.use_remove_padding=false"
                )
        return out.reshape(-1, out.shape[-1])

    def _run_backbone(self, layout: RowLayout) -> Tensor:
        if self.image_tokens is None:
            given = {"input_ids": layout.input_ids}
        else:
            given = {"inputs_embeds": embed(self.backbone, self.image_tokens, layout.input_ids, layout.images)}
        return self.backbone(
            **given,
            attention_mask=layout.attention_mask,
            position_ids=layout.position_ids,
            use_cache=False,
        ).last_hidden_state

    def hf_named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers under their Transformers names; tied ones once, under the first name."""
        yield from self.model.named_parameters()
        for name, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    yield (f"{name}.{key}" if name else key), buffer

    def forward(
        self, layout: RowLayout | ProbeRow, want: frozenset[str], temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Compute the wanted fields, float32; of a :class:`ProbeRow` :data:`PROBE` in plain Transformers, (R,)."""
        if isinstance(layout, ProbeRow):
            return {PROBE: self.plain_probe(layout)}
        if want == {PROBE}:
            return {PROBE: self.probe(layout)}
        self._check(want)
        return self.compute(layout, want, temperature)

    @abstractmethod
    def compute(self, layout: RowLayout, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        """Compute the wanted fields, float32."""

    def probe(self, layout: RowLayout) -> Tensor:
        """:data:`PROBE` of the rows in ``layout``: here hidden states along a fixed direction."""
        states = self.hidden_states(layout).index_select(0, layout.predict_index)
        return place_results(layout, {PROBE: _along(states)})[PROBE]

    @torch.no_grad()
    def plain_probe(self, row: ProbeRow) -> Tensor:
        """The same for one row in plain Transformers."""
        device = self.backbone.get_input_embeddings().weight.device
        ids = torch.tensor(row.token_ids, device=device)[None]
        with plain_attention(self.model):
            states = self.backbone(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return _along(states.last_hidden_state[0, row.prompt_length - 1 : -1])

    def _check(self, want: frozenset[str]) -> None:
        if not want <= self.outputs:
            raise ConfigError(
                f"{type(self).__name__} computes {sorted(self.outputs)}, not {sorted(want - self.outputs)}"
            )


class PolicyModel(HeadModel):
    """Causal LM: ``log_probs``, ``entropys`` and ``sum_pi_squared`` (B,R) of the response tokens."""

    outputs = LM_OUTPUTS

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigError(f"{type(model).__name__} has no linear output embedding; use a causal language model")
        # Kept out of the module tree: registered twice it would change the parameter names.
        self.__dict__["lm_head"] = head
        self.transform = LogitTransform.of(model)
        self.keep_logits = True  # for the backward pass, where they fit one chunk

    def compute(self, layout: RowLayout, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        states = self.hidden_states(layout).index_select(0, layout.predict_index)
        head = self.__dict__["lm_head"]
        log_probs, entropies = token_log_probs(
            states,
            head.weight,
            head.bias,
            layout.targets,
            temperature=temperature,
            transform=self.transform,
            entropy="entropys" in want,
            keep=self.keep_logits,
        )
        results = {"log_probs": log_probs}
        if entropies is not None:
            results["entropys"] = entropies
        if "sum_pi_squared" in want:
            results["sum_pi_squared"] = token_sum_pi_squared(
                states.detach(), head.weight, head.bias, temperature=temperature, transform=self.transform
            )
        return place_results(layout, results)

    def probe(self, layout: RowLayout) -> Tensor:
        """Log-probabilities: the head's transformation of logits takes part."""
        return self.compute(layout, frozenset({"log_probs"}), 1.0)["log_probs"]

    def plain_probe(self, row: ProbeRow) -> Tensor:
        weight = self.__dict__["lm_head"].weight
        allowed = None
        if self.transform.unsampled is not None:
            allowed = torch.ones(weight.shape[0], dtype=torch.bool)
            allowed[self.transform.unsampled.cpu()] = False
        return plain_log_probs(self.model, [row], device=weight.device, allowed=allowed)[0]


class ValueModel(HeadModel):
    """Critic: ``values`` (B,R), each the value of the state before its response token is chosen."""

    outputs = VALUE_OUTPUTS

    def compute(self, layout: RowLayout, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        states = self.hidden_states(layout).index_select(0, layout.predict_index)
        return place_results(layout, {"values": self.model.score(states)[:, 0].float()})


class ClassifierModel(HeadModel):
    """Reward model: ``scores`` (B,), the head's output at each row's last token; (B, labels) with several labels."""

    outputs = CLASSIFIER_OUTPUTS

    def compute(self, layout: RowLayout, want: frozenset[str], temperature: float) -> dict[str, Tensor]:
        states = self.hidden_states(layout)
        if layout.rows == 0:
            return {"scores": _anchor(self.model.score(states[:1])).expand(0).clone()}
        scores = self.model.score(states.index_select(0, layout.last_index)).float()
        if layout.last_spread is not None:
            scores = layout.last_spread.join(scores)
        return {"scores": scores[:, 0].clone() if scores.shape[1] == 1 else scores}


HEADS: dict[str, type[HeadModel]] = {"lm": PolicyModel, "value": ValueModel, "classifier": ClassifierModel}


def _along(states: Tensor) -> Tensor:
    """(N, H) states to (N,): their parts along a fixed direction, as large as one of their values."""
    direction = torch.randn(states.shape[-1], generator=torch.Generator().manual_seed(0)).to(states.device)
    return states.float() @ (direction / direction.norm())


def place_results(layout: RowLayout, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """(N,) results into (B,R). Without any response token the zeros still hang on the graph."""
    if not layout.empty:
        return {name: layout.scatter(values) for name, values in results.items()}
    # clone: what a sharded module returns must not be a view
    shape = (layout.rows, layout.response_length)
    return {name: _anchor(values).expand(shape).clone() for name, values in results.items()}


def _anchor(values: Tensor) -> Tensor:
    """A zero that depends on ``values`` with a zero gradient.

    Sharded backward passes are collective: a rank without a token must run one too, or the others wait for ever.
    """
    never = torch.zeros((), dtype=torch.bool, device=values.device)
    return torch.where(never, values.float().sum(), torch.zeros((), device=values.device))
