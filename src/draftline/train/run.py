"""A run from recipe to measured drafter, as one rank of it: the stages, then export, evaluation and summary."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftline.channel.routes import FeatureInbox, FeatureOutbox, FeatureSource
from draftline.config import Recipe
from draftline.environment import variables
from draftline.environment.compile_cache import use_compile_cache
from draftline.environment.compile_guard import CompileGuard
from draftline.environment.device import training_device
from draftline.environment.fingerprint import fingerprint
from draftline.environment.switch_watch import SwitchWatch
from draftline.environment.switches import apply_settings, configure_torch
from draftline.errors import Interrupted, PeerLost, PlainError, RunError
from draftline.evaluate.evaluation import EvalRequest, evaluate, prompt_ids
from draftline.export.folder import record_tau
from draftline.export.speculators import speculators_config
from draftline.monitor.events import Derived, Evaluation, EventLog, RunEnded
from draftline.monitor.notices import Notices, stdout_console
from draftline.monitor.progress import Progress
from draftline.monitor.trace import Trace, trace_path
from draftline.records import EvalReport
from draftline.target.load import load_target
from draftline.train.auto import choose_placement
from draftline.train.checkpoint import newest_checkpoint, refuse_other_identity
from draftline.train.connect import connect
from draftline.train.feeder import Feeder
from draftline.train.folder import RunFolder, open_run_folder
from draftline.train.job import Job, Setting, assemble, colocated_source, derived_facts, feature_capture, prepare
from draftline.train.loop import Loop
from draftline.train.monitoring import Monitoring
from draftline.train.preflight import preflight, prove_target
from draftline.train.process_alarms import ProcessAlarms
from draftline.train.publishing import export_checkpoint
from draftline.train.ranks import Ranks, alone, join, replan
from draftline.train.roofline import judge, measure, measure_rates
from draftline.train.warm_up import warm_up
from draftline.train.watch import Watch

PEER_GRACE_S = 3.0  # the launcher should see the rank that failed before those that only lost it


def this_process(recipe: Recipe) -> torch.device:
    """This rank's device, with torch's switches set as the recipe declares them."""
    device = training_device(recipe.placement.device)
    configure_torch(device)
    apply_settings(recipe.overrides)
    use_compile_cache()
    return device


@dataclass(frozen=True)
class Spoken:
    """What a rank says to a person, and what it watches of its own process from the start on."""

    notices: Notices
    alarms: ProcessAlarms


def alarms_of(recipe: Recipe, device: torch.device) -> ProcessAlarms:
    alarms = ProcessAlarms(SwitchWatch(recipe.overrides, device), CompileGuard())
    alarms.guard.watch_kernels()
    alarms.look("at the start")
    return alarms


def train_alone(recipe: Recipe, resume: bool) -> dict[str, Any]:
    """In this process, which is the whole world."""
    folder = open_run_folder(recipe.train.out, resume)
    device = this_process(recipe)
    alarms = alarms_of(recipe, device)
    notices = Notices(stdout_console())
    setting = prepare(recipe, notices, alone(recipe.placement, device), device)
    return train_drafter(setting, folder, colocated_source(setting, notices), Spoken(notices, alarms), resume)


def train_rank(recipe: Recipe, resume: bool) -> dict[str, Any]:
    """As one rank of a world that a launcher started. A signal's end is no failure here: the launcher sent it."""
    device = this_process(recipe)
    alarms = alarms_of(recipe, device)
    ranks = join(recipe.placement, device)
    notices = Notices(stdout_console() if ranks.first else Console(quiet=True))
    try:
        with ranks.heart.phase("start-up"):
            resume = resume or is_started_again(recipe, ranks)
            folder = ranks.together(lambda: rank_folder(recipe, ranks, resume))
            if recipe.placement.kind == "auto":
                placement = choose_placement(recipe, ranks, folder, notices, device)
                ranks = replan(ranks, placement, device)
            setting = prepare(recipe, notices, ranks, device)
            ends = connect(setting) if ranks.plan.kind == "split" else None
        if ranks.role.drafter is None:
            assert not isinstance(ends, FeatureInbox)
            feed(setting, ends, folder, notices)
            return {}
        source = ends if isinstance(ends, FeatureInbox) else colocated_source(setting, notices)
        return train_drafter(setting, folder, source, Spoken(notices, alarms), resume)
    except Interrupted as interruption:
        if not variables.launched_here():
            notices.say(str(interruption))
        return {}
    except PeerLost:
        time.sleep(PEER_GRACE_S)
        raise


