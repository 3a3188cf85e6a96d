"""What every metric means: one sentence for each name that the library emits. The reference page is made from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

# Patterns: {a|b} stands for one of the words, <word> for any text (slashes included), <N> for a number.
GLOSSARY: dict[str, str] = {
    # batch
    "critic/score/{mean|max|min}": "Score of a response: the sum of its token_level_scores, before any KL penalty.",
    "critic/rewards/{mean|max|min}": "Reward of a response: the sum of its token_level_rewards, after a KL penalty.",
    "critic/advantages/{mean|max|min}": "Advantage of a response token.",
    "critic/returns/{mean|max|min}": "Return of a response token, the critic's target.",
    "critic/values/{mean|max|min}": "Value that the critic gave a response token before its update.",
    "critic/vf_explained_var": (
        "Explained variance of the returns, 1 - Var(returns - values) / Var(returns) over response tokens: 1 is "
        "perfect, 0 no better than a constant."
    ),
    "response_length/{mean|max|min}": "Tokens of a response, tool output included.",
    "response_length/clip_ratio": "Share of responses as long as the response limit.",
    "response_length_non_aborted/{mean|max|min|clip_ratio}": "The same over responses that are not empty.",
    "response/aborted_ratio": "Share of responses without a single token.",
    "response/overlong_ratio": (
        "Share of responses that the length limit cut off; algorithm.filter_overlong_responses leaves them out of the "
        "updates."
    ),
    "prompt_length/{mean|max|min}": "Tokens of a prompt.",
    "prompt_length/clip_ratio": "Share of prompts as long as the prompt limit.",
    "num_turns/{mean|max|min}": "Turns of a conversation, both sides counted.",
    "tool_call_counts/{mean|max|min}": "Tool calls of a conversation.",
    # agents
    "agent/aborted/<reason>": (
        "Trajectories given up: timeout, exception, data, score, rollout, generation_aborted, history_rewrite."
    ),
    "agent/aborted_fraction": "Share of trajectories given up; they take no part in the update.",
    "agent/tool_calls/<tool>": "Calls of a tool, those that failed included.",
    "agent/tool_failures/<kind>": (
        "Tool calls answered with an error: malformed_call, unknown_tool, bad_arguments, too_many_calls, exception, "
        "timeout, not_text; reward counts failures of calc_reward."
    ),
    "agent/tool_failure_fraction": "Share of tool calls answered with an error.",
    "agent/tool_seconds/{mean|max}": "Wall time of a tool call, waiting for its turn included, in seconds.",
    "agent/generate_seconds/{mean|max}": "Wall time that a trajectory waited for the model, in seconds.",
    "agent/trajectory_seconds/{mean|max}": "Wall time of a trajectory in seconds.",
    "agent/truncated": "Trajectories that ended because an answer did not fit into the response length.",
    "agent/history_rewrites": "Trajectories in which the chat template would have rewritten earlier turns.",
    "agent/forked_rows": "Training rows besides one for each trajectory (on_history_rewrite=fork).",
    "agent/trace_failures": "Trajectories whose trace could not be written or sent (rollout.agent.trace_dir).",
    "agent/replays_diverged": (
        "Turns of carried trajectories sampled anew because a tool or environment answered differently this time."
    ),
    "agent/engine_idle_fraction": "Share of the generation phase in which no trajectory waited for the model.",
    "agent/reported/<name>": "Mean of a number that agent loops return as a metric.",
    "global_seqlen/{min|max}": "Fewest and most tokens of a rank if the batch were cut as it came.",
    "global_seqlen/minmax_diff": "Difference between the most and the fewest tokens of a rank without balancing.",
    "global_seqlen/{balanced_min|balanced_max}": "Fewest and most tokens of a rank after balancing.",
    "global_seqlen/mean": "Mean tokens of a rank.",
    # updates
    "critic/vf_loss": "Clipped value loss over the global mini-batch, averaged over the step's mini-batches.",
    "critic/vf_clipfrac": "Share of response tokens for which the clipped value error was the larger one.",
    "critic/vpred_mean": "Mean value prediction per response token during the update.",
    "{actor|critic|reward_model|train}/grad_norm": "Norm of the gradient before clipping, over all parameters.",
    "{actor|critic|reward_model|train}/lr": "Learning rate.",
    "{actor|critic|reward_model|train}/skipped_steps": (
        "Share of a step's updates skipped because of a gradient that is not finite."
    ),
    "actor/pg_loss": "Policy loss over the global mini-batch, averaged over the step's mini-batches.",
    "actor/pg_clipfrac": "Share of response tokens for which the clipped ratio gave the larger loss.",
    "actor/pg_clipfrac_lower": (
        "Share of response tokens whose advantage is negative and whose loss was bounded by clip_ratio_c."
    ),
    "actor/ppo_kl": "Mean of old minus new log-prob per response token: how far updates moved the policy, in nats.",
    "actor/cov_selected": "Share of response tokens chosen for their covariance (clip_cov, kl_cov).",
    "actor/dppo_divergence": "Mean divergence per response token that decides which are dropped (dppo_tv, dppo_kl).",
    "actor/sapo_gate": "Mean gradient weight of a response token relative to ratio 1 (sapo).",
    "actor/dro_penalty": "Mean quadratic penalty per response token (dro).",
    "actor/bypass_is_weight": "Mean bounded importance weight of a response token (bypass_mode).",
    "actor/entropy": "Mean entropy of the policy's next-token distribution per response token, in nats.",
    "actor/kl_loss": "KL loss to the reference over the global mini-batch, before its coefficient.",
    "actor/kl_coef": "Coefficient of the KL loss.",
    "actor/reward_kl_penalty": "Mean KL to the reference per response token as used in the reward, in nats.",
    "actor/reward_kl_penalty_coeff": "Coefficient of the KL penalty in the reward, as used for this batch.",
    "{train|val}/loss": "Supervised loss: mean negative log-likelihood per trained token, in nats.",
    "train/tokens": "Tokens of the step over all ranks, prompts included.",
    # checkpoints
    "checkpoint/rollbacks": "Whether models went back to the last checkpoint in this step (on_nonfinite=rollback).",
    "checkpoint/failed_saves": "Checkpoints that could not be written since the last step (on_save_error=continue).",
    "tracking/failures": (
        "Records and values that a destination of reports did not take, so far in this run; absent while there is none."
    ),
    "tracking/failures/<destination>": (
        "The same of one destination: a tracker's name; console and log, text that standard output and error did not "
        "take; samples, files of trainer.rollout_data_dir and validation_data_dir; reported, values of reward "
        "functions; metrics, numbers without a form; memory, the memory report."
    ),
    # rewards
    "reward/{errors|timeouts}": "Samples whose reward function raised, returned no finite number, or ran out of time.",
    "reward/abstained": "Samples without a score, which take no part in the update.",
    "reward/empty_responses": "Responses without a token that a score could be placed on.",
    # process reward model
    "reward_model/loss": "Cross-entropy of outcomes under the process reward model, mean over responses.",
    "reward_model/accuracy": "Share of responses whose summed process reward has the sign that the outcome says; "
    "zero counts one half.",
    # dynamic sampling
    "filter_groups/num_gen_batches": "Generation batches that the step's training batch took.",
    "filter_groups/informative_fraction": "Share of the groups generated in this step whose samples differ in outcome.",
    "filter_groups/surplus": "Groups kept for the next step.",
    "filter_groups/filled": "Groups without a signal that fill the batch up.",
    # rows
    "training/{rows|padding_rows}": (
        "Rows of the training batch where trajectories may have several, and rows without a token that fill "
        "mini-batches."
    ),
    # generation
    "rollout/preemptions": (
        "Times that a sample left the full key-value cache to others and was continued later (rollout.name=hf)."
    ),
    "rollout/recomputed_tokens": "Tokens whose keys and values were computed again because of that.",
    # over-sampling
    "over_sampling/started": "Prompts for which samples were begun in this step.",
    "over_sampling/stopped": "Samples stopped before their end because enough prompts were complete.",
    "over_sampling/dropped": "Samples that were begun and are not trained on (partial_rollout=False).",
    "over_sampling/carried": "Samples kept for the next step, those that wait for others of their prompt included.",
    "over_sampling/carried_tokens": "Sampled tokens of the samples kept for the next step.",
    "training/staleness/{mean|max}": (
        "Updates of the rollout's weights between the first token of a response and the step that trains on it."
    ),
    "training/stale_token_fraction": "Share of sampled tokens that older weights than the newest sampled.",
    # weight sync
    "weight_sync/version": "Version of the weights that the rollout has: the step that made them.",
    "weight_sync/seconds": "Wall time of the weight sync.",
    "weight_sync/{copied|shared}_mb": "Weights in the rollout's own copy, and weights that it reads in place, in MiB.",
    "weight_sync/changed_tensors": ("Weights that differ from those synced before (rollout.on_unchanged_weights)."),
    "weight_sync/received_mb": (
        "Weights that a rank got from others where the rollout splits the model, in MiB: its part, less what it trains."
    ),
    "weight_sync/buckets": "Pieces in which weights were synced.",
    # run
    "training/{global_step|epoch}": "Where the training stands.",
    "training/rollout_probs_diff_{mean|max|std}": (
        "Absolute difference of a sampled token's probability between rollout and training engine."
    ),
    "rollout_corr/kl": "KL divergence of rollout from training policy, mean log-ratio of sampled tokens, in nats.",
    "rollout_corr/k3_kl": "The same from an estimate with less variance that is never negative.",
    "rollout_corr/log_prob_abs_diff": "Mean absolute difference of a sampled token's log-prob, in nats.",
    "rollout_corr/{training|rollout}_ppl": "Perplexity of the sampled tokens under that policy, mean over responses.",
    "rollout_corr/ppl_ratio": "Training over rollout perplexity, mean over responses.",
    "rollout_corr/log_ppl_{diff|abs_diff}": "Training less rollout log perplexity, mean over responses.",
    "rollout_corr/rollout_is_{mean|std|min|max}": "Importance weights before truncation.",
    "rollout_corr/rollout_is_eff_sample_size": "Effective share of samples: 1 when all importance weights are equal.",
    "rollout_corr/rollout_is_ratio_fraction_{high|low}": "Share of importance weights beyond the upper or lower bound.",
    "rollout_corr/chi2_{token|seq}": "Mean squared importance ratio less 1, of tokens and of responses.",
    "rollout_corr/rollout_rs_masked_fraction": "Share of response tokens left out of the update.",
    "rollout_corr/rollout_rs_seq_masked_fraction": "Share of responses of which a token is left out of the update.",
    "rollout_corr/rollout_is_veto_fraction": "Share of responses with a token ratio below the veto.",
    "rollout_corr/rollout_is_catastrophic_token_fraction": "Share of response tokens with a ratio below the veto.",
    "timing_s/<phase>": "Wall time of a phase in seconds.",
    "timing_per_token_ms/<phase>": (
        "Wall time of a phase in milliseconds per token: per sampled token for gen, per prompt or response token else."
    ),
    "perf/total_num_tokens": "Prompt and response tokens of the batch.",
    "perf/time_per_step": "Wall time of the step in seconds.",
    "perf/throughput": "Prompt and response tokens per second and device.",
    "perf/max_memory_{allocated|reserved}_gb": "Most accelerator memory of any worker, in GiB.",
    "perf/cpu_memory_used_gb": "Most host memory that a worker process uses at the end of its update, in GiB.",
    "perf/cpu_memory_peak_gb": "Most host memory that a worker process has used so far, in GiB.",
    "perf/memory_{load|generate|log_prob|update|sync}_gb": (
        "Most memory of any worker process in a phase, in GiB: on an accelerator the peak held by tensors, on a CPU "
        "the process's size at its end; of all models that ran in the phase, and the last time it ran."
    ),
    "perf/mfu/{actor|critic}": "Achieved share of the device's peak FLOP/s during the update.",
    # validation
    "val-{core|aux}/<data_source>/<variable>/mean@<N>": "Mean over a prompt's N samples, averaged over prompts.",
    "val-{core|aux}/<data_source>/<variable>/std@<N>": (
        "Standard deviation (divided by N) over a prompt's N samples, averaged over prompts."
    ),
    "val-{core|aux}/<data_source>/<variable>/best@<N>": "Expected best of a prompt's N samples, averaged over prompts.",
    "val-{core|aux}/<data_source>/<variable>/worst@<N>": (
        "Expected worst of N samples of a prompt, averaged over prompts."
    ),
    "val-{core|aux}/<data_source>/<variable>/pass@<N>": (
        "Unbiased probability that at least one of N samples of a prompt is right, averaged over prompts."
    ),
    "val-{core|aux}/<data_source>/<variable>/maj@<N>": (
        "Expected value of the answer that most of N samples of a prompt give, averaged over prompts; ties share."
    ),
}


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    compiled = []
    for pattern, sentence in GLOSSARY.items():
        regex = ""
        for part in re.split(r"(\{[^}]*\}|<[^>]*>)", pattern):
            if part.startswith("{"):
                regex += f"(?:{'|'.join(re.escape(word) for word in part[1:-1].split('|'))})"
            elif part == "<N>":
                regex += r"\d+"
            elif part.startswith("<"):
                regex += ".+"
            else:
                regex += re.escape(part)
        compiled.append((re.compile(regex), sentence))
    return tuple(compiled)


def describe(name: str) -> str | None:
    """The glossary's sentence for a metric, or ``None``."""
    return next((sentence for pattern, sentence in _patterns() if pattern.fullmatch(name)), None)


def undocumented(names: Iterable[str]) -> list[str]:
    """Metric names (or the keys of a metrics dict) that :data:`GLOSSARY` does not cover, sorted."""
    return sorted(name for name in names if describe(name) is None)
