"""The certificate as a function."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        run: compares, and yields what it finds; its docstring says what is claimed.
        generates: it needs the rollout engine.
    """

    run: Callable[[Bench], Iterator[Measure]]
    generates: bool = False

    @property
    def claim(self) -> str:
        """What the check claims, in one sentence."""
        return " ".join((self.run.__doc__ or "").split())


#: by name, in the order in which they run; ``weight sync`` and those after it see the weights after an update
CHECKS: dict[str, Check] = {
    training.LOG_PROBS: Check(training.log_probs),
    training.GRADIENTS: Check(training.gradients),
    training.PAD: Check(training.pad_token),
    training.NOISE: Check(training.noise),
    training.ROUTING: Check(training.routing),
    sequence.SEQUENCE: Check(sequence.sequence_parallel),
    generation.SAMPLING: Check(generation.sampling, generates=True),
    generation.FILTERS: Check(generation.filters, generates=True),
    generation.AGREEMENT: Check(generation.agreement, generates=True),
    generation.STOPS: Check(generation.stop_tokens, generates=True),
    generation.VOCABULARY: Check(generation.vocabulary, generates=True),
    tokens.FRAME: Check(tokens.frame),
    adapters.ADAPTERS: Check(adapters.adapters, generates=True),
    weights.SYNC: Check(weights.weight_sync, generates=True),
    weights.SAVED: Check(weights.save_and_merge),
    weights.TIED: Check(weights.tied),
    adapters.FILES: Check(adapters.adapter_files),
    tokens.TOKENIZER: Check(tokens.round_trip),
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
    ranks: int | sequence.Ranks = 2,
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
        ranks: how many processes share sequences, below 2 none; or processes that other certificates use too.
        only: names of checks to run; none runs all.
        faults: planted faults, see :mod:`verl.selftest.certificate.faults`.
        trust_remote_code: run code that comes with the model.
        tolerances: largest allowed figures; None: those of float32.
        seed: of rows and sampling.

    Raises:
        ConfigError: no model is there, or an option is wrong.
    """
    started, cpu = time.monotonic(), time.process_time()
    pool = ranks if isinstance(ranks, sequence.Ranks) else None
    setup = Setup(engine, rollout, lora, resolve_device(device), ranks if isinstance(ranks, int) else ranks.world)
    wanted = list(only)
    chosen = _chosen(wanted)
    with ExitStack() as stack:
        stack.enter_context(alone(one_thread=False))
        for fault in faults:
            stack.enter_context(plant(fault))
        subject = stack.enter_context(open_subject(model, layers=layers, trust_remote_code=trust_remote_code))
        bench = Bench(subject, setup, tolerances or Tolerances(), longest, seed)
        bench.ranks = pool
        stack.callback(bench.close)
        bench.generates = START in wanted or any(CHECKS[name].generates for name in chosen)
        measures = _start(bench)
        seconds = {START: time.monotonic() - started}
        for name in chosen if bench.trains else ():
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
            cpu_seconds=time.process_time() - cpu,
            seconds_of=seconds,
            planted=tuple(faults),
        )
    return certificate


def _chosen(wanted: Sequence[str]) -> list[str]:
    """The checks to run after the start-up, which always runs."""
    if unknown := [name for name in wanted if name not in (START, *CHECKS)]:
        names = ", ".join((START, *CHECKS))
        raise ConfigError(f"--only={unknown[0]!r} is no check of the certificate; checks: {names}")
    return [name for name in CHECKS if not wanted or name in wanted]


def _start(bench: Bench) -> list[Measure]:
    """Build the engines. A refusal is a verdict; what the other engine computes is still checked."""
    found = []
    bench.trains = True
    for what in ("trainer", "generator") if bench.generates else ("trainer",):
        name = {"trainer": f"training ({bench.setup.engine})", "generator": f"rollout ({bench.setup.rollout})"}[what]
        try:
            getattr(bench, what)
        except Exception as error:
            logger.debug("start-up failed", exc_info=not isinstance(error, VerlError))
            refused = isinstance(error, ConfigError)
            text = str(error) if refused else f"{type(error).__name__}: {error}"
            found.append(Measure(START, name, error=text, refused=refused))
            if what == "trainer":
                bench.trains = False
            bench.generates = False
            return found
        found.append(bench.exact(START, name, "refusals", 0))
    return found


def _run(name: str, check: Check, bench: Bench) -> list[Measure]:
    if check.generates and not bench.generates:
        return [Measure(name, "", reason="there is no rollout engine")]
    found: list[Measure] = []
    try:
        found.extend(check.run(bench))
    except Exception as error:
        logger.debug("%s failed", name, exc_info=not isinstance(error, VerlError))
        found.append(Measure(name, "", error=f"{type(error).__name__}: {error}"))
    return found
