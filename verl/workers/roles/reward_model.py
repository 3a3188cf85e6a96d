"""The worker that holds a sequence-classification reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from verl.config import (
    ModelConfig,
    RewardModelConfig,
)
from verl.data.chat import encode, encode_plain, render
from verl.data.images import IMAGE_FIELD, copies_of, image_parts, repeated
from verl.errors import DataError
from verl.models.loading import load_hf_config
from verl.models.vision import ImageTokens
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.tokenizer import load_tokenizer
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.images import prompt_parts, with_images
from verl.workers.roles.base import RoleWorker, measured


class RewardModelWorker(RoleWorker):
    """A sequence-classification model that scores responses.

    The conversation is written with the reward model's own chat template and tokens: its vocabulary and format
    need not be the policy's.

    Args:
        config: the ``reward_model`` section.
        policy_model: model whose tokenizer decodes the policy's responses.
        max_length: longest conversation in the reward model's tokens.
    """

    def __init__(self, config: RewardModelConfig, policy_model: ModelConfig, max_length: int, **runtime: Any) -> None:
        super().__init__(external_lib=config.model.external_lib, **runtime)
        self.config = config
        self.max_length = config.max_length or max_length
        model = config.model
        self.tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        self.image_tokens = ImageTokens.of(load_hf_config(model))
        self.policy_tokenizer = load_tokenizer(
            policy_model.tokenizer_path or policy_model.path, trust_remote_code=policy_model.trust_remote_code
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @measured("load")
    def init_model(self) -> None:
        """Load the model and build the engine. Collective."""
        config = self.config
        self.engine = self.make_engine(config.model, config, None, head="classifier")
        self.engine.build()
        self.join_mesh("reward_model", self.engine)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward_model"))
    @measured("log_prob")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """``rm_scores`` (B,R): the model's score of each conversation, on the last token of the response.

        Args:
            data: ``responses``, ``response_mask`` (B,R), ``attention_mask``, the chat ``raw_prompt`` (B,) and, where
                prompts have images, ``multi_modal_inputs``.

        Raises:
            DataError: a conversation with images is longer than ``max_length``.
        """
        batch = data.batch
        width = batch["responses"].shape[1]
        present = batch["attention_mask"][:, -width:].bool()
        texts = [
            self.policy_tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)
            for row, keep in zip(batch["responses"], present, strict=True)
        ]
        chats = [
            self._chat(prompt, text) for prompt, text in zip(data.non_tensor_batch["raw_prompt"], texts, strict=True)
        ]
        column = list(data.non_tensor_batch.get(IMAGE_FIELD, [None] * len(chats)))
        images = prompt_parts(column, [0 if isinstance(chat, str) else image_parts(chat) for chat in chats])
        rows = with_images(self._tokenize(chats, images), images)
        with self.engine.resident(optimizer=False):
            scores = self.engine.forward(rows, frozenset({"scores"}), micro=MicroBatching(*self.config.micro_batch()))[
                "scores"
            ].cpu()
        rm_scores = torch.zeros_like(present, dtype=torch.float32)
        has_token = batch["response_mask"].bool().any(-1)
        # the last token that the policy itself made; an empty response has none and keeps 0
        last = (batch["response_mask"].bool() * torch.arange(1, width + 1)).argmax(-1)
        scored = torch.nonzero(has_token).flatten()
        rm_scores[scored, last[scored]] = scores[scored]
        return DataProto.from_dict({"rm_scores": rm_scores})

    def _chat(self, prompt: str | list[dict[str, Any]], response: str) -> str | list[dict[str, Any]]:
        """A conversation for the reward model; text where neither model has a chat template."""
        if isinstance(prompt, str):
            if not getattr(self.tokenizer, "chat_template", None):
                return prompt + response
            prompt = [{"role": "user", "content": prompt}]
        return [*prompt, {"role": "assistant", "content": response}]

    def _tokenize(self, chats: Sequence[str | list[dict[str, Any]]], images: list[dict[str, Any] | None]) -> TensorDict:
        """Conversations as left-padded rows; too long ones lose their beginning, since the response is judged."""
        rows = [self._token_ids(chat, shown) for chat, shown in zip(chats, images, strict=True)]
        width = max(map(len, rows))
        input_ids = torch.full((len(rows), width), self.tokenizer.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for i, row in enumerate(rows):
            input_ids[i, width - len(row) :] = torch.tensor(row)
            attention_mask[i, width - len(row) :] = 1
        return TensorDict(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(-1) - 1).clamp_(min=0),
                # every token but the first, which nothing precedes
                "response_mask": attention_mask[:, 1:] * attention_mask[:, :-1],
            },
            batch_size=[len(rows)],
        )

    def _token_ids(self, chat: str | list[dict[str, Any]], images: dict[str, Any] | None) -> list[int]:
        if isinstance(chat, str):
            ids = encode_plain(self.tokenizer, chat)
        else:
            ids = encode(self.tokenizer, render(self.tokenizer, chat, add_generation_prompt=False))
        if images is None:
            return ids[-self.max_length :]
        assert self.image_tokens is not None  # checked at start-up
        counts = self.image_tokens.counts(images["image_grid_thw"].numpy()).tolist()
        ids = repeated(ids, copies_of(ids, self.image_tokens.token_id, counts))
        if len(ids) > self.max_length:
            raise DataError(
                f"a conversation has {len(ids)} tokens of the reward model with those of its images, more than "
                f"reward_model.max_length={self.max_length}, and is not cut; raise it"
            )
        return ids
