"""Runs the trajectories of a batch at the same time, in one process."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.agent_loop.base import (
    AgentContext,
    AgentLoopBase,
    AgentLoopOutput,
    GenerationAborted,
    LoopSpec,
    TokenGenerator,
    find_loop,
    read_agent_loops,
)
from verl.agent_loop.batch import CUT_OFF, Row, rows_from_batch
from verl.agent_loop.conversation import HistoryRewritten
from verl.agent_loop.partial_rollouts import CompletionRecorder, CutOff, RecordedCompletion
from verl.agent_loop.trace import SpanExporter, Trace, TraceWriter
from verl.data.images import ImageReader
from verl.errors import ConfigError, DataError, LostProcessError, RolloutError, ScoreError
from verl.interactions.base import load_interactions
from verl.rewards.outcome import checked_score
from verl.tools.loading import load_tools
from verl.tools.toolbox import ToolLimits
from verl.trajectories import Sample
from verl.trajectories.batch import PLAYER, Layout, empty_last_segment, to_envelope
from verl.utils.telling import BOUNDARY
from verl.utils.tokenizer import load_processor, load_tokenizer
from verl.workers.rollout.types import Completion, GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import AgentConfig, ModelConfig, RolloutConfig
    from verl.protocol import DataProto
    from verl.tools.base_tool import BaseTool

logger = logging.getLogger(__name__)

#: fewest and most pixels of an image, ``data.image_min_pixels`` and ``image_max_pixels``
ImageLimits = tuple[int | None, int | None]

#: how long a trajectory that is given up may take to clean up
_GRACE_S = 30.0
#: characters of an error's traceback that travel with the batch
_MAX_ERROR = 4000
_FACTS = ("uid", "sample_index", "index", "data_source")


class AgentLoopRunner:
    """The agent loops and tools of a run.

    Args:
        config: the ``rollout`` section.
        tokenizer: the policy's tokenizer.
        template_kwargs: ``data.apply_chat_template_kwargs``.
        tools: by name; None loads those that the configuration names.
        name: of this process among those that run agent loops, for the file of traces.
        image_reader: opens images as the policy reads them; None where it reads none.

    Raises:
        ConfigError: an agent loop, tool or format does not exist or cannot work with this tokenizer.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Mapping[str, BaseTool] | None = None,
        name: str = "0",
        image_reader: ImageReader | None = None,
    ) -> None:
        self.image_reader = image_reader
        multi_turn = config.multi_turn
        self.config = config
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        if tools is None:
            tools = load_tools(multi_turn.tool_config_path, multi_turn.function_tool_path)
        self.tools = dict(tools)
        self.interactions = load_interactions(multi_turn.interaction_config_path)
        self.loops = read_agent_loops(config.agent.agent_loop_config_path)
        self.default = config.agent_loop or "single_turn_agent"
        self._checked: set[str] = set()
        self._loop(self.default)
        self.limits = ToolLimits(
            timeout_s=multi_turn.tool_timeout_s,
            max_length=multi_turn.max_tool_response_length,
            truncate_side=multi_turn.tool_response_truncate_side,
        )
        self.writer = TraceWriter(config.agent.trace_dir, name) if config.agent.trace_dir else None
        self.spans = SpanExporter() if config.agent.opentelemetry else None

    async def run(
        self,
        rows: Sequence[Row],
        generator: TokenGenerator,
        *,
        facts: Mapping[str, Any] | None = None,
        cut: CutOff | None = None,
    ) -> list[Sample]:
        """Run one trajectory for each row.

        Args:
            rows: what to do.
            generator: samples tokens; it can also ``abort`` requests where there is a ``cut``.
            facts: what traces say of all of them, for example the step.
            cut: stops the trajectories that the step does not wait for; None: all run to their end.

        Raises:
            ConfigError: a row names an agent loop that does not exist.
            LostProcessError: no rollout server is there to sample from.
        """
        specs = [self._loop_of(row) for row in rows]
        meter = _Meter(generator)
        places = asyncio.Semaphore(self.config.agent.max_concurrent)

        async def one(number: int, row: Row, spec: LoopSpec) -> Sample:
            if row.ended:
                sample = self._without_result(spec, row)
            else:
                async with places:
                    sample = await self._one(number, row, spec, meter, facts or {}, cut)
            if cut is not None and sample.unfinished is None:
                cut.ended(number)
            return sample

        stopping = None if cut is None else asyncio.ensure_future(cut.enforce(meter))
        try:
            ended = await asyncio.gather(
                *(one(number, row, spec) for number, (row, spec) in enumerate(zip(rows, specs, strict=True)))
            )
        finally:
            if stopping is not None and not stopping.cancel():
                stopping.result()  # stopping may have failed
        idle = meter.idle_fraction()
        for sample in ended:
            sample.info["engine_idle_fraction"] = idle
        return list(ended)

    async def respond(
        self, prompts: DataProto, generator: TokenGenerator, *, seed: int, pad_token_id: int
    ) -> DataProto:
        """Run one trajectory for each row of a batch.

        Args:
            prompts: ``input_ids``, ``attention_mask`` (B,P) left-padded, ``sample_index`` (B,) and the columns
                :data:`~verl.agent_loop.batch.ROW_FIELDS`; ``meta_info`` holds ``step`` and ``validate``. Where it holds
                :data:`~verl.agent_loop.batch.CUT_OFF`, generation ends when this part of the rows has its share of
                complete groups; ``must_finish`` (B,) bool then names rows that are waited for in any case.
            generator: samples tokens.
            seed: seed of the run.
            pad_token_id: fills prompts and responses.

        Returns:
            The samples as :func:`~verl.trajectories.batch.to_envelope` packs them.
        """
        step, validate = prompts.meta_info["step"], prompts.meta_info.get("validate", False)
        rows = rows_from_batch(prompts, self.config, seed=seed, step=step, validate=validate)
        cut = _cut_off(prompts)
        samples = await self.run(rows, generator, facts={"step": step, "validate": validate}, cut=cut)
        layout = Layout(
            prompt_length=self.config.prompt_length,
            response_length=self.config.response_length,
            pad_token_id=pad_token_id,
            max_failed_fraction=self.config.agent.max_failed_fraction,
            forks=self.config.multi_turn.on_history_rewrite == "fork",
        )
        return to_envelope(samples, layout)

    def close(self) -> None:
        """Let every tool give back what it holds."""
        for tool in self.tools.values():
            tool.close()

    def _loop_of(self, row: Row) -> LoopSpec:
        name = str(row.fields.get("agent_name") or self.default)
        spec = self._loop(name)
        if row.fields.get("images") is not None and not getattr(spec.cls, "reads_images", False):
            raise ConfigError(
                f"agent loop {name!r} reads text alone and trajectory {row.session} has images; use a loop that reads "
                "them (single_turn_agent, tool_agent, or your own with reads_images = True), or leave the images out"
            )
        return spec

    def _loop(self, name: str) -> LoopSpec:
        spec = find_loop(name, self.loops)
        if name not in self._checked:
            check = getattr(spec.cls, "check", None)
            if check is not None:
                check(self.config, self.tokenizer)
            self._checked.add(name)
        return spec

    async def _one(
        self,
        number: int,
        row: Row,
        spec: LoopSpec,
        generator: _Meter,
        facts: Mapping[str, Any],
        cut: CutOff | None,
    ) -> Sample:
        """Run a trajectory to its end, or until the cut-off."""
        if cut is not None and cut.reached:
            return self._without_result(spec, row, row.recorded)
        about = {name: row.fields[name] for name in _FACTS if row.fields.get(name) is not None}
        trace = Trace(row.session, {**facts, **about, "agent": getattr(spec.cls, "__name__", str(spec.cls))})
        recorder = None if cut is None else CompletionRecorder(generator, row.recorded, cut, trace)
        context = AgentContext(
            config=self.config,
            tokenizer=self.tokenizer,
            generator=generator if recorder is None else recorder,
            session=row.session,
            trace=trace,
            tools=self.tools,
            tool_limits=self.limits,
            interactions=self.interactions,
            template_kwargs=self.template_kwargs,
            image_reader=self.image_reader,
        )
        aborted, why = None, ""
        outputs = self._nothing(spec, row)
        task = asyncio.ensure_future(_run(spec, context, row))
        if cut is not None and recorder is not None:
            cut.began(number, recorder, task)
        limit = self.config.agent.timeout_s
        try:
            ends: set[asyncio.Future[Any]] = {task} if recorder is None else {task, recorder.given_up}
            done, _ = await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if done and recorder is not None and recorder.stopped:
                _ = not task.done() or task.cancelled() or task.exception()  # which is only the echo
                return self._without_result(spec, row, recorder.recorded)
            if done:
                outputs = task.result()
            else:
                task.cancel()
                await asyncio.wait({task}, timeout=_GRACE_S)
                aborted, why = "timeout", f"it did not end within rollout.agent.timeout_s={limit:g} s"
        except (ConfigError, LostProcessError):  # no fault of this sample
            raise
        except asyncio.CancelledError:
            task.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - one sample; counted, and an error when there are many
            aborted, why = _reason(error), "".join(traceback.format_exception(error))
            logger.warning("trajectory %s was aborted (%s): %s: %s", row.session, aborted, type(error).__name__, error)
        if forks := sum(len(output.earlier) for output in outputs):
            trace.counts["forked_rows"] += forks
        trace.finish(aborted)
        self._record(trace, outputs, why)
        filler = AgentLoopBase.nothing(self.config, row.fields["raw_prompt_ids"])
        made = [*outputs, *filler * (self.config.rows_per_sample - len(outputs))]
        told = {"error": why[-_MAX_ERROR:]} if why else {}
        info = {**outputs[0].metrics, **trace.summary(), **told}
        return Sample([output.trajectory() for output in made], info, aborted)

    def _nothing(self, spec: LoopSpec, row: Row) -> list[AgentLoopOutput]:
        """The rows of a trajectory without a result."""
        make = getattr(spec.cls, "nothing", AgentLoopBase.nothing)
        return list(make(self.config, row.fields["raw_prompt_ids"]))

    def _without_result(self, spec: LoopSpec, row: Row, recorded: Sequence[RecordedCompletion] | None = None) -> Sample:
        """A sample that has its result in another step; with what the model has said if it is still to be finished."""
        said = None if recorded is None else [one.to_plain() for one in recorded]
        return Sample([output.trajectory() for output in self._nothing(spec, row)], unfinished=said)

    def _described(self, output: AgentLoopOutput) -> dict[str, Any]:
        return {
            "prompt_tokens": len(output.prompt_ids),
            "response_tokens": len(output.response_ids),
            "sampled_tokens": sum(output.response_mask),
            "num_turns": output.num_turns,
            "policy_versions": output.policy_versions,
            "reward_score": output.reward_score,
            "turn_scores": output.extra_fields.get("turn_scores"),
            "tool_rewards": output.extra_fields.get("tool_rewards"),
            "response": self.tokenizer.decode(output.response_ids),
        }

    def _record(self, trace: Trace, outputs: Sequence[AgentLoopOutput], why: str) -> None:
        """Write the trace down; a trace that is lost is counted in it."""
        with BOUNDARY.guard(
            "traces", f"recording trajectories (rollout.agent.trace_dir={self.config.agent.trace_dir})"
        ) as written:
            self._write(trace, outputs, why)
        with BOUNDARY.guard("spans", "sending spans (rollout.agent.opentelemetry)") as sent:
            if self.spans is not None:
                self.spans.export(trace)
        if written.failed or sent.failed:
            trace.count("trace_failures")

    def _write(self, trace: Trace, outputs: Sequence[AgentLoopOutput], why: str) -> None:
        if self.writer is not None:
            more = self._described(outputs[0])
            if len(outputs) > 1:
                more["rows"] = [
                    {"player": output.extra_fields.get(PLAYER), **self._described(output)} for output in outputs
                ]
            self.writer.write(trace.record(**more, **({"error": why} if why else {})))


