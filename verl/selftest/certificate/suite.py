"""The certificate as a function."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from verl.errors import ConfigError, VerlError
from verl.selftest.certificate import adapters, generation, sequence, tokens, training, weights
from verl.selftest.certificate.bench import Bench, describe_setup
from verl.selftest.certificate.engines import Setup
from verl.selftest.certificate.faults import plant
from verl.selftest.certificate.outcome import Measure, Tolerances
from verl.selftest.certificate.report import Certificate
from verl.selftest.certificate.subject import open_subject
from verl.selftest.suite import alone
from verl.utils.device import resolve_device

logger = logging.getLogger(__name__)

START = "start-up"
LONGEST = 4608

#: name of a check -> what runs it, in the order in which they run; those behind ``tied weights`` change the weights
CHECKS: dict[str, Callable[[Bench], Iterator[Measure]]] = {
    training.LOG_PROBS: training.log_probs,
    training.GRADIENTS: training.gradients,
    training.PAD: training.pad_token,
    training.NOISE: training.noise,
    training.ROUTING: training.routing,
    sequence.SEQUENCE: sequence.sequence_parallel,
    generation.SAMPLING: generation.sampling,
    generation.FILTERS: generation.filters,
    generation.AGREEMENT: generation.agreement,
    generation.STOPS: generation.stop_tokens,
    generation.VOCABULARY: generation.vocabulary,
    tokens.FRAME: tokens.frame,
    adapters.ADAPTERS: adapters.adapters,
    weights.SYNC: weights.weight_sync,
    weights.SAVED: weights.save_and_merge,
    weights.TIED: weights.tied,
    adapters.FILES: adapters.adapter_files,
    tokens.TOKENIZER: tokens.round_trip,
}


def certify(
    model: str,
    *,
    engine: str = "fsdp",
    rollout: str = "hf",
    lora: bool = False,
    layers: int | None = None,
    longest: int = LONGEST,
    device: str = "auto",
    ranks: int = 2,
    only: Iterable[str] = (),
    faults: Iterable[str] = (),
    trust_remote_code: bool = False,
    tolerances: Tolerances | None = None,
    seed: int = 0,
) -> Certificate:
    """Check one model: rollout, trainer and plain Transformers agree, and what is saved is what was trained.

    Args:
        model: directory, or hub name.
        engine: ``fsdp`` or ``megatron``.
        rollout: ``hf``, ``vllm`` or ``sglang``.
        lora: train low-rank adapters.
        layers: of a copy that is cut to its first layers; None: the whole model.
        longest: tokens of the longest row.
        device: ``auto``, ``cpu`` or ``cuda``.
        ranks: processes that share sequences; below 2: none.
        only: names of checks to run; none runs all.
        faults: planted faults, see :mod:`verl.selftest.certificate.faults`.
        trust_remote_code: run code that comes with the model.
        tolerances: largest allowed figures; None: those of float32.
        seed: of rows and sampling.

    Raises:
        ConfigError: no model is there, or an option is wrong.
    """
    started = time.monotonic()
    setup = Setup(engine, rollout, lora, resolve_device(device), ranks)
    chosen = _chosen(only)
    with ExitStack() as stack:
        stack.enter_context(alone(one_thread=False))
        for fault in faults:
            stack.enter_context(plant(fault))
        subject = stack.enter_context(open_subject(model, layers=layers, trust_remote_code=trust_remote_code))
        bench = Bench(subject, setup, tolerances or Tolerances(), longest, seed)
        stack.callback(bench.close)
        measures = _start(bench)
        seconds = {START: time.monotonic() - started}
        if not any(measure.refused or measure.error for measure in measures):
            for name in chosen:
                begun = time.monotonic()
                measures += _run(name, CHECKS[name], bench)
                seconds[name] = time.monotonic() - begun
        certificate = Certificate(
            subject=subject.describe(),
            source=subject.source,
            setup=describe_setup(setup),
            tolerances=bench.tolerances,
            measures=measures,
            notes=list(dict.fromkeys(subject.notes)),
            seconds=time.monotonic() - started,
            seconds_of=seconds,
            planted=tuple(faults),
        )
    return certificate


def _chosen(only: Iterable[str]) -> list[str]:
    wanted = list(only)
    if unknown := [name for name in wanted if name not in CHECKS]:
        raise ConfigError(f"--only={unknown[0]!r} is no check of the certificate; checks: {', '.join(CHECKS)}")
    return [name for name in CHECKS if not wanted or name in wanted]


def _start(bench: Bench) -> list[Measure]:
    """Build both engines; a refusal is a verdict of its own."""
    try:
        _ = bench.trainer
        _ = bench.generator
    except ConfigError as error:
        return [Measure(START, "", error=str(error), refused=True)]
    except Exception as error:
        logger.debug("start-up failed", exc_info=True)
        return [Measure(START, "", error=f"{type(error).__name__}: {error}")]
    return [bench.exact(START, "", "engines that refuse the model", 0, f"{bench.setup.engine}, {bench.setup.rollout}")]


def _run(name: str, check: Callable[[Bench], Iterator[Measure]], bench: Bench) -> list[Measure]:
    found: list[Measure] = []
    try:
        found.extend(check(bench))
    except Exception as error:
        logger.debug("%s failed", name, exc_info=not isinstance(error, VerlError))
        found.append(Measure(name, "", error=f"{type(error).__name__}: {error}"))
    return found
