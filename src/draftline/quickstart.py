"""`draftline quickstart`: the whole way on the tiny target that ships with the package, offline, in a few minutes."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from rich.text import Text

from draftline.config import Recipe, load_recipe
from draftline.data.conversations import read_prompts
from draftline.decode.chain import Decoded
from draftline.drafter.model import untrained
from draftline.errors import InputError
from draftline.evaluate.decoding import Measured, measure
from draftline.evaluate.evaluation import EvalRequest, decoding_task, evaluate_here, load_request_target
from draftline.export.folder import read_spec, record_tau
from draftline.monitor.notices import Notices, stdout_console
from draftline.target.load import Target
from draftline.train.regeneration import RegenerateRequest, regenerate
from draftline.train.start import train

UNTRAINED_PROMPTS = 12
MAX_NEW_TOKENS = 160  # the tiny target's longest answers have about 120


def quickstart(out: Path) -> None:
    """Answers, training, export and evaluation under `out`. Raises InputError where `out` already holds files."""
    started = time.perf_counter()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} already holds files", "name another folder, or remove this one")
    notices = Notices(stdout_console())
    assets = Path(str(files("draftline") / "assets"))
    notices.section("the target answers its prompts")
    answers = out / "answers.jsonl"
    regenerate(
        RegenerateRequest(
            target=str(assets / "tiny_target"),
            prompts=assets / "prompts/train.jsonl",
            out=answers,
            max_new_tokens=MAX_NEW_TOKENS,
            batch_size=80,
            temperature=0.0,
            seed=0,
            device="cpu",
        )
    )
    recipe = write_recipe(assets, answers, out)
    train(recipe)
    show_results(recipe, assets, out, notices)
    notices.say(f"  all of it took {time.perf_counter() - started:.0f} s")


def write_recipe(assets: Path, answers: Path, out: Path) -> Recipe:
    """The shipped recipe with this machine's paths, kept in `out` so that it can be changed and trained again."""
    tree: dict[str, Any] = yaml.safe_load((assets / "quickstart.yaml").read_text(encoding="utf-8"))
    tree["target"]["path"] = str(assets / "tiny_target")
    tree["data"]["train"] = str(answers)
    tree["train"]["out"] = str(out / "run")
    tree["placement"] = {"device": "cpu"}
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return load_recipe(path)


def show_results(recipe: Recipe, assets: Path, out: Path, notices: Notices) -> None:
    export = out / "run" / "export"
    request = EvalRequest(
        target=recipe.target.path,
        draft=export,
        prompts=assets / "prompts/held_out.jsonl",
        max_new_tokens=MAX_NEW_TOKENS,
        device="cpu",
    )
    notices.section("held-out prompts")
    target = load_request_target(request)
    trained = evaluate_here(request, target)
    before = measure_untrained(recipe, request, target)
    record_tau(export, [trained.report])
    notices.table(
        ["drafter", "tau", "tokens/s", "prompts"],
        [
            [name, f"{m.report.tau:.2f}", f"{m.report.tokens_per_s:,.0f}", m.report.prompts]
            for name, m in (("untrained", before), ("trained", trained))
        ],
    )
    report = trained.report
    notices.facts(
        {
            "text": f"equal to the target's own on {report.same_text_share:.0%} of the prompts, token for token",
            "the target alone": f"{report.plain_tokens_per_s:,.0f} tokens/s",
        }
    )
    mark = "what is green" if notices.console.is_terminal else "what stands in [brackets]"
    notices.section(f"one answer; {mark} was drafted and accepted, the rest the target chose itself")
    question = read_prompts(str(request.prompts), 1)[0].messages[-1]["content"]
    notices.console.print(Text(f"{question}\n", style="dim"), soft_wrap=True)
    notices.console.print(coloured(target, trained.answers[0], notices.console.is_terminal), soft_wrap=True)
    notices.section("where everything lies")
    notices.facts(
        {
            "answers": out / "answers.jsonl",
            "recipe": f"{out / 'recipe.yaml'} (change it, then: draftline train {out / 'recipe.yaml'} train.out=...)",
            "run": f"{out / 'run'} (events.jsonl, checkpoints/, summary.json)",
            "drafter": f"{export} (its README.md has the commands that serve it)",
        }
    )


def measure_untrained(recipe: Recipe, request: EvalRequest, target: Target) -> Measured:
    """The same drafter before its first step, on a few of the prompts: what decoding gains without training."""
    request = replace(request, compare_plain=False, max_prompts=UNTRAINED_PROMPTS)
    drafter = untrained(read_spec(request.draft), recipe.train.seed)
    return measure(target, drafter.eval().requires_grad_(False), decoding_task(request, target), lambda _: None)


def coloured(target: Target, answer: Decoded, has_colour: bool) -> Text:
    """The answer's text; on a terminal accepted draft tokens are green, elsewhere they stand in brackets."""
    text, at = Text(), 1
    text.append(target.tokenizer.decode(answer.ids[:1]))
    for count in answer.committed:
        accepted, own = answer.ids[at : at + count - 1], answer.ids[at + count - 1 : at + count]
        if accepted:
            drafted = target.tokenizer.decode(accepted)
            text.append(drafted if has_colour else f"[{drafted}]", style="bold green")
        text.append(target.tokenizer.decode(own))
        at += count
    return text
