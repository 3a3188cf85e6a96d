"""The reference: Transformers' own model in float32 with its plain attention, one row at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from verl.models.loading import language_model_class, quiet_transformers

ENTROPY_WEIGHT = 0.1


class PlainModel:
    """A model directory in plain Transformers.

    The embedding of the padding token gets its gradient like any other: a pad token inside a row is a token.

    Args:
        path: the directory.
        device: of the model.
        allowed: (V,) bool, tokens that may be sampled; None: all.
        trust_remote_code: run code that comes with the model.
    """

    def __init__(
        self, path: str | Path, device: torch.device, allowed: Tensor | None, *, trust_remote_code: bool = False
    ) -> None:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with quiet_transformers():
            self.model: PreTrainedModel
            self.loading: dict[str, Any]
            self.model, self.loading = language_model_class(config).from_pretrained(
                path,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        self.model.to(device).eval()
        self.device = device
        self.adapters: dict[str, Tensor] = {}
        self.scaling = 0.0
        self.columns = None if allowed is None else allowed.nonzero()[:, 0].to(device)
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None
        self._keeps = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def add_adapters(self, adapters: Mapping[str, Tensor], scaling: float) -> None:
        """Add ``scaling * B A`` to the weight of every adapted layer, in float64."""
        self.adapters, self.scaling = dict(adapters), scaling
        weights = dict(self.model.named_parameters())
        with torch.no_grad():
            for layer in adapted_layers(adapters):
                a, b = (adapters[f"{layer}.{part}"].double().to(self.device) for part in ("lora_A", "lora_B"))
                weight = weights[f"{layer}.weight"]
                weight.copy_((weight.double() + scaling * (b @ a)).float())

    def of_adapters(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the adapters by the chain rule, from those of the weights that they were added to."""
        found = {}
        for layer in adapted_layers(self.adapters):
            a, b = (self.adapters[f"{layer}.{part}"].double() for part in ("lora_A", "lora_B"))
            grad = gradients[f"{layer}.weight"].double()
            found[f"{layer}.lora_A"] = (self.scaling * b.T @ grad).float()
            found[f"{layer}.lora_B"] = (self.scaling * grad @ a.T).float()
        return found

    @property
    def not_loaded(self) -> list[str]:
        """Parameters that the files do not give, and tensors of the files that the model does not have."""
        return sorted({*self.loading["missing_keys"], *self.loading["unexpected_keys"]})

    def distributions(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
        """(R, N) log-probabilities before each token of the response, of the N tokens that may be sampled."""
        ids = torch.tensor([[*prompt, *response]], device=self.device)
        kept = {"logits_to_keep": len(response) + 1} if self._keeps else {}
        logits = self.model(input_ids=ids, use_cache=False, **kept).logits[0, -len(response) - 1 : -1].float()
        return torch.log_softmax((logits if self.columns is None else logits[:, self.columns]) / temperature, -1)

    def of_tokens(self, log_p: Tensor, response: Sequence[int]) -> Tensor:
        """(R,) entries of :meth:`distributions` that belong to the response; -inf for what may not be sampled."""
        chosen = torch.tensor(response, device=self.device)
        if self.columns is None:
            return log_p.gather(1, chosen[:, None])[:, 0]
        column = torch.searchsorted(self.columns, chosen).clamp(max=len(self.columns) - 1)
        known = self.columns[column] == chosen
        return torch.where(known, log_p.gather(1, column[:, None])[:, 0], float("-inf"))

    @torch.no_grad()
    def token_log_probs(self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> Tensor:
        """(R,) log-probabilities of the response."""
        return self.of_tokens(self.distributions(prompt, response, temperature), response).cpu()

    def outputs(self, batch: TensorDict, temperature: float) -> dict[str, Tensor]:
        """``log_probs`` and ``entropys`` (B, R) of a batch, 0 where the mask is 0; differentiable."""
        mask = batch["response_mask"].to(self.device) != 0
        found: dict[str, list[Tensor]] = {"log_probs": [], "entropys": []}
        for prompt, response in rows_of(batch):
            log_p = self.distributions(prompt, response, temperature)
            entropy = -(log_p.exp() * log_p).sum(-1)
            for name, value in (("log_probs", self.of_tokens(log_p, response)), ("entropys", entropy)):
                found[name].append(nn.functional.pad(value, (0, mask.shape[1] - len(response))))
        zero = torch.zeros((), device=self.device)
        return {name: torch.where(mask, torch.stack(values), zero) for name, values in found.items()}

    @torch.no_grad()
    def forward(self, batch: TensorDict, temperature: float) -> dict[str, Tensor]:
        """:meth:`outputs` without a graph, on the host."""
        return {name: value.cpu() for name, value in self.outputs(batch, temperature).items()}

    def gradients(self, batch: TensorDict, temperature: float) -> tuple[float, dict[str, Tensor]]:
        """Loss of :func:`probe_loss` and its gradient of every parameter, on the host."""
        self.model.zero_grad(set_to_none=True)
        self.model.requires_grad_(True)
        loss = probe_loss(self.outputs(batch, temperature), batch.to(self.device))
        loss.backward()
        gradients = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).cpu().clone()
            for name, p in self.model.named_parameters()
        }
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach()), gradients


def adapted_layers(adapters: Mapping[str, Tensor]) -> list[str]:
    """Names of the layers that adapter matrices belong to."""
    return sorted({name.rpartition(".")[0] for name in adapters})


def rows_of(batch: TensorDict) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, response) of every row, without padding."""
    room = batch["response_mask"].shape[1]
    present = batch["attention_mask"] != 0
    for ids, real in zip(batch["input_ids"], present, strict=True):
        yield ids[:-room][real[:-room]].tolist(), ids[-room:][real[-room:]].tolist()


def probe_loss(outputs: Mapping[str, Tensor], batch: TensorDict, tokens: int | None = None) -> Tensor:
    """Policy gradient with an entropy bonus, divided by the tokens of the whole batch."""
    mask = batch["response_mask"] != 0
    per_token = -outputs["log_probs"] * batch["advantages"] - ENTROPY_WEIGHT * outputs["entropys"]
    return torch.where(mask, per_token, torch.zeros((), device=per_token.device)).sum() / (tokens or int(mask.sum()))