def _cut_off(prompts: DataProto) -> CutOff | None:
    """When to end the generation of a part of a batch; None where nothing says so."""
    settings = prompts.meta_info.get(CUT_OFF)
    if settings is None:
        return None
    size = settings["group_size"]
    share = math.ceil(len(prompts) // size * settings["keep"] / settings["groups"])
    return CutOff(prompts.batch["must_finish"].tolist(), size, share)


def longest_run_s(agent: AgentConfig, rows: int, *, stops: bool = False) -> float | None:
    """Seconds within which :meth:`AgentLoopRunner.run` ends with ``rows`` rows; None where nothing limits them.

    Args:
        stops: some may be stopped, which takes time too.
    """
    if agent.timeout_s is None:
        return None
    return math.ceil(rows / agent.max_concurrent) * (agent.timeout_s + _GRACE_S) + (_GRACE_S if stops else 0.0)


def build_runner(
    model: ModelConfig,
    rollout: RolloutConfig,
    template_kwargs: Mapping[str, Any],
    *,
    name: str,
    image_limits: ImageLimits | None = None,
) -> AgentLoopRunner:
    """The runner of a process, with the policy's tokenizer and, unless ``image_limits`` is None, its image reader."""
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    reader = None
    if image_limits is not None:
        processor = load_processor(str(model.path), model.trust_remote_code)
        if hasattr(processor, "image_processor"):
            reader = ImageReader(processor, min_pixels=image_limits[0], max_pixels=image_limits[1])
    return AgentLoopRunner(rollout, tokenizer, template_kwargs=template_kwargs, name=name, image_reader=reader)


async def _run(spec: LoopSpec, context: AgentContext, row: Row) -> list[AgentLoopOutput]:
    result: Any = await spec.build(context).run(dict(row.sampling_params), **row.fields)
    outputs = list(result) if isinstance(result, list | tuple) else [result]
    most = context.config.rows_per_sample
    if not 1 <= len(outputs) <= most:
        raise RolloutError(
            f"the agent loop returned {len(outputs)} rows; between 1 and rollout.agent.rows_per_sample={most} are used"
        )
    for output in outputs:
        _check(output, context.config)
        _check_scores(output, getattr(spec.cls, "__name__", str(spec.cls)))
    return outputs


def _check_scores(output: AgentLoopOutput, loop: str) -> None:
    """Raise :class:`ScoreError` for a score that is no finite number, whatever part of the loop made it."""
    if output.reward_score is not None:
        output.reward_score = checked_score(output.reward_score, f"agent loop {loop}, as reward_score,")
    scores = output.extra_fields.get("turn_scores")
    if scores is not None:
        if isinstance(scores, str) or not hasattr(scores, "__iter__"):
            raise RolloutError(f"agent loop {loop} returned turn_scores={scores!r}; give a list, one for each turn")
        output.extra_fields["turn_scores"] = [
            checked_score(score, f"agent loop {loop}, in turn_scores[{turn}],") for turn, score in enumerate(scores)
        ]


def _check(output: Any, config: RolloutConfig) -> None:
    """Raise :class:`RolloutError` unless an agent loop's output can be trained on."""
    if not isinstance(output, AgentLoopOutput):
        raise RolloutError(f"the agent loop returned {type(output).__name__}, expected AgentLoopOutput")
    for one in (*output.earlier, output):
        if one.response_logprobs is None and any(one.response_mask):
            raise RolloutError(
                "the agent loop returned no response_logprobs; take them from the completions, as log_probs, and give "
                "0.0 for tokens that were not sampled"
            )
        if len(one.response_ids) > config.response_length:
            raise RolloutError(
                f"the agent loop returned {len(one.response_ids)} response tokens, more than "
                f"data.max_response_length={config.response_length}; end a trajectory before that"
            )
    if problem := empty_last_segment(output.trajectory().segments):
        raise DataError(problem)
    if output.earlier and config.multi_turn.on_history_rewrite != "fork":
        raise RolloutError(
            f"the agent loop returned {len(output.earlier)} earlier rows; trajectories of several rows need "
            "rollout.multi_turn.on_history_rewrite=fork"
        )


def _reason(error: Exception) -> str:
    for kind, name in (
        (HistoryRewritten, "history_rewrite"),
        (GenerationAborted, "generation_aborted"),
        (DataError, "data"),
        (ScoreError, "score"),
        (RolloutError, "rollout"),
    ):
        if isinstance(error, kind):
            return name
    return "exception"


class _Meter:
    """A generator that knows for which part of the time it had something to do."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._began = time.perf_counter()
        self._waiting = 0
        self._since = 0.0
        self._busy = 0.0

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        if not self._waiting:
            self._since = time.perf_counter()
        self._waiting += 1
        try:
            return await self._generator.generate(request, session=session)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._busy += time.perf_counter() - self._since

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._generator.abort(request_ids)

    def idle_fraction(self) -> float:
        """Part of the time so far in which nobody waited for a token."""
        elapsed = time.perf_counter() - self._began
        return max(0.0, 1.0 - self._busy / elapsed) if elapsed > 0 else 0.0
