"""The fields of a batch: one table, and the check that a stage finds what it reads.

A stage of the training step adds fields and never rewrites one, so the table can say of every field who makes it.
Shapes are written in symbols: B rows, P prompt tokens, R response tokens, S = P + R tokens of a whole sequence.

The module reads a batch through ``batch`` and ``non_tensor_batch``, or as a plain mapping, and imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.errors import SchemaError

T = TypeVar("T")

#: dtypes of masks: whole numbers, or truth values
MASK = ("int64", "int32", "int8", "uint8", "bool")
INT = ("int64",)
FLOAT = ("float32",)
OBJECT = ("object",)


@dataclass(frozen=True)
class Field:
    """One field of the batch.

    Attributes:
        name: its name.
        shape: a symbol or a number for each dimension.
        dtypes: accepted dtypes, without the ``torch.`` prefix; ``object`` for per-row Python objects.
        made_by: the stage that makes it.
        read_by: who reads it.
        doc: what it holds.
    """

    name: str
    shape: tuple[str | int, ...]
    dtypes: tuple[str, ...]
    made_by: str
    read_by: str
    doc: str

    @property
    def shape_text(self) -> str:
        """The shape as documentation writes it."""
        return f"({', '.join(map(str, self.shape))}{',' if len(self.shape) == 1 else ''})"


_ROW = ("B",)
_RESPONSE = ("B", "R")
_TABLE = (
    Field("prompts", ("B", "P"), INT, "source", "rewards, metrics", "Prompt token ids, padded on the left."),
    Field("responses", _RESPONSE, INT, "source", "all", "Response token ids, padded on the right."),
    Field("input_ids", ("B", "S"), INT, "source", "engines", "Prompt and response token ids; S = P + R."),
    Field("attention_mask", ("B", "S"), MASK, "source", "engines, metrics", "1 for tokens, 0 for padding."),
    Field(
        "position_ids", ("B", "S"), INT, "source", "engines", "Position of each token, counted from the first real one."
    ),
    Field(
        "response_mask",
        _RESPONSE,
        (*MASK, "float32"),
        "source",
        "losses, advantages, metrics",
        "1 where the policy sampled the token; 0 for tool output and padding. Made from lengths, not from token ids.",
    ),
    Field(
        "rollout_log_probs",
        _RESPONSE,
        FLOAT,
        "rollout",
        "rollout correction, bypass mode",
        "Log-probability of each token under the distribution it was sampled from (temperature, top-p, top-k applied).",
    ),
    Field(
        "policy_version",
        ("B", 2),
        ("int32",),
        "rollout",
        "sources, metrics",
        "Oldest and newest weights that sampled a row.",
    ),
    Field(
        "token_versions",
        _RESPONSE,
        ("int32",),
        "agent loop",
        "metrics",
        "Weights that sampled each token; -1 where none was sampled.",
    ),
    Field("overlong", _ROW, ("bool",), "rollout", "updates, metrics", "Whether a length limit cut a response off."),
    Field("born_step", _ROW, INT, "source", "rollout", "Step that began a sample; its seed derives from it."),
    Field("must_finish", _ROW, ("bool",), "source", "agent loop", "Whether generation waits for a row in any case."),
    Field("unfinished", _ROW, ("bool",), "agent loop", "source", "Whether a trajectory was stopped before its end."),
    Field(
        "sample_index",
        _ROW,
        INT,
        "source",
        "rollout, mini-batches",
        "Place of the sample in the whole batch; its seed derives from it.",
    ),
    Field(
        "trajectory", _ROW, INT, "trainer", "mini-batches", "Trajectory of a row, where it may have several; -1: none."
    ),
    Field("last_row", _ROW, ("bool",), "trainer", "metrics", "Whether a row is the last one of its trajectory."),
    Field("greedy", _ROW, ("bool",), "source", "rollout", "Whether a row gets the most probable tokens (ReMax)."),
    Field("has_score", _ROW, ("bool",), "reward", "sources, metrics", "False where the reward function abstained."),
    Field(
        "token_level_scores",
        _RESPONSE,
        FLOAT,
        "reward",
        "reward shaping, metrics",
        "Score of the response, on its last valid token.",
    ),
    Field(
        "rm_scores", _RESPONSE, FLOAT, "reward model", "reward", "Score of the reward model, on the last valid token."
    ),
    Field(
        "token_level_rewards",
        _RESPONSE,
        FLOAT,
        "reward shaping",
        "advantages, metrics",
        "Scores, less the KL penalty where it is part of the reward.",
    ),
    Field(
        "sum_pi_squared",
        _RESPONSE,
        FLOAT,
        "actor",
        "advantages",
        "Sum of the squared probabilities of all tokens at each place; only for estimators that use it.",
    ),
    Field(
        "old_log_probs",
        _RESPONSE,
        FLOAT,
        "actor",
        "policy loss, KL, metrics",
        "Log-probabilities of the policy before this step's updates.",
    ),
    Field(
        "entropys", _RESPONSE, FLOAT, "actor", "metrics", "Entropy of the policy's distribution at each token, in nats."
    ),
    Field("ref_log_prob", _RESPONSE, FLOAT, "ref", "KL in reward or loss", "Log-probabilities of the reference model."),
    Field("values", _RESPONSE, FLOAT, "critic", "GAE, value loss, metrics", "Value before each response token."),
    Field("rm_ref_log_prob", _RESPONSE, FLOAT, "process reward", "process reward", "Reference of the reward model."),
    Field("outcomes", _ROW, FLOAT, "reward", "process reward", "Whether a response is right, 0 to 1."),
    Field("process_rewards", _RESPONSE, FLOAT, "process reward", "PRIME", "Reward of each token."),
    Field(
        "turn_scores",
        _RESPONSE,
        FLOAT,
        "agent loop",
        "reward",
        "Scores of single turns, on each turn's last token; added to the response's.",
    ),
    Field("aborted", _ROW, ("bool",), "agent loop", "reward", "Whether a trajectory was given up and has no result."),
    Field("reward_baselines", _ROW, FLOAT, "source", "ReMax", "Reward of the greedy response to the same prompt."),
    Field(
        "rollout_is_weights",
        _RESPONSE,
        FLOAT,
        "rollout correction",
        "policy loss",
        "Importance weights from the rollout's to the training distribution.",
    ),
    Field(
        "rollout_accepted",
        _RESPONSE,
        ("bool",),
        "rollout correction",
        "update of the actor",
        "Response tokens that take part in the policy update.",
    ),
    Field("advantages", _RESPONSE, FLOAT, "estimator", "policy loss, metrics", "Advantage of each token."),
    Field("returns", _RESPONSE, FLOAT, "estimator", "value loss, metrics", "Target of the value function."),
    Field("uid", _ROW, OBJECT, "source", "group estimators", "Text that a prompt's samples have in common."),
    Field("data_source", _ROW, OBJECT, "data", "reward, validation", "Name of the data set, which selects the scorer."),
    Field("ability", _ROW, OBJECT, "data", "reward", "Kind of task."),
    Field("reward_model", _ROW, OBJECT, "data", "reward", "Style of the reward and the ground truth."),
    Field("extra_info", _ROW, OBJECT, "data", "reward, agent loop", "Anything else that the data says of a row."),
    Field("index", _ROW, OBJECT, "data set", "agent loop", "Number of the row, or the one that extra_info gives."),
    Field("raw_prompt", _ROW, OBJECT, "data set", "agent loop", "The chat messages of the prompt."),
    Field("raw_prompt_ids", _ROW, OBJECT, "data set", "rollout servers", "The prompt's token ids without padding."),
    Field("agent_name", _ROW, OBJECT, "data", "agent loop", "Agent loop that handles the row."),
    Field("tools_kwargs", _ROW, OBJECT, "data set", "agent loop", "Arguments for the row's tools."),
    Field("interaction_kwargs", _ROW, OBJECT, "data set", "agent loop", "Arguments for the row's user or environment."),
    Field("__num_turns__", _ROW, OBJECT, "agent loop", "reward, metrics", "Turns of a conversation, both sides."),
    Field("tool_call_counts", _ROW, OBJECT, "agent loop", "metrics", "Tool calls of a conversation."),
    Field("agent_info", _ROW, OBJECT, "agent loop", "metrics", "Times, counts and failures of a trajectory."),
    Field("earlier_rows", _ROW, OBJECT, "agent loop", "trainer", "Rows of a trajectory before its last one."),
    Field("carried", _ROW, OBJECT, "agent loop", "agent loop", "What a trajectory that was stopped has said so far."),
    Field("state_hashes", _ROW, OBJECT, "agent loop", "GiGPO", "State in which each turn was taken."),
    Field("tool_rewards", _ROW, OBJECT, "agent loop", "reward", "What tools gave for turns and the trajectory."),
    Field("player", _ROW, OBJECT, "agent loop", "reward, metrics", "Whose row it is, of several players."),
    Field("interaction_rewards", _ROW, OBJECT, "agent loop", "reward", "What a user or environment gave for turns."),
    Field("multi_modal_inputs", _ROW, OBJECT, "data set", "rollout, engines", "Processed images of the row, or None."),
)

#: every field of the batch by name
FIELDS: Mapping[str, Field] = {field.name: field for field in _TABLE}

#: the stage whose fields are columns of data files
_FROM_FILES = "data"

#: column with the images of prompts
IMAGE_FIELD = "multi_modal_inputs"

# columns that two stages share and that no other one sees
SAMPLES = "__samples__"
SCORE_OUTCOME = "score_outcome"
#: begins the columns with what a reward function reports besides the score
REPORTED_PREFIX = "reward_"

#: columns in which pandas stores the labels of rows, after a filter for example; no program reads them
_ROW_LABELS = re.compile(r"__index_level_\d+__")

#: columns that are no fields, with what they hold
PRIVATE: Mapping[str, str] = {
    SAMPLES: "what agent loops return",
    SCORE_OUTCOME: "scores of agent loops",
}


def reserved_for(name: str) -> str | None:
    """What the run itself keeps in a column of this name, so that no data file can have one; None: the name is free."""
    field = FIELDS.get(name)
    if field is not None:
        return None if field.made_by == _FROM_FILES else f"made by {field.made_by}: {field.doc.rstrip('.')}"
    if name in PRIVATE:
        return PRIVATE[name]
    if name.startswith("__") and not _ROW_LABELS.fullmatch(name):
        return "values of the run, whose names begin with two underscores"
    if name.startswith(REPORTED_PREFIX):
        return f"what the reward function reports as {name.removeprefix(REPORTED_PREFIX)!r}"
    return None


_SEQUENCE = ("input_ids", "attention_mask", "position_ids")
_ROLLOUT = ("prompts", "responses", *_SEQUENCE, "response_mask")
_LOSS = (*_SEQUENCE, "response_mask")

#: stage -> the fields that it reads in any configuration; workers are sent these, and what the configuration adds
STAGES: Mapping[str, tuple[str, ...]] = {
    # prompts alone: the sequence is the prompt, and S stands for its length
    "prompts": _SEQUENCE,
    "rollout": _ROLLOUT,
    "reward": ("prompts", "responses", "attention_mask", "response_mask"),
    "rm_score": ("responses", "attention_mask", "response_mask", "raw_prompt"),
    "log_prob": _LOSS,
    "values": _LOSS,
    "advantage": ("token_level_rewards", "response_mask"),
    "update_actor": (*_LOSS, "advantages"),
    "update_critic": (*_LOSS, "values", "returns"),
    "process_rewards": (*_LOSS, "rm_ref_log_prob"),
    "update_reward_model": (*_LOSS, "rm_ref_log_prob", "outcomes"),
}

#: columns that the workers of a stage read where a batch has them
OPTIONAL_COLUMNS: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("rm_score", "log_prob", "values", "update_actor", "update_critic", "process_rewards", "update_reward_model"),
    ("multi_modal_inputs",),
)


def check_batch(batch: T, stage: str, require: Iterable[str] = ()) -> T:
    """Check that a batch is what ``stage`` reads, and return it.

    Looks for missing fields, and at the shape and dtype of every field of the table that is there, needed or not;
    fields that the table does not know are left alone.

    Args:
        batch: a ``DataProto``, or a mapping of names to tensors and arrays.
        stage: a name of :data:`STAGES`.
        require: fields that this configuration reads besides, such as the parameters of its advantage estimator.

    Raises:
        SchemaError: with every problem, one a line.
    """
    if stage not in STAGES:
        raise SchemaError(f"unknown stage {stage!r}; the stages are {', '.join(STAGES)}")
    values = _values(batch)
    needed = dict.fromkeys([*STAGES[stage], *require])
    problems = [_missing(name) for name in needed if name not in values]
    problems += _wrong(values)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise SchemaError(f"the batch does not fit stage {stage!r}:\n{lines}")
    return batch


def _values(batch: Any) -> dict[str, Any]:
    if hasattr(batch, "non_tensor_batch"):
        tensors = {} if batch.batch is None else dict(batch.batch.items())
        return {**tensors, **batch.non_tensor_batch}
    return dict(batch.items())


def _missing(name: str) -> str:
    field = FIELDS.get(name)
    if field is None:
        return f"{name!r} is missing; it is not a field of the schema, so the run itself must add it"
    return f"{name!r} {field.shape_text} is missing; it is made by: {field.made_by}"


def _wrong(values: Mapping[str, Any]) -> list[str]:
    """Problems of the known fields that are there, in the order of the table."""
    problems: list[str] = []
    sizes: dict[str, tuple[int, str]] = {}  # symbol -> its size and the field that said so first
    for field in _TABLE:
        if field.name not in values:
            continue
        value = values[field.name]
        dtype = str(value.dtype).removeprefix("torch.")
        # a column of numbers is as good as a column of objects
        if dtype not in field.dtypes and field.dtypes != OBJECT:
            problems.append(f"{field.name!r} has dtype {dtype}, expected {' or '.join(field.dtypes)}")
        shape = tuple(value.shape)
        if len(shape) != len(field.shape):
            if field.dtypes == OBJECT and len(shape) > 1:
                continue  # equal-length rows may have become columns
            problems.append(f"{field.name!r} has shape {shape}, expected {field.shape_text}{_bound(field, sizes)}")
            continue
        for symbol, size in zip(field.shape, shape, strict=True):
            if isinstance(symbol, int):
                if size != symbol:
                    problems.append(f"{field.name!r} has shape {shape}, expected {field.shape_text}")
                continue
            known, source = sizes.setdefault(symbol, (size, field.name))
            if size != known:
                problems.append(
                    f"{field.name!r} has shape {shape}, expected {field.shape_text} "
                    f"with {symbol}={known} as in {source!r}"
                )
    if {"P", "R", "S"} <= sizes.keys() and sizes["S"][0] != sizes["P"][0] + sizes["R"][0]:
        (prompt, of_p), (response, of_r), (whole, of_s) = (sizes[symbol] for symbol in "PRS")
        problems.append(
            f"{of_s!r} has S={whole} columns, expected P + R = {prompt} + {response} = {prompt + response} "
            f"from {of_p!r} and {of_r!r}"
        )
    return problems


def _bound(field: Field, sizes: Mapping[str, tuple[int, str]]) -> str:
    known = [f"{symbol}={sizes[symbol][0]}" for symbol in field.shape if isinstance(symbol, str) and symbol in sizes]
    return f" with {', '.join(known)}" if known else ""
