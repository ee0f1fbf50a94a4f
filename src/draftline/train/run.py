"""A run from recipe to measured drafter: assemble, train, export, evaluate, summarise."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from draftline.config import Recipe
from draftline.environment.compile_cache import use_compile_cache
from draftline.environment.compile_guard import CompileGuard
from draftline.environment.fingerprint import fingerprint
from draftline.environment.overrides import enter_overrides
from draftline.environment.switch_watch import SwitchWatch
from draftline.environment.switches import apply_settings, configure_torch
from draftline.errors import Interrupted, PlainError, RunError
from draftline.evaluate.evaluation import EvalRequest, evaluate, prompt_ids
from draftline.export.folder import record_tau
from draftline.export.speculators import speculators_config
from draftline.monitor.events import Derived, Evaluation, EventLog, RunEnded
from draftline.monitor.notices import Notices, stdout_console
from draftline.monitor.progress import Progress
from draftline.monitor.sinks import require
from draftline.records import EvalReport
from draftline.target.load import choose_device, load_target
from draftline.train.checkpoint import newest_checkpoint, refuse_other_identity
from draftline.train.folder import RunFolder, open_run_folder
from draftline.train.job import Job, assemble, derived_facts
from draftline.train.loop import Loop
from draftline.train.monitoring import Monitoring
from draftline.train.preflight import preflight
from draftline.train.process_alarms import ProcessAlarms
from draftline.train.publishing import export_checkpoint
from draftline.train.roofline import judge, measure, measure_rates
from draftline.train.warm_up import warm_up
from draftline.train.watch import Watch


def train(recipe: Recipe, resume: bool = False) -> dict[str, Any]:
    """Run a recipe; returns what summary.json holds. `resume` goes on from the newest complete checkpoint."""
    enter_overrides(recipe.overrides)
    folder = open_run_folder(recipe.train.out, resume)
    device = choose_device(recipe.placement.device)
    configure_torch(device)
    apply_settings(recipe.overrides)
    use_compile_cache()
    require(recipe.monitor.sinks)
    notices = Notices(stdout_console())
    alarms = ProcessAlarms(SwitchWatch(recipe.overrides, device), CompileGuard())
    alarms.look("at the start")
    job = assemble(recipe, notices)
    alarms.look("after the target was loaded")
    foresee(job, folder)
    passed = preflight(job, folder, notices)
    with Monitoring(recipe, folder, job.step.clock, fingerprint()) as monitoring:
        log, watchman = monitoring.enter(notices)
        loop = Loop(job, folder, log, progress_of(job, notices), watchman, Watch(job, folder, log, notices), alarms)
        resumed_from = restore_newest(loop, notices) if resume else None
        folder.write_recipe(recipe)
        log.write(monitoring.started(job.total_steps, resumed_from))
        alarms.start(loop.watch.raise_all)
        log.write(Derived(derived_facts(job) | {"data": job.stream.content_hash, "weights": job.target.identity}))
        log.write(passed)
        try:
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
        seconds = warm_up(job.step, [job.stream.batch(0)], job.target.dtype, loop.alarms.guard)
        found = measure(job.step, job.stream.batch(0), job.target.dtype, measure_rates(job.target.device))
        notices.facts({"warm-up": f"{loop.alarms.guard.kernels} kernels in {seconds:.1f} s", "roofline": judge(found)})
    started = time.perf_counter()
    with loop.progress:
        loop.run()
    seconds = time.perf_counter() - started
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