def is_started_again(recipe: Recipe, ranks: Ranks) -> bool:
    """Whether this launch has run before: then it goes on from its newest checkpoint. A torchrun agent counts its own
    failures only, and none where another host came or went, so the launch's name in the run folder decides too."""
    kept = RunFolder(Path(recipe.train.out)).launch
    same = variables.run_id() is not None and kept.is_file() and kept.read_text() == variables.run_id()
    return any(ranks.gather(variables.restart_count() > 0 or same))


def rank_folder(recipe: Recipe, ranks: Ranks, resume: bool) -> RunFolder:
    """Rank 0 opens the run folder and leaves the launch's name there."""
    if not ranks.first:
        return RunFolder(Path(recipe.train.out))
    folder = open_run_folder(recipe.train.out, resume)
    folder.ranks.mkdir(exist_ok=True)
    folder.launch.write_text(variables.run_id() or "")
    return folder


def feed(setting: Setting, outbox: FeatureOutbox | None, folder: RunFolder, notices: Notices) -> None:
    """A capturing rank's whole run."""
    ranks = setting.ranks
    with ranks.heart.phase("preparation"):
        feeder = ranks.together(lambda: Feeder(setting, feature_capture(setting, notices), outbox))
        passed = prove_target(setting, notices)  # while the drafters pass the gates of their data,
        feeder.hand_on_for_preflight()
        ranks.together(lambda: None)  # then those of the features,
        first_step = ranks.gather(ranks.together(lambda: 0))[0]  # and find the step to go on from
    with Monitoring(setting, folder, fingerprint()) as monitoring:
        log, _ = monitoring.enter(notices)
        feeder.log = log
        log.write(monitoring.started(first_step or None))
        log.write(passed)
        feeder.trace = trace_of(setting, folder)
        feeder.run(first_step)
        log.write(RunEnded("completed"))
    ranks.leave()


def train_drafter(
    setting: Setting, folder: RunFolder, source: FeatureSource, spoken: Spoken, resume: bool
) -> dict[str, Any]:
    """A training rank's whole run; rank 0 also exports, evaluates and summarises."""
    ranks, recipe, notices, alarms = setting.ranks, setting.recipe, spoken.notices, spoken.alarms
    alarms.look("after the target was loaded")
    with ranks.heart.phase("preparation"):
        job = ranks.together(lambda: ready(setting, notices, source, folder))
        passed = preflight(job, folder, notices)
    with Monitoring(setting, folder, fingerprint()) as monitoring:
        log, watchman = monitoring.enter(notices)
        loop = Loop(job, folder, log, progress_of(job, notices), watchman, Watch(job, folder, log, notices), alarms)
        resumed_from = ranks.gather(ranks.together(lambda: restore_newest(loop, notices) if resume else 0))[0]
        if ranks.first:
            folder.write_recipe(recipe)
        log.write(monitoring.started(resumed_from if resume else None))
        alarms.start(loop.watch.raise_all)
        if ranks.first:
            log.write(Derived(derived_facts(job) | {"data": job.stream.content_hash, "weights": job.target.identity}))
        log.write(passed)
        try:
            loop.trace = trace_of(setting, folder)
            summary = finish(loop, notices)
        except Interrupted as interruption:
            log.write(RunEnded("interrupted", interruption.what))
            raise
        except PlainError as error:
            log.write(RunEnded("failed", error.what))
            raise
        except KeyboardInterrupt:  # during export or evaluation, where nothing is left to save
            log.write(RunEnded("interrupted"))
            raise
        log.write(RunEnded("completed"))
    return summary


def trace_of(setting: Setting, folder: RunFolder) -> Trace | None:
    """With train.trace, where this rank writes down what it does and when."""
    if not setting.recipe.train.trace:
        return None
    return Trace(trace_path(folder.root, setting.ranks.role.rank), setting.clock)


def ready(setting: Setting, notices: Notices, source: FeatureSource, folder: RunFolder) -> Job:
    job = assemble(setting, notices, source)
    foresee(job, folder)
    return job


def progress_of(job: Job, notices: Notices) -> Progress:
    return Progress(
        "train",
        job.total_steps,
        console=notices.console,
        every=job.recipe.train.log_every,
        remarks=[override.text for override in job.recipe.overrides],
    )


