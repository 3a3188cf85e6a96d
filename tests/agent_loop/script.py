"""A generator that says what a script tells it, and what the tests of agent loops share."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.fixtures.tiny import make_tokenizer
from verl.agent_loop.batch import Row
from verl.agent_loop.runner import AgentLoopRunner
from verl.config import AgentConfig, MultiTurnConfig, RolloutConfig
from verl.protocol import DataProto
from verl.trajectories import Sample
from verl.trajectories.batch import Layout, from_envelope, join_samples, to_envelope
from verl.utils.arrays import object_array
from verl.utils.transport import pack
from verl.workers.rollout.types import Completion, GenerationRequest

TOKENIZER = make_tokenizer(4096)

#: what the model says, given the text of everything so far; an exception is raised
Script = Callable[[str], Any]


class Scripted:
    """Answers requests by a script; ``requests`` are what it was asked."""

    def __init__(self, script: Script, *, seconds: float = 0.0) -> None:
        self.script = script
        self.seconds = seconds
        self.requests: list[GenerationRequest] = []
        self.sessions: list[str | None] = []

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        self.requests.append(request)
        self.sessions.append(session)
        await asyncio.sleep(self.seconds)
        said = self.script(TOKENIZER.decode(request.prompt_ids))
        if isinstance(said, BaseException):
            raise said
        if isinstance(said, Completion):
            return said
        ids = ids_of(said)
        reason = "stop" if ids[-1] == TOKENIZER.eos_token_id else "length"
        kept = ids[: request.sampling.max_tokens]
        return Completion(kept, [-0.1] * len(kept), "length" if len(kept) < len(ids) else reason, 4)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def config(
    *, multi_turn: dict[str, Any] | None = None, agent: dict[str, Any] | None = None, **rollout: Any
) -> RolloutConfig:
    sizes = {"prompt_length": 400, "response_length": 600, **rollout}
    return RolloutConfig(
        multi_turn=MultiTurnConfig(**{"enable": True, **(multi_turn or {})}),
        agent=AgentConfig(**(agent or {})),
        **sizes,
    )


def row(name: str = "one", content: str = "go", **fields: Any) -> Row:
    messages = [{"role": "user", "content": content}]
    given = {"raw_prompt": messages, "raw_prompt_ids": ids_of(f"<|user|>{content}<|end|><|assistant|>"), **fields}
    return Row(name, {"temperature": 1.0, "seed": 5}, given)


def run(
    runner: AgentLoopRunner, script: Script | Scripted, rows: Sequence[Row] | None = None, **facts: Any
) -> list[Sample]:
    generator = script if isinstance(script, Scripted) else Scripted(script)
    return asyncio.run(runner.run(rows or [row()], generator, facts=facts))


def text_of(sample: Sample) -> str:
    return TOKENIZER.decode(sample.trajectory.last.response_ids)


def batch_of(
    samples: Sequence[Sample],
    *,
    prompt_length: int,
    response_length: int,
    uids: Sequence[str] | None = None,
    **more: Any,
) -> DataProto:
    """What the trainer makes of samples, which begin with number 5 of a step."""
    names = [str(number) for number in range(len(samples))] if uids is None else list(uids)
    rows = DataProto.from_dict({"sample_index": torch.arange(5, 5 + len(samples))}, {"uid": object_array(names)})
    rows.non_tensor_batch.update(more.pop("columns", {}))
    sent = pickle.loads(pickle.dumps(pack(to_envelope(samples, Layout(prompt_length, response_length, 0, **more)))))
    return join_samples(rows, *from_envelope(sent))