def foresee(job: Job, folder: RunFolder) -> None:
    """Raise now the InputErrors that would otherwise come after training: of the prompts and of the export's format."""
    if job.recipe.eval.prompts is not None:
        prompt_ids(eval_request(job.recipe, folder, Path(job.recipe.eval.prompts)), job.target)
    if job.recipe.export.format == "speculators":
        speculators_config(job.spec, job.target.dtype, job.target.name)


def restore_newest(loop: Loop, notices: Notices) -> int:
    """Go on from the newest complete checkpoint; InputError where the run differs from the one that wrote it."""
    checkpoint = newest_checkpoint(loop.folder.checkpoints)
    if checkpoint is None:
        notices.say(f"  {loop.folder.checkpoints} holds no checkpoint yet: from the first step")
        return 0
    refuse_other_identity(checkpoint, loop.job.identity)
    loop.restore(checkpoint)
    return checkpoint.step


def finish(loop: Loop, notices: Notices) -> dict[str, Any]:
    job, folder = loop.job, loop.folder
    notices.section("training")
    if job.step.fused is not None:
        with job.ranks.heart.phase("warm-up"):
            warm_up(job.step, [job.stream.batch(0)], job.target.dtype, loop.alarms.guard)
            rates = measure_rates(job.target.device, job.step.products)
            found = measure(job.step, job.stream.batch(0), job.target.dtype, rates)
        notices.facts({"kernels": f"{loop.alarms.guard.kernels} compiled or loaded", "roofline": judge(found)})
    started = time.perf_counter()
    with loop.progress:
        loop.run()
    seconds = time.perf_counter() - started
    if not job.ranks.first:
        return {}
    checkpoint = newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise RunError(f"{folder.checkpoints} holds no checkpoint after training")
    notices.section("export")
    export_checkpoint(checkpoint, folder.export, job.recipe.export.format, job.target)
    notices.say(f"  {folder.export} reloads to the same logits")
    reports = evaluate_export(job, folder, loop.log)
    loop.alarms.look("after the evaluation")
    summary = summarise(job, folder, loop, seconds, reports)
    folder.write_summary(summary)
    notices.section("summary")
    notices.facts(summary_facts(summary))
    return summary


def evaluate_export(job: Job, folder: RunFolder, log: EventLog) -> list[EvalReport]:
    recipe = job.recipe
    if recipe.eval.prompts is None:
        return []
    with job.step.clock.phase("evaluation"):
        target = job.target if job.target.has_layers else load_target(recipe.target, job.target.device)
        report = evaluate(eval_request(recipe, folder, Path(recipe.eval.prompts)), target)
    log.write(Evaluation(report))
    record_tau(folder.export, [report])
    return [report]


def eval_request(recipe: Recipe, folder: RunFolder, prompts: Path) -> EvalRequest:
    return EvalRequest(
        target=recipe.target.path,
        draft=folder.export,
        prompts=prompts,
        temperature=recipe.eval.temperature,
        max_new_tokens=recipe.eval.max_new_tokens,
        max_prompts=recipe.eval.max_prompts,
        template_kwargs=recipe.data.template_kwargs,
    )


def summarise(job: Job, folder: RunFolder, loop: Loop, seconds: float, reports: list[EvalReport]) -> dict[str, Any]:
    last = loop.last_report
    return {
        "target": job.target.name,
        "export": str(folder.export),
        "steps": loop.step,
        "target_tokens": loop.tokens,
        "train_seconds": seconds,
        "tokens_per_s": loop.tokens_this_attempt / seconds,
        "loss": last.loss if last else None,
        "proxy_tau": last.proxy_tau if last else None,
        "evaluations": [report.as_json() for report in reports],
    }


def summary_facts(summary: dict[str, Any]) -> dict[str, Any]:
    speed = f"{summary['tokens_per_s']:,.0f}/s over {summary['train_seconds']:.0f} s"
    facts = {
        "steps": f"{summary['steps']:,}",
        "tokens": f"{summary['target_tokens']:,} ({speed})",
        "loss": "none: no step was left to do" if summary["loss"] is None else f"{summary['loss']:.4f}",
        "proxy tau": "none" if summary["proxy_tau"] is None else f"{summary['proxy_tau']:.3f}",
    }
    for report in summary["evaluations"]:
        facts[f"tau ({report['benchmark']})"] = f"{report['tau']:.3f} over {report['prompts']} prompts"
    return facts | {"export": summary["export"]}
